"""Products of consecutive groups of rows with a matrix each: the linears of a mixture of experts."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, pad

# Bytes that each row of a factor must be a multiple of for ``grouped_mm``.
_ALIGNMENT = 16


def multiply_groups(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix.

    In bfloat16 torch's grouped kernel computes all groups at once, without the host knowing their sizes; in other
    dtypes, which it does not have or computes no faster, there is a product for each group.

    Args:
        x: Rows, ``[n, in]``, sorted by group.
        weight: One matrix for each group, ``[groups, in, out]``.
        ends: Row after the last one of each group, int32 ``[groups]``.

    Returns:
        Products, ``[n, out]``; any numbers for rows after the last group.
    """
    if x.dtype is torch.bfloat16 and _has_kernel(x.device):
        return _multiply_aligned(x, weight, ends)
    product: Tensor = multiply_each_group(x, weight, ends)
    return product


def _has_kernel(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _multiply_aligned(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Call the grouped kernel, with the sizes of the matrices, such as an adapter's rank, padded to what it needs."""
    multiple = _ALIGNMENT // x.element_size()
    size_in, size_out = weight.shape[1:]
    if missing := -size_in % multiple:
        x, weight = pad(x, (0, missing)), pad(weight, (0, 0, 0, missing))
    if missing := -size_out % multiple:
        weight = pad(weight, (0, missing))
    if weight.requires_grad and leaves_empty_groups(x.device):
        weight = _ZeroEmptyGroups.apply(weight, ends)  # type: ignore[no-untyped-call]
    product: Tensor = grouped_mm(x, weight, offs=ends)
    return product[:, :size_out]


def leaves_empty_groups(device: torch.device) -> bool:
    """Return whether the grouped kernel may leave any number in the gradient of a matrix without rows.

    On GPUs of compute capability 10 it does: https://github.com/pytorch/pytorch/issues/172439. Elsewhere it writes
    zeros, which a pass over the gradient of all experts would only repeat.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


class _ZeroEmptyGroups(torch.autograd.Function):
    """Matrices ``[groups, in, out]``, whose gradient is zero where a group has no rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (ends,) = ctx.saved_tensors
        is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return grad.masked_fill(is_empty[:, None, None], 0.0), None


@torch.library.custom_op("fctune::multiply_each_group", mutates_args=())
def multiply_each_group(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply group by group, as one operator, so that compilation and activation checkpointing see one.

    On CUDA the host waits once, for the sizes of the groups.
    """
    out = x.new_empty(len(x), weight.shape[2])
    for index, rows in _group_slices(ends):
        torch.mm(x[rows], weight[index], out=out[rows])
    return out


@multiply_each_group.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[2])


@torch.library.custom_op("fctune::multiply_each_group_rows", mutates_args=())
def multiply_each_group_rows(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Return ``x' grad`` of each group, ``[groups, in, out]``: the gradient of the matrices."""
    out = x.new_zeros(len(ends), x.shape[1], grad.shape[1])
    for index, rows in _group_slices(ends):
        torch.mm(x[rows].T, grad[rows], out=out[index])
    return out


@multiply_each_group_rows.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), x.shape[1], grad.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, weight, ends = inputs
    # The rows are only for the gradient of the matrices, which frozen ones do not need.
    ctx.save_for_backward(x if weight.requires_grad else None, weight, ends)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    grad_x = multiply_each_group(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    grad_weight = multiply_each_group_rows(x, grad, ends) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


multiply_each_group.register_autograd(_backward, setup_context=_save_for_backward)


def _group_slices(ends: Tensor) -> list[tuple[int, slice]]:
    """Return the index and the rows of each group that has any."""
    stops: list[int] = ends.tolist()
    pairs = itertools.pairwise([0, *stops])
    return [(index, slice(start, stop)) for index, (start, stop) in enumerate(pairs) if stop > start]


def product_operators() -> set[Any]:
    """Return the operators that ``multiply_groups`` may dispatch to, whose outputs may be kept by checkpointing."""
    return {torch.ops.aten._grouped_mm.default, torch.ops.fctune.multiply_each_group.default}
