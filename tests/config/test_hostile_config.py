"""A config that somebody else wrote: wrong values are reported, at bounded cost, and none of its code is executed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.cli import main
from fctune.config.components import ALLOW_COMPONENTS, resolve_component
from fctune.config.loading import load_config
from tests.conftest import ROOT, TINY_BASE
from tests.warm_interpreter import warm_python

BASE = f"""
output_dir: runs/x
model: {{path: {TINY_BASE}}}
data: {{sources: [{{path: synthetic:train:10}}]}}
adapter: {{rank: 4}}
"""
LONG = "x" * 5000
NINES = "9" * 5000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def load(tmp_path: Path, text: str, *overrides: str) -> str:
    """Return the report of a config; fails if it is none, or if it shows a value of thousands of characters."""
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    assert len(str(raised.value)) < 8000
    return str(raised.value)


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ("epochs: 2026-01-01", "epochs='2026-01-01': expected an integer, got str"),
        ("epochs: 2026-13-45", "epochs='2026-13-45': expected an integer, got str"),
        (f"seed: {NINES}", "(5,002 characters): expected an integer, got one of more than 64 bits"),
        (f"clip_grad_norm: {'9' * 400}", "clip_grad_norm=inf: expected more than 0"),
        (f"seed: {':'.join(['1'] * 300)}", "expected an integer"),
        (f"checkpoint: {{every: {'9' * 4000}}}", "expected steps (500), a time"),
        ("seed: !!int abc", "seed='abc': expected an integer, got str"),
        ("seed: !!bool abc", "seed='abc': expected an integer, got str"),
        ("optimizer: !!set {a}", "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"),
        ("seed: !!python/object/apply:os.system [id]", "could not determine a constructor for the tag"),
        (f"optimizer: {'[' * 3000}{']' * 3000}", "nested deeper than 50 levels"),
        ("optimizer: &o {lr: *o}", "the alias *o is part of what it stands for"),
        ("optimizer: &o\n  <<: *o", "the alias *o is part of what it stands for"),
        ("".join(f"a{n}: &a{n} [*a{n - 1}]\n" if n else "a0: &a0 [x]\n" for n in range(60)), "through the alias *a"),
        (BOMB, "its aliases expand to more than 2,097,152 characters"),
        (f"optimizer: [{'1,' * 21_000}]", "more than 20,000 values"),
        (f"#{'x' * 2**20}", "longer than 1,048,576 characters"),
        ("".join(f"key{n}: 1\n" for n in range(2000)), "the config: 1,950 more unknown keys"),
        (f"resume: {LONG}", "(5,002 characters): too long; expected at most 4,096 characters"),
        ('resume: "a\\0b"', "resume='a\\x00b': contains a NUL character"),
        ('resume: "\\ud800"', "resume='\\ud800': is not valid Unicode"),
        ("x: \0", "unacceptable character #x0000"),
        (f"extends: {LONG}", "no such config file"),
        ('extends: "a\\0b"', "no such config file"),
    ],
    ids=range(24),
)
def test_values_that_no_config_has_are_reported(added: str, reason: str, tmp_path: Path) -> None:
    assert reason in load(tmp_path, BASE + added + "\n")


def test_paths_that_no_disk_has_are_reported_together_with_other_problems(tmp_path: Path) -> None:
    part = "y" * 300  # longer than a file's name can be
    text = f"""
output_dir: "runs/\\0"
model: {{path: {part}, chat_template: {part}}}
data: {{sources: [{{path: {LONG}}}, {{path: {part}.jsonl}}]}}
eval: {{cases: {part}, every: 5}}
resume: 2026-13-45
epochs: 0
"""
    report = load(tmp_path, text)
    keys = ("output_dir", "model.path", "model.chat_template", "data.sources.0.path", "data.sources.1.path")
    for key in (*keys, "eval.cases", "epochs"):
        assert f"  {key}=" in report, report


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("optimizer=&a [*a]", "the alias *a is part of what it stands for"),
        (f"data.sources.{NINES}.path=x", "is neither a key of a mapping nor an index of a list"),
        ("data.sources.\N{SUPERSCRIPT TWO}.path=x", "is neither a key of a mapping nor an index of a list"),
        (".".join(["a"] * 2000) + "=1", "more than 50 levels; no key is as deep"),
        (f"model.path={LONG}", "too long; expected at most 4,096 characters"),
    ],
    ids=range(5),
)
def test_overrides_that_no_user_means_are_reported(override: str, reason: str, tmp_path: Path) -> None:
    assert reason in load(tmp_path, BASE, override)


def test_files_that_extend_each_other_many_times_are_refused(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.yaml").write_text(f"extends: [{', '.join([f'{number + 1}.yaml'] * 9)}]\n")
    (tmp_path / "9.yaml").write_text(BASE)
    with pytest.raises(ConfigError, match=r"0\.yaml: extends more than 50 files; merge some of them"):
        load_config(tmp_path / "0.yaml")


def test_long_words_of_a_command_line_are_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", LONG]) == 2
    assert main(["config", "check", "tiny_lora", f"model.path={LONG}"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose import leaves a trace, installed for this process and its children."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "planted.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\nfrom torch.optim import AdamW\nclass Mine(AdamW):\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv(ALLOW_COMPONENTS, "")  # restored after the test
    return "planted"


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        ("planted.Mine", "not imported, because a config may only name components of torch.optim, torchao.optim"),
        (
            "os.system",
            "If you trust its code, pass --allow-component os.system, or set FCTUNE_ALLOW_COMPONENTS=os.",
        ),
        ("torch.optimx.AdamW", "not imported"),
        ("torch.optim.os.system", "No module named 'torch.optim.os'"),
        ("torch.optim.lr_scheduler.partial", "it is functools.partial, which is not allowed"),
        ("...", "not an import path"),
        ("AdamW", "not an import path"),
        ("5", "not an import path"),
    ],
    ids=range(8),
)
def test_a_component_is_imported_from_known_packages_only(
    component: str, reason: str, package: str, tmp_path: Path
) -> None:
    report = load(tmp_path, f"{BASE}optimizer: {{_component_: {component}}}\n")
    assert f"optimizer._component_={component}: " in report
    assert reason in report
    assert not (tmp_path / "executed").exists()


def test_a_component_that_the_user_allows_reaches_the_check_and_the_ranks(package: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{BASE}optimizer: {{_component_: planted.Mine, lr: 0.5}}\n")
    check = [warm_python(), "-P", "-m", "fctune.cli", "config", "check", str(path)]
    refused = subprocess.run(check, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--allow-component planted.Mine" in refused.stderr
    assert not (tmp_path / "executed").exists()

    assert main(["config", "check", str(path), "--allow-component", "planted"]) == 0
    assert os.environ[ALLOW_COMPONENTS] == "planted"  # which ranks and other children inherit
    component, arguments = resolve_component(load_config(path).optimizer)
    assert (component.__module__, arguments) == ("planted", {"lr": 0.5})

    from fctune.training.entry import read_command_line

    os.environ[ALLOW_COMPONENTS] = ""
    assert read_command_line(["--config", str(path), "--allow-component", "planted.Mine", "a=1"], "") == (path, ["a=1"])
    assert load_config(path).optimizer["lr"] == 0.5
    assert (ROOT / ".env.example").read_text().count(f"export {ALLOW_COMPONENTS}=") == 1
