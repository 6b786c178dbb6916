"""Sources of a parameter: the regions of stored tensors that it consists of, and how they are reordered.

A ``Source`` describes a tensor that is not read yet. It reads any region of it, touching only the stored data that the
region consists of, and it does the inverse, which splits a tensor into the stored ones. Sources nest: a fused
``gate_up_proj`` of a mixture of experts is a stack over experts of concatenations of two stored tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fctune.models.tensor_files import TensorHeader, TensorReader

# Numbers to dequantise at a time, which takes several times their memory.
_CHUNK_ELEMENTS = 1 << 24

Offsets = Sequence[int]  # index of a region's first element along each dim


class Source(ABC):
    """A tensor made of stored tensors.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the stored data.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Fill ``out`` with the region of its shape that starts at ``offsets``, in place, converted to its dtype."""

    @abstractmethod
    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Split the region of this tensor that starts at ``offsets`` into pieces of the stored tensors."""

    @abstractmethod
    def leaves(self) -> Iterator[Leaf]:
        """Iterate over the tensors, as an export stores them, that this one is made of."""

    @abstractmethod
    def step_along(self, dim: int) -> int:
        """Return a number of indices along a dim, counted from 0, that no stored number is read for twice.

        Regions that are cut at its multiples can be read one by one, at the cost of reading the tensor once.
        """

    def read(self, reader: TensorReader, dtype: torch.dtype | None = None) -> Tensor:
        """Return the complete tensor, by default in the stored dtype."""
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read_(out, (0,) * len(self.shape), reader)
        return out


class Leaf(Source):
    """A tensor that an export stores under a name of its own.

    Attributes:
        name: Name in the export.
    """

    name: str

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Yield the region itself, as it is stored without a change."""
        yield Piece(self, tuple(offsets), part)

    def leaves(self) -> Iterator[Leaf]:
        """Yield this stored tensor, the only one that the parameter consists of."""
        yield self

    @abstractmethod
    def headers(self) -> Sequence[TensorHeader]:
        """Return the headers of the stored tensors that this one is read from."""


class Piece(NamedTuple):
    """A region of a stored tensor, with its values."""

    leaf: Leaf
    offsets: tuple[int, ...]
    values: Tensor


class Stored(Leaf):
    """A stored tensor as it is."""

    def __init__(self, header: TensorHeader):
        self.header, self.name, self.shape, self.dtype = header, header.name, header.shape, header.dtype

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read the region from the file; see ``Source.read_``."""
        out.copy_(reader.read(self.header, offsets, out.shape))

    def step_along(self, dim: int) -> int:
        """Return 1: any region is read alone."""
        return 1

    def headers(self) -> Sequence[TensorHeader]:
        """Return the header of the stored tensor, the only one read."""
        return (self.header,)


class Stack(Source):
    """Tensors of one shape, stacked along a new dim."""

    def __init__(self, parts: Sequence[Source], dim: int):
        shape = parts[0].shape
        if odd := next((part for part in parts if part.shape != shape), None):
            raise ValueError(f"{_name(odd)} has the shape {list(odd.shape)}, {_name(parts[0])} {list(shape)}")
        self.parts, self.dim = tuple(parts), dim % (len(shape) + 1)
        self.shape = (*shape[: self.dim], len(parts), *shape[self.dim :])
        self.dtype = parts[0].dtype

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read the parts within the region; see ``Source.read_``."""
        rest = [*offsets[: self.dim], *offsets[self.dim + 1 :]]
        for i in range(out.shape[self.dim]):
            self.parts[offsets[self.dim] + i].read_(out.select(self.dim, i), rest, reader)

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Split each part within the region; see ``Source.split``."""
        rest = [*offsets[: self.dim], *offsets[self.dim + 1 :]]
        for i in range(part.shape[self.dim]):
            yield from self.parts[offsets[self.dim] + i].split(part.select(self.dim, i), rest)

    def step_along(self, dim: int) -> int:
        """Return 1 along the new dim, else the parts' step; see ``Source.step_along``."""
        if dim == self.dim:
            return 1
        return math.lcm(*{part.step_along(dim - (dim > self.dim)) for part in self.parts})

    def leaves(self) -> Iterator[Leaf]:
        """Yield the leaves of every part."""
        for part in self.parts:
            yield from part.leaves()


class Concatenation(Source):
    """Tensors joined along a dim."""

    def __init__(self, parts: Sequence[Source], dim: int):
        first = parts[0].shape
        self.parts, self.dim = tuple(parts), dim % len(first)
        for part in parts:
            if _without(part.shape, self.dim) != _without(first, self.dim):
                raise ValueError(f"{_name(part)} has the shape {list(part.shape)}, {_name(parts[0])} {list(first)}")
        size = sum(part.shape[self.dim] for part in parts)
        self.shape = (*first[: self.dim], size, *first[self.dim + 1 :])
        self.dtype = parts[0].dtype

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read the overlap of each part with the region; see ``Source.read_``."""
        for part, inner, region in self._overlaps(out, offsets):
            part.read_(region, inner, reader)

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Split the overlap of each part with the region; see ``Source.split``."""
        for source, inner, region in self._overlaps(part, offsets):
            yield from source.split(region, inner)

    def leaves(self) -> Iterator[Leaf]:
        """Yield the leaves of every part."""
        for part in self.parts:
            yield from part.leaves()

    def step_along(self, dim: int) -> int:
        """Return a step that suits all parts; see ``Source.step_along``."""
        step = math.lcm(*{part.step_along(dim) for part in self.parts})
        if dim == self.dim and any(part.shape[dim] % step for part in self.parts):
            return self.shape[dim]
        return step

    def _overlaps(self, region: Tensor, offsets: Offsets) -> Iterator[tuple[Source, list[int], Tensor]]:
        first = offsets[self.dim]
        last, start = first + region.shape[self.dim], 0
        for part in self.parts:
            end = start + part.shape[self.dim]
            low, high = max(first, start), min(last, end)
            if low < high:
                inner = [*offsets[: self.dim], low - start, *offsets[self.dim + 1 :]]
                yield part, inner, region.narrow(self.dim, low - first, high - low)
            start = end


class Narrowed(Source):
    """A range of a tensor along a dim."""

    def __init__(self, source: Source, dim: int, start: int, size: int):
        self.source, self.dim, self.start = source, dim % len(source.shape), start
        self.shape = (*source.shape[: self.dim], size, *source.shape[self.dim + 1 :])
        self.dtype = source.dtype

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read the region, shifted; see ``Source.read_``."""
        self.source.read_(out, self._shifted(offsets), reader)

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Split the region, shifted; see ``Source.split``."""
        yield from self.source.split(part, self._shifted(offsets))

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over those of the tensor."""
        yield from self.source.leaves()

    def step_along(self, dim: int) -> int:
        """Return the tensor's step, if the range starts at a multiple of it; see ``Source.step_along``."""
        step = self.source.step_along(dim)
        return self.shape[dim] if dim == self.dim and self.start % step else step

    def _shifted(self, offsets: Offsets) -> list[int]:
        return [*offsets[: self.dim], offsets[self.dim] + self.start, *offsets[self.dim + 1 :]]


class Transposed(Source):
    """A tensor with two dims swapped."""

    def __init__(self, source: Source, dim0: int, dim1: int):
        self.source = source
        self.dims = (dim0 % len(source.shape), dim1 % len(source.shape))
        self.shape, self.dtype = tuple(self._swapped(source.shape)), source.dtype

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read the transposed region; see ``Source.read_``."""
        self.source.read_(out.transpose(*self.dims), self._swapped(offsets), reader)

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Split the transposed region; see ``Source.split``."""
        yield from self.source.split(part.transpose(*self.dims), self._swapped(offsets))

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over those of the tensor."""
        yield from self.source.leaves()

    def step_along(self, dim: int) -> int:
        """Return the tensor's step along the swapped dim; see ``Source.step_along``."""
        first, second = self.dims
        return self.source.step_along({first: second, second: first}.get(dim, dim))

    def _swapped(self, sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        first, second = self.dims
        swapped[first], swapped[second] = sizes[second], sizes[first]
        return swapped


class Reindexed(Source):
    """A tensor whose elements are permuted by a function, read in full for any region of it."""

    def __init__(self, source: Source, function: Callable[[Tensor], Tensor]):
        self.source, self.function = source, function
        self.shape = tuple(function(torch.empty(source.shape, device="meta")).shape)
        self.dtype = source.dtype
        if math.prod(self.shape) != math.prod(source.shape):
            raise ValueError(f"{_name(source)}: its elements would be repeated or dropped rather than permuted")

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Read everything, and copy the region; see ``Source.read_``."""
        out.copy_(_region(self.function(self.source.read(reader)), offsets, out.shape))

    def split(self, part: Tensor, offsets: Offsets) -> Iterator[Piece]:
        """Undo the permutation of the complete tensor; see ``Source.split``."""
        assert tuple(part.shape) == self.shape, "a permuted tensor is exported in full"
        index = self.function(torch.arange(part.numel(), device=part.device).view(self.source.shape))
        original = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
        original[index.flatten()] = part.flatten()
        yield from self.source.split(original.view(self.source.shape), (0,) * len(self.source.shape))

    def step_along(self, dim: int) -> int:
        """Return the size: any region takes reading everything."""
        return self.shape[dim]

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over those of the tensor."""
        yield from self.source.leaves()


@dataclass(slots=True)
class Dequantized(Leaf):
    """A quantised tensor with its scales; an export stores it dequantised, under one name.

    Attributes:
        name: Name in the export.
        shape: Shape after dequantisation.
        inputs: The stored tensors.
        function: Dequantises them; takes the tensors and the dtype to return.
        num_groups: Equal parts, along dim 0 of every tensor, that are dequantised independently.
        packing: Format of the stored tensors, if a frozen base can keep it.
    """

    name: str
    shape: tuple[int, ...]
    inputs: tuple[TensorHeader, ...]
    function: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    num_groups: int = 1
    dtype: torch.dtype = torch.bfloat16
    packing: Literal["mxfp4"] | None = None

    def read_(self, out: Tensor, offsets: Offsets, reader: TensorReader) -> None:
        """Dequantise the groups that the region is in; see ``Source.read_``."""
        size = self.shape[0] // self.num_groups
        step = size * max(1, _CHUNK_ELEMENTS // (size * math.prod(self.shape[1:])))
        start, end = offsets[0], offsets[0] + len(out)
        while start < end:
            stop = min(end, start - start % size + step)
            first, last = start // size, math.ceil(stop / size)
            parts = [self._read_groups(header, first, last, reader) for header in self.inputs]
            region = out.narrow(0, start - offsets[0], stop - start)
            region.copy_(_region(self.function(parts, out.dtype), (start - first * size, *offsets[1:]), region.shape))
            start = stop

    def step_along(self, dim: int) -> int:
        """Return the size of a group; see ``Source.step_along``."""
        return self.shape[dim] // (self.num_groups if dim == 0 else 1)

    def headers(self) -> Sequence[TensorHeader]:
        """The quantised tensor and its scales."""
        return self.inputs

    def _read_groups(self, header: TensorHeader, first: int, last: int, reader: TensorReader) -> Tensor:
        if not header.shape:  # one scale for all
            return reader.read_all(header)
        size = header.shape[0] // self.num_groups
        offsets = (first * size, *(0 for _ in header.shape[1:]))
        return reader.read(header, offsets, ((last - first) * size, *header.shape[1:]))


def _region(tensor: Tensor, offsets: Offsets, shape: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))]


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _name(source: Source) -> str:
    return next(source.leaves()).name
