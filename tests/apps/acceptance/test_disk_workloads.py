"""Disk workloads on this machine's disk: their groups, files and time limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fctune.apps.acceptance.config import StorageConfig
from fctune.apps.acceptance.fault_injection import FaultConfig, FaultInjector
from fctune.apps.acceptance.storage import WORKLOADS, find_obstacle, list_groups, run_workload

CONFIG = StorageConfig(mib=5, num_small_files=3, small_kib=2, num_flushes=6, repetitions=3)
HEALTHY = FaultInjector([], 0)


def test_a_shared_disk_is_used_by_one_rank_then_one_node_then_all() -> None:
    assert list_groups("shared", 2, 4) == {"one_rank": range(1), "one_node": range(2), "all": range(4)}
    assert list(list_groups("node", 2, 4)) == list(list_groups("shared", 4, 4)) == ["one_rank", "all"]


def test_every_workload_is_timed_and_writes_the_configured_files(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    counts = {workload: len(run_workload(workload, tmp_path, CONFIG, until, HEALTHY)) for workload in WORKLOADS}
    assert counts == {"write": 1, "read": 1, "files": 1, "flush": 2}
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"large": 5 * 2**20, "flushed": 2 * 4096, **{f"small-{n}": 2048 for n in range(3)}}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_that_runs_out_of_time_reports_nothing(workload: str, tmp_path: Path) -> None:
    run_workload("write", tmp_path, CONFIG, time.monotonic() + 60, HEALTHY)
    assert run_workload(workload, tmp_path, CONFIG, time.monotonic() - 1, HEALTHY) == []
    assert len(list(tmp_path.iterdir())) <= 2, "one small file at most, not all of them"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_slow_disk_delays_every_workload(workload: str, tmp_path: Path) -> None:
    until = time.monotonic() + 60
    run_workload("write", tmp_path, CONFIG, until, HEALTHY)
    slow = FaultInjector([FaultConfig(kind="slow_disk", rank=0, seconds=0.03)], 0)
    assert all(seconds >= 0.03 for seconds in run_workload(workload, tmp_path, CONFIG, until, slow))


def test_a_delay_with_a_count_stops_after_it() -> None:
    faults = FaultInjector([FaultConfig(kind="slow_disk", rank=0, seconds=0.02, times=2)], 0)
    seconds = []
    for _ in range(4):
        started = time.monotonic()
        faults.delay("slow_disk")
        seconds.append(time.monotonic() - started)
    assert [s >= 0.02 for s in seconds] == [True, True, False, False]


def test_a_test_that_needs_too_much_of_the_free_space_is_refused(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    mib = free.f_bavail * free.f_frsize // 2**20
    assert find_obstacle(StorageConfig(mib=1, num_small_files=1), str(tmp_path / "new"), 1) is None
    found = find_obstacle(StorageConfig(mib=mib // 4, max_share_of_free=0.5), str(tmp_path), 4)
    assert found is not None
    assert "over 50% of it; free some space, or lower storage.mib" in found
