"""A directory is locked by one run at a time, and a dead run leaves no lock."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fctune.base.errors import ConfigError
from fctune.runs.directory import DirectoryLock, RunDirectory
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank
from tests.runs.sample_runs import make_config, make_run

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


def test_a_second_run_is_refused_at_once_and_names_the_first(tmp_path: Path) -> None:
    with held(tmp_path / "run") as holder:
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"another run is writing to it .process {holder.pid} on ") as caught:
            RunDirectory(tmp_path / "run").lock()
        assert time.monotonic() - started < 5
        assert "Use another directory" in str(caught.value)


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
