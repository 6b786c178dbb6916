"""Causal attention within each conversation of a packed row, without a dense ``[s, s]`` mask.

The fastest kernel of the device is chosen once per run:

- ``varlen``: flash attention over variable-length rows, on CUDA in half precision;
- ``flex``: flex attention with a block mask, on CUDA otherwise;
- ``per_document``: one attention call per conversation, on CPU (10.5 ms instead of 141 ms with a dense mask: 2,048
  tokens in 8 conversations, forward and backward, 2 threads), and on CUDA in float64.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

AttentionKernel = Literal["varlen", "flex", "per_document"]

# Lengths are padded to multiples of this where a kernel is kept for each, in positions.
CPU_TILE = 64
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Boundaries of the conversations in packed rows; the padding of a row counts as a conversation.

    Attributes:
        kernel: kernel that the bounds are for.
        ends: cumulative lengths over the flattened batch, starting with 0: int32 ``[conversations + 1]``; on the CPU
            for ``per_document``, else on the device of the queries.
        max_length: upper bound of the conversations' lengths, in tokens.
        shape: rows of the batch, and tokens per row.
        block_mask: for ``flex`` only.
    """

    kernel: AttentionKernel
    ends: Tensor
    max_length: int
    shape: tuple[int, int]
    block_mask: Any = None

    def pin(self) -> DocumentBounds:
        """Return a copy in pinned memory, from which copies to a CUDA device are asynchronous."""
        return self if self.kernel == "per_document" else replace(self, ends=self.ends.pin_memory())

    def to(self, device: torch.device) -> DocumentBounds:
        """Return a copy on the device of the queries, with the block mask for ``flex``."""
        if self.kernel == "per_document":
            return self
        ends = self.ends.to(device, non_blocking=True)
        return replace(self, ends=ends, block_mask=_block_mask(ends, self.shape) if self.kernel == "flex" else None)


def make_bounds(lengths: Sequence[Sequence[int]], kernel: AttentionKernel) -> DocumentBounds:
    """Return the bounds of rows whose conversations have these lengths; all rows have the same total."""
    flat = torch.tensor([0, *(length for row in lengths for length in row)], dtype=torch.int32)
    longest = int(flat.max())
    # A power of two, so that compiled blocks are specialised for few values.
    return DocumentBounds(
        kernel, flat.cumsum(0, dtype=torch.int32), 1 << (longest - 1).bit_length(), (len(lengths), sum(lengths[0]))
    )


def choose_attention_kernel(
    device_type: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None
) -> tuple[AttentionKernel, str]:
    """Return the fastest kernel for packed rows, and its description for the log.

    Args:
        device_type: cpu or cuda.
        dtype: dtype of the queries.
        head_dim: size of a head.
        capability: CUDA compute capability; None on CPU.
    """
    if device_type != "cuda" or capability is None:
        return "per_document", "flash attention, one call per conversation"
    if dtype in (torch.bfloat16, torch.float16) and capability >= (8, 0) and head_dim <= 256:
        return "varlen", "flash attention over variable-length rows (varlen_attn)"
    if dtype is not torch.float64 and capability >= (7, 5) and head_dim >= 16:
        return "flex", "flex attention with a block mask"
    return "per_document", "one call per conversation"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: DocumentBounds | None,
    implementation: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute causal attention for ``q [b, s, h, d]`` and ``k, v [b, s, kv_h, d]``; returns ``[b, s, h, d]``.

    Without bounds, each row is one conversation; its padding is at the end, where no real token attends to it.
    ``implementation`` replaces torch's function for ``varlen`` and ``flex``.
    """
    if bounds is None:
        length = q.shape[1]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.device.type == "cpu":
            q, k, v = (_repeat_heads(_pad_to_tile(t), q.shape[1]) for t in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
        return attended[:, :, :length].transpose(1, 2)
    if bounds.kernel == "varlen":
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        out: Tensor = (implementation or _varlen())(
            *flat, bounds.ends, bounds.ends, bounds.max_length, bounds.max_length
        )
        return out.view_as(q)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if bounds.kernel == "flex":
        out = (implementation or _flex())(q, k, v, block_mask=bounds.block_mask, enable_gqa=k.shape[1] < q.shape[1])
    elif q.device.type == "cpu":
        out, _ = attend_per_document(q, k, v, bounds.ends)
    else:
        out = _attend_each_by_sdpa(q, k, v, bounds.ends)
    return out.transpose(1, 2)


@torch.library.custom_op("fctune::attend_per_document", mutates_args=())
def attend_per_document(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Attend within each conversation on CPU; returns the output ``[b, h, s, d]`` and log-sum-exp ``[b, h, s]``.

    ``q`` is ``[b, h, s, d]``, ``k`` and ``v`` are ``[b, kv_h, s, d]``. It is a custom operator, so that compilation and
    activation checkpointing treat all the calls as one.
    """
    out = torch.empty_like(q)
    lse = _empty_lse(q)
    for index in _document_slices(ends, q.shape[2]):
        queries, keys, values = (_repeat_heads(_pad_to_tile(t[index]), q.shape[1]) for t in (q, k, v))
        found, sums = _FLASH(queries, keys, values, 0.0, True)
        length = index[2].stop - index[2].start
        out[index], lse[index] = found[:, :, :length], sums[:, :, :length]
    return out, lse


@attend_per_document.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _empty_lse(q)


@torch.library.custom_op("fctune::attend_per_document_backward", mutates_args=())
def attend_per_document_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    heads, kv_heads = q.shape[1], k.shape[1]
    for index in _document_slices(ends, q.shape[2]):
        length = index[2].stop - index[2].start
        padded = [_repeat_heads(_pad_to_tile(t[index]), heads) for t in (grad, q, k, v, out)]
        sums = torch.nn.functional.pad(lse[index], (0, padded[0].shape[2] - length))
        for target, full in zip(grads, _FLASH_BACKWARD(*padded, sums, 0.0, True), strict=True):
            part = full[:, :, :length]
            shared = part if target.shape[1] == heads else part.unflatten(1, (kv_heads, -1)).sum(2)
            target[index] = shared
    return grads


@attend_per_document_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, ends, out, lse = ctx.saved_tensors
    return *attend_per_document_backward(grad, q, k, v, out, lse, ends), None


attend_per_document.register_autograd(_backward, setup_context=_save_for_backward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_each_by_sdpa(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    rows: list[list[Tensor]] = [[] for _ in range(q.shape[0])]
    for index in _document_slices(ends, q.shape[2]):
        rows[index[0].start].append(scaled_dot_product_attention(q[index], k[index], v[index], is_causal=True))
    return torch.cat([torch.cat(row, dim=2) for row in rows])


def _document_slices(ends: Tensor, row_length: int) -> list[tuple[slice, slice, slice]]:
    """Return the index of each conversation in ``[b, h, s, ...]``."""
    flat: list[int] = ends.tolist()
    slices = []
    for start, stop in itertools.pairwise(flat):
        row, first = divmod(start, row_length)
        slices.append((slice(row, row + 1), slice(None), slice(first, first + stop - start)))
    return slices


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each head of keys or values ``[b, kv_h, s, d]`` for the query heads that share it."""
    b, kv_heads, s, d = x.shape
    if kv_heads == num_heads:
        return x
    return x.unsqueeze(2).expand(b, kv_heads, num_heads // kv_heads, s, d).flatten(1, 2)


def _pad_to_tile(x: Tensor) -> Tensor:
    """Append zeros to the sequences of ``[b, h, s, d]``, up to a multiple of ``CPU_TILE``, where a kernel is kept.

    Causal attention shows no real query what comes after it, and the gradients of the padding are zero.
    """
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % CPU_TILE)) if keeps_kernels(x) else x


def keeps_kernels(x: Tensor) -> bool:
    """Return True if torch compiles a kernel for each new shape of such a product, and keeps it as long as it runs.

    On CPU, 16-bit products use oneDNN's compiled kernels. Those of attention take 3 MiB for each length and are never
    freed, so a run whose conversations have a thousand different lengths would grow by gigabytes.
    """
    return x.device.type == "cpu" and x.dtype.itemsize == 2


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)


@functools.cache
def _varlen() -> Callable[..., Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    # Since torch 2.12; 2.11 always allows fewer key heads.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    chosen: Any = functools.partial(varlen_attn, **options)
    return chosen  # type: ignore[no-any-return]


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def _block_mask(ends: Tensor, shape: tuple[int, int]) -> Any:
    """Return the flex attention mask for conversations that end at ``ends``."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_rows, length = shape
    positions = torch.arange(num_rows * length, device=ends.device, dtype=ends.dtype)
    document = torch.searchsorted(ends, positions, right=True).view(shape)

    def may_see(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[b, query] == document[b, key])

    return create_block_mask(may_see, num_rows, None, length, length, device=ends.device)


def attention_operators() -> set[Any]:
    """Return the operators that attention may dispatch to, whose outputs are cheaper to store than to recompute."""
    aten, varlen = torch.ops.aten, getattr(torch.ops.torch_attn, "_varlen_attn", None)  # exists once imported
    operators = {
        torch.ops.fctune.attend_per_document.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    }
    return operators if varlen is None else operators | {varlen.default}
