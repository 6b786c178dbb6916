"""Weights in 4 bits, NF4 (https://arxiv.org/abs/2305.14314). Importing it imports torchao, which takes a second."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torchao.dtypes.nf4tensor import NF4Tensor, linear_nf4, to_nf4

__all__ = ["NF4Tensor", "multiply", "quantize", "shard_like", "to_nf4"]


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x W'`` in the dtype of x; backward dequantises the weight ``[out, in]`` again.

    torch.compile would keep the dequantised weight of each linear for backward, since forward has computed it, and with
    all of them the memory that 4 bits should save. What a checkpoint computes is computed again instead.
    """
    if torch.compiler.is_compiling():
        return linear(x, checkpoint(_dequantize, weight, x.dtype, use_reentrant=False))
    product: Tensor = linear_nf4(x, weight)
    return product


def _dequantize(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


def quantize(base: nn.Linear) -> Tensor:
    """Return the weight of a linear in 4 bits; its size must be a multiple of ``frozen_linear.NF4_BLOCK``."""
    if base.weight.is_meta:
        return _make_meta(base.weight.shape, base.weight.dtype)
    quantized: Tensor = to_nf4(base.weight.detach())
    return quantized


@functools.cache
def _make_meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Make a tensor without storage, once per shape: one for each linear of a 70B model would take ten seconds."""
    quantized: Tensor = to_nf4(torch.empty(shape, dtype=dtype, device="meta"))
    return quantized


def shard_like(full: Tensor, parameter: Tensor) -> Tensor:
    """Shard a 4-bit tensor like a parameter, which is sharded along one axis of its mesh."""
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    axis = next(axis for axis, placement in enumerate(parameter.placements) if placement.is_shard(0))
    shard = full.chunk(mesh.size(axis))[mesh.get_local_rank(axis)]
    # The chunk is a view, which would keep the full tensor in memory.
    local = shard.new_zeros(shard.shape)
    local.copy_(shard)
    sharded: Tensor = DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded
