"""Bytes that a run writes to the shared volume."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config.schema import RunConfig
from fctune.planner.memory import MemoryModel
from fctune.planner.models import find_architecture, shape_model
from fctune.planner.storage import plan_storage

GIB = 1024**3


def tell_bytes(count: int) -> str:
    """As a disk's room is spoken of."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes by what they are of."""

    model: int  # the base's weights, where they are not there yet
    checkpoints: int  # all that are kept, and the ones being written
    export: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.model + self.checkpoints + self.export

    def __str__(self) -> str:
        parts = {"model": self.model, "checkpoints": self.checkpoints, "export": self.export}
        named = ", ".join(f"{name} {tell_bytes(value)}" for name, value in parts.items() if value)
        return f"{tell_bytes(self.total)} ({named})"


def count_space(config: RunConfig, is_downloaded: bool) -> Space:
    """What a run needs at its fullest.

    Raises:
        ConfigError: the model's shape cannot be found.
    """
    architecture, _, _ = find_architecture(config.model.path)
    memory = MemoryModel(shape_model(config, architecture), config, device_bytes=1)
    storage = plan_storage(memory, config, world_size=1, rows=None, disk_gb_s=1.0, failures_per_gpu_day=0.0)
    return Space(
        model=0 if is_downloaded else storage.base_bytes,
        checkpoints=storage.checkpoints_bytes,
        export=storage.export_bytes,
    )
