"""Choices that a run makes when it starts: batches of a number of tokens or of auto, and where metrics go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fctune.apps.plan.plan import Plan, make_plan
from fctune.apps.plan.request import PlanRequest
from fctune.apps.preflight.checks import check_length
from fctune.base.distributed import World
from fctune.base.gpus import GPUS
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "gpu", "gpus", "seq_len"),
    [
        ("llama3_1_8b_lora", "h100", 1, 4096),
        ("llama3_1_8b_lora", "h100", 8, 16384),
        ("llama3_1_8b_full", "h100", 16, 4096),
        ("qwen3_0_6b_lora", "a10g", 1, 4096),
    ],
)
def test_auto_plans_the_largest_micro_batch_among_the_fastest_that_fit(
    name: str, gpu: str, gpus: int, seq_len: int
) -> None:
    """Compared with the plan of each number of packs, written as a number."""
    given = [f"data.seq_len={seq_len}", "global_batch_size=32", "data.sources=[{path: synthetic:train:5}]"]
    nodes = max(1, gpus // 8)
    request = PlanRequest(GPUS[gpu], nodes, gpus // nodes)

    def plan(size: int | str) -> Plan:
        config = load_config(ROOT / "configs" / f"{name}.yaml", [*given, f"micro_batch_size={size}"])
        return make_plan(config, request)

    auto = plan("auto")
    share = 32 // gpus
    plans = {size: plan(size) for size in (1, 2, 4, 8, 16, 32) if size <= share}
    fitting = {n: p for n, p in plans.items() if p.peak.footprint.total <= 0.9 * GPUS[gpu].memory_bytes}
    least_s = min(p.estimate.step_s for p in fitting.values())
    chosen = auto.config.micro_batch_packs
    assert auto.config.global_batch_size == 32
    assert auto.peak.footprint.total <= 0.9 * GPUS[gpu].memory_bytes
    assert auto.estimate.step_s <= 1.011 * least_s
    assert chosen >= max(n for n, p in fitting.items() if p.estimate.step_s <= 1.005 * least_s)
    assert auto.search.micro_batch_reason.endswith("of the blocks checkpointed")


def test_ranks_share_the_micro_batch_of_auto_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    common = ["micro_batch_size=auto", "global_batch_size=4", "success=null", "epochs=8"]
    first = run_ranks(run_on_rank, 2, arguments_for(tmp_path, *common, "max_steps=1"))
    assert [done["code"] for done in first] == [0, 0], first[0]["err"]
    assert "micro_batch_size: auto is 2 packs (" in first[0]["out"] + first[0]["err"]
    run = tmp_path / "run"
    for file in (run / "run.json", *run.glob("checkpoints/*/trainer_state.json")):
        assert json.loads(file.read_text())["config"]["micro_batch_size"] == 2
    again = run_ranks(run_without_choice, 1, arguments_for(tmp_path, *common, "max_steps=2"))[0]
    assert again["code"] == 0, again["err"]
    assert "micro_batch_size: auto is 2 packs (as in " in again["out"] + again["err"]
    assert json.loads((run / "run.json").read_text())["config"]["micro_batch_size"] == 2


def run_without_choice(world: World, argv: list[str]) -> dict[str, Any]:
    """Train on a rank where no micro-batch can be chosen."""
    with patch.object(setup, "choose_micro_batch", side_effect=AssertionError):
        return run_on_rank(world, argv)


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
