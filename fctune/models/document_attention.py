"""Attention within each conversation of packed rows, one at a time, on any device.

On a CPU the products are those of torch's flash attention. Soft caps and sinks, which it lacks, and other devices are
computed from the definition, for some queries at a time, so that no ``[s, s]`` scores are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fctune.models.precision import wide_dtype

# Lengths are padded to multiples of this where a kernel is kept for each, in positions.
CPU_TILE = 64
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries of a sliding window that are computed together, at least.
_MIN_QUERIES = 128
# Scores that are computed together without flash attention, at most.
_MAX_SCORES = 2**24


class _Piece(NamedTuple):
    """Queries of one conversation and the keys that some of them see, as positions in a row."""

    row: int
    queries: slice
    keys: slice

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the part of ``[b, h, s, ...]``."""
        return x[self.row : self.row + 1, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the part of ``[b, h, s, ...]``."""
        return x[self.row : self.row + 1, :, self.keys]

    def hidden(self, window: int, device: torch.device) -> Tensor:
        """Return the mask of keys that queries must not see, ``[queries, keys]``."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None]
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)[None]
        hidden = keys > queries
        return hidden | (queries - keys >= window) if window else hidden


@torch.library.custom_op("fctune::attend_per_document", mutates_args=())
def attend_per_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within each conversation; returns the output ``[b, h, s, v_d]`` and the log-sum-exp ``[b, h, s]``.

    It is a custom operator, so that compilation and activation checkpointing treat all the products as one.

    Args:
        q: Queries, ``[b, h, s, d]``.
        k: Keys, ``[b, kv_h, s, d]``.
        v: Values, ``[b, kv_h, s, v_d]``.
        ends: Cumulative lengths of the conversations over the flattened batch, starting with 0, on the CPU.
        scale: Factor on the scores.
        window: Tokens that a token sees, itself included; 0 is all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)``; 0 leaves them.
        sinks: Score of a key of each head that every token sees and whose value is zero, ``[h]``.
    """
    out, lse = _empty_outputs(q, v)
    uses_flash = _uses_flash(q, softcap, sinks)
    for piece in _split(ends, q, window, uses_flash):
        parts = piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
        if uses_flash:
            found, sums = _attend_by_flash(piece, *parts, scale, window)
        else:
            scores = _scores(piece, *parts[:2], scale, window, softcap)
            sums = torch.logsumexp(scores, dim=-1)
            if sinks is not None:
                sums = torch.logaddexp(sums, sinks.to(sums.dtype)[None, :, None])
            found = torch.exp(scores - sums[..., None]) @ _repeat_heads(parts[2].to(scores.dtype), q.shape[1])
        piece.of_queries(out).copy_(found)
        piece.of_queries(lse).copy_(sums)
    return out, lse


@attend_per_document.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q, v)


@torch.library.custom_op("fctune::attend_per_document_backward", mutates_args=())
def attend_per_document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks, whose gradient is empty if there are none."""
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_sinks = lse.new_zeros(0 if sinks is None else len(sinks))
    uses_flash = _uses_flash(q, softcap, sinks)
    for piece in _split(ends, q, window, uses_flash):
        inputs = piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
        outputs = piece.of_queries(grad), piece.of_queries(out), piece.of_queries(lse)
        if uses_flash:
            found = _flash_backward(piece, *inputs, *outputs, scale, window)
        else:
            found, delta = _backward_from_scores(piece, *inputs, *outputs, scale, window, softcap)
            if sinks is not None:
                shares = torch.exp(sinks.to(lse.dtype)[None, :, None] - outputs[2])
                of_sinks -= (shares * delta).sum((0, 2))
        targets = piece.of_queries(grads[0]), piece.of_keys(grads[1]), piece.of_keys(grads[2])
        for target, full in zip(targets, found, strict=True):
            if target.shape[1] != full.shape[1]:  # query heads share a head of keys and values
                full = full.view(1, target.shape[1], -1, *full.shape[2:]).sum(2)
            target += full
    return *grads, of_sinks if sinks is None else of_sinks.to(sinks.dtype)


@attend_per_document_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_sinks


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ends, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, ends, *output, sinks)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    found = attend_per_document_backward(grad, *tensors, ctx.scale, ctx.window, ctx.softcap, sinks)
    return *found[:3], None, None, None, None, None if sinks is None else found[3]


attend_per_document.register_autograd(_backward, setup_context=_save_for_backward)


def _uses_flash(q: Tensor, softcap: float, sinks: Tensor | None) -> bool:
    return q.device.type == "cpu" and not softcap and sinks is None


def _split(ends: Tensor, q: Tensor, window: int, uses_flash: bool) -> Iterator[_Piece]:
    """Split the conversations into queries that are computed together."""
    num_heads, row_length = q.shape[1:3]
    flat: list[int] = ends.tolist()
    for start, stop in itertools.pairwise(flat):
        row, first = divmod(start, row_length)
        last = first + stop - start
        size = last - first
        if uses_flash:
            size = max(window, _MIN_QUERIES) if 0 < window < size else size
        else:
            size = max(1, min(size, _MAX_SCORES // (num_heads * size)) if size else 1)
        for at in range(first, last, size or 1):
            seen = max(first, at - window + 1) if window else first
            end = min(at + size, last)
            yield _Piece(row, slice(at, end), slice(seen, end))


def _attend_by_flash(
    piece: _Piece, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    width, length = v.shape[-1], q.shape[2]
    q, k, v = _fit_for_flash(q.shape[1], q, k, v)
    is_causal, mask = _flash_mask(piece, q, k, window)
    found, sums = _FLASH(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return found[:, :, :length, :width], sums[:, :, :length]


def _flash_backward(
    piece: _Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
) -> list[Tensor]:
    shapes = [t.shape for t in (q, k, v)]
    q, k, v, grad, out = _fit_for_flash(q.shape[1], q, k, v, grad, out)
    lse = pad(lse, (0, q.shape[2] - lse.shape[2]))
    is_causal, mask = _flash_mask(piece, q, k, window)
    found = _FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
    return [full[:, :, : shape[2], : shape[3]] for full, shape in zip(found, shapes, strict=True)]


def _fit_for_flash(num_heads: int, *tensors: Tensor) -> list[Tensor]:
    """Pad tensors to one head size and to full tiles, and repeat the heads of keys and values."""
    width = max(t.shape[-1] for t in tensors)
    return [_repeat_heads(pad_to_tile(pad(t, (0, width - t.shape[-1]))), num_heads) for t in tensors]


def _flash_mask(piece: _Piece, q: Tensor, k: Tensor, window: int) -> tuple[bool, Tensor | None]:
    """Return whether flash attention's own causal mask serves, else the mask to add to the scores of padded inputs."""
    num_queries, num_keys = (part.stop - part.start for part in (piece.queries, piece.keys))
    if num_queries == num_keys and (not window or num_keys <= window):
        return True, None
    hidden = piece.hidden(window, q.device)
    # Padded queries see everything, because a query that sees nothing gets NaN; their gradients are zero.
    hidden = pad(hidden, (0, k.shape[2] - num_keys), value=True)
    hidden = pad(hidden, (0, 0, 0, q.shape[2] - num_queries), value=False)
    return False, torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))


def _scores(piece: _Piece, q: Tensor, k: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """Return the scores ``[1, h, queries, keys]`` in at least float32, hidden ones as minus infinity."""
    dtype = wide_dtype(q.dtype)
    scores = (q.to(dtype) @ _repeat_heads(k.to(dtype), q.shape[1]).transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.masked_fill_(piece.hidden(window, q.device), float("-inf"))


def _backward_from_scores(
    piece: _Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of q, k and v, the heads of keys repeated, and the sums of grad x out, ``[1, h, s]``."""
    heads, dtype = q.shape[1], wide_dtype(q.dtype)
    scores = _scores(piece, q, k, scale, window, softcap)
    shares, grad = torch.exp(scores - lse[..., None]), grad.to(dtype)
    delta = (grad * out.to(dtype)).sum(-1)
    of_scores = shares * (grad @ _repeat_heads(v.to(dtype), heads).transpose(-1, -2) - delta[..., None])
    if softcap:
        slope = 1 - (scores / softcap).square()
        of_scores = torch.where(shares > 0, of_scores * slope, 0.0)
    of_scores = of_scores * scale
    of_keys = of_scores.transpose(-1, -2) @ q.to(dtype)
    return [of_scores @ _repeat_heads(k.to(dtype), heads), of_keys, shares.transpose(-1, -2) @ grad], delta


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # The heads of a token lie side by side, so that the output projection reads them without a copy.
    b, h, s, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]).transpose(1, 2), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each head of keys or values ``[b, kv_h, s, d]`` for the query heads that share it."""
    b, kv_heads, s, d = x.shape
    if kv_heads == num_heads:
        return x
    return x.unsqueeze(2).expand(b, kv_heads, num_heads // kv_heads, s, d).flatten(1, 2)


def pad_to_tile(x: Tensor) -> Tensor:
    """Append zeros to the sequences of ``[b, h, s, d]``, up to a multiple of ``CPU_TILE``, where a kernel is kept.

    Causal attention shows no real query what comes after it, and the gradients of the padding are zero.
    """
    return pad(x, (0, 0, 0, -x.shape[2] % CPU_TILE)) if keeps_kernels(x) else x


def keeps_kernels(x: Tensor) -> bool:
    """Return True if torch compiles a kernel for each new shape of such a product, and keeps it as long as it runs.

    On CPU, 16-bit products use oneDNN's compiled kernels. Those of attention take 3 MiB for each length and are never
    freed, so a run whose conversations have a thousand different lengths would grow by gigabytes.
    """
    return x.device.type == "cpu" and x.dtype.itemsize == 2
