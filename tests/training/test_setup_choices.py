"""Choices that a run makes when it starts: the batch of a number of tokens, and where metrics go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fctune.apps.preflight.checks import check_length
from fctune.base.distributed import World
from fctune.config.loading import load_config
from fctune.config.sections.telemetry import WandbConfig
from fctune.data.prepared_set import resolve_batch_size
from fctune.parallel.layout import Hardware
from fctune.training import setup
from fctune.training.setup import is_wandb_on
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank

CONFIG = ROOT / "configs" / "tiny_lora.yaml"


@pytest.mark.parametrize(
    ("wanted", "tokens", "packs", "batch"),
    [
        (500_000, 4_000_000, 1000, 125),
        (4000, 4_000_000, 1000, 1),
        (10, 4_000_000, 1000, 1),
        (10_000, 4_000_000, 1000, 2),
    ],
)
def test_a_batch_of_tokens_is_that_many_mean_packs_and_at_least_one(
    wanted: int, tokens: int, packs: int, batch: int
) -> None:
    config = load_config(CONFIG, ["~global_batch_size", f"global_batch_tokens={wanted}"])
    assert resolve_batch_size(config, tokens, packs).global_batch_size == batch


def test_a_run_records_the_batch_that_its_tokens_make_and_resumes(tmp_path: Path) -> None:
    tokens = ["~global_batch_size", "global_batch_tokens=600", "epochs=2"]
    for last in (2, 3):
        result = run_ranks(run_on_rank, 1, arguments_for(tmp_path, *tokens, f"max_steps={last}"))[0]
        assert result["code"] == 0, result
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    batch = run["config"]["global_batch_size"]
    per_conversation = sum(line["tokens_total"] for line in lines) / (len(lines) * batch)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert abs(batch * per_conversation - 600) < 2 * per_conversation


@pytest.mark.parametrize(
    ("mode", "key", "is_on"),
    [("auto", "k", True), ("auto", "", False), ("online", "", True), ("offline", "", True), ("disabled", "k", False)],
)
def test_wandb_is_on_in_mode_auto_if_there_is_a_key(mode: str, key: str, is_on: bool) -> None:
    config = WandbConfig(project="p", mode=mode)  # type: ignore[arg-type]
    assert is_wandb_on(config, {"WANDB_API_KEY": key}) == is_on


def test_the_preflight_notes_a_run_of_a_few_steps() -> None:
    changes = ["data.max_samples=100", "global_batch_size=64", "epochs=3", "lr_scheduler.warmup=3%"]
    (problem,) = check_length(load_config(CONFIG, changes))
    assert problem.severity == "note"
    assert "data.max_samples=100 leaves at most 6 optimizer steps; expect little change" in str(problem)
    assert check_length(load_config(CONFIG)) == []  # nothing is known of its data


def describe_uneven(world: World) -> Hardware:
    setup.total_memory = lambda device, ranks_per_node: (80 - 40 * world.rank) * 10**9
    return setup._describe_hardware(world)


def test_ranks_with_unequal_memory_plan_by_the_least() -> None:
    first, second = run_ranks(describe_uneven, 2)
    assert first == second
    assert first.memory_bytes == 40 * 10**9
