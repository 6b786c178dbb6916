"""Disks, on this one: what is used how, by whom, and that it stops when the time is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fctune.acceptance.config import FaultConfig, StorageConfig
from fctune.acceptance.fault_injection import Faults
from fctune.acceptance.storage import KINDS, _use, find_obstacle, list_groups

CONFIG = StorageConfig(mib=5, num_small_files=3, small_kib=2, num_flushes=6, repetitions=3)
HEALTHY = Faults([], 0)


def test_a_shared_disk_is_used_by_one_rank_then_one_node_then_all() -> None:
    assert list_groups("shared", 2, 4) == {"one_rank": range(1), "one_node": range(2), "all": range(4)}
    assert list(list_groups("node", 2, 4)) == list(list_groups("shared", 4, 4)) == ["one_rank", "all"]


def test_every_kind_of_use_is_timed_and_leaves_what_it_should(tmp_path: Path) -> None:
    until = time.monotonic() + 60
    counts = {kind: len(_use(kind, tmp_path, CONFIG, until, HEALTHY)) for kind in KINDS}
    assert counts == {"write": 1, "read": 1, "files": 1, "flush": 2}
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"large": 5 * 2**20, "flushed": 2 * 4096, **{f"small-{n}": 2048 for n in range(3)}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_use_that_is_not_done_in_time_counts_for_nothing(kind: str, tmp_path: Path) -> None:
    _use("write", tmp_path, CONFIG, time.monotonic() + 60, HEALTHY)
    assert _use(kind, tmp_path, CONFIG, time.monotonic() - 1, HEALTHY) == []
    assert len(list(tmp_path.iterdir())) <= 2, "one small file at most, not all of them"


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_disk_is_slow_in_every_use(kind: str, tmp_path: Path) -> None:
    until = time.monotonic() + 60
    _use("write", tmp_path, CONFIG, until, HEALTHY)
    slow = Faults([FaultConfig(kind="slow_disk", rank=0, seconds=0.03)], 0)
    assert all(seconds >= 0.03 for seconds in _use(kind, tmp_path, CONFIG, until, slow))


def test_a_delay_that_is_to_pass_does() -> None:
    faults = Faults([FaultConfig(kind="slow_disk", rank=0, seconds=0.02, times=2)], 0)
    seconds = []
    for _ in range(4):
        started = time.monotonic()
        faults.delay("slow_disk")
        seconds.append(time.monotonic() - started)
    assert [s >= 0.02 for s in seconds] == [True, True, False, False]


def test_what_a_test_would_take_is_bounded_by_a_share_of_what_is_free(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    mib = free.f_bavail * free.f_frsize // 2**20
    assert find_obstacle(StorageConfig(mib=1, num_small_files=1), str(tmp_path / "new"), 1) is None
    found = find_obstacle(StorageConfig(mib=mib // 4, max_share_of_free=0.5), str(tmp_path), 4)
    assert found is not None
    assert "over 50% of it; free space, or lower storage.mib" in found
