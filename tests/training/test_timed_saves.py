"""Saves and validation by rank 0's clock: the same on every rank whatever theirs say, and kept up over restarts."""

from __future__ import annotations

import itertools
import json
import time
import types
from pathlib import Path
from typing import Any

from fctune.base.distributed import World
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank


def run_with_own_clock(world: World, argv: list[str]) -> dict[str, Any]:
    """Run the recipe where rank 0's clock takes a second from step to step, and rank 1's an hour."""
    from fctune.training import loop, step

    ticks = itertools.count(100.0, 1.0 if world.rank == 0 else 3600.0)
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    loop.time = step.time = clock  # type: ignore[assignment]
    return run_on_rank(world, argv)


def read_run(run: Path) -> tuple[list[int], list[int]]:
    """Return the steps of the sharded checkpoints, and those with a validation loss."""
    saved = sorted(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").glob("checkpoint-*"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return saved, [line["step"] for line in lines if "validation_loss" in line]


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
