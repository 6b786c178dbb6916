"""Weights of experts that do not train, stored in 4 bits (NF4, MXFP4) or 8 (float8), dequantised for each product."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from fctune.base.errors import CheckpointError
from fctune.models.frozen_linear import FLOAT8, NF4_BLOCK, quantize_rows_to_float8, rows_of_shard
from fctune.models.grouped_products import multiply_groups
from fctune.models.tensor_files import TensorReader
from fctune.models.weight_sources import Dequantized, Source

# The values of four bits; of NF4 https://arxiv.org/abs/2305.14314 as torchao rounds them, of MXFP4 those of float4 E2M1
# (OCP Microscaling Formats 1.0, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
_NF4_LEVELS = (
    *(-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0),
    *(0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0),
)
_FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_NF4_SCALED, _MXFP4_SCALED = 64, 32  # weights that share a scale
_MXFP4_BIAS = 127  # of the exponents that MXFP4's scales are

# Weights that are dequantised at a time without compilation, which takes several times their memory.
CHUNK_ELEMENTS = 1 << 24


class FrozenExperts(nn.Module, ABC):
    """The weight of all experts of a block in fewer bits; takes the place of the parameter.

    Each part has one row for each expert, so experts are sharded, or spread over ranks, as they are in the run's dtype.

    Args:
        weight: The weight, ``[experts, out, in]``, or ``[experts, in, out]`` if it is stored transposed.
        is_transposed: How the weight is stored.

    Attributes:
        shape: Shape of the weight.
        dtype: Dtype of the weight before it was quantised, and in exports.
    """

    part_names: ClassVar[tuple[str, ...]]

    def __init__(self, weight: Tensor, is_transposed: bool):
        super().__init__()
        self.shape, self.dtype, self.is_transposed = weight.shape, weight.dtype, is_transposed
        device, num_experts = weight.device, len(weight)
        for name, (sizes, dtype) in zip(self.part_names, self._describe_parts(), strict=True):
            part = torch.empty(num_experts, *sizes, dtype=dtype, device=device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    @property
    def parts(self) -> list[Tensor]:
        """The stored tensors, ``[experts, ...]``."""
        return [self.get_parameter(name) for name in self.part_names]

    @property
    def local_parts(self) -> list[Tensor]:
        """This rank's experts of the stored tensors, ``[own experts, ...]``."""
        return [part.to_local() if isinstance(part, DTensor) else part for part in self.parts]

    @property
    def num_weights(self) -> int:
        """Number of weights of all experts."""
        return math.prod(self.shape)

    @abstractmethod
    def _describe_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape, without the experts, and the dtype of each part."""

    @abstractmethod
    def _make_unpack(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Return the function that dequantises the parts of some experts, as the weight is stored."""

    @abstractmethod
    def load_(self, source: Source, reader: TensorReader, start: int, stop: int) -> None:
        """Read some of this rank's experts from a checkpoint, in place.

        Args:
            source: The weight of all experts.
            reader: Reader of the files.
            start: Index of the first of them among all experts.
            stop: Index after the last.

        Raises:
            CheckpointError: The checkpoint does not store them in this format, and they are not converted to it.
        """

    @abstractmethod
    def init_random_(self, generator: torch.Generator) -> None:
        """Fill this rank's experts with small random numbers, in place."""

    def multiply(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return ``x W[e]'`` for the expert e of each row; see ``multiply_groups``.

        Backward dequantises again, because the dequantised weights of all blocks would take the memory that fewer bits
        save. What torch.compile would keep is part of a checkpoint, as in ``nf4.multiply``.
        """
        parts = self.local_parts
        if torch.compiler.is_compiling():
            factor = self._to_factor(checkpoint(self._make_unpack(x.dtype), *parts, use_reentrant=False))
            return multiply_groups(x, factor, ends)
        product: Tensor = _FrozenProduct.apply(x, ends, partial(self._unpack_factor, x.dtype), *parts)  # type: ignore[no-untyped-call]
        return product

    def _unpack_factor(self, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        return self._to_factor(_unpack_in_chunks(self._make_unpack(dtype), self.shape[1:], *parts))

    def _to_factor(self, weight: Tensor) -> Tensor:
        """Return the weight as ``[experts, in, out]``."""
        return weight if self.is_transposed else weight.transpose(1, 2)

    @torch.no_grad()
    def dequantized_weight(self) -> Tensor:
        """Return the weight in ``dtype``, stored and sharded as it was."""
        first, parts = self.parts[0], self.local_parts
        local = _unpack_in_chunks(self._make_unpack(self.dtype), self.shape[1:], *parts)
        if not isinstance(first, DTensor):
            return local
        stride = (self.shape[1] * self.shape[2], self.shape[2], 1)
        mesh, placements = first.device_mesh, first.placements
        return DTensor.from_local(local.contiguous(), mesh, placements, shape=self.shape, stride=stride)


class QuantizedExperts(FrozenExperts):
    """Experts that are quantised when they are loaded, one by one, whatever the checkpoint stores."""

    def load_(self, source: Source, reader: TensorReader, start: int, stop: int) -> None:
        """Read and quantise experts; see ``FrozenExperts.load_``."""
        first = rows_of_shard(self.parts[0]).start
        for expert in range(start, stop):
            weight = torch.empty((1, *self.shape[1:]), dtype=source.dtype)
            source.read_(weight, (expert, 0, 0), reader)
            self.quantize_(expert - first, weight[0])

    @abstractmethod
    def quantize_(self, index: int, weight: Tensor) -> None:
        """Store the weight of one expert, ``[out, in]`` or transposed, by its index among this rank's, in place."""


class Float8Experts(QuantizedExperts):
    """Experts in float8 (e4m3), with a scale for each output of each expert.

    Products are computed in the run's dtype.
    """

    part_names = ("rounded", "scales")

    def _describe_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        _, first, second = self.shape
        return [((first, second), FLOAT8), ((second if self.is_transposed else first,), torch.float32)]

    def _make_unpack(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(_unpack_float8, self.is_transposed, dtype)

    @torch.no_grad()
    def quantize_(self, index: int, weight: Tensor) -> None:
        """Round the weight of one expert; see ``QuantizedExperts.quantize_``."""
        rounded, scales = self.local_parts
        weight = weight.to(rounded.device, self.dtype)
        found, scale = quantize_rows_to_float8(weight.t() if self.is_transposed else weight)
        rounded[index].copy_(found.t() if self.is_transposed else found)
        scales[index].copy_(scale)

    @torch.no_grad()
    def init_random_(self, generator: torch.Generator) -> None:
        """Draw numbers, all with the same scale; see ``FrozenExperts.init_random_``."""
        rounded, scales = self.local_parts
        for expert in rounded:
            expert.copy_(torch.empty(expert.shape, device=expert.device).normal_(generator=generator))
        scales.fill_(0.02)


class Nf4Experts(QuantizedExperts):
    """Experts in NF4, quantised as torchao does."""

    part_names = ("codes", "scales", "factors", "means")

    def __init__(self, weight: Tensor, is_transposed: bool):
        super().__init__(weight, is_transposed)
        self.levels: Tensor  # of both halves of each byte
        self.register_buffer("levels", torch.empty(256, 2, dtype=weight.dtype, device=weight.device), persistent=False)

    def _describe_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        num_blocks = math.ceil(math.prod(self.shape[1:]) / NF4_BLOCK)  # the last one is filled up with zeros
        return [
            ((num_blocks * NF4_BLOCK // 2,), torch.uint8),
            ((num_blocks * NF4_BLOCK // _NF4_SCALED,), torch.int8),
            ((num_blocks,), self.dtype),
            ((1,), self.dtype),
        ]

    def _make_unpack(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(_unpack_nf4, self.levels, tuple(self.shape[1:]), dtype)

    def init_buffers_(self) -> None:
        """Compute the values of each byte, whose high half is the first weight."""
        levels = torch.tensor(_NF4_LEVELS)
        self.levels.copy_(torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1))

    @torch.no_grad()
    def quantize_(self, index: int, weight: Tensor) -> None:
        """Quantise the weight of one expert; see ``QuantizedExperts.quantize_``."""
        from fctune.models.nf4 import to_nf4

        locals_ = self.local_parts
        flat = weight.to(locals_[0].device, self.dtype).flatten()
        made = to_nf4(pad(flat, (0, -len(flat) % NF4_BLOCK)))
        values = (made.quantized_data, made.quantized_scalers, made.quantization_factor, made.scaler_mean)
        for part, value in zip(locals_, values, strict=True):
            part[index].copy_(value.view(part[index].shape))

    @torch.no_grad()
    def init_random_(self, generator: torch.Generator) -> None:
        """Draw codes, all with the same scale; see ``FrozenExperts.init_random_``."""
        codes, scales, factors, means = self.local_parts
        codes.random_(0, 256, generator=generator)
        scales.zero_()
        factors.fill_(1.0)
        means.fill_(0.04)


class Mxfp4Experts(FrozenExperts):
    """Experts as a checkpoint stores them in MXFP4: 32 weights of one output share a power of two."""

    part_names = ("blocks", "scales")

    def __init__(self, weight: Tensor, is_transposed: bool):
        super().__init__(weight, is_transposed)
        self.levels: Tensor  # of both halves of each byte
        self.powers: Tensor
        self.register_buffer("levels", torch.empty(256, 2, device=weight.device), persistent=False)
        self.register_buffer("powers", torch.empty(256, device=weight.device), persistent=False)

    def _describe_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        # Whichever way the model stores the weight, a group is a part of an output's inputs, the last dim of a factor.
        _, in_dim, out_dim = self.shape
        groups = (out_dim, in_dim // _MXFP4_SCALED)
        return [((*groups, _MXFP4_SCALED // 2), torch.uint8), (groups, torch.uint8)]

    def _make_unpack(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return partial(_unpack_mxfp4, self.levels, self.powers, dtype)

    def init_buffers_(self) -> None:
        """Compute the values of each byte, whose low half is the first weight, and of each scale."""
        levels = torch.tensor(_FP4_LEVELS)
        self.levels.copy_(torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1))
        self.powers.copy_(torch.pow(2.0, torch.arange(256) - _MXFP4_BIAS))

    def load_(self, source: Source, reader: TensorReader, start: int, stop: int) -> None:
        """Copy the stored bytes of experts; see ``FrozenExperts.load_``."""
        first = rows_of_shard(self.parts[0]).start
        for local, header in zip(self.local_parts, self.check_stored(source).inputs, strict=True):
            part = local[start - first : stop - first]
            part.copy_(reader.read(header, (start, *(0,) * (part.ndim - 1)), part.shape))

    def check_stored(self, source: Source) -> Dequantized:
        """Return a source that stores the weight in MXFP4.

        Raises:
            CheckpointError: It does not.
        """
        shapes = [tuple(part.shape) for part in self.parts]
        if (
            isinstance(source, Dequantized)
            and source.packing == "mxfp4"
            and [tuple(header.shape) for header in source.inputs] == shapes
        ):
            return source
        name = next(source.leaves()).name
        raise CheckpointError(
            f"adapter.base=mxfp4: {name} is not stored in MXFP4, whatever config.json says; use adapter.base=nf4."
        )

    @torch.no_grad()
    def init_random_(self, generator: torch.Generator) -> None:
        """Draw codes, all with the same scale; see ``FrozenExperts.init_random_``."""
        blocks, scales = self.local_parts
        blocks.random_(0, 256, generator=generator)
        scales.fill_(_MXFP4_BIAS - 7)


def iter_frozen_experts(model: nn.Module) -> Iterator[tuple[str, FrozenExperts]]:
    """Iterate over the weights of experts that a model keeps in fewer bits, by path."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, FrozenExperts))


class _FrozenProduct(torch.autograd.Function):
    """``multiply_groups`` with a factor that is computed in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, unpack: Callable[..., Tensor], *parts: Tensor) -> Tensor:
        ctx.save_for_backward(ends, *parts)
        ctx.unpack = unpack
        return multiply_groups(x, unpack(*parts), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ends, *parts = ctx.saved_tensors
        factor = ctx.unpack(*parts).transpose(1, 2)
        return multiply_groups(grad.contiguous(), factor, ends), None, None, *(None for _ in parts)


def _unpack_in_chunks(unpack: Callable[..., Tensor], sizes: tuple[int, ...], *parts: Tensor) -> Tensor:
    """Dequantise a few experts at a time, with little memory for what is computed on the way."""
    num_experts, size = len(parts[0]), max(1, CHUNK_ELEMENTS // math.prod(sizes))
    if num_experts <= size:
        return unpack(*parts)
    first = unpack(*(part[:size] for part in parts))
    # What is unpacked may be a transposed view.
    order = sorted(range(3), key=first.stride, reverse=True)
    shape = (num_experts, *sizes)
    out = first.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(3)])
    out[:size] = first
    for start in range(size, num_experts, size):
        out[start : start + size] = unpack(*(part[start : start + size] for part in parts))
    return out


def _unpack_float8(is_transposed: bool, dtype: torch.dtype, rounded: Tensor, scales: Tensor) -> Tensor:
    """Return experts in float8, as they are stored."""
    return (rounded.float() * scales.unsqueeze(1 if is_transposed else 2)).to(dtype)


def _unpack_nf4(
    levels: Tensor,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    codes: Tensor,
    scales: Tensor,
    factors: Tensor,
    means: Tensor,
) -> Tensor:
    """Return experts in NF4, ``[experts, *sizes]``, by torchao's arithmetic."""
    num_experts, num_groups = factors.shape
    # A rank may have no expert, so no size can be left to ``view``.
    grouped = scales.view(num_experts, num_groups, NF4_BLOCK // _NF4_SCALED) / factors[..., None]
    scalers = grouped.to(levels.dtype).flatten(1) + means
    values = levels[codes.int()].view(*scalers.shape, _NF4_SCALED) * scalers[..., None]
    return values.flatten(1)[:, : math.prod(sizes)].view(num_experts, *sizes).to(dtype)


def _unpack_mxfp4(levels: Tensor, powers: Tensor, dtype: torch.dtype, blocks: Tensor, scales: Tensor) -> Tensor:
    """Return experts in MXFP4, ``[experts, in, out]``, as ``convert_moe_packed_tensors`` of transformers does."""
    values = levels[blocks.int()].flatten(-2) * powers[scales.int()][..., None]
    return values.to(dtype).flatten(2).transpose(1, 2)
