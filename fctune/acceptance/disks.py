"""What the checks of disks ask of their samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fctune.acceptance.judge import Jury
from fctune.acceptance.metrics import DISKS
from fctune.acceptance.statistics import excess, percentile
from fctune.acceptance.storage import KINDS

Ranks = Mapping[int, Any]

_LEAST_S = 0.02  # disks are compared by shares of this at least: less is a cache that missed


def judge_storage(jury: Jury, found: Ranks) -> None:
    """How fast each disk is for one rank, one node and all, which rank is slower than the others, and who sees it."""
    for disk in DISKS:
        name = f"storage_{disk}"
        results = {rank: sample.get(disk, {}) for rank, sample in found.items()}
        reason = next((r["skipped"] for r in results.values() if "skipped" in r), None)
        if reason is not None:
            jury.skip(name, reason)
            continue
        check = jury.open(name)
        for group, infix in (("one_rank", "_one_rank"), ("one_node", "_one_node"), ("all", "")):
            times = {rank: result[group] for rank, result in results.items() if any(result.get(group, {}).values())}
            _add_rates(jury, f"{name}{infix}", times)
        everyone = {rank: result.get("all", {}) for rank, result in results.items()}
        flushes = {rank: times["flush"] for rank, times in everyone.items() if times.get("flush")}
        jury.add(f"{name}_fsync_s", {rank: percentile(seconds, 0.99) for rank, seconds in flushes.items()})
        # By its best time of each kind: what disturbs a disk for a moment is not the disk.
        over: dict[int, float] = {}
        for kind in KINDS:
            best = {rank: min(times[kind]) for rank, times in everyone.items() if times.get(kind)}
            for rank, value in excess(best, _LEAST_S).items():
                over[rank] = max(over.get(rank, 0.0), value)
        jury.add(f"{name}_spread", over)
        for rank, result in results.items():
            if "error" in result:
                check.worsen("FAIL", result["error"])
                jury.accuse(check, "rank", [rank], result["error"])
        blind = [rank for rank, sample in found.items() if disk == "shared" and sample.get("sees_shared") is False]
        if blind:
            check.worsen("FAIL", "not shared: what rank 0 writes is not seen everywhere")
            jury.blame(check, blind, "does not see what rank 0 writes")


def _add_rates(jury: Jury, name: str, times: Mapping[int, Mapping[str, list[float]]]) -> None:
    """What a group of ranks writes and reads together, and how many small files the slowest of them."""
    config = jury.config.storage
    for way in ("write", "read"):
        rounds = list(zip(*(mine[way] for mine in times.values()), strict=False))  # as many as all came to
        if rounds:
            size = len(times) * config.mib * 2**20 / 1e9
            jury.add(f"{name}_{way}_gb_s", {None: statistics.median(size / max(seconds) for seconds in rounds)})
    files = {rank: config.num_small_files / min(mine["files"]) for rank, mine in times.items() if mine["files"]}
    jury.add(f"{name}_files_per_s", files)
