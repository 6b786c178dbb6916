"""Checkpoints: how large, how often, and how much room a run takes on the shared disk."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from fctune.config.schema import RunConfig
from fctune.planner.data_size import DataSize
from fctune.planner.memory import MemoryModel
from fctune.planner.parameters import optimizer_state_bytes

# Unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 H100 (https://arxiv.org/abs/2407.21783).
FAILURES_PER_GPU_DAY = 419 / 54 / 16_384

HOST_GB_S = 25  # of a GPU's copies to pinned memory over PCIe, beside the other GPUs of its node

# Where saves and failures take more of the time than this, first order says no more: hours are at least so many.
MAX_LOST_SHARE = 0.9

# Bytes a token in the prepared set: an int32 and a code.
_PREPARED_BYTES = 5


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes on the shared disk, and the rhythm of saves that loses least."""

    checkpoint_bytes: int  # of one, sharded or elastic: both hold what trains and its optimizer
    checkpoints_bytes: int  # all that are kept, and the ones being written
    base_bytes: int
    export_bytes: int
    prepared_bytes: int | None
    save_s: float  # to the shared disk
    stall_s: float  # that training waits for
    hours_between_failures: float
    best_interval_s: float
    lost_share: float  # of the time, saving so

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.checkpoints_bytes + self.base_bytes + self.export_bytes + (self.prepared_bytes or 0)

    def hours(self, num_steps: int | None, step_s: float) -> float | None:
        """Of so many steps with saves and failures as expected, where all is saved in the best rhythm."""
        return None if num_steps is None else num_steps * step_s / 3600 / (1 - min(MAX_LOST_SHARE, self.lost_share))

    def to_json(self) -> dict[str, float | None]:
        """All of it."""
        return asdict(self) | {"total_bytes": self.total_bytes}


def plan_storage(
    memory: MemoryModel,
    config: RunConfig,
    world_size: int,
    rows: DataSize | None,
    disk_gb_s: float,
    failures_per_gpu_day: float,
    num_shards: int = 1,
    num_steps: int | None = None,
) -> Storage:
    """Sizes of what a run writes, and how often to save.

    Args:
        memory: of the run's model.
        config: of the run.
        world_size: ranks.
        rows: None where they are not known.
        disk_gb_s: of the shared disk, all ranks writing.
        failures_per_gpu_day: on average.
        num_shards: ranks that a copy of what trains is cut over; each holds its part and copies that for a save.
        num_steps: of the run; None where it is not known.
    """
    trained = [t for t in memory.all.tensors if t.is_trained]
    weights = sum(t.num_bytes for t in trained)
    size = weights + sum(optimizer_state_bytes(config.optimizer, t.numel, t.itemsize) for t in trained)
    base = 2 * sum(t.numel for t in memory.all.tensors if not t.is_adapter)
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
        checkpoints_bytes=_most_kept(config, num_steps) * size,
        base_bytes=base,
        export_bytes=base + adapters,
        prepared_bytes=None if rows is None else _PREPARED_BYTES * rows.tokens,
        save_s=save_s,
        stall_s=stall_s,
        hours_between_failures=between_s / 3600,
        best_interval_s=interval,
        lost_share=lost,
    )


def _most_kept(config: RunConfig, num_steps: int | None) -> int:
    """Checkpoints that lie there at the fullest, one of each kind being written among them.

    Of each kind the newest stay, and every nth; of the elastic ones also the best evaluation's
    (``fctune.checkpoint.store``). A run has one at its end, or where it is stopped, whatever its steps. Of a run whose
    steps are not known, every nth cannot be counted.
    """
    checkpoint, evaluated_every = config.checkpoint, config.eval.every_n_steps
    newest = max(1, checkpoint.keep_last) + 1
    most = 0
    for every, is_elastic in ((checkpoint.every_n_steps, False), (checkpoint.elastic_every_n_steps, True)):
        has_best = is_elastic and evaluated_every > 0
        if num_steps is None:
            most += newest + has_best if every or has_best else 1
            continue
        written = 1 + ((num_steps - 1) // every if every else 0) + (num_steps // evaluated_every if has_best else 0)
        nth = math.lcm(every, checkpoint.keep_every_n_steps) if every and checkpoint.keep_every_n_steps else 0
        most += min(written, newest + has_best + ((num_steps - 1) // nth if nth else 0))
    return most


def optimal_save_interval(stall_s: float, between_failures_s: float) -> float:
    """Seconds between saves that lose least: sqrt(2 d M) for a stall d and M between failures, to first order.

    Source: Young, CACM 17(9), 1974; for stalls that are not small, Daly's second order (Future Generation Computer
    Systems 22(3), 2006): sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d under d = 2M, else M.
    """
    if not math.isfinite(between_failures_s):
        return math.inf
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = stall_s / (2 * between_failures_s)
    return math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
