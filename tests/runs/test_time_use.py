"""Account of a run's time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fctune.runs.figures import PART_DESCRIPTIONS, account_for_time
from fctune.runs.record import RunRecord, read_run

START = "2026-01-01T00:00:00Z"


def make(path: Path, steps: list[dict[str, Any]], **run: Any) -> RunRecord:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | s) + "\n" for i, s in enumerate(steps, 1)))
    (path / "run.json").write_text(json.dumps({"started_at": START, "world_size": 4} | run))
    (path / "exit.json").write_text('{"code": 0, "reason": "completed"}')
    return read_run(path)


def test_every_second_belongs_to_one_part(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = [{"step_time_s": 2.0, "data_time_s": 0.5} for _ in range(20)]
    steps[0] = {"step_time_s": 12.0, "data_time_s": 0.5}  # compiles
    steps[7] = {"step_time_s": 9.0, "data_time_s": 0.5}  # stalls for 7 s
    steps[8] = {"step_time_s": 2.0, "data_time_s": 0.5, "is_skipped": True}
    steps[9] = {"step_time_s": 2.0, "data_time_s": 0.5, "eval_time_s": 6.0}
    steps[11] = {"step_time_s": 2.0, "data_time_s": 0.5, "validation_time_s": 4.0}
    steps[10] = {"step_time_s": 2.25, "data_time_s": 0.5, "save_wait_s": 0.25, "save_time_s": 3.0}
    time = account_for_time(
        make(tmp_path / "run", steps, finished_at="2026-01-01T00:02:00Z", closing={"save_s": 2.0, "export_s": 5.0})
    )
    assert time.elapsed_s == 120
    due = {"training": 19 * 1.5, "data": 10.0, "stalls": 7.0, "first steps": 10.0, "skipped steps": 1.5}
    due |= {"saves": 5.25, "validation": 4.0, "evaluation": 6.0, "export": 5.0, "restarts": 0.0, "other": 42.75}
    assert time.parts == pytest.approx(due)
    assert sum(time.parts.values()) == pytest.approx(120)
    assert time.goodput == pytest.approx(28.5 / 120)
    assert time.gpu_hours == pytest.approx(4 * 120 / 3600)
    assert time.parts.keys() == PART_DESCRIPTIONS.keys()


def test_a_restart_costs_all_time_but_the_kept_steps(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    resumed = [
        {"step": 10, "at": "2026-01-01T00:01:00Z", "world_size": 2},  # 20 of 60 s kept
        {"step": 10, "at": "2026-01-01T00:01:30Z", "world_size": 2},  # none of 30 s kept
    ]
    time = account_for_time(make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:30Z"))
    assert time.elapsed_s == 150
    assert time.parts["restarts"] == pytest.approx(40 + 30)
    assert time.parts["training"] == pytest.approx(60)
    assert time.parts["other"] == pytest.approx(20)
    assert time.gpu_hours == pytest.approx(2 * 150 / 3600)  # the first segment's ranks are taken from the next


def test_a_slow_first_step_after_a_restart_is_not_a_stall(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0 if i != 10 else 30.0, "data_time_s": 0.0} for i in range(30)]
    resumed = [{"step": 10, "at": "2026-01-01T00:00:20Z", "world_size": 4}]
    time = account_for_time(make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:30Z"))
    assert (time.parts["stalls"], time.parts["first steps"]) == (0.0, 28.0)


def test_slower_steps_on_fewer_ranks_are_not_stalls(tmp_path: Path) -> None:
    steps = [{"step_time_s": 1.0 if i < 30 else 4.0, "data_time_s": 0.0} for i in range(50)]
    steps[40] = {"step_time_s": 14.0, "data_time_s": 0.0}  # stalls for 10 s
    before = {"world_size": 8, "until": "2026-01-01T00:00:30Z", "exit": None}
    resumed = [{"step": 30, "at": "2026-01-01T00:00:30Z", "world_size": 2, "before": before}]
    record = make(tmp_path / "run", steps, world_size=2, resumed=resumed, finished_at="2026-01-01T00:02:00Z")
    time = account_for_time(record)
    assert (time.parts["stalls"], time.parts["training"]) == (10.0, 30 * 1.0 + 20 * 4.0)
    assert time.goodput == pytest.approx(110 / 120)


def test_steps_discarded_by_a_later_restart_count_for_no_earlier_segment(tmp_path: Path) -> None:
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    resumed = [
        {"step": 20, "at": "2026-01-01T00:01:00Z", "world_size": 4},
        {"step": 5, "at": "2026-01-01T00:01:10Z", "world_size": 4},  # from an older checkpoint: 15 steps again
    ]
    record = make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T00:02:10Z")
    assert record.segment_indices() == [0] * 5 + [2] * 25
    time = account_for_time(record)
    assert time.parts["restarts"] == pytest.approx((60 - 5 * 2) + 10)
    assert time.parts["other"] == pytest.approx(130 - 60 - 60)


def test_unrecorded_time_is_unknown(tmp_path: Path) -> None:
    time = account_for_time(make(tmp_path / "run", [{"step_time_s": 2.0}] * 5, started_at="yesterday"))
    assert (time.elapsed_s, time.goodput, time.gpu_hours) == (None, None, None)
    assert time.parts["training"] == pytest.approx(10)
    assert "other" not in time.parts
    older = account_for_time(make(tmp_path / "older", [{"loss": 1.0}] * 5))
    assert not any(seconds for name, seconds in older.parts.items() if name != "other")


def test_downtime_before_a_restart_is_not_counted_as_gpu_hours(tmp_path: Path) -> None:
    before = {"world_size": 8, "until": "2026-01-01T00:00:40Z", "exit": {"code": 75, "reason": "stopped"}}
    resumed = [{"step": 10, "at": "2026-01-01T02:00:00Z", "world_size": 2, "before": before}]
    steps = [{"step_time_s": 2.0, "data_time_s": 0.0}] * 30
    record = make(tmp_path / "run", steps, resumed=resumed, finished_at="2026-01-01T02:00:50Z")
    assert account_for_time(record).gpu_hours == pytest.approx((8 * 40 + 2 * 50) / 3600)
