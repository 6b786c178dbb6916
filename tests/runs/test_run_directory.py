"""A run's directory: what a launch writes, keeps and renames, and its lock."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError
from fctune.runs.directory import DirectoryLock, RunDirectory, find_typed_command
from fctune.runs.record import read_run
from fctune.runs.success import judge_run
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank
from tests.runs.sample_runs import change_run, make_config, make_run, write_steps


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
    reason = "rank 3: OutOfMemoryError: CUDA ran out."
    directory.finish(1, reason, 10, is_crash=True, is_out_of_memory=True)
    resume(tmp_path / "run", 5, world_size=8).finish(0, "completed", 5)
    record = read_run(tmp_path / "run")
    assert record.segments[0].exit == {"code": 1, "reason": reason, "is_out_of_memory": True}
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


@pytest.mark.parametrize(
    ("started", "resume", "again", "code", "expected"),
    [
        ({}, "A/checkpoint-2", {}, 75, True),
        ({}, "A/checkpoint-2", {}, None, True),
        ({}, "A/checkpoint-2", {}, 0, False),
        ({}, "never", {}, 75, False),
        ({"LAUNCH_ID": "a"}, "never", {"LAUNCH_ID": "a"}, 75, True),
        ({"LAUNCH_ID": "a"}, "never", {"LAUNCH_ID": "b"}, 75, False),
        ({"SKYPILOT_TASK_ID": "a"}, "never", {"SKYPILOT_TASK_ID": "a", "SLURM_JOB_ID": "8"}, 76, True),
        ({"SLURM_JOB_ID": "7"}, "never", {"SLURM_JOB_ID": "7"}, 75, False),
        ({"SLURM_JOB_ID": "7"}, "never", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, 75, True),
    ],
)
def test_a_start_is_repeated_to_continue_the_run_it_began(
    started: dict[str, str],
    resume: str,
    again: dict[str, str],
    code: int | None,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def set_launch(variables: dict[str, str]) -> None:
        for name in ("LAUNCH_ID", "SKYPILOT_TASK_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_launch(started)
    directory = RunDirectory(tmp_path / "run")
    directory.start(replace(make_config(tmp_path / "run"), resume=resume), 1)
    if code is not None:
        directory.finish(code, "ended", 3)
    set_launch(again)
    later = RunDirectory(tmp_path / "run")
    assert later.has_applied(resume) == expected
    assert not later.has_applied("B/checkpoint-2")


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


HOLDER = """
import sys, time
from pathlib import Path
from fctune.runs.directory import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Lock a folder by another process."""
    folder.mkdir(exist_ok=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.wait()


def test_a_second_run_is_refused_at_once_and_names_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path / "run") as holder:
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"another run is writing to it .process {holder.pid} on ") as caught:
            RunDirectory(tmp_path / "run").lock()
        assert time.monotonic() - started < 5
        assert str(caught.value).endswith("Use another directory, or stop that run first.")
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        with pytest.raises(ConfigError, match=r"stop that run first, or let srun start one task per node\.$"):
            RunDirectory(tmp_path / "run").lock()


def test_a_killed_run_releases_its_lock(tmp_path: Path) -> None:
    with held(tmp_path / "run") as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        directory = RunDirectory(tmp_path / "run")
        directory.lock()
        about = json.loads((tmp_path / "run" / ".lock").read_text())
        assert (about["process"], about["host"]) == (os.getpid(), platform.node())


def test_a_holder_on_another_machine_is_awaited_before_the_refusal(tmp_path: Path) -> None:
    with held(tmp_path / "run"):
        lock = tmp_path / "run" / ".lock"
        lock.write_text(json.dumps({"process": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00"}))
        started = time.monotonic()
        with pytest.raises(ConfigError, match="process 1 on elsewhere"):
            DirectoryLock(tmp_path / "run", wait_s=0.5)
        assert 0.5 <= time.monotonic() - started < 5


def test_moving_an_earlier_run_aside_keeps_the_directory_locked(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    directory = RunDirectory(tmp_path / "run")
    directory.lock()
    moved = directory.start(make_config(tmp_path / "run"), 1)
    assert moved == tmp_path / "run.1"
    with pytest.raises(ConfigError, match="another run is writing to it"):
        RunDirectory(tmp_path / "run").lock()
    RunDirectory(tmp_path / "run.1").lock()
    directory.unlock()
    RunDirectory(tmp_path / "run").lock()


@pytest.mark.thorough
def test_a_recipe_does_not_touch_a_locked_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3, code=None)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with held(tmp_path / "run"):
        results = run_ranks(run_on_rank, 2, arguments_for(tmp_path))
        lock = tmp_path / "run" / ".lock"
        assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p != lock} == before
    assert [result["code"] for result in results] == [2, 2], results
    assert "another run is writing to it" in results[0]["err"]
    assert not (tmp_path / "run.1").exists()
    assert [result["code"] for result in run_ranks(run_on_rank, 2, arguments_for(tmp_path))] == [
        0,
        0,
    ]  # when that one has gone
    assert (tmp_path / "run.1" / "metrics.jsonl").is_file()
