"""Sizes of sharded parameters and of their optimizer state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fctune.models.frozen_linear import NF4_BYTES_PER_WEIGHT, is_nf4
from fctune.models.lora import is_adapter

# Quantized moments by suffix of the optimizer's name: elements per scale, bits per element, bytes of the code book.
_QUANTIZED = {"8bit": (256, 8, 1024), "4bit": (128, 4, 64), "Fp8": (256, 8, 0)}


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Shape and kind of one parameter.

    Attributes:
        num_parts: Ranks that hold an equal part each under expert parallelism, whatever the shards of other
            parameters; None for those that are sharded.
    """

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_adapter: bool
    is_nf4: bool
    num_parts: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return int(self.numel * NF4_BYTES_PER_WEIGHT) if self.is_nf4 else self.numel * self.itemsize

    def local_numel(self, num_shards: int) -> int:
        """Return the number of elements in the largest shard, which splits rows like ``torch.chunk``."""
        if self.num_parts is not None:
            return self.numel // self.num_parts
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])


class ParameterGroup:
    """Parameters that are sharded together: one block, the ends of the model, or all of it.

    Args:
        named: The parameters by name.
        spread: Parameters that expert parallelism spreads over ranks.
        num_parts: The number of these ranks, ``parallel.expert``.
    """

    def __init__(
        self, named: Iterable[tuple[str, Tensor]], spread: AbstractSet[Tensor] = frozenset(), num_parts: int = 1
    ):
        self.tensors = [
            ParameterShape(
                *(tuple(p.shape), p.element_size(), p.requires_grad, is_adapter(name), is_nf4(p)),
                num_parts if p in spread else None,
            )
            for name, p in named
        ]
        self.sharded = [t for t in self.tensors if t.num_parts is None]
        self.spread = [t for t in self.tensors if t.num_parts is not None]
        self.numel = sum(t.numel for t in self.sharded)

    def local_bytes(self, tensor: ParameterShape, num_shards: int) -> int:
        """Return the bytes of one rank's shard of a parameter."""
        if tensor.is_nf4:
            return tensor.num_bytes // num_shards
        return tensor.local_numel(num_shards) * tensor.itemsize


def optimizer_state_bytes(optimizer: dict[str, Any], numel: int, itemsize: int) -> int:
    """Return the bytes of optimizer state of one tensor: two moments and a step counter (https://arxiv.org/abs/1711.05101).

    Quantized moments have a scale per block (256 elements in 8 bits and float8, 128 in 4 bits) and a code book each;
    tensors that are small or not a multiple of the block keep unquantized moments (torchao.optim).

    Args:
        optimizer: The config's ``optimizer``.
        numel: Elements of the tensor.
        itemsize: Bytes per element.
    """
    name = str(optimizer.get("_component_", "AdamW")).rpartition(".")[2]
    if name == "SGD":
        return numel * itemsize if optimizer.get("momentum") else 0
    if name == "Adafactor":
        return numel // 16
    block, bits, tables = next((sizes for suffix, sizes in _QUANTIZED.items() if name.endswith(suffix)), (0, 0, 0))
    if block and numel >= 4096 and numel % block == 0:
        return 2 * (numel * bits // 8 + numel // block * 4 + tables) + 4
    return 2 * numel * itemsize + 4
