"""Saves and validation by rank 0's clock: the same on every rank whatever theirs say, and kept up over restarts."""

from __future__ import annotations

import itertools
import json
import time
import types
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.checkpoint.state import RunTimers
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank


def run_with_own_clock(world: World, argv: list[str], step_s: float = 1.0) -> dict[str, Any]:
    """Run the recipe where rank 0's clock takes ``step_s`` from step to step, and rank 1's an hour."""
    from fctune.training import loop, step

    ticks = itertools.count(100.0, step_s if world.rank == 0 else 3600.0)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    loop.time = step.time = clock  # type: ignore[assignment]
    return run_on_rank(world, argv)


def find_due_steps(num_steps: int, step_s: float, every_s: float) -> list[int]:
    timers, due = RunTimers(), []
    timers.start(num_steps, 0.0)
    for step in range(1, num_steps):
        timers.advance(step * step_s)
        if timers.is_due_by_either("save", every_s, num_steps // 3, step, 60.0):
            due.append(step)
    return due


def test_a_save_is_due_by_its_time_or_at_a_third_of_the_run_but_not_within_a_minute() -> None:
    assert find_due_steps(300, 2.0, 1350.0) == [100, 200]
    assert find_due_steps(300, 10.0, 650.0) == [65, 100, 165, 200, 265]
    assert find_due_steps(300, 0.1, 1350.0) == []


@pytest.mark.thorough
def test_elastic_checkpoints_of_auto_come_by_the_clock_of_rank_0(tmp_path: Path) -> None:
    """A tiny model's interval is the least one, a minute."""
    options = ["checkpoint.every=0", "checkpoint.keep_last=9", "global_batch_size=2", "micro_batch_size=1"]
    results = run_ranks(run_with_own_clock, 2, arguments_for(tmp_path, *options, "epochs=9", "max_steps=7"), 25.0)
    assert [result["code"] for result in results] == [0, 0], results
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("elastic-checkpoint-*"))
    assert saved == ["elastic-checkpoint-3", "elastic-checkpoint-6", "elastic-checkpoint-7"]


def read_run(run: Path) -> tuple[list[int], list[int]]:
    """Return the steps of the sharded checkpoints, and those with a validation loss."""
    saved = sorted(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("checkpoint-*"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return saved, [line["step"] for line in lines if "validation_loss" in line]


@pytest.mark.thorough
def test_timed_actions_follow_rank_0_and_go_on_after_a_restart(tmp_path: Path) -> None:
    timed = ["checkpoint.every=3s", "checkpoint.keep_last=9", "validation.every=4s", "epochs=9"]
    timed += ["global_batch_size=2", "micro_batch_size=1"]
    results = run_ranks(run_with_own_clock, 2, arguments_for(tmp_path, *timed, "max_steps=7"))
    assert [result["code"] for result in results] == [0, 0], results
    assert read_run(tmp_path / "run") == ([3, 6], [4, 7])
    results = run_ranks(run_with_own_clock, 2, arguments_for(tmp_path, *timed, "max_steps=13"))
    assert [result["code"] for result in results] == [0, 0], results
    # Counted from step 6 and 4, not from the restart after step 7.
    assert read_run(tmp_path / "run") == ([3, 6, 9, 12], [4, 7, 8, 12, 13])
