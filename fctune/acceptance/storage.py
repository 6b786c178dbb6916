"""Disks: how fast they write, flush and read, for one rank, one node and all, within a bound and cleaned up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fctune.acceptance.config import StorageConfig
from fctune.acceptance.fault_injection import Faults
from fctune.acceptance.session import Session

KINDS = ("write", "read", "files", "flush")

_MIB = 2**20
_BLOCK = 4 * _MIB


def folder_in(directory: str | Path, run: str) -> Path:
    """Where a run writes in a directory; its name says what may remove it."""
    return Path(directory) / f".fctune-acceptance-{run}"


def find_obstacle(config: StorageConfig, directory: str, ranks: int) -> str | None:
    """Why a disk cannot be measured without harm; None where it can. ``ranks`` write to it at the same time."""
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
            f"{directory}: {free / _MIB:,.0f} MiB free, and the test would take {needed / _MIB:,.0f} MiB, over "
            f"{config.max_share_of_free:.0%} of it; free space, or lower storage.mib"
        )
    return None


def list_groups(disk: str, ranks_per_node: int, world_size: int) -> dict[str, range]:
    """The ranks that use a disk at once, one group after the other; ``all`` comes last."""
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
    faults: Faults,
    found: dict[str, Any],
) -> None:
    """Add to ``found`` what this rank sees of a disk, by group: seconds of each kind of use; and what went wrong.

    A rank stops within a round when the run's time is over. It heard of the time left after rank 0 did, so at the
    round's end rank 0 finds that there is none, and all stop.

    Args:
        session: of the run.
        config: how much.
        folder: on the disk; this rank's part is removed at the end.
        disk: its name, ``node`` or ``shared``.
        groups: of ``list_groups``.
        faults: of this rank.
        found: filled here, in place.
    """
    rank, limit_s = session.launch.rank, session.limits.build_s
    mine = folder / f"rank-{rank}"
    session.keep_clean(folder)
    mine.mkdir(parents=True, exist_ok=True)
    try:
        for group, ranks in groups.items():
            times = found.setdefault(group, {kind: [] for kind in KINDS})
            who = f"{disk} disk, {group.replace('_', ' ')}"
            for _ in range(config.repetitions):
                until = time.monotonic() + session.time_left()
                for kind in KINDS:
                    session.meet(f"{who}: {kind}", limit_s)
                    if rank not in ranks or found.get("error"):
                        continue
                    session.enter(f"{who}: {kind}", limit_s)
                    try:
                        times[kind] += _use(kind, mine, config, until, faults)
                    except OSError as error:  # a quota, or a disk that fails: an answer to what is asked here
                        found["error"] = f"{who}, {kind}: {error.strerror}"
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def _use(kind: str, folder: Path, config: StorageConfig, until: float, faults: Faults) -> list[float]:
    """Seconds of one kind of use of a disk, none where its time was over."""
    if kind == "flush":
        return _flush(folder, max(1, config.num_flushes // config.repetitions), until, faults)
    steps = {"write": _write, "read": _read, "files": _write_and_read_small}[kind](folder, config)
    next(steps)
    started = time.perf_counter()
    faults.delay("slow_disk")
    for _ in steps:
        if time.monotonic() > until:
            return []
    return [float(f"{time.perf_counter() - started:.5g}")]


def _write(folder: Path, config: StorageConfig) -> Iterator[None]:
    """A large file, written and flushed."""
    block = os.urandom(_BLOCK)  # not compressible
    with open(folder / "large", "wb", buffering=0) as file:
        yield
        left = config.mib * _MIB
        while left > 0:
            left -= file.write(block[: min(left, _BLOCK)])
            yield
        os.fsync(file.fileno())


def _read(folder: Path, config: StorageConfig) -> Iterator[None]:
    """The same file, from the disk as far as the system lets go of what it keeps in memory."""
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
    """Many small files, new ones."""
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


def _flush(folder: Path, count: int, until: float, faults: Faults) -> list[float]:
    """Seconds of each flush of 4 kB."""
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
