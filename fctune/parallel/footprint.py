"""Memory of one rank by use; ``fctune.parallel.memory`` estimates it."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 1024**3

# Share of a device's memory that an estimate may fill; the rest is a margin for what estimates leave out.
SAFE_SHARE = 0.9

# Share of a device's memory that full gradients may take while they accumulate.
MAX_GRADIENT_SHARE = 0.1

# Names of the parts in messages, if not those of the fields.
LABELS = {
    "gathered": "gathered weights",
    "reducing": "unreduced gradients",
    "working": "recomputed activations and temporaries",
    "context": "CUDA and NCCL (assumed)",
    "fragmentation": "fragmentation (assumed)",
    "process": "Python and libraries (measured)",
}


def can_hold_gradients(gradient_bytes: int, device_bytes: int | None) -> bool:
    """Return whether full gradients fit while they accumulate; ``device_bytes`` is None if the memory is unknown."""
    return device_bytes is None or gradient_bytes <= MAX_GRADIENT_SHARE * device_bytes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes in the memory of one rank at one moment."""

    parameters: int = 0  # of the base
    adapters: int = 0
    buffers: int = 0
    teacher: int = 0  # frozen weights of a teacher, a copy on each rank
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # full weights, gathered from shards
    reducing: int = 0  # full gradients and the buffers of their reduction
    activations: int = 0
    working: int = 0  # recomputed activations and temporaries of one block's backward
    logits: int = 0
    context: int = 0  # CUDA context and NCCL buffers
    fragmentation: int = 0
    process: int = 0  # interpreter and libraries, which share the memory with the model on a CPU

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def state(self) -> int:
        """Sharded state, which is known to the byte: weights, gradients and optimizer."""
        return self.parameters + self.adapters + self.gradients + self.optimizer

    @property
    def of_batch(self) -> int:
        """Parts that shrink with the micro-batch."""
        return self.activations + self.working + self.logits + self.fragmentation

    def to_json(self) -> dict[str, int]:
        """Return the bytes of each part and of the total, by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {"total": self.total}

    def __str__(self) -> str:
        unit, name = (GIB, "GiB") if self.total >= GIB else (1024**2, "MiB")
        sizes = {part.name: getattr(self, part.name) / unit for part in fields(self)}
        parts = [f"{LABELS.get(part, part)} {size:.1f}" for part, size in sizes.items() if size >= 0.05]
        return f"{self.total / unit:.1f} {name} ({', '.join(parts)})"
