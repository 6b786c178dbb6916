"""Runs that cannot work end before their data is prepared, which may take long, or before their first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fctune.base.distributed import World
from fctune.models.transformers import attention
from tests.models.expert_samples import save_base
from tests.models.hybrid_samples import save_hybrid
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import Kind, arguments_for, check_single_reports, run_on_rank

ROWS = 100_000  # would take a minute to prepare


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        assert changes.keys() <= config.keys()
        (path / "config.json").write_text(json.dumps(config | changes))

    return change


def keep(path: Path) -> None:
    """Leave the model as it is."""


# By claim: the kind of model, what is done to it, settings, and parts of the message.
CASES: dict[str, tuple[str, Callable[[Path], None], list[str], list[str]]] = {
    "experts in MXFP4 that are not stored so": (
        "experts",
        keep,
        ["adapter.modules=all-linear", "adapter.base=mxfp4"],
        ["adapter.base=mxfp4: keeps experts as a checkpoint stores them in MXFP4", "set adapter.base=nf4"],
    ),
    "a module that is not there": (
        "experts",
        keep,
        ["adapter.modules=[q_prj]"],
        ["adapter.modules: no such module: q_prj; did you mean q_proj?", "experts.down_proj"],
    ),
    "a module that takes no adapter": (
        "falcon_h1",
        keep,
        ["adapter.modules=[out_proj]"],
        ["adapter.modules: out_proj takes no adapter", "PEFT"],
    ),
    "weights of another model": (
        "experts",
        change_config(hidden_size=128),
        ["adapter.modules=all-linear"],
        ["embed_tokens.weight has the shape", ", 64], config.json implies", "compare config.json with the published"],
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    save_base("qwen3_moe", folder / "experts", with_tokenizer=True, num_experts=4)
    save_hybrid("falcon_h1", folder / "falcon_h1", with_tokenizer=True)
    return folder


def try_cases(world: World, bases: Path, output: Path) -> dict[str, dict[str, Any]]:
    """Run all cases one after another on this rank."""
    found: dict[str, dict[str, Any]] = {}
    for number, (claim, (kind, change, settings, _)) in enumerate(CASES.items()):
        base = output / f"base {number}"
        base.mkdir()
        for file in (bases / kind).iterdir():
            if file.name == "config.json":
                (base / file.name).write_bytes(file.read_bytes())
            else:
                (base / file.name).symlink_to(file)
        change(base)
        rows = f"data.sources.0.path=synthetic:train:{ROWS}:1"
        argv = arguments_for(output / str(number), f"model.path={base}", rows, *settings)
        found[claim] = run_on_rank(world, argv)
    return found


def test_runs_that_cannot_work_end_before_their_data_is_prepared(bases: Path, tmp_path: Path) -> None:
    results = run_ranks(try_cases, 1, bases, tmp_path)[0]
    for claim, (*_, parts) in CASES.items():
        result = results[claim]
        assert result["code"] == 2, (claim, result)
        assert "data:" not in result["out"], (claim, result)
        message = result["err"].strip().splitlines()[-1]
        assert all(part in message for part in parts), (claim, message)


def test_data_with_tokens_that_the_model_has_no_rows_for_is_rejected(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model(vocab_size=1405)
    words = f"{base}: the data has tokens beyond the 1,405 rows of the model's embedding: </tool_call>, "
    kinds: list[Kind] = ["lora", "full"]
    check_single_reports(
        [(arguments_for(tmp_path / kind, f"model.path={base}", kind=kind), words, kind) for kind in kinds]
    )


def run_with_leak(world: World, argv: list[str]) -> dict[str, Any]:
    """Run on this rank with attention that ignores where conversations end."""
    attend = attention.attend
    with patch.object(attention, "attend", lambda q, k, v, bounds, **options: attend(q, k, v, None, **options)):
        return run_on_rank(world, argv)


def test_a_run_whose_packed_conversations_see_each_other_takes_no_step(bases: Path, tmp_path: Path) -> None:
    settings = ["data.packed=true", "data.seq_len=512", "adapter.modules=[q_proj]"]
    argv = arguments_for(tmp_path, f"model.path={bases / 'experts'}", *settings)
    result = run_ranks(run_with_leak, 1, argv)[0]
    assert result["code"] == 2, result
    message = result["err"].strip().splitlines()[-1]
    assert "data.packed: conversations of a packed row see each other in Qwen3MoeAttention" in message
    assert message.endswith("Set data.packed=false.")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not metrics.read_text()
