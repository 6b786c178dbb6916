"""Memory of one rank by part. ``fctune.planner.memory`` counts it."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 1024**3

# Share of a device that a run may be planned to fill: what is left is for what nobody counts.
SAFE_SHARE = 0.9

# Whole gradients of what trains may take this share of a device while they accumulate.
HELD_GRADIENTS = 0.1

# What parts are called where their names would not say it.
LABELS = {
    "gathered": "weights held whole",
    "reducing": "gradients held whole",
    "working": "computed again, temporaries",
    "context": "CUDA and NCCL (assumed)",
    "fragmentation": "fragmentation (assumed)",
}


def can_hold_gradients(whole_bytes: int, device_bytes: int | None) -> bool:
    """Whether gradients stay whole while they accumulate, so that they are reduced once; None: memory is not known."""
    return device_bytes is None or whole_bytes <= HELD_GRADIENTS * device_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one rank at one moment."""

    parameters: int = 0  # of the base
    adapters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # weights that sharding holds whole
    reducing: int = 0  # gradients that are whole, and what they are reduced from
    activations: int = 0
    working: int = 0  # activations computed again, and temporaries of one block's backward
    logits: int = 0
    context: int = 0  # CUDA's and NCCL's own
    fragmentation: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def state(self) -> int:
        """What sharding cuts: known to the byte."""
        return self.parameters + self.adapters + self.gradients + self.optimizer

    @property
    def of_batch(self) -> int:
        """What a smaller batch needs less of."""
        return self.activations + self.working + self.logits + self.fragmentation

    def to_json(self) -> dict[str, int]:
        """Bytes by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {"total": self.total}

    def __str__(self) -> str:
        unit, name = (GIB, "GiB") if self.total >= GIB else (1024**2, "MiB")
        sizes = {part.name: getattr(self, part.name) / unit for part in fields(self)}
        parts = [f"{LABELS.get(part, part)} {size:.1f}" for part, size in sizes.items() if size >= 0.05]
        return f"{self.total / unit:.1f} {name} ({', '.join(parts)})"
