"""Disks: how fast they write, flush and read, alone and all at once, within a bound and cleaned up."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from fctune.acceptance.config import StorageConfig
from fctune.acceptance.faults import Faults
from fctune.acceptance.session import Session

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
            f"{directory}: {free / 2**30:.1f} GiB free, and the test would take {needed / 2**30:.2f} GiB, over "
            f"{config.max_share_of_free:.0%} of it; free space, or lower storage.mib"
        )
    return None


def measure_disk(
    session: Session, config: StorageConfig, folder: Path, disk: str, rank: int, faults: Faults
) -> dict[str, Any]:
    """What this rank sees of a disk that all ranks use: rank 0 alone first, then all at once.

    Args:
        session: of the run.
        config: how much.
        folder: on the disk; removed at the end.
        disk: its name, ``node`` or ``shared``.
        rank: global.
        faults: of this rank.
    """
    mine = folder / f"rank-{rank}"
    session.keep_clean(folder)
    mine.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"write": [], "read": [], "files": [], "flush": []}
    try:
        if rank == 0:
            session.enter(f"writing to the {disk} disk, alone", session.limits.build_s)
            found["one"] = [_write(mine / "large", config.mib, faults) for _ in range(config.repetitions)]
        for repetition in range(config.repetitions):
            session.meet(f"{disk} disk {repetition}", session.limits.build_s)
            session.enter(f"writing to the {disk} disk")
            found["write"].append(_write(mine / "large", config.mib, faults))
            session.meet(f"{disk} disk {repetition}, read")
            session.enter(f"reading from the {disk} disk")
            found["read"].append(_read(mine / "large", faults))
            (mine / "large").unlink()
            session.enter(f"small files on the {disk} disk")
            found["files"].append(_small_files(mine, config, faults))
        session.enter(f"flushing to the {disk} disk")
        found["flush"] = _flushes(mine, config.num_flushes, faults)
    finally:
        shutil.rmtree(mine, ignore_errors=True)
    return {name: [float(f"{value:.5g}") for value in values] for name, values in found.items()}


def _write(path: Path, mib: int, faults: Faults) -> float:
    """Seconds to write and flush."""
    block = os.urandom(_BLOCK)  # not compressible
    started = time.perf_counter()
    faults.delay("slow_disk")
    with open(path, "wb", buffering=0) as file:
        left = mib * _MIB
        while left > 0:
            left -= file.write(block[: min(left, _BLOCK)])
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _read(path: Path, faults: Faults) -> float:
    """Seconds to read, from the disk as far as the system lets go of what it keeps in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        faults.delay("slow_disk")
        while os.read(descriptor, _BLOCK):
            pass
        return time.perf_counter() - started
    finally:
        os.close(descriptor)


def _small_files(folder: Path, config: StorageConfig, faults: Faults) -> float:
    """Seconds to write and read many files."""
    content = os.urandom(config.small_kib * 1024)
    started = time.perf_counter()
    faults.delay("slow_disk")
    paths = [folder / f"small-{number}" for number in range(config.num_small_files)]
    for path in paths:
        path.write_bytes(content)
    for path in paths:
        path.read_bytes()
    seconds = time.perf_counter() - started
    for path in paths:
        path.unlink()
    return seconds


def _flushes(folder: Path, count: int, faults: Faults) -> list[float]:
    """Seconds of each flush of 4 kB."""
    seconds = []
    with open(folder / "flushed", "wb", buffering=0) as file:
        for _ in range(count):
            file.write(b"x" * 4096)
            started = time.perf_counter()
            faults.delay("slow_disk")
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - started)
    return seconds
