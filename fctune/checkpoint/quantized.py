"""Checkpoints of 8-bit and 4-bit optimizer states (torchao), stored as quantized codes and block scales.

Converting a state to floats and back changes it, because no code represents a block's lowest value; and floats take
four or eight times the memory, on a device chosen without room for that.

torchao divides each rank's flattened shard of a state into blocks. If every rank's shard is a multiple of the block
size, the state is stored in blocks, and any other layout that meets the same condition reads its own blocks. Otherwise
a state is stored, or read, in floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

_MIN_QUANTIZED_NUMEL = 4_096  # torchao keeps smaller shards in floats


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of an optimizer's state, under ``key`` of a parameter; ``name`` is its name in a checkpoint."""

    name: str
    key: str
    value: Tensor
    optimizer: Optimizer

    @property
    def codes_name(self) -> str:
        """Name of the stored codes, if stored in blocks."""
        return f"{self.name}.codes"

    @property
    def scale_name(self) -> str:
        """Name of the stored block scales, if stored in blocks."""
        return f"{self.name}.scale"

    def is_in_blocks(self) -> bool:
        """Return True if every rank's shard is a multiple of the block size; depends on shapes only, so ranks agree."""
        block = getattr(self.optimizer, "block_size", math.inf)
        if math.isinf(block) or not self.value.dim():
            return False
        row = math.prod(self.value.shape[1:])
        shards = list(_shard_rows(self.value))
        # Blocks that span rows divide equal shards only as they divide the flat tensor.
        fits = row % block == 0 or len(set(shards)) == 1
        return fits and all(rows * row >= _MIN_QUANTIZED_NUMEL and rows * row % block == 0 for rows in shards)

    def to_store(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name; codes and scales are views of the live state."""
        if self.is_in_blocks():
            codes, scale = _codes_and_scale(self.value)
            return {self.codes_name: self._as_stored(codes), self.scale_name: self._as_stored(scale)}
        return {self.name: _to_float(self.value)}

    def to_read(self, stored: AbstractSet[str]) -> dict[str, Tensor]:
        """Return tensors to fill from a checkpoint and pass to ``load_``, by the names in ``stored``."""
        if (self.codes_name in stored) == self.is_in_blocks():
            return self.to_store()
        if self.codes_name in stored:  # in blocks of another layout: read the full state
            full = _codes_and_scale(self._empty_full_state())
            codes, scale = (self._by_rows(flat, self.value.numel()) for flat in full)
            return {self.codes_name: codes, self.scale_name: scale}
        return {self.name: torch.zeros_like(_to_float(self.value))}

    def load_(self, read: dict[str, Tensor]) -> None:
        """Copy tensors that were read into the live state, in place."""
        if self.name in read:
            if read[self.name] is not self.value:
                self.value.copy_(read[self.name])
        elif not self.is_in_blocks():
            full: Any = self._empty_full_state()
            codes, scale = _codes_and_scale(full)
            codes.copy_(read[self.codes_name].view(-1))
            scale.copy_(read[self.scale_name].view(-1))
            plain = full.dequantize().to(self.value.device)
            if isinstance(self.value, DTensor):
                plain = distribute_tensor(plain, self.value.device_mesh, self.value.placements, src_data_rank=None)
            self.value.copy_(plain)

    def _empty_full_state(self) -> Tensor:
        """Allocate the unsharded state on the CPU."""
        make: Any = type(self.optimizer)
        block: int = self.optimizer.block_size  # type: ignore[attr-defined]
        full: Tensor = make._subclass_zeros(torch.empty(self.value.shape), self.key == "exp_avg", block)
        return full

    def _as_stored(self, flat: Tensor) -> Tensor:
        """Wrap this rank's codes or scales as a DTensor with the layout of the state."""
        if not isinstance(self.value, DTensor):
            return self._by_rows(flat, self.value.numel())
        numbers = self.value.to_local().numel()
        local = self._by_rows(flat, numbers)
        rows = (self.value.shape[0],) if local.dim() == 2 else (self.value.numel() * len(flat) // numbers,)
        shape = torch.Size([*rows, *local.shape[1:]])
        return DTensor.from_local(
            local, self.value.device_mesh, self.value.placements, run_check=False, shape=shape, stride=local.stride()
        )

    def _by_rows(self, flat: Tensor, numbers: int) -> Tensor:
        """Reshape codes or scales to one row per row of the state, if its rows are multiples of the block size."""
        row = math.prod(self.value.shape[1:])
        is_multiple: bool = row % self.optimizer.block_size == 0  # type: ignore[attr-defined]
        return flat.view(numbers // row, -1) if is_multiple else flat


def _shard_rows(value: Tensor) -> Iterator[int]:
    """Yield the number of rows of each shard of a tensor."""
    num_shards = 1
    if isinstance(value, DTensor):
        for size, placement in zip(value.device_mesh.shape, value.placements, strict=True):
            if isinstance(placement, Shard):
                num_shards *= size
    rows = value.shape[0]
    chunk = -(-rows // num_shards)
    for shard in range(num_shards):
        yield max(0, min(chunk, rows - shard * chunk))


def _codes_and_scale(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of a quantized state's flat codes, as bytes, and of its block scales."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    return local.codes.view(torch.uint8).view(-1), local.scale


def _to_float(value: Tensor) -> Tensor:
    """Return a dequantized copy, or the state itself if it is not quantized."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "codes"):
        return value
    plain: Tensor = local.dequantize()
    if isinstance(value, DTensor):
        return DTensor.from_local(
            plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return plain
