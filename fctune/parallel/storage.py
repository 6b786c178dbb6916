"""Disk space of a run and the save interval that loses the least time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fctune.config.intervals import AUTO, parse_interval, parse_interval_or_auto
from fctune.config.schema import RunConfig
from fctune.data.data_size import DataSize
from fctune.models.architecture import Architecture
from fctune.parallel.memory import MemoryModel, optimizer_state_bytes

HOST_GB_S = 25  # rate of a GPU's copies to pinned memory over PCIe while all GPUs of the node copy

KERNEL_CACHE_BYTES = 5 * 2**30  # kernels compiled by Triton and Inductor during a run, on each node's own disk

# Above this share of time lost to saves and failures, the first-order estimate is only a lower bound.
MAX_LOST_SHARE = 0.9

_WIDTH = 2  # bytes of a weight of a base and of an export, in bfloat16

# Bytes of a weight in MXFP4: four bits, and a byte for the scale of 32 (OCP Microscaling Formats, 1.0).
_MXFP4_WIDTH = 17 / 32

# Bytes per token in the prepared set: an int32 token id and a one-byte code.
_PREPARED_BYTES = 5


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes on the shared disk, and the save interval that loses the least time."""

    checkpoint_bytes: int  # one checkpoint, sharded or elastic: trained parameters and optimizer state
    checkpoints_bytes: int  # all kept checkpoints and those being written
    base_bytes: int  # files of the base
    export_bytes: int
    prepared_bytes: int | None
    save_s: float  # time to write one checkpoint to the shared disk
    stall_s: float  # time that training waits for a save
    hours_between_failures: float
    best_interval_s: float
    lost_share: float  # share of time lost to saves and failures at that interval

    @property
    def total_bytes(self) -> int:
        """Total bytes on the shared disk."""
        return self.checkpoints_bytes + self.base_bytes + self.export_bytes + (self.prepared_bytes or 0)

    @property
    def fallback_bytes(self) -> int:
        """Bytes on another disk if the shared one is full: the last checkpoint and the export."""
        return self.checkpoint_bytes + self.export_bytes

    def hours(self, num_steps: int | None, step_s: float) -> float | None:
        """Return the hours of ``num_steps`` with the expected saves and failures at the best interval."""
        return None if num_steps is None else num_steps * step_s / 3600 / (1 - min(MAX_LOST_SHARE, self.lost_share))


def plan_storage(
    memory: MemoryModel,
    config: RunConfig,
    world_size: int,
    rows: DataSize | None,
    disk_gb_s: float,
    failures_per_gpu_day: float,
    num_shards: int = 1,
    num_steps: int | None = None,
    step_s: float | None = None,
) -> Storage:
    """Compute the sizes of a run's files and the best save interval.

    Args:
        memory: Memory model of the run.
        config: Config of the run.
        world_size: Number of ranks.
        rows: Size of the data; None if unknown.
        disk_gb_s: Rate of the shared disk with all ranks writing.
        failures_per_gpu_day: Average number of failures.
        num_shards: Ranks that the trained parameters are sharded over; each copies its shard for a save.
        num_steps: Optimizer steps of the run; None if unknown.
        step_s: Seconds of a step; None if unknown.
    """
    trained = [t for t in memory.all.tensors if t.is_trained]
    weights = sum(t.num_bytes for t in trained)
    size = weights + sum(optimizer_state_bytes(config.optimizer, t.numel, t.itemsize) for t in trained)
    experts = sum(block.num_expert_weights for block in memory.architecture.blocks)
    adapters = sum(t.num_bytes for t in memory.all.tensors if t.is_adapter)
    save_s = size / (disk_gb_s * 1e9)
    stall_s = size / num_shards / (HOST_GB_S * 1e9) if config.checkpoint.async_save else save_s
    between_s = 86_400 / (failures_per_gpu_day * world_size) if failures_per_gpu_day else math.inf
    interval = optimal_save_interval(stall_s, between_s)
    if config.checkpoint.async_save and math.isfinite(interval):
        interval = max(interval, save_s)  # one save at a time
    lost = stall_s / interval + (interval / 2 + save_s) / between_s if math.isfinite(interval) else 0.0
    return Storage(
        checkpoint_bytes=size,
        checkpoints_bytes=_max_checkpoints(config, num_steps, step_s, interval) * size,
        base_bytes=_WIDTH * (memory.num_base_weights - experts) + count_expert_bytes(memory.architecture),
        export_bytes=_WIDTH * memory.num_base_weights + adapters,
        prepared_bytes=None if rows is None else _PREPARED_BYTES * rows.tokens,
        save_s=save_s,
        stall_s=stall_s,
        hours_between_failures=between_s / 3600,
        best_interval_s=interval,
        lost_share=lost,
    )


def count_expert_bytes(architecture: Architecture) -> int:
    """Count the bytes of the experts' weights in the files of the base."""
    weights = sum(block.num_expert_weights for block in architecture.blocks)
    return int(weights * (_MXFP4_WIDTH if architecture.stores_mxfp4 else _WIDTH))


def _max_checkpoints(
    config: RunConfig, num_steps: int | None, step_s: float | None = None, auto_s: float = math.inf
) -> int:
    """Return the largest number of checkpoints on disk at once, including one of each kind that is being written.

    The newest and every nth of each kind are kept, and the elastic one of the best evaluation
    (``fctune.checkpoint.store``). A run always has one at its end or stop. Without a known number of steps, every nth
    cannot be counted. ``auto_s`` is the interval that loses the least time.
    """
    checkpoint = config.checkpoint
    steps = [parse_interval(value).in_steps(num_steps or 0, step_s) for value in (checkpoint.every, config.eval.every)]
    steps.insert(1, count_elastic_steps(checkpoint.elastic_every, num_steps, step_s, auto_s))
    if None in steps:  # a time, and unknown steps
        num_steps = None
    every_sharded, every_elastic, evaluated_every = (1 if n is None else n for n in steps)
    newest = max(1, checkpoint.keep_last) + 1
    most = 0
    for every, is_elastic in ((every_sharded, False), (every_elastic, True)):
        has_best = is_elastic and evaluated_every > 0
        if num_steps is None:
            most += newest + has_best if every or has_best else 1
            continue
        written = 1 + ((num_steps - 1) // every if every else 0) + (num_steps // evaluated_every if has_best else 0)
        nth = math.lcm(every, checkpoint.keep_every_n_steps) if every and checkpoint.keep_every_n_steps else 0
        most += min(written, newest + has_best + ((num_steps - 1) // nth if nth else 0))
    return most


def count_elastic_steps(
    every: int | str, num_steps: int | None, step_s: float | None, best_interval_s: float
) -> int | None:
    """Return the steps between elastic checkpoints, 0 for never; None for a time without ``step_s``.

    ``auto`` is the interval that loses the least time, at most a third of the run.
    """
    steps = parse_interval_or_auto(every).in_steps(num_steps or 0, step_s)
    if every != AUTO or not step_s or not math.isfinite(best_interval_s):
        return steps
    best = max(1, int(best_interval_s / step_s))
    return best if num_steps is None else min(best, steps or best)


def optimal_save_interval(stall_s: float, between_failures_s: float) -> float:
    """Return the seconds between saves that lose the least time: sqrt(2 d M) for a stall d and M between failures.

    Source: Young, CACM 17(9), 1974. For stalls that are not small, Daly's higher order (Future Generation Computer
    Systems 22(3), 2006): sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d for d < 2M, else M.
    """
    if not math.isfinite(between_failures_s):
        return math.inf
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = stall_s / (2 * between_failures_s)
    return math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
