"""Metrics that thresholds can be set on, the checks that they belong to, and the statistics behind them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point")
DTYPES = ("fp32", "bf16", "fp8")
SCOPES = ("node", "all")  # each node separately, all nodes together
DISKS = ("node", "network", "shared")

# In the order in which they are judged and shown.
CHECKS = {
    "arrival": "all ranks start, on the requested nodes and devices, and stay until the end",
    "identity": "the same hardware and software everywhere",
    "clocks": "clocks agree",
    "compute": "matrix products on all devices at once",
    "corruption": "products are the same on every rank, and twice in a row",
    "memory": "memory bandwidth",
    "transfer": "bandwidth between host and device",
    "health": "temperature, throttling, ECC errors, Xids",
    "links": "messages between every pair of ranks",
    "collectives_node": "collectives within each node",
    "collectives_all": "collectives of all nodes",
    "collective_data": "results of collectives are correct",
    "storage_node": "the node's disk",
    "storage_network": "the node's network volume",
    "storage_shared": "the shared disk",
    "training_node": "training steps on each node separately",
    "training_all": "training steps on all nodes",
    "checkpoint": "saving and loading a checkpoint",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that describes the cluster by its worst rank, pair or node."""

    check: str
    unit: str
    better: Literal["higher", "lower"]
    description: str


def _list_metrics() -> dict[str, Metric]:
    slowdown = "relative slowdown of the slowest against the median of the others"
    metrics = {
        "clock_offset_s": Metric("clocks", "s", "lower", "largest offset of a rank's clock from rank 0's"),
        "checksum_mismatches": Metric("corruption", "ranks", "lower", "ranks whose products differ"),
        "memory_gb_s": Metric("memory", "GB/s", "higher", "copies on the device, reads and writes counted"),
        "memory_spread": Metric("memory", "", "lower", slowdown),
        "host_to_device_gb_s": Metric("transfer", "GB/s", "higher", "from pinned memory"),
        "device_to_host_gb_s": Metric("transfer", "GB/s", "higher", "to pinned memory"),
        "transfer_spread": Metric("transfer", "", "lower", slowdown),
        "temperature_c": Metric("health", "C", "lower", "hottest GPU under load"),
        "throttled_share": Metric(
            "health", "", "lower", "share of readings under load throttled by heat, power brake or hardware"
        ),
        "ecc_errors": Metric("health", "errors", "lower", "uncorrected errors of all GPUs"),
        "xids": Metric("health", "errors", "lower", "driver errors in the kernel log"),
        "pair_gb_s": Metric("links", "GB/s", "higher", "slowest pair, per direction, both directions at once"),
        "pair_spread": Metric("links", "", "lower", slowdown),
        "wrong_elements": Metric("collective_data", "elements", "lower", "in all results of collectives"),
        "all_reduce_scaling": Metric("collectives_all", "", "higher", "busbw of all nodes relative to one node's"),
        "checkpoint_save_s": Metric("checkpoint", "s", "lower", "trained weights and optimizer, from device to disk"),
        "checkpoint_load_s": Metric("checkpoint", "s", "lower", "the same, from disk"),
        "training_scaling": Metric("training_all", "", "higher", "tokens/s per rank of all nodes relative to one's"),
        "training_spread": Metric("training_node", "", "lower", f"{slowdown}, by node"),
    }
    for dtype in DTYPES:
        metrics[f"matmul_{dtype}_tflops"] = Metric("compute", "TFLOP/s", "higher", f"{dtype} products, slowest rank")
        metrics[f"matmul_{dtype}_spread"] = Metric("compute", "", "lower", slowdown)
    for scope in SCOPES:
        for operation in OPERATIONS:
            description = f"busbw of {operation} at collectives.judged_mib"
            metrics[f"{operation}_{scope}_gb_s"] = Metric(f"collectives_{scope}", "GB/s", "higher", description)
        check = f"training_{scope}"
        metrics[f"{check}_tokens_per_s"] = Metric(check, "tokens/s", "higher", "per rank, padding included")
        metrics[f"{check}_mfu"] = Metric(check, "", "higher", "model FLOP/s relative to training.peak_tflops")
        metrics[f"{check}_memory_gib"] = Metric(check, "GiB", "lower", "peak memory of a rank")
    for disk in DISKS:
        check = f"storage_{disk}"
        for prefix, who, files_who in (
            (check, "sum of all ranks at once", "slowest rank"),
            (f"{check}_one_rank", "rank 0 alone", "rank 0 alone"),
            (f"{check}_one_node", "sum of one node's ranks at once", "slowest rank of one node"),
        ):
            metrics[f"{prefix}_write_gb_s"] = Metric(check, "GB/s", "higher", f"{who}, flushed")
            metrics[f"{prefix}_read_gb_s"] = Metric(check, "GB/s", "higher", who)
            metrics[f"{prefix}_files_per_s"] = Metric(
                check, "files/s", "higher", f"small files written and read, {files_who}"
            )
        metrics[f"{check}_fsync_s"] = Metric(
            check, "s", "lower", "99th percentile of the time to flush 4 kB, slowest rank"
        )
        metrics[f"{check}_spread"] = Metric(check, "", "lower", slowdown)
    return metrics


METRICS = _list_metrics()

Name = TypeVar("Name", bound="int | str | tuple[int, ...]")


def compute_bandwidth(operation: str, num_bytes: int, num_ranks: int, seconds: float) -> tuple[float, float]:
    """Compute algbw and busbw in GB/s (10^9 bytes).

    Busbw scales algbw by a factor of the operation, so that it can be compared with the hardware's bandwidth. Source:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md, where a message to the next rank is sendrecv,
    with factor 1.

    Args:
        operation: A name in ``OPERATIONS``.
        num_bytes: Size of the larger buffer of one rank, as nccl-tests counts it.
        num_ranks: Number of participants.
        seconds: Duration of one operation.
    """
    factor = 1.0
    if operation == "all_reduce":
        factor = 2 * (num_ranks - 1) / num_ranks
    elif operation in ("all_gather", "reduce_scatter", "all_to_all"):
        factor = (num_ranks - 1) / num_ranks
    algbw = num_bytes / seconds / 1e9
    return algbw, algbw * factor


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize_times(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median, 99th percentile and minimum of durations."""
    return {
        "mean_s": statistics.fmean(seconds),
        "p50_s": percentile(seconds, 0.5),
        "p99_s": percentile(seconds, 0.99),
        "best_s": min(seconds),
    }


def compute_slowdowns(seconds: Mapping[Name, float], floor_s: float = 0.0) -> dict[Name, float]:
    """Compute how much longer each participant takes than the median of the others, relative to it.

    Args:
        seconds: Duration for each participant; a single participant has a slowdown of 0.
        floor_s: The smallest denominator, where differences below it are explained by a clock or a cache.
    """
    slowdowns = {}
    for name, mine in seconds.items():
        others = [value for other, value in seconds.items() if other != name]
        median = statistics.median_low(others) if others else mine
        slowdowns[name] = (mine - median) / max(median, floor_s)
    return slowdowns


def isolate_slow_pairs(
    seconds: Mapping[tuple[int, int], float], max_slowdown: float
) -> tuple[list[int], list[tuple[int, int]]]:
    """Split slow pairs into slow ranks, and slow links between ranks that are not slow.

    A rank is slow if it has several pairs and even its fastest is slow: one healthy partner clears it. Links are
    compared among the pairs of the remaining ranks.

    Args:
        seconds: Duration of a message in each direction, by pair; all pairs use the same kind of link.
        max_slowdown: ``compute_slowdowns`` up to which a rank or a link is not slow.
    """
    best: dict[int, float] = {}
    for pair, value in seconds.items():
        for rank in pair:
            best[rank] = min(value, best.get(rank, math.inf))
    counts = Counter(rank for pair in seconds for rank in pair)
    slow = [rank for rank, s in sorted(compute_slowdowns(best).items()) if s > max_slowdown and counts[rank] > 1]
    rest = {pair: value for pair, value in seconds.items() if not set(pair) & set(slow)}
    return slow, [pair for pair, s in sorted(compute_slowdowns(rest).items()) if s > max_slowdown]


def find_outliers(values: Mapping[int, Any]) -> list[int] | None:
    """List the ranks whose value differs from the majority's; None if no value has a majority."""
    counts = Counter(values.values())
    ((common, most),) = counts.most_common(1)
    if len(counts) > 1 and 2 * most <= len(values):
        return None
    return sorted(rank for rank, value in values.items() if value != common)
