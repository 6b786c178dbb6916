"""How much memory a rank needs: a first estimate, from the shapes of a model that has no memory yet."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from fctune.config import ActivationCheckpointingConfig
from fctune.modeling.build import CausalLM
from fctune.modeling.frozen import NF4_BYTES, is_nf4
from fctune.modeling.loss import MAX_LOGITS
from fctune.modeling.precision import Formats

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one rank. What the allocator loses, the CUDA context and the libraries' workspaces are not in it."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int  # weights that sharding holds whole at a time
    activations: int

    @property
    def state(self) -> int:
        """What is there whatever the batch."""
        return self.total - self.activations

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        unit, name = (GIB, "GiB") if self.total >= GIB else (1024**2, "MiB")
        parts = [f"{part.name} {getattr(self, part.name) / unit:.1f}" for part in fields(self)]
        return f"{self.total / unit:.1f} {name} ({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Workload:
    """What besides the shapes decides the memory of a step."""

    formats: Formats
    optimizer: dict[str, Any]  # as in the config
    tokens: int  # of a micro-batch
    checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    is_cpu_offloaded: bool = False


def estimate(model: CausalLM, work: Workload, num_shards: int) -> Footprint:
    """Bytes that a rank needs where each copy of the model lies on ``num_shards`` ranks.

    Activations of a block are counted from what its backward reads: about 10 tensors of the model's width and 4 of the
    feed-forward's a token, in the compute format; the loss adds one chunk of logits with its float32 copy and gradient.
    """
    frozen = sum(_num_bytes(p) for p in model.parameters() if not p.requires_grad)
    trained = sum(_num_bytes(p) for p in model.parameters() if p.requires_grad)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    width = work.formats.compute.itemsize
    states = num_trained * _state_bytes(work.optimizer, trained / max(1, num_trained))
    gathered = 0
    if num_shards > 1 or work.formats.is_mixed:
        block = max(_compute_bytes(block, work.formats) for block in model.blocks)
        rest = _compute_bytes(model, work.formats) - sum(_compute_bytes(b, work.formats) for b in model.blocks)
        gathered = 3 * block + rest  # the block that runs, the next, and the gradients of one
    a = model.architecture
    per_token = (10 * a.embed_dim + 4 * a.intermediate_dim) * width
    per_checkpoint = a.embed_dim * width  # the block's input; and attention's output with half of the products'
    if work.checkpointing.policy == "op":
        per_checkpoint += int((2.5 * a.embed_dim + a.intermediate_dim) * width)
    share = work.checkpointing.fraction
    kept = a.num_layers * ((1 - share) * per_token + share * per_checkpoint)
    recomputed = per_token if share else 0
    logits = min(MAX_LOGITS, work.tokens * a.vocab_size) * (width + 4 + 4)
    activations = int(work.tokens * (kept + recomputed)) + logits
    on_device = 0 if work.is_cpu_offloaded else 1
    return Footprint(
        weights=on_device * (frozen + trained) // num_shards,
        gradients=on_device * trained // num_shards,
        optimizer=on_device * int(states) // num_shards,
        gathered=gathered,
        activations=activations,
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    if is_nf4(tensor):
        return int(tensor.numel() * NF4_BYTES)
    return tensor.numel() * tensor.element_size()


def _compute_bytes(module: nn.Module, formats: Formats) -> int:
    """Bytes of a module's weights as they are multiplied."""
    if not formats.is_mixed:
        return sum(_num_bytes(p) for p in module.parameters())
    return sum(p.numel() * formats.compute.itemsize for p in module.parameters())


def _state_bytes(optimizer: dict[str, Any], parameter_bytes: float) -> float:
    """Bytes of optimizer state a trained weight, by the component's name; two moments where the name says nothing."""
    name = str(optimizer.get("_component_", "AdamW")).rpartition(".")[2]
    if name.endswith(("8bit", "Fp8")):
        return 2.1
    if name.endswith("4bit"):
        return 1.1
    if name == "SGD":
        return parameter_bytes if optimizer.get("momentum") else 0.0
    return 0.1 if name == "Adafactor" else 2 * parameter_bytes
