"""Configs that extend others: the merge, its errors, and the origin of each value."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from fctune.base.errors import ConfigError
from fctune.cli import main
from fctune.config import shipped
from fctune.config.loading import load_config
from fctune.config.reference import json_schema

BASE = """
output_dir: runs/base
model: {path: fctune/assets/tiny_base}
adapter: {rank: 8, alpha: 16, modules: [q_proj, k_proj]}
data: {sources: [{path: synthetic:train:20:1}, {path: synthetic:train:20:2}], seq_len: 512}
optimizer: {_component_: torch.optim.SGD, lr: 0.1, momentum: 0.9}
clip_grad_norm: 2.0
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_later_files_win_mappings_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    write(tmp_path / "bases" / "base.yaml", BASE)
    write(tmp_path / "bases" / "fast.yaml", "extends: null\nepochs: 7\ndata: {seq_len: 1024}\nadapter: {rank: 4}\n")
    top = write(
        tmp_path / "top.yaml",
        "extends: [bases/base.yaml, bases/fast.yaml]\nadapter: {modules: [v_proj]}\n"
        "data: {sources: [{path: synthetic:train:20:3}]}\n",
    )
    config = load_config(top, ["epochs=9"])
    assert config.adapter is not None
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.modules) == (4, 16, ["v_proj"])
    assert [source.path for source in config.data.sources] == ["synthetic:train:20:3"]
    assert (config.data.seq_len, config.epochs, config.output_dir) == (1024, 9, "runs/base")


def test_files_are_relative_to_the_file_that_names_them_and_may_share_a_base(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "base.yaml", BASE)
    write(tmp_path / "deep" / "one.yaml", "extends: base.yaml\nseed: 1\n")
    write(tmp_path / "two.yaml", "extends: deep/base.yaml\nepochs: 2\n")
    top = write(tmp_path / "top" / "run.yaml", "extends: [../deep/one.yaml, ../two.yaml]\n")
    config = load_config(top)
    assert (config.seed, config.epochs, config.data.seq_len) == (1, 2, 512)


def test_null_removes_a_section_an_argument_or_a_limit_and_else_selects_the_default(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    top = write(
        tmp_path / "top.yaml",
        "extends: base.yaml\nadapter: null\nclip_grad_norm: null\ndata: {seq_len: null}\n"
        "optimizer: {_component_: torch.optim.AdamW, momentum: null}\n",
    )
    config = load_config(top)
    assert config.adapter is None
    assert config.clip_grad_norm is None
    assert config.data.seq_len == load_config("tiny_lora", ["~data.seq_len"]).data.seq_len != 512
    assert config.optimizer == {"_component_": "torch.optim.AdamW", "lr": 0.1}


def test_a_shipped_config_is_extended_by_its_name(tmp_path: Path) -> None:
    top = write(tmp_path / "tiny_lora.yaml", "extends: tiny_lora\nseed: 7\n")
    assert load_config(top).to_dict() == load_config("tiny_lora", ["seed=7"]).to_dict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: bsae.yaml", ["top.yaml: extends=bsae.yaml", "did you mean base.yaml"]),
        ("extends: [base.yaml, 3]", ["top.yaml: extends=3: expected a file, or a list of files"]),
        ("extends: {a: b}", ["expected a file, or a list of files"]),
        ("extends: top.yaml", ["top.yaml: extends itself", "remove one extends"]),
        ("extends: back.yaml", ["top.yaml: extends itself", "back.yaml ->"]),
        ("extends: list.yaml", ["list.yaml: expected a mapping"]),
        ("extends: base.yaml\nadapter: {rnk: 3}", ["adapter.rnk: unknown key; did you mean adapter.rank?"]),
    ],
    ids=["missing", "number", "mapping", "itself", "cycle", "not_a_config", "unknown_key"],
)
def test_what_cannot_be_extended_is_reported(text: str, words: list[str], tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    write(tmp_path / "back.yaml", "extends: top.yaml")
    write(tmp_path / "list.yaml", "[1]")
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path / "top.yaml", text))
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_command_line_cannot_extend() -> None:
    with pytest.raises(ConfigError, match=r"extends=x\.yaml: only a file can extend another"):
        load_config("tiny_lora", ["extends=x.yaml"])


def test_show_names_the_origin_of_each_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "base.yaml", BASE)
    top = write(tmp_path / "top.yaml", "extends: base.yaml\nadapter: {rank: 4}\n")
    assert (
        main(["config", "show", str(top), "data.sources.1.path=synthetic:train:20:3", "seed=3", "~clip_grad_norm"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert f"  rank: 4 # {top}" in lines
    assert f"  alpha: 16 # {base}" in lines
    assert f"    - path: synthetic:train:20:1 # {base}" in lines
    assert "    - path: synthetic:train:20:3 # command line" in lines
    assert "seed: 3 # command line" in lines
    assert not any("clip_grad_norm" in line for line in lines)


@pytest.mark.parametrize("options", [[], ["--defaults"]], ids=["given", "defaults"])
@pytest.mark.parametrize("name", ["tiny_lora", "tiny_full", "llama3_1_8b_lora", "top"])
def test_what_show_prints_is_the_same_config(
    name: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "base.yaml", BASE)
    top = write(tmp_path / "top.yaml", 'extends: base.yaml\noutput_dir: "1e-4"\nmodel: {template_args: {a: "on"}}\n')
    config = str(top) if name == "top" else name
    assert main(["config", "show", config, "seed=3", *options]) == 0
    shown = write(tmp_path / "shown.yaml", capsys.readouterr().out)
    assert load_config(shown).to_dict() == load_config(config, ["seed=3"]).to_dict()
    assert set(load_config(config).to_dict()) == set(yaml.safe_load(shown.read_text())) or not options


def test_cp_copies_the_files_that_a_config_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = tmp_path / "shipped"
    write(configs / "bases" / "base.yaml", BASE)
    write(configs / "run_lora.yaml", "# A run.\nextends: bases/base.yaml\nseed: 5\n")
    monkeypatch.setattr(shipped, "shipped_dir", lambda name: configs if name == "configs" else tmp_path / name)
    target = tmp_path / "mine"
    assert main(["config", "cp", "run_lora", f"{target}/renamed.yaml"]) == 0
    assert load_config(target / "renamed.yaml").seed == 5
    assert capsys.readouterr().out.splitlines() == [f"{target}/renamed.yaml", f"{target}/bases/base.yaml"]
    assert main(["config", "cp", "run_lora", str(target)]) == 0, "an equal base is no conflict"
    write(target / "bases" / "base.yaml", "seed: 1")
    assert main(["config", "cp", "run_lora", f"{target}/again.yaml"]) == 2
    assert "differs from" in capsys.readouterr().err
    assert not (target / "again.yaml").exists()


def test_the_json_schema_requires_keys_only_of_a_config_that_extends_none() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert validator.is_valid({"extends": "base.yaml", "adapter": {"rank": 4}})
    assert validator.is_valid({"extends": ["a.yaml", "b.yaml"]})
    assert not validator.is_valid({"extends": "base.yaml", "adapter": {"rank": "x"}})
    assert not validator.is_valid({"extends": 3})
    assert not validator.is_valid({"adapter": {"rank": 4, "alpha": 8}})
