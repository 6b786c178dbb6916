"""The metrics of each step contain the time that saves cost it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank


def run_and_count(world: World, argv: list[str]) -> dict[str, Any]:
    """Run the recipe; returns its result and the costs of saves until the last step."""
    counted: dict[str, Any] = {}

    class CountingRecipe(LoRAFunctionCallingRecipe):
        def save_checkpoint(self) -> None:
            costs = self.training.checkpoint.costs
            counted.update(stall_s=costs.wait_s + costs.start_s, num_saves=costs.num_saves)
            super().save_checkpoint()

    return run_on_rank(world, argv, CountingRecipe) | counted


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_the_step_after_a_save_reports_its_cost(is_async: bool, tmp_path: Path) -> None:
    overrides = ["epochs=4", "max_steps=6", "checkpoint.every=2", f"checkpoint.async_save={is_async}".lower()]
    (result,) = run_ranks(run_and_count, 1, arguments_for(tmp_path, *overrides))
    assert result["code"] == 0, result
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    between = {line["step"]: line["save_time_s"] for line in lines}
    assert {step for step, seconds in between.items() if seconds > 0} == {3, 5}
    waits = {line["step"]: line["save_wait_s"] for line in lines}
    assert all(0 <= seconds <= line["step_time_s"] for line, seconds in zip(lines, waits.values(), strict=True))
    assert sum(between.values()) + sum(waits.values()) == pytest.approx(result["stall_s"])
    assert result["num_saves"] == 2
    if not is_async:  # collecting, copying and writing all happen between steps
        # The steps that would wait for a save; a loaded machine may hold one of the others.
        assert min(between[3], between[5]) > 100 * max(waits[3], waits[5])
        assert sum(between.values()) > 10 * sum(waits.values())
