"""All of a config is checked, and every problem is reported with its key and remedy."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.base.errors import ConfigError
from fctune.config import key_hints
from fctune.config.components import ALLOW_COMPONENTS, find_argument_problems, resolve_component
from fctune.config.fields import SectionProblems
from fctune.config.loading import compose_config, load_config, parse_config
from fctune.config.schema import RunConfig
from fctune.config.shipped import list_shipped_configs
from fctune.config.yaml_text import dump_yaml, parse_yaml
from fctune.models.run_config import load_run_config
from tests.conftest import ROOT

MINIMAL = {
    "output_dir": "runs/x",
    "model": {"path": "fctune/assets/tiny_base"},
    "data": {"sources": [{"path": "synthetic:train:10"}]},
}


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return path


def problems_of(tmp_path: Path, *overrides: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, **changes), overrides)
    return str(caught.value)


def test_defaults_are_those_of_the_schema(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.seed, config.epochs, config.data.seq_len, config.adapter) == (42, 3, 4096, None)


def test_overrides_reach_nested_keys_lists_and_null(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, adapter={"rank": 4}),
        [
            "adapter.rank=8",
            "data.sources.0.path=synthetic:train:7",
            "clip_grad_norm=null",
            "optimizer.lr=3e-4",
            "~max_steps",
        ],
    )
    assert config.adapter is not None
    assert config.adapter.rank == 8
    assert config.data.sources[0].path == "synthetic:train:7"
    assert config.clip_grad_norm is None
    assert config.optimizer["lr"] == 3e-4


def test_all_problems_come_in_one_report(tmp_path: Path) -> None:
    report = problems_of(tmp_path, epochs="many", seeed=1, data={"sources": [{"path": "x", "wight": 2}], "packed": 3})
    assert report.splitlines()[0].endswith("5 problems")
    for line in (
        "epochs='many': expected an integer",
        "seeed: unknown key; did you mean seed?",
        "data.sources.0.wight: unknown key; did you mean data.sources.0.weight?",
        "data.packed=3: expected true or false",
        "data.sources.0.path=x: no such file or directory",
    ):
        assert line in report


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"optimizer": {"_component_": "torch.optim.AdamW", "lrr": 1}},
            "optimizer.lrr: AdamW takes no such argument; did you mean optimizer.lr?",
        ),
        ({"optimizer": {"_component_": "torch.optim.Adamm"}}, "cannot be imported"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr='fast'"),
        ({"optimizer": {"_component_": "torch.optim.AdamW", "lr": -1}}, "optimizer.lr=-1"),
        ({"adapter": {"rank": 0}}, "adapter.rank=0"),
        ({"adapter": {"dropout": 1.0}}, "adapter.dropout=1.0"),
        ({"adapter": {"scaling": "rslaura"}}, "did you mean rslora?"),
        ({"model": {"path": "no/such/dir"}}, "model.path=no/such/dir: no such directory"),
        ({"model": {"path": "configs"}}, "contains no config.json"),
        ({"model": {}}, "model.path: missing"),
        ({"data": {"sources": []}}, "data.sources=[]: empty"),
        ({"data": {"sources": [{"path": "no/rows.jsonl"}]}}, "no/rows.jsonl: no such file"),
        ({"data": {"sources": [{"path": "configs"}]}}, "0.path=configs: no data files in this directory; expected"),
        ({"data": {"sources": [{"path": "synthetic:train:9"}], "validation_share": 1.5}}, "data.validation_share=1.5"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"max_steps": -1}, "max_steps=-1"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0"),
        ({"lr_scheduler": {"name": "cosin"}}, "did you mean cosine?"),
        ({"lr_scheduler": {"warmup": 0.03}}, "lr_scheduler.warmup=0.03: not a number of steps; for a share of the run"),
        ({"lr_scheduler": {"warmup": "5min"}}, "lr_scheduler.warmup=5min: expected steps (100) or a share"),
        ({"checkpoint": {"every": "10 minutes"}}, "checkpoint.every=10 minutes: expected steps (500), a time (90s"),
        ({"checkpoint": {"every": -1}}, "checkpoint.every=-1: expected 0 (never) or more"),
        ({"validation": {"every": "101%"}}, "validation.every=101%: expected at most 100%"),
        ({"checkpoint": {"keep_every_n_steps": 9}}, "checkpoint.keep_every_n_steps=9: needs intervals in steps"),
        ({"global_batch_tokens": 9, "global_batch_size": 2}, "global_batch_size=2 is set too; keep one"),
        ({"output_dir": "pyproject.toml"}, "output_dir=pyproject.toml: is a file"),
        ({"precision": "fp8"}, "precision='fp8': expected one of fp32, bf16, fp64"),
        ({"data": 3}, "data: expected a mapping"),
        ({"seed": True}, "seed=True: expected an integer"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
        ({"lr_scheduler": {"min_factor": 10}}, "lr_scheduler.min_factor=10.0: expected 0 or more and at most 1"),
        ({"lr_scheduler": {"min_factor": -1}}, "lr_scheduler.min_factor=-1.0: expected 0 or more and at most 1"),
        ({"lr_scheduler": {"min_factor": float("nan")}}, "lr_scheduler.min_factor=nan: expected 0 or more"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas=[0.9]: expected two numbers from 0 to less than 1"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas=0.9: expected two numbers"),
        ({"optimizer": {"betas": [0.9, 1]}}, "optimizer.betas=[0.9, 1]: expected two numbers"),
        ({"profile": {"first_step": 0}}, "profile.first_step=0: expected 1 or more"),
        ({"profile": {"first_step": 9, "last_step": 8}}, "profile.last_step=8: less than profile.first_step=9"),
        ({"profile": {"ranks": [0, -1]}}, "profile.ranks.1=-1: expected 0 or more"),
        ({"adapter": {"alpha": float("nan")}}, "adapter.alpha=nan: expected more than 0"),
        ({"telemetry": {"prometheus": {"port": 70000}}}, "expected 1 or more and at most 65535, or null (no endpoint)"),
        ({"eval": {"every": 5, "cases": "no.jsonl"}}, "eval.cases=no.jsonl: no such file"),
        ({"eval": {"every": 5, "cases": "configs"}}, "eval.cases=configs: a directory, not a file"),
        ({"parallel": {"replicate": 2}}, "parallel.replicate=2: only hsdp"),
        ({"parallel": {"mode": "ddp", "cpu_offload": True}}, "parallel.cpu_offload: offloads shards"),
        ({"adapter": {}, "precision": "bf16_mixed"}, "precision=bf16_mixed: is for training all weights"),
        ({"activation_checkpointing": {"offload": True}}, "activation_checkpointing.offload"),
        (
            {"activation_checkpointing": {"offload": True, "fraction": 1.0, "policy": "op"}},
            "activation_checkpointing.offload: moves the inputs of blocks, and activation_checkpointing.policy=op",
        ),
        (
            {"activation_checkpointing": {"mlp_tiles": 8, "policy": "op"}},
            "mlp_tiles=8: recomputes the products of MLPs, which activation_checkpointing.policy=op keeps",
        ),
        (
            {"activation_checkpointing": {"mlp_tiles": 8}, "precision": "float8_mixed"},
            "mlp_tiles=8: with precision=float8_mixed, the numbers of a row share a scale",
        ),
        (
            {"precision": "float8", "data": {"sources": [{"path": "synthetic:train:9"}], "seq_len": 1000}},
            "data.seq_len=1000: float8 products need a multiple of 16 tokens, and precision=float8; use 992",
        ),
        ({"profile": {"ranks": []}}, "profile.ranks=[]: empty; write e.g. [0]"),
        ({"profile": {"steps": 3}}, "profile.steps: unknown key"),
        ({"price_per_gpu_hour": -2}, "price_per_gpu_hour=-2.0: expected 0 or more, or null (cost is not reported)"),
        ({"price_per_gpu_hour": "cheap"}, "price_per_gpu_hour='cheap': expected a number"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in problems_of(tmp_path, **changes)


def test_an_empty_file_of_rows_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    shown = f"data.sources.0.path={empty}: an empty file; expected rows"
    assert shown in problems_of(tmp_path, data={"sources": [{"path": str(empty)}]})


@pytest.mark.parametrize("override", ["epochs", "=3", "data.sources.9.path=x", "epochs=[1"])
def test_a_wrong_override_is_named(tmp_path: Path, override: str) -> None:
    assert override in problems_of(tmp_path, override)


def test_a_missing_file_is_answered_with_similar_names() -> None:
    with pytest.raises(ConfigError, match=r"tiny_lorra\.yaml: no such config file.*tiny_lora\.yaml"):
        load_config(ROOT / "configs" / "tiny_lorra.yaml")


@pytest.mark.parametrize("text", ["a: [", "just text", "\x00"])
def test_a_file_that_is_not_a_config_is_named_in_the_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config(path)


# Acceptance configs have their own schema, tested in tests/apps/acceptance.
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("acceptance_"))


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    raw = compose_config(path, RunConfig).values
    problems: list[str] = []
    assert parse_config(raw, problems), problems
    assert not problems


def test_rules_between_values_are_checked_although_other_keys_are_wrong(tmp_path: Path) -> None:
    report = problems_of(
        tmp_path,
        seeed=1,
        adapter={"rnk": 8},
        precision="bf16_mixed",
        model={"path": "no/such", "revision": "x"},
        parallel={"replicate": 2, "cpu_offload": 3},
        profile={"first_step": 9, "last_step": 8, "shapes": "yes"},
    )
    for line in (
        "seeed: unknown key",
        "adapter.rnk: unknown key",
        "model.path=no/such: no such directory",
        "precision=bf16_mixed: is for training all weights",
        "parallel.replicate=2: only hsdp",
        "parallel.cpu_offload=3: expected true or false",
        "profile.last_step=8: less than",
    ):
        assert line in report


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["model=3", "adapter.modules=[]"], ["model: expected a mapping", "adapter.modules: empty"]),
        (["adapter.modules=3"], ["adapter.modules=3: expected one of all-linear, or a list"]),
        (["adapter.modules=[3, q_prj]"], ["adapter.modules.0=3: expected text", "no such module: q_prj"]),
    ],
    ids=str,
)
def test_a_section_of_the_wrong_type_does_not_stop_the_check_of_the_model(
    overrides: list[str], lines: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("tiny_lora", overrides)
    report = str(caught.value).splitlines()
    assert len(report) == 1 + len(lines)
    for shown, line in zip(report[1:], lines, strict=True):
        assert line in shown


def test_a_misspelt_or_wrong_key_causes_no_second_problem(tmp_path: Path) -> None:
    report = problems_of(
        tmp_path,
        eval={"every": 5, "cases": "x.jsonl", "case": "x.jsonl"},
        parallel={"mode": "hdsp", "replicate": 2},
        profile={"first_step": 9, "last_stp": 20},
    )
    assert report.splitlines()[0].endswith("3 problems")


def test_a_problem_of_one_section_does_not_hide_those_of_another(tmp_path: Path) -> None:
    report = problems_of(tmp_path, epochs=0, optimizer={"lrr": 1}, model={"path": "no/such"}, seed="x")
    for key in ("epochs=0", "optimizer.lrr", "model.path=no/such", "seed='x'"):
        assert key in report


def test_checking_a_config_leaves_it_unchanged(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, optimizer={"weight_decay": 0.1}))
    before = config.to_dict()
    config.check("", SectionProblems())
    assert config.to_dict() == before
    assert config.optimizer == {"_component_": "torch.optim.AdamW", "lr": 2e-4, "weight_decay": 0.1}


@pytest.mark.parametrize("argument", ["weight_decay", "betas", "fused", "lr", "_component_"])
def test_null_removes_an_argument_of_the_optimizer(argument: str, tmp_path: Path) -> None:
    default = {"_component_": "torch.optim.AdamW", "lr": 2e-4}
    assert load_config(write(tmp_path), [f"optimizer.{argument}=null"]).optimizer == default
    assert load_config(write(tmp_path, optimizer={argument: None})).optimizer == default


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("016", 16),
        ("0042", 42),
        ("-089", -89),
        ("0x1F", 31),
        ("0b11", 3),
        ("65_536", 65536),
        ("0o17", "0o17"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("1_0.5", 10.5),
        ("1.5e3", 1500.0),
        ("2e-4", 2e-4),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("1.2.3", "1.2.3"),
    ],
)
def test_numbers_are_those_of_yaml_1_2_and_written_text_stays_text(text: str, value: float | str) -> None:
    assert (type(parse_yaml(text)), parse_yaml(text)) == (type(value), value)
    assert parse_yaml(dump_yaml(text)) == text
    assert parse_yaml(dump_yaml(value)) == value


def test_a_time_as_on_a_clock_is_no_number_of_steps(tmp_path: Path) -> None:
    assert "checkpoint.every=1:00:00: expected steps (500), a time" in problems_of(tmp_path, "checkpoint.every=1:00:00")
    assert "max_steps='1:30': expected an integer" in problems_of(tmp_path, "max_steps=1:30")


def test_paths_may_start_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    overrides = ["output_dir=~/runs/mine", "data.sources.0.path=~/rows.jsonl", "checkpoint.fallback_dir=~/disk"]
    config = load_config(write(tmp_path), overrides)
    assert config.output_dir == str(tmp_path / "runs" / "mine")
    assert config.data.sources[0].path == str(tmp_path / "rows.jsonl")
    assert config.checkpoint.fallback_dir == str(tmp_path / "disk")


def test_a_float_in_scientific_notation_is_a_number_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + "optimizer: {lr: 4e-3, eps: 1E-8}\nclip_grad_norm: 1e+0\n")
    config = load_config(path)
    assert (config.optimizer["lr"], config.optimizer["eps"], config.clip_grad_norm) == (0.004, 1e-8, 1.0)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam", "Adafactor", "Muon"])
def test_arguments_of_torch_optimizers_are_read_from_source_as_torch_defines_them(name: str) -> None:
    import torch

    accepted = [n for n in inspect.signature(getattr(torch.optim, name)).parameters if n != "params"]
    spec = {"_component_": f"torch.optim.{name}"} | dict.fromkeys(accepted)
    assert find_argument_problems(spec, "optimizer") == []
    assert find_argument_problems(spec | {"nonsense": 1}, "optimizer") == [
        f"optimizer.nonsense: {name} takes no such argument; drop it with ~optimizer.nonsense"
    ]


@pytest.mark.parametrize("config", [c for c in list_shipped_configs() if "optimizer:" in c.read_text()], ids=str)
def test_every_shipped_config_works_with_an_optimizer_that_has_no_fused_update(config: Path) -> None:
    import torch

    spec = compose_config(config, RunConfig).values["optimizer"] | {"_component_": "torchao.optim.AdamW8bit"}
    assert spec["fused"]
    assert find_argument_problems(spec, "optimizer") == []
    component, arguments = resolve_component(spec)
    optimizer = component([torch.nn.Parameter(torch.zeros(2))], **arguments)
    assert optimizer.param_groups[0]["lr"] == spec["lr"]


def test_a_component_outside_torch_optim_is_imported_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_COMPONENTS, "fractions")
    spec = {"_component_": "fractions.Fraction", "numeratr": 3}
    assert find_argument_problems(spec, "x") == [
        "x.numeratr: Fraction takes no such argument; did you mean x.numerator?"
    ]


@pytest.mark.parametrize("name", ["tiny_lora", "lora_tiny", "tiny_lora.yaml", "configs/tiny_lora.yaml"])
def test_a_shipped_config_is_found_by_name_with_its_words_in_any_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(name)
    assert config.output_dir == "runs/tiny_lora"
    assert Path(config.model.path) == ROOT / "fctune" / "assets" / "tiny_base"


def test_wrong_adapter_modules_are_reported_with_the_other_problems(tmp_path: Path) -> None:
    path = write(tmp_path, adapter={"modules": ["q_prj"]}, epochs=0)
    with pytest.raises(ConfigError) as caught:
        load_run_config(path)
    assert "epochs=0" in str(caught.value)
    assert "adapter.modules: no such module: q_prj; did you mean q_proj?" in str(caught.value)


def test_off_is_a_choice_although_yaml_reads_a_boolean() -> None:
    path = ROOT / "configs" / "tiny_lora.yaml"
    for text, expected in (("off", "off"), ("auto", "auto"), ("[<a>]", ["<a>"])):
        adapter = load_config(path, [f"adapter.train_tokens={text}"]).adapter
        assert adapter is not None
        assert adapter.train_tokens == expected
    with pytest.raises(ConfigError, match=r"adapter\.train_tokens=True: expected one of auto, off"):
        load_config(path, ["adapter.train_tokens=on"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("lr=3", "did you mean optimizer.lr?"),
        ("num_train_epochs=3", "did you mean epochs?"),
        ("learning_rate=3e-4", "did you mean optimizer.lr?"),
        ("batch_size=3", "did you mean global_batch_size?"),
        ("adapter.r=8", "did you mean adapter.rank?"),
        ("rank=8", "did you mean adapter.rank?"),
        ("seedd=8", "did you mean seed?"),
        ("data.seq_length=8", "did you mean data.seq_len?"),
        ("data.path=rows.jsonl", "did you mean --data FILE, or data.sources=[{path: FILE}]?"),
        ("data=rows.jsonl", "did you mean --data FILE, or data.sources=[{path: FILE}]?"),
        ("model=hf:me/model", "did you mean model.path?"),
    ],
)
def test_keys_of_other_trainers_and_other_sections_are_answered_with_the_right_key(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_lora", [override])
    assert remedy in str(caught.value)


def test_every_key_that_stands_for_another_trainers_name_exists() -> None:
    for key, names in key_hints._OTHER_NAMES.items():
        assert key == key_hints.DATA_REMEDY or key in key_hints.list_keys() or key.startswith("optimizer."), key
        assert not set(names) & set(key_hints.list_keys()) - {"model", "data"}, names


_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]+[a-z]")
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+(?==)|(?<=\bset )[a-z_]+(?:\.[a-z_]+)+")
_OF_OTHERS = {
    "--disable-log-stats",
    "--help",
    "--heat",
    "--max-logprobs",
    "--max-model-len",
    "--gpus-per-node",
    "--no-deps",
    "--nodes",
    "--ntasks",
    "--rdzv_id",
    "--shm-size",
}  # vLLM, pip, torchrun, docker, Slurm


def test_messages_name_options_and_keys_that_exist() -> None:
    options = set(_OPTION.findall((ROOT / "docs" / "reference" / "commands.md").read_text())) | _OF_OTHERS
    sections = {key.partition(".")[0] for key in key_hints.list_keys() if "." in key} - {"optimizer"}
    unknown = []
    for file in sorted((ROOT / "fctune").rglob("*.py")):
        for text in _iter_raised(file):
            unknown += [f"{file}: {name} in {text!r}" for name in _OPTION.findall(text) if name not in options]
            keys = [key for key in _KEY.findall(text) if key.partition(".")[0] in sections]
            unknown += [f"{file}: {key} in {text!r}" for key in keys if key not in key_hints.list_keys()]
    assert not unknown, "\n".join(unknown)


def _iter_raised(file: Path) -> Iterator[str]:
    """Yield the texts in exceptions, lists of problems, errors of commands, and warnings."""
    for node in ast.walk(ast.parse(file.read_text())):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".append", ".error", ".warning"))
        if is_call or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
