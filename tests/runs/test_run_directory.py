"""The record of a run covers all of its restarts."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fctune.runs.directory import RunDirectory, find_typed_command
from fctune.runs.record import read_run
from fctune.runs.success import judge_run
from tests.runs.sample_runs import change_run, make_config, write_steps


def resume(path: Path, step: int, world_size: int) -> RunDirectory:
    directory = RunDirectory(path)
    directory.resume(make_config(path), world_size, step, path / "checkpoints" / f"checkpoint-{step}", [])
    return directory


def start(path: Path, hours_ago: float, world_size: int = 8) -> RunDirectory:
    directory = RunDirectory(path)
    directory.start(make_config(path), world_size)
    write_steps(directory, 1, 10)
    change_run(directory, started_at=format_time(hours_ago))
    return directory


def format_time(hours_ago: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(file: Path, hours: float) -> None:
    at = (datetime.now(UTC) - timedelta(hours=hours)).timestamp()
    os.utime(file, (at, at))


def test_gpu_hours_exclude_the_time_between_restarts(tmp_path: Path) -> None:
    start(tmp_path / "run", hours_ago=10)
    age(tmp_path / "run" / "metrics.jsonl", 7)  # three hours on eight ranks, killed; then four idle hours
    again = resume(tmp_path / "run", 5, world_size=4)
    assert again.gpu_hours() == pytest.approx(24, abs=0.01)
    resumed = json.loads((tmp_path / "run" / "run.json").read_text())["resumed"]
    resumed[0]["at"] = format_time(2)
    change_run(again, resumed=resumed)
    assert resume(tmp_path / "run", 5, world_size=4).gpu_hours() == pytest.approx(24 + 8, abs=0.02)


def test_the_end_of_a_segment_survives_its_restart(tmp_path: Path) -> None:
    directory = start(tmp_path / "run", hours_ago=1)
    directory.finish(1, "rank 3: OutOfMemoryError: CUDA out of memory.", 10)
    resume(tmp_path / "run", 5, world_size=8).finish(0, "completed", 5)
    record = read_run(tmp_path / "run")
    assert record.segments[0].exit == {"code": 1, "reason": "rank 3: OutOfMemoryError: CUDA out of memory."}
    criteria = {criterion.name: criterion for criterion in judge_run(record)}
    assert criteria["no out-of-memory"].status == "FAIL"
    assert "rank 3" in criteria["no out-of-memory"].detail


@pytest.mark.parametrize(
    ("end", "expected"),
    [((75, "stopped after step 9"), "PASS"), ((1, "rank 1: ValueError: x"), "PASS"), (None, "not measured")],
)
def test_a_killed_segment_has_no_reason(end: tuple[int, str] | None, expected: str, tmp_path: Path) -> None:
    directory = start(tmp_path / "run", hours_ago=1)
    if end is not None:
        directory.finish(*end, 10)
    resume(tmp_path / "run", 5, world_size=8).finish(0, "completed", 5)
    criteria = {criterion.name: criterion for criterion in judge_run(read_run(tmp_path / "run"))}
    assert criteria["no out-of-memory"].status == expected


def test_resuming_removes_the_record_of_the_end(tmp_path: Path) -> None:
    directory = start(tmp_path / "run", hours_ago=1)
    ending: dict[str, Any] = {"finished_at": format_time(0), "closing": {"save_s": 1.0, "export_s": 2.0}, "success": []}
    directory.describe(**ending)
    resume(tmp_path / "run", 10, world_size=8)
    assert not ending.keys() & json.loads((tmp_path / "run" / "run.json").read_text()).keys()


def test_a_full_disk_at_the_end_hides_neither_the_reason_nor_the_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = start(tmp_path / "run", hours_ago=1)
    (directory.path / "exit.json").mkdir()  # cannot be replaced by a file, even as root
    directory.finish(1, "no room", 10)
    assert "exit.json: cannot be written" in caplog.text
    assert not list(directory.path.glob(".*.partial"))


def test_ranks_that_fail_together_leave_one_complete_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = start(tmp_path / "run", hours_ago=1).path
    reasons = [f"rank {rank}: " + "x" * 5000 * rank for rank in range(8)]

    def fail(reason: str) -> None:
        directory = RunDirectory(path)
        directory.has_begun = True
        for step in range(20):
            directory.finish(1, reason, step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, reasons))
    assert json.loads((path / "exit.json").read_text())["reason"] in reasons
    assert not caplog.records
    assert not list(path.glob(".*.partial"))


def test_a_launch_that_does_not_begin_leaves_the_record_of_the_run_before(tmp_path: Path) -> None:
    path = start(tmp_path / "run", hours_ago=1).path
    (path / "exit.json").write_text('{"code": 0, "reason": "completed"}')
    before = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}
    refused = RunDirectory(path)
    refused.lock()
    refused.describe(num_steps=99)
    refused.finish(2, "seed: was 3, is 4", 0)
    refused.unlock()
    assert json.loads((path / "not_started.json").read_text())["code"] == 2
    assert {name: (path / name).read_bytes() for name in before} == before
    again = RunDirectory(path)
    again.lock()
    assert not (path / "not_started.json").exists(), "it is of the launch before"
    again.unlock()


def test_a_run_resumes_even_if_exit_json_is_corrupt(tmp_path: Path) -> None:
    path = start(tmp_path / "run", hours_ago=1).path
    (path / "exit.json").write_text('{"code": 1}\n}')
    resume(path, 5, 8)
    assert json.loads((path / "run.json").read_text())["resumed"][-1]["before"]["exit"]["code"] is None


def test_resuming_drops_metrics_and_alerts_of_later_steps_and_malformed_lines(tmp_path: Path) -> None:
    path = start(tmp_path / "run", hours_ago=1).path
    steps = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 9)]
    odd = ["7\n", "{}\n", '{"step": null}\n', '{"step": 3, "lo']
    (path / "metrics.jsonl").write_text("".join(steps + odd))
    alerts = [json.dumps({"step": step, "name": "disk"}) + "\n" for step in (4, 6)]
    (path / "alerts.jsonl").write_text("".join(alerts))
    resume(path, 5, 8)
    assert (path / "metrics.jsonl").read_text() == "".join(steps[:5])
    assert (path / "alerts.jsonl").read_text() == alerts[0]


@pytest.mark.parametrize(
    ("own", "parent", "command"),
    [
        ("python -u x.py --config c", "/v/bin/python /v/bin/fctune train c a=1", "fctune train c a=1"),
        ("python -u x.py --config c", "python -m fctune.cli train c", "fctune train c"),
        (
            "python -u x.py",
            "python /v/bin/tune run --nproc_per_node 2 recipes/x",
            "tune run --nproc_per_node 2 recipes/x",
        ),
        ("/v/bin/python /v/bin/tune run recipes/x --config c", "bash", "tune run recipes/x --config c"),
        ("python x.py", "bash", None),
    ],
)
def test_the_command_of_a_run_is_recorded_as_it_was_typed(own: str, parent: str, command: str | None) -> None:
    assert find_typed_command([own.split(), parent.split()]) == (command and command.split())
