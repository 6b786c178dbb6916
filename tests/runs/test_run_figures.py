"""Summary figures of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fctune.config.sections.success import SuccessConfig
from fctune.runs.figures import describe_run
from fctune.runs.record import MetricsFile, RunRecord, read_run
from fctune.runs.success import judge_run
from tests.runs.sample_runs import change_run, make_run


@pytest.mark.parametrize("num_steps", [1, 3, 99, 100, 101, 700])
def test_the_99th_percentile_is_the_nearest_rank(num_steps: int, tmp_path: Path) -> None:
    times = [float(n) for n in range(num_steps)]
    random.Random(0).shuffle(times)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "step_time_s": t}) + "\n" for n, t in enumerate(times, 1)))
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.quantile("step_time_s", 0.99) == np.percentile(times, 99, method="inverted_cdf")


def make_shrinking_run(path: Path, **metrics: float) -> RunRecord:
    """Write 200 steps of 8 ranks at 8,000 tokens/s, then 50 of 2 ranks at 2,000: 1,000 per rank throughout."""
    directory = make_run(path, 1)
    speeds: list[dict[str, Any]] = [{"step": step, "tokens_per_s": 8000.0, **metrics} for step in range(1, 201)]
    speeds += [{"step": step, "tokens_per_s": 2000.0, **metrics} for step in range(201, 251)]
    directory.metrics.write_text("".join(json.dumps(line) + "\n" for line in speeds))
    before = {"world_size": 8, "until": "2026-01-01T00:00:40Z", "exit": None}
    change_run(directory, resumed=[{"step": 200, "world_size": 2, "before": before}], world_size=2)
    return read_run(path)


def test_the_speed_per_rank_uses_the_number_of_ranks_of_each_step(tmp_path: Path) -> None:
    record = make_shrinking_run(tmp_path / "run", tokens_per_s_per_device=1000.0)
    assert describe_run(record).tokens_per_s_per_rank == 1000
    judged = {one.name: one for one in judge_run(record, SuccessConfig(min_tokens_per_s_per_gpu=2000))}
    assert judged["tokens/s per GPU, median"].status == "FAIL"


def test_the_speed_per_rank_is_unknown_if_it_was_not_recorded_and_the_ranks_changed(tmp_path: Path) -> None:
    record = make_shrinking_run(tmp_path / "older")
    assert describe_run(record).tokens_per_s == 8000
    assert describe_run(record).tokens_per_s_per_rank is None
