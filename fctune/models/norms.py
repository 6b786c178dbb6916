"""Root mean square norms (https://arxiv.org/abs/1910.07467) of any source of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as fused_rms_norm

# Numbers that a CPU normalises at a time, so that what it computes from them stays in the cache of a core.
_CHUNK = 2**16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)`` over the last dim of ``x [..., d]``, rounded once."""
    if is_rowwise(x):
        return rowwise_rms_norm(x, weight, eps)
    return fused_rms_norm(x, (x.shape[-1],), weight, eps)


def is_rowwise(x: Tensor) -> bool:
    """Return True on CPUs outside of compiled code: torch has no fused norm for them."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def rowwise_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return the norm of ``x [..., d]`` with ``weight + offset``, computed for some rows at a time.

    torch computes it by six operations over all rows, and keeps float32 copies of half-precision inputs for backward.
    This one keeps the input and a number per row.
    """
    normed: Tensor = _RowwiseRMSNorm.apply(x, weight, eps, offset)  # type: ignore[no-untyped-call]
    return normed


class _RowwiseRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rows, factor = x.reshape(-1, x.shape[-1]), _wide(weight, x) + offset
        out = torch.empty_like(rows)
        inverse = rows.new_empty(len(rows), 1, dtype=factor.dtype)
        for part in _split(rows):
            wide = _wide(rows[part], x)
            of_part = wide.square().mean(dim=-1, keepdim=True).add_(eps)
            inverse[part] = of_part.rsqrt_()
            out[part] = (wide * of_part).mul_(factor)
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset = offset
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        factor = _wide(weight, x) + ctx.offset
        of_x = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(factor) if ctx.needs_input_grad[1] else None
        for part in _split(rows):
            normed, of_out = _wide(rows[part], x) * inverse[part], _wide(grad_rows[part], x)
            if of_weight is not None:
                of_weight += (of_out * normed).sum(0)
            if of_x is not None:
                of_normed = of_out * factor
                mean = (of_normed * normed).mean(-1, keepdim=True)
                of_x[part] = of_normed.addcmul_(normed, mean, value=-1.0).mul_(inverse[part])
        return (
            None if of_x is None else of_x.view(x.shape),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
        )


def _split(rows: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK // rows.shape[-1])
    return (slice(start, start + size) for start in range(0, len(rows), size))


def _wide(tensor: Tensor, x: Tensor) -> Tensor:
    """Convert to the dtype that the norm of x is computed in: float32, or float64 if x is."""
    return tensor.to(torch.promote_types(x.dtype, torch.float32))
