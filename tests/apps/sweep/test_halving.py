"""Early stopping by successive halving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fctune.apps.sweep.driver import Progress, choose_worst, find_rung, measure
from fctune.apps.sweep.spec import EarlyStopConfig
from fctune.runs.record import MetricsFile

HALVE = EarlyStopConfig(first_step=10, factor=2)


def write_metrics(path: Path, values: list[float | None], metric: str = "validation_loss") -> MetricsFile:
    rows = [{"step": step, **({metric: value} if value is not None else {})} for step, value in enumerate(values, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(path)
    metrics.update()
    return metrics


def make_progress(folder: Path, values: list[float], num_steps: list[int]) -> dict[int, Progress]:
    return {
        number: Progress(write_metrics(folder / f"{number}.jsonl", [value] * steps), 100, True)
        for number, (value, steps) in enumerate(zip(values, num_steps, strict=True))
    }


def test_the_worse_half_of_those_at_a_rung_is_stopped(tmp_path: Path) -> None:
    runs = make_progress(tmp_path, [0.4, 0.1, 0.3, 0.2, 0.0], [12, 12, 12, 12, 9])
    assert choose_worst(HALVE, runs, "validation_loss", False) == {0: 10, 2: 10}
    assert choose_worst(HALVE, runs, "validation_loss", True) == {1: 10, 3: 10}


def test_a_run_is_compared_at_the_last_rung_it_reached_by_its_value_there(tmp_path: Path) -> None:
    late_loser = write_metrics(tmp_path / "late.jsonl", [0.1] * 19 + [0.5] * 6)
    steady = write_metrics(tmp_path / "steady.jsonl", [0.3] * 25)
    runs = {0: Progress(late_loser, 100, True), 1: Progress(steady, 100, True)}
    assert choose_worst(HALVE, runs, "validation_loss", False) == {0: 20}
    assert measure(late_loser, "validation_loss", 19) == 0.1


def test_ended_runs_count_and_are_not_stopped_again(tmp_path: Path) -> None:
    runs = make_progress(tmp_path, [0.1, 0.2], [30, 10])
    ended = {0: Progress(runs[0].metrics, 100, False), 1: runs[1]}
    assert choose_worst(HALVE, ended, "validation_loss", False) == {1: 10}
    assert choose_worst(HALVE, {0: ended[0], 1: Progress(runs[1].metrics, 100, False)}, "validation_loss", False) == {}


@pytest.mark.parametrize(
    ("values", "steps", "num_steps"),
    [([0.9], [50], 100), ([0.9, 0.1], [9, 50], 100), ([0.9, 0.1], [40, 40], 40)],
    ids=["alone", "before_the_first_rung", "at_its_last_step"],
)
def test_runs_are_left_alone(values: list[float], steps: list[int], num_steps: int, tmp_path: Path) -> None:
    runs = {
        number: Progress(one.metrics, num_steps, True) for number, one in make_progress(tmp_path, values, steps).items()
    }
    assert choose_worst(HALVE, runs, "validation_loss", False) == {}


def test_the_best_run_is_never_stopped(tmp_path: Path) -> None:
    for best in range(5):
        values = [0.5 + number for number in range(5)]
        values[best] = 0.1
        runs = make_progress(tmp_path, values, [10, 20, 15, 40, 33])
        assert best not in choose_worst(EarlyStopConfig(first_step=10, factor=4), runs, "validation_loss", False)


def test_rungs_grow_by_the_factor() -> None:
    assert [find_rung(HALVE, step) for step in (10, 19, 20, 39, 40, 81)] == [10, 10, 20, 20, 40, 80]
    assert find_rung(EarlyStopConfig(first_step=1, factor=1.1), 5) == 5


def test_the_loss_is_averaged_and_other_metrics_are_the_latest(tmp_path: Path) -> None:
    loss = write_metrics(tmp_path / "loss.jsonl", [100.0] * 10 + [1.0, 3.0] * 10, "loss")
    assert measure(loss, "loss") == 2.0
    sparse = write_metrics(tmp_path / "sparse.jsonl", [None, 0.7, None, 0.4, None])
    assert (measure(sparse, "validation_loss"), measure(sparse, "validation_loss", 3)) == (0.4, 0.7)
    assert measure(sparse, "validation_loss", 1) is None
