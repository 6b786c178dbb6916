"""Disk measurements: writing, reading, flushing and small files, for one rank, one node and all ranks."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fctune.apps.acceptance.config import StorageConfig
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.session import Session

WORKLOADS = ("write", "read", "files", "flush")

_MIB = 2**20
_BLOCK = 4 * _MIB


def work_dir(directory: str | Path, run_id: str) -> Path:
    """Return the directory that a run writes to and removes; its name identifies the run."""
    return Path(directory) / f".fctune-acceptance-{run_id}"


def find_obstacle(config: StorageConfig, directory: str, ranks: int) -> str | None:
    """Return why ``ranks`` ranks cannot safely measure a disk at the same time; None if they can."""
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
    except OSError as error:
        return f"{directory}: cannot be used ({error.strerror})"
    if not os.access(path, os.W_OK):
        return f"{directory}: cannot be written"
    needed = ranks * (config.mib * _MIB + config.num_small_files * config.small_kib * 1024)
    if needed > config.max_share_of_free * free:
        return (
            f"{directory}: {free / _MIB:,.0f} MiB free, but the test needs {needed / _MIB:,.0f} MiB, over "
            f"{config.max_share_of_free:.0%} of it; free some space, or lower storage.mib"
        )
    return None


def list_groups(disk: str, ranks_per_node: int, world_size: int) -> dict[str, range]:
    """List the groups of ranks that use a disk at once, one group after the other, ending with ``all``."""
    groups = {"one_rank": range(1)}
    if disk == "shared" and world_size > ranks_per_node:
        groups["one_node"] = range(ranks_per_node)
    return groups | {"all": range(world_size)}


def measure_disk(
    session: Session,
    config: StorageConfig,
    folder: Path,
    disk: str,
    groups: Mapping[str, Sequence[int]],
    faults: FaultInjector,
    sample: dict[str, Any],
) -> None:
    """Add to ``sample`` the seconds of each workload by group, and ``error`` if a workload failed on this rank.

    When the run's time is over, a rank stops within a round. Its deadline is later than rank 0's, which therefore
    finds at the end of that round that no time is left, and all ranks stop.

    Args:
        session: Session of the run.
        config: File sizes and counts.
        folder: On the disk; this rank's part of it is removed at the end.
        disk: ``node`` or ``shared``.
        groups: As ``list_groups`` returns them.
        faults: Faults of this rank.
        sample: Updated in place.
    """
    rank, limit_s = session.launch.rank, session.limits.build_s
    mine = folder / f"rank-{rank}"
    session.remove_at_exit(folder)
    mine.mkdir(parents=True, exist_ok=True)
    try:
        for group, ranks in groups.items():
            times = sample.setdefault(group, {workload: [] for workload in WORKLOADS})
            label = f"{disk} disk, {group.replace('_', ' ')}"
            for _ in range(config.repetitions):
                until = time.monotonic() + session.time_left()
                for workload in WORKLOADS:
                    session.barrier(f"{label}: {workload}", limit_s)
                    if rank not in ranks or sample.get("error"):
                        continue
                    session.enter(f"{label}: {workload}", limit_s)
                    try:
                        times[workload] += run_workload(workload, mine, config, until, faults)
                    except OSError as error:  # a quota or a failing disk is a finding, not a crash
                        sample["error"] = f"{label}, {workload}: {error.strerror}"
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def run_workload(
    workload: str, folder: Path, config: StorageConfig, until: float, faults: FaultInjector
) -> list[float]:
    """Run a workload and return its durations in seconds; empty if ``until`` (monotonic) passed before its end."""
    if workload == "flush":
        return _flush(folder, max(1, config.num_flushes // config.repetitions), until, faults)
    steps = {"write": _write, "read": _read, "files": _write_and_read_small}[workload](folder, config)
    next(steps)
    started = time.perf_counter()
    faults.delay("slow_disk")
    for _ in steps:
        if time.monotonic() > until:
            return []
    return [float(f"{time.perf_counter() - started:.5g}")]


def _write(folder: Path, config: StorageConfig) -> Iterator[None]:
    """Write and flush a large file."""
    block = os.urandom(_BLOCK)  # incompressible
    with open(folder / "large", "wb", buffering=0) as file:
        yield
        remaining = config.mib * _MIB
        while remaining > 0:
            remaining -= file.write(block[: min(remaining, _BLOCK)])
            yield
        os.fsync(file.fileno())


def _read(folder: Path, config: StorageConfig) -> Iterator[None]:
    """Read the large file, after dropping it from the page cache as far as the system allows."""
    path = folder / "large"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield
        while os.read(descriptor, _BLOCK):
            yield
    finally:
        os.close(descriptor)


def _write_and_read_small(folder: Path, config: StorageConfig) -> Iterator[None]:
    """Create and read many small files."""
    content = os.urandom(config.small_kib * 1024)
    paths = [folder / f"small-{number}" for number in range(config.num_small_files)]
    for path in paths:
        path.unlink(missing_ok=True)
    yield
    for path in paths:
        path.write_bytes(content)
        yield
    for path in paths:
        path.read_bytes()
        yield


def _flush(folder: Path, count: int, until: float, faults: FaultInjector) -> list[float]:
    """Time flushes of 4 kB each."""
    seconds = []
    with open(folder / "flushed", "wb", buffering=0) as file:
        for _ in range(count):
            if time.monotonic() > until:
                break
            file.write(b"x" * 4096)
            started = time.perf_counter()
            faults.delay("slow_disk")
            os.fsync(file.fileno())
            seconds.append(float(f"{time.perf_counter() - started:.5g}"))
    return seconds
