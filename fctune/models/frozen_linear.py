"""Linears whose weight does not train, stored in the run's dtype, in 4 bits (NF4) or in 8 bits (float8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import linear

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import BaseDtype

FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(FLOAT8).max

# Four bits, a byte of scale per 64 weights, and two bytes of scale per 256 scales.
NF4_BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 2 / (64 * 256)

# 64 weights share a scale, and 256 scales share a scale of theirs: shards must be a multiple of the product.
NF4_BLOCK = 64 * 256

_LINEAR_ATTRIBUTES = frozenset(vars(nn.Linear(1, 1, device="meta")))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``x W' + b``, unlike subclasses of ``nn.Linear`` such as routers of experts."""
    own = vars(module).keys() - _LINEAR_ATTRIBUTES
    is_plain = type(module).forward is nn.Linear.forward or all(name.startswith("_") for name in own)
    return isinstance(module, nn.Linear) and is_plain


class FrozenLinear(nn.Module):
    """``x W' + b`` with a weight ``[out, in]`` that does not train.

    NF4 weights (https://arxiv.org/abs/2305.14314) are dequantised to the input's dtype for the product. Float8 weights
    have one float32 scale per row (``weight_scale [out]``) and are multiplied in float8, with one scale per token.

    Args:
        base: Linear to take the weight and bias from.
        base_dtype: Storage of the weight; ``bf16`` keeps the dtype of ``base``.

    Raises:
        ConfigError: NF4 for a weight that is not a multiple of its scale blocks, or float8 for one whose sizes are not
            multiples of 16.
    """

    def __init__(self, base: nn.Linear, base_dtype: BaseDtype = "bf16"):
        super().__init__()
        self.weight = nn.Parameter(base.weight, requires_grad=False)
        self.bias = None if base.bias is None else base.bias.requires_grad_(False)
        if base_dtype == "nf4":
            from fctune.models import nf4

            if base.weight.numel() % NF4_BLOCK:
                raise ConfigError(
                    f"adapter.base=nf4: the size of a linear, {list(base.weight.shape)}, is not a multiple of the "
                    f"{NF4_BLOCK:,} weights that share scales; use bf16 or float8."
                )
            self.weight = nn.Parameter(nf4.quantize(base), requires_grad=False)
        elif base_dtype == "float8":
            if any(size % 16 for size in base.weight.shape):
                raise ConfigError(
                    f"adapter.base=float8: the size of a linear, {list(base.weight.shape)}, is not a multiple of 16, "
                    "which float8 products need; use bf16 or nf4."
                )
            self.weight = nn.Parameter(torch.empty_like(base.weight, dtype=FLOAT8), requires_grad=False)
            scale = torch.empty(len(base.weight), dtype=torch.float32, device=base.weight.device)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.base_dtype = base_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Project ``[..., in]`` to ``[..., out]``."""
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """Return ``x W' + b`` without any adapter."""
        if self.base_dtype == "bf16":
            return linear(x, self.weight, self.bias)
        return self.multiply(x) if self.bias is None else self.multiply(x) + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x W'``, without the bias."""
        if self.base_dtype == "bf16":
            return linear(x, self.weight)
        if self.base_dtype == "nf4":
            from fctune.models import nf4

            return nf4.multiply(x, self.weight)
        rows: Any = Float8Matmul.apply(x.flatten(0, -2), self.weight, self.weight_scale)  # type: ignore[no-untyped-call]
        product: Tensor = rows.view(*x.shape[:-1], -1)
        return product

    @torch.no_grad()
    def dequantized_weight(self) -> Tensor:
        """Return the weight ``[out, in]`` dequantised, sharded as it is; float32 for float8, else the base's dtype."""
        weight = self.weight.detach()
        local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
        if self.base_dtype == "nf4":
            local = local.get_original_weight()
        elif self.base_dtype == "float8":
            scale = self.weight_scale.detach()
            local = local.float() * (scale.to_local() if isinstance(scale, DTensor) else scale)[:, None]
        if not isinstance(weight, DTensor):
            plain: Tensor = local
            return plain
        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(local, mesh, placements, shape=weight.shape, stride=(weight.shape[1], 1))


class Float8Matmul(torch.autograd.Function):
    """``x W'`` for ``x [n, in]`` and a float8 weight, with the products of forward and backward in float8.

    With W = s W8 (one scale per row of W), the gradient of x is (dy s) W8: multiplying dy by the scales before rounding
    it lets both products use the same rounded weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the product ``[n, out]`` in the dtype of x."""
        ctx.save_for_backward(weight, scale)
        return _multiply_scaled(x, weight.t(), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x, ``[n, in]``."""
        weight, scale = ctx.saved_tensors
        # The kernel needs its second factor in column-major order.
        columns = weight.t().contiguous().t()
        return _multiply_scaled(grad * scale.to(grad.dtype), columns, torch.ones_like(scale[:1])), None, None


def _multiply_scaled(x: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    """Return ``x factor`` with x rounded to float8 by row; ``scale`` is one number, or one per column of the factor."""
    rounded, row_scale = quantize_rows_to_float8(x)
    column_scale = scale.expand(factor.shape[1])[None].contiguous()
    product: Tensor = torch._scaled_mm(
        rounded, factor, scale_a=row_scale[:, None], scale_b=column_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product.to(x.dtype)


def quantize_rows_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``x [n, k]`` to float8; returns it with the float32 scale of each row, ``[n]``, to multiply by."""
    wide = x.float()
    scale = wide.abs().amax(dim=1).clamp(min=1e-12) / _FLOAT8_MAX
    return (wide / scale[:, None]).clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(FLOAT8), scale


def check_nf4_shards(model: nn.Module, num_shards: int) -> None:
    """Check that the 4-bit weights of a model can be sharded over ``num_shards`` ranks.

    Raises:
        ConfigError: A shard would split weights that share a scale.
    """
    for name, module in model.named_modules():
        if isinstance(module, FrozenLinear) and module.base_dtype == "nf4":
            rows, columns = module.weight.shape
            if rows % num_shards or (rows // num_shards * columns) % NF4_BLOCK:
                raise ConfigError(
                    f"adapter.base=nf4: {name} [{rows}, {columns}] cannot be sharded over {num_shards} ranks, "
                    f"because {NF4_BLOCK:,} weights share scales. Use parallel.mode=ddp, another number of ranks, or "
                    "adapter.base=float8."
                )


def is_nf4(tensor: Tensor) -> bool:
    """Return whether a weight, or the local shard of a DTensor, is stored in 4 bits."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) in (Tensor, nn.Parameter):
        return False  # without importing torchao
    from fctune.models.nf4 import NF4Tensor

    return isinstance(local, NF4Tensor)


def is_quantized(tensor: Tensor) -> bool:
    """Return whether a weight, or the local shard of a DTensor, is stored in 4 or 8 bits."""
    return tensor.dtype is FLOAT8 or is_nf4(tensor)


def is_scale(name: str) -> bool:
    """Return whether a parameter of this name is a scale, computed when the base's weights are loaded."""
    return name.endswith(".weight_scale")


def rows_of_shard(parameter: Tensor) -> slice:
    """Return the rows of the full tensor that ``copy_rows_`` needs: this rank's shard, or all of a 4-bit tensor."""
    if not isinstance(parameter, DTensor) or is_nf4(parameter):
        return slice(0, len(parameter))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def find_weight_device(model: nn.Module) -> torch.device:
    """Return the device of a model's weights; its 4-bit ones may not have memory yet."""
    return next((p.device for p in model.parameters() if not is_nf4(p)), torch.device("cpu"))


@torch.no_grad()
def copy_rows_(model: nn.Module, name: str, rows: Tensor) -> None:
    """Copy the rows given by ``rows_of_shard`` into a parameter, in place, quantising them to its storage."""
    owner_name, _, leaf = name.rpartition(".")
    owner: Any = model.get_submodule(owner_name)
    parameter: Tensor = getattr(owner, leaf)
    local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if is_nf4(local):
        from fctune.models import nf4

        # ``Module.to_empty`` leaves the parts of an NF4 tensor on the meta device, so its memory is allocated here.
        full = nf4.to_nf4(rows.to(find_weight_device(model), local.dtype), local.block_size, local.scaler_block_size)
        setattr(owner, leaf, nn.Parameter(nf4.shard_like(full, parameter), requires_grad=False))
    elif local.dtype is FLOAT8:
        scale = owner.weight_scale
        rounded, row_scale = quantize_rows_to_float8(rows.to(local.device))
        local.copy_(rounded)
        (scale.to_local() if isinstance(scale, DTensor) else scale).copy_(row_scale)
    else:
        local.copy_(rows)
