"""Linears of a frozen base: whole, in 4 bits (NF4), or in 8 (float8)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import linear
from torchao.dtypes.nf4tensor import NF4Tensor, linear_nf4, to_nf4

from fctune.config.schema import BaseDtype
from fctune.errors import ConfigError

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(FLOAT8).max

NF4_BYTES_PER_WEIGHT = (
    0.5 + 1 / 64 + 2 / (64 * 256)
)  # of a weight: its four bits, and its part of the scales and of theirs

# Weights that share a scale in NF4, times the scales that share one of theirs: what a shard must be a multiple of.
_NF4_BLOCK = 64 * 256


class FrozenLinear(nn.Module):
    """``x W' + b`` with a weight ``[out, in]`` that does not train.

    NF4 (https://arxiv.org/abs/2305.14314) is widened to the input's format for the product. Float8 weights have a scale
    a row (``weight_scale [out]``, float32) and are multiplied in float8, with inputs scaled by token.
    """

    def __init__(self, base: nn.Linear, format: BaseDtype = "bf16"):
        super().__init__()
        self.weight = nn.Parameter(base.weight, requires_grad=False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        if format == "nf4":
            self.weight = nn.Parameter(_start_nf4(base), requires_grad=False)
        elif format == "float8":
            self.weight = nn.Parameter(torch.empty_like(base.weight, dtype=FLOAT8), requires_grad=False)
            scale = torch.empty(len(base.weight), dtype=torch.float32, device=base.weight.device)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.format = format

    def forward(self, x: Tensor) -> Tensor:
        """Project ``[..., in]`` to ``[..., out]``."""
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """``x W' + b``."""
        if self.format == "bf16":
            return linear(x, self.weight, self.bias)
        return self.multiply(x) if self.bias is None else self.multiply(x) + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """``x W'``."""
        if self.format == "bf16":
            return linear(x, self.weight)
        if self.format == "nf4":
            widened: Tensor = linear_nf4(x, self.weight)
            return widened
        rows: Any = Float8Matmul.apply(x.flatten(0, -2), self.weight, self.weight_scale)  # type: ignore[no-untyped-call]
        product: Tensor = rows.view(*x.shape[:-1], -1)
        return product

    @torch.no_grad()
    def widened(self) -> Tensor:
        """The weight as ordinary numbers, sharded as it is; float32 from float8, else in the base's format."""
        weight = self.weight.detach()
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        if self.format == "nf4":
            local = local.get_original_weight()
        elif self.format == "float8":
            scale = self.weight_scale.detach()
            local = local.float() * (scale.to_local() if isinstance(scale, DTensor) else scale)[:, None]
        if not isinstance(weight, DTensor):
            plain: Tensor = local
            return plain
        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(local, mesh, placements, shape=weight.shape, stride=(weight.shape[1], 1))


class Float8Matmul(torch.autograd.Function):
    """``x W'`` of ``[n, in]`` and a float8 weight, both products of it and its backward in float8.

    With W = s W8 (a scale a row of W), the gradient of x is (dy s) W8: the scales go into dy before it is rounded, so
    one rounded weight serves both products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Product ``[n, out]`` in the format of x."""
        ctx.save_for_backward(weight, scale)
        return _multiply_scaled(x, weight.t(), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x."""
        weight, scale = ctx.saved_tensors
        # The kernel reads its second factor by columns.
        columns = weight.t().contiguous().t()
        return _multiply_scaled(grad * scale.to(grad.dtype), columns, torch.ones_like(scale[:1])), None, None


def _multiply_scaled(x: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    """``x factor`` with x rounded to float8 by row, and a scale a column of ``factor [k, n]`` (or one for all)."""
    rounded, row_scale = quantize_rows_to_float8(x)
    column_scale = scale.expand(factor.shape[1])[None].contiguous()
    product: Tensor = torch._scaled_mm(
        rounded, factor, scale_a=row_scale[:, None], scale_b=column_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product.to(x.dtype)


def quantize_rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [n, k]`` in float8, and the float32 scale ``[n]`` that each row is to be multiplied by."""
    wide = x.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-12) / _FLOAT8_MAX
    return (wide / scale[:, None]).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(FLOAT8), scale


def check_nf4_shards(model: nn.Module, num_shards: int) -> None:
    """Stop where 4-bit weights cannot be cut over ``num_shards`` ranks.

    Raises:
        ConfigError: shards that would cut through weights of one scale.
    """
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and module.format == "nf4":
            rows, columns = module.weight.shape
            if rows % num_shards or (rows // num_shards * columns) % _NF4_BLOCK:
                raise ConfigError(
                    f"adapter.base=nf4: {name} [{rows}, {columns}] cannot be cut over {num_shards} ranks, as weights "
                    f"share scales by {_NF4_BLOCK:,}. Use parallel.mode=ddp, another number of ranks, or float8."
                )


def _start_nf4(base: nn.Linear) -> Tensor:
    rows, columns = base.weight.shape
    if rows * columns % _NF4_BLOCK:
        raise ConfigError(
            f"adapter.base=nf4: a linear of [{rows}, {columns}] is not a multiple of the {_NF4_BLOCK:,} weights that "
            "share scales; use bf16 or float8."
        )
    if base.weight.is_meta:
        return _start_meta_nf4(base.weight.shape, base.weight.dtype)
    started: Tensor = to_nf4(base.weight.detach())
    return started


@functools.cache
def _start_meta_nf4(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Without storage, and so one for all linears of a shape: a 70B model's would take ten seconds."""
    started: Tensor = to_nf4(torch.empty(shape, dtype=dtype, device="meta"))
    return started


def is_nf4(tensor: Tensor) -> bool:
    """Whether a weight, or a rank's shard of it, is in 4 bits."""
    return isinstance(tensor.to_local() if isinstance(tensor, DTensor) else tensor, NF4Tensor)


def is_scale(name: str) -> bool:
    """Whether a parameter of this name is made from the base's weights when they are loaded."""
    return name.endswith(".weight_scale")


def rows_of_shard(parameter: Tensor) -> slice:
    """The rows of the whole tensor that ``copy_rows_`` needs: those of this rank's shard; all of a 4-bit one's."""
    if not isinstance(parameter, DTensor) or is_nf4(parameter):
        return slice(0, len(parameter))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


@torch.no_grad()
def copy_rows_(model: nn.Module, name: str, rows: Tensor) -> None:
    """Fill a parameter, in place, with the rows that ``rows_of_shard`` names; rounded to how it is held."""
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    parameter: Tensor = getattr(owner, leaf)
    local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if isinstance(local, NF4Tensor):
        # Such a tensor gets its memory here: ``Module.to_empty`` leaves its parts on the meta device.
        device = next((p.device for p in model.parameters() if not is_nf4(p)), rows.device)
        whole: Tensor = to_nf4(rows.to(device, local.dtype), local.block_size, local.scaler_block_size)
        setattr(owner, leaf, nn.Parameter(_cut_nf4(whole, parameter), requires_grad=False))
    elif local.dtype is FLOAT8:
        scale = owner.weight_scale
        rounded, row_scale = quantize_rows_to_float8(rows.to(local.device))
        local.copy_(rounded)
        (scale.to_local() if isinstance(scale, DTensor) else scale).copy_(row_scale)
    else:
        local.copy_(rows)


def _cut_nf4(whole: Tensor, parameter: Tensor) -> Tensor:
    """A 4-bit tensor as a parameter is sharded, along the one axis of the mesh that cuts it."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    axis = next(axis for axis, placement in enumerate(parameter.placements) if placement.is_shard(0))
    shard = whole.chunk(mesh.size(axis))[mesh.get_local_rank(axis)]
    # The chunk is a view of the whole, which would be kept with it.
    local = shard.new_zeros(shard.shape)
    local.copy_(shard)
    cut: Tensor = DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return cut
