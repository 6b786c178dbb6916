"""Optimizer states in 8 or 4 bits (torchao), stored as they are: their codes and the scale of each block.

A state that was turned into floats and back is not the same, as no code stands for a block's lowest value; and in
floats it is four or eight times as large, on a device that had no room for that.

torchao cuts a rank's part of a state, laid flat, into blocks. Where every rank's part is whole blocks, so is the state,
and any other layout of which that holds reads its own. Elsewhere a state is stored, or read, in floats.
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

_LEAST = 4_096  # numbers of a rank's part below which torchao does not quantise


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of an optimizer's state: of a parameter, under a key; ``name`` is its name in a checkpoint."""

    name: str
    key: str
    value: Tensor
    optimizer: Optimizer

    @property
    def codes_name(self) -> str:
        """Name of its codes, where it is stored in blocks."""
        return f"{self.name}.codes"

    @property
    def scale_name(self) -> str:
        """Name of the scales of its blocks."""
        return f"{self.name}.scale"

    def is_in_blocks(self) -> bool:
        """Whether it is quantised in whole blocks on every rank; told by shapes alone, so equal on all ranks."""
        block = getattr(self.optimizer, "block_size", math.inf)
        if math.isinf(block) or not self.value.dim():
            return False
        row = math.prod(self.value.shape[1:])
        parts = list(_rows_of_parts(self.value))
        # A block may reach over rows: then parts of one size alone are cut as a flat tensor is.
        fits = row % block == 0 or len(set(parts)) == 1
        return fits and all(rows * row >= _LEAST and rows * row % block == 0 for rows in parts)

    def to_store(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it; codes and scales are views of the live state."""
        if self.is_in_blocks():
            codes, scale = _codes_and_scale(self.value)
            return {self.codes_name: self._as_stored(codes), self.scale_name: self._as_stored(scale)}
        return {self.name: _to_float(self.value)}

    def to_read(self, stored: AbstractSet[str]) -> dict[str, Tensor]:
        """Tensors of the names under which it was stored, to be filled and given to ``take_``."""
        if (self.codes_name in stored) == self.is_in_blocks():
            return self.to_store()
        if self.codes_name in stored:  # in blocks that are not this layout's: all of it
            codes, scale = (self._by_rows(flat, self.value.numel()) for flat in _codes_and_scale(self._whole()))
            return {self.codes_name: codes, self.scale_name: scale}
        return {self.name: torch.zeros_like(_to_float(self.value))}

    def take_(self, read: dict[str, Tensor]) -> None:
        """Take over what was read, in place."""
        if self.name in read:
            if read[self.name] is not self.value:
                self.value.copy_(read[self.name])
        elif not self.is_in_blocks():
            whole: Any = self._whole()
            codes, scale = _codes_and_scale(whole)
            codes.copy_(read[self.codes_name].view(-1))
            scale.copy_(read[self.scale_name].view(-1))
            plain = whole.dequantize().to(self.value.device)
            if isinstance(self.value, DTensor):
                plain = distribute_tensor(plain, self.value.device_mesh, self.value.placements, src_data_rank=None)
            self.value.copy_(plain)

    def _whole(self) -> Tensor:
        """An empty state of this kind on the CPU, of all ranks' parts together."""
        make: Any = type(self.optimizer)
        block: int = self.optimizer.block_size  # type: ignore[attr-defined]
        whole: Tensor = make._subclass_zeros(torch.empty(self.value.shape), self.key == "exp_avg", block)
        return whole

    def _as_stored(self, flat: Tensor) -> Tensor:
        """This rank's codes or scales as its part of those of all ranks."""
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
        """Codes or scales of so many numbers by rows where a row is whole blocks, else flat: so on any layout."""
        row = math.prod(self.value.shape[1:])
        is_whole: bool = row % self.optimizer.block_size == 0  # type: ignore[attr-defined]
        return flat.view(numbers // row, -1) if is_whole else flat


def _rows_of_parts(value: Tensor) -> Iterator[int]:
    """Rows of each part that a tensor is cut into."""
    num_parts = 1
    if isinstance(value, DTensor):
        for size, placement in zip(value.device_mesh.shape, value.placements, strict=True):
            if isinstance(placement, Shard):
                num_parts *= size
    rows = value.shape[0]
    chunk = -(-rows // num_parts)
    for part in range(num_parts):
        yield max(0, min(chunk, rows - part * chunk))


def _codes_and_scale(value: Tensor) -> tuple[Tensor, Tensor]:
    """Flat codes, as bytes, and the scales of a quantised state's blocks; both live."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    return local.codes.view(torch.uint8).view(-1), local.scale


def _to_float(value: Tensor) -> Tensor:
    """The state itself where it is not quantised, else a copy in floats."""
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(local, "codes"):
        return value
    plain: Tensor = local.dequantize()
    if isinstance(value, DTensor):
        return DTensor.from_local(
            plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return plain
