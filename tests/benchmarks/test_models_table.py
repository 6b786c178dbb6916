"""The table of supported models is current, can fail, and holds for architectures of every kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import models
from benchmarks.model_checks import CHECKS, check_alone
from benchmarks.model_runs import prepare_sets
from benchmarks.model_zoo import (
    CALL_FORMATS,
    ENTRIES,
    HEADLINES,
    NO_CALL_FORMAT,
    SERVED,
    TEMPLATES,
    Entry,
    find_entry,
)
from benchmarks.templates import find_templates
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.calls.formats.registry import FORMATS, detect_format
from fctune.models.sources import read_architecture
from fctune.models.transformers.refused_types import list_refusals
from tests.ranks import run_ranks

RESULT: dict[str, Any] = json.loads(models.RESULT.read_text(encoding="utf-8"))

# Soft caps, sinks with experts and YaRN, latent attention with shared experts, layers with state, a vision tower,
# and a decoder of torchtune's.
SAMPLE = ("gemma2", "gpt_oss", "glm4_moe_lite", "lfm3", "mistral3", "qwen2")


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    prepare_sets(folder)
    return folder


def test_the_page_is_that_of_the_result() -> None:
    assert models.PAGE.read_text(encoding="utf-8") == models.format_page(RESULT), "python -m benchmarks.models --page"


def test_every_architecture_passes_or_is_refused_by_name() -> None:
    rows = RESULT["rows"]
    assert [row["model_type"] for row in rows] == [entry.model_type for entry in ENTRIES]
    passed = [row["model_type"] for row in rows if models.has_passed(row)]
    readme = " ".join((models.ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"tiny models of {len(passed)} architectures" in readme
    assert all("compile" in row["outcomes"] for row in rows if row["model_type"] in passed)
    refused = {row["model_type"]: row["refused"] for row in rows if "refused" in row}
    assert {row["model_type"] for row in rows} == {*passed, *refused}
    for family, reason in refused.items():
        assert "choose another model" in reason, family
    assert set(passed) >= HEADLINES


def test_every_causal_model_of_transformers_is_in_the_table_or_refused_by_name(tmp_path: Path) -> None:
    rows = {entry.model_type for entry in ENTRIES}
    refused = {name: reason for reason, names in list_refusals().items() for name in names}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= rows | refused.keys()
    assert not rows & refused.keys()
    for name, reason in refused.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(ConfigError) as caught:
            read_architecture(tmp_path)
        assert f"model_type={name!r} {reason}; choose another model." in str(caught.value)


def test_every_row_has_a_call_format_or_says_why_not() -> None:
    passed = {row["model_type"] for row in RESULT["rows"] if models.has_passed(row)}
    assert passed <= CALL_FORMATS.keys() | NO_CALL_FORMAT.keys()
    assert not CALL_FORMATS.keys() & NO_CALL_FORMAT.keys()


def test_the_call_formats_and_templates_of_the_table_exist() -> None:
    known = {entry.model_type for entry in ENTRIES}
    assert known >= {*CALL_FORMATS, *TEMPLATES, *SERVED}
    templates = {template.name: template for template in find_templates()}
    for model_type, names in TEMPLATES.items():
        found = {detect_format(templates[name].source).name for name in names}
        assert found <= set(CALL_FORMATS[model_type]), model_type
    assert {name for names in CALL_FORMATS.values() for name in names} <= FORMATS.keys()


def test_the_servers_of_the_table_answered_models_of_these_architectures() -> None:
    for model_type, source in SERVED.items():
        text = (models.ROOT / source).read_text(encoding="utf-8")
        served = {"llama": "tiny_base", "gemma3_text": "Gemma 3 270M"}.get(model_type, f'"{model_type}"')
        assert served in text, source


def test_a_proof_that_was_cut_off_is_resumed_without_the_rows_of_the_present_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, proven = tmp_path / "result.json", []

    def prove(entry: Entry, folder: Path, sets: Path, checks: Sequence[str]) -> dict[str, Any]:
        proven.append(entry.model_type)
        return {"model_type": entry.model_type, "models": entry.models, "refused": "choose another model"}

    def run(*options: str) -> list[str]:
        """Return what a command proves."""
        monkeypatch.setattr(sys, "argv", ["models", "--out", str(out), *options])
        proven.clear()
        models.main()
        return proven

    def written() -> dict[str, str]:
        return {row["model_type"]: row["code"] for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}

    def interrupt_second(row: dict[str, Any]) -> str:
        if out.is_file():
            raise KeyboardInterrupt
        return "one row"

    monkeypatch.setattr(models, "prove", prove)
    monkeypatch.setattr(models, "prepare_sets", lambda folder: None)
    names = ["qwen2", "gpt_oss", "gemma"]
    with monkeypatch.context() as during:
        during.setattr(models, "describe", interrupt_second)
        with pytest.raises(KeyboardInterrupt):
            run("--only", *names)
    (first,) = written()
    assert run("--only", *names, "--resume") == [name for name in names if name != first]
    assert list(written()) == names
    assert run("--only", *names, "--resume") == []
    assert run("--only", "gemma") == ["gemma"]
    monkeypatch.setattr(models, "digest_code", lambda: "other code")
    assert run("--only", "gemma", "qwen2", "--resume") == ["qwen2", "gemma"]
    assert run("--only", *names, "--resume") == ["gpt_oss"]
    assert written() == dict.fromkeys(names, "other code")
    assert "gpt_oss" in capsys.readouterr().out


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[] if name == "lfm3" else pytest.mark.thorough) for name in SAMPLE],
)
def test_architectures_of_every_kind_pass(model_type: str, sets: Path, tmp_path: Path) -> None:
    names = ("pack", "lora", "full", "resume", "export")
    (found,) = run_ranks(check_alone, 1, find_entry(model_type), tmp_path, sets, names)
    failed = {name: outcome["note"] for name, outcome in found["outcomes"].items() if not outcome["passed"]}
    assert not failed
    assert found["outcomes"].keys() == {"build", *names}
    assert found["is_packed"]


def check_with_a_leak(world: World, folder: Path, sets: Path) -> dict[str, Any]:
    """Run the check of packed rows with attention that sees the neighbour."""
    from fctune.models.transformers import attention

    whole = attention.attend

    def leak(q: Tensor, k: Tensor, v: Tensor, bounds: Any, *rest: Any, **options: Any) -> Tensor:
        return whole(q, k, v, None, *rest, **options)

    attention.attend = leak
    return check_alone(world, find_entry("qwen3"), folder, sets, ("pack",))


def test_a_model_whose_conversations_see_each_other_is_not_called_packed(sets: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(check_with_a_leak, 1, tmp_path, sets)
    assert not found["is_packed"]


def check_with_a_wrong_scale(world: World, folder: Path, sets: Path) -> dict[str, Any]:
    """Run all checks with adapters that are scaled a little too much."""
    from fctune.models import lora

    scaling = lora.adapter_scaling
    lora.adapter_scaling = lambda config: 1.05 * scaling(config)
    torch.manual_seed(0)
    return check_alone(world, find_entry("qwen3"), folder, sets, ("pack", "lora"))


@pytest.mark.thorough
def test_an_adapter_that_is_scaled_wrongly_fails(sets: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(check_with_a_wrong_scale, 1, tmp_path, sets)[0]["outcomes"]
    assert outcomes["pack"]["passed"]
    assert not outcomes["lora"]["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.model_type)
def test_the_result_holds_for_every_architecture(entry: Any, sets: Path, tmp_path: Path) -> None:
    expected = next(row for row in RESULT["rows"] if row["model_type"] == entry.model_type)
    row = models.prove(entry, tmp_path / "model", sets)
    assert ("refused" in row) == ("refused" in expected), models.describe(row)
    assert models.has_passed(row) or "refused" in row, models.describe(row)
    assert set(row.get("outcomes", CHECKS)) >= set(CHECKS)
