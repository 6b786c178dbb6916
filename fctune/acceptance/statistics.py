"""From samples to figures, and from figures to the one that stands out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Name = TypeVar("Name", bound="int | str | tuple[int, int]")


def bus_factor(operation: str, num_ranks: int) -> float:
    """What bandwidth by size (algbw) is multiplied by to compare it with the hardware's (busbw).

    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. There, a message to the next rank
    is sendrecv, and counts as it is.
    """
    if operation == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    assert operation in ("broadcast", "point_to_point"), operation
    return 1.0


def bandwidth(operation: str, num_bytes: int, num_ranks: int, seconds: float) -> tuple[float, float]:
    """Algbw and busbw, in GB/s of 10^9 bytes.

    Args:
        operation: of ``bus_factor``.
        num_bytes: of the larger side of one rank, as nccl-tests counts it.
        num_ranks: that take part.
        seconds: that it took.
    """
    algorithm = num_bytes / seconds / 1e9
    return algorithm, algorithm * bus_factor(operation, num_ranks)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def describe(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and least of durations."""
    return {
        "mean_s": statistics.fmean(seconds),
        "p50_s": percentile(seconds, 0.5),
        "p99_s": percentile(seconds, 0.99),
        "best_s": min(seconds),
    }


def excess(seconds: Mapping[Name, float], floor_s: float = 0.0) -> dict[Name, float]:
    """How much longer each takes than the median of the others, as a share of it; 0 for one that is alone.

    Args:
        seconds: by name.
        floor_s: the share is of so many seconds at least, where less is within what a clock or a cache explains.
    """
    found = {}
    for name, mine in seconds.items():
        others = [value for other, value in seconds.items() if other != name]
        middle = statistics.median_low(others) if others else mine
        found[name] = (mine - middle) / max(middle, floor_s)
    return found


def isolate_pairs(seconds: Mapping[tuple[int, int], float], spread: float) -> tuple[list[int], list[tuple[int, int]]]:
    """Slow ranks, and slow links between ranks that are not slow.

    A rank is slow when it has several pairs and its quickest is slow: one healthy partner clears it. Links are held
    to the pairs of ranks that are not slow.

    Args:
        seconds: of a message each way, by pair; of one kind of link, or as shares of what is usual of its kind.
        spread: share by which one may take longer than the median of the others.
    """
    best: dict[int, float] = {}
    counts: dict[int, int] = {}
    for pair, value in seconds.items():
        for rank in pair:
            best[rank] = min(value, best.get(rank, math.inf))
            counts[rank] = counts.get(rank, 0) + 1
    ranks = [rank for rank, over in sorted(excess(best).items()) if over > spread and counts[rank] > 1]
    clean = {pair: value for pair, value in seconds.items() if not set(pair) & set(ranks)}
    return ranks, [pair for pair, over in sorted(excess(clean).items()) if over > spread]


def minority(values: Mapping[int, Any]) -> list[int] | None:
    """Ranks whose value is not that of more than half; None where no value is."""
    counts: dict[Any, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    common, most = max(counts.items(), key=lambda item: item[1])
    if len(counts) > 1 and 2 * most <= len(values):
        return None
    return sorted(rank for rank, value in values.items() if value != common)
