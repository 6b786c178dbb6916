"""What saves cost stands in the metrics of the steps that paid for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fctune.distributed import World
from fctune.training.keeper import Keeper
from tests.ranks import run_ranks
from tests.recipes.test_lora_recipe import run_here, small


def run_and_ask(world: World, argv: list[str]) -> dict[str, Any]:
    """The recipe, and what its keeper counted until the last step was told."""
    keepers: list[Keeper] = []
    finish = Keeper.finish
    counted: dict[str, Any] = {}

    def note(self: Keeper, step: int) -> Any:
        keepers.append(self)
        counted.update(stall_s=self.cost.stall_s, num_saves=self.cost.num_saves)
        return finish(self, step)

    Keeper.finish = note  # type: ignore[method-assign]
    return run_here(world, argv) | counted


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_save_took_is_told_by_the_step_after_it(is_async: bool, tmp_path: Path) -> None:
    more = ["epochs=4", "max_steps=6", "checkpoint.every_n_steps=2", f"checkpoint.async_save={is_async}".lower()]
    (result,) = run_ranks(run_and_ask, 1, small(tmp_path, *more))
    assert result["code"] == 0, result
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    between = {line["step"]: line["save_time_s"] for line in lines}
    assert {step for step, seconds in between.items() if seconds > 0} == {3, 5}
    waits = {line["step"]: line["save_wait_s"] for line in lines}
    assert all(0 <= seconds <= line["step_time_s"] for line, seconds in zip(lines, waits.values(), strict=True))
    assert sum(between.values()) + sum(waits.values()) == pytest.approx(result["stall_s"])
    assert result["num_saves"] == 2
    if not is_async:  # all of it stands between steps: collecting, copying and writing
        assert min(between[3], between[5]) > 100 * max(waits.values())
