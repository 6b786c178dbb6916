"""Loss of the supervised positions: their cross-entropy, or another function of their logits."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, pad
from torch.utils.checkpoint import checkpoint

from fctune.models.document_attention import CPU_TILE, keeps_kernels
from fctune.models.precision import wide_dtype

Projection = Callable[[Tensor, Tensor | None], Tensor]

IGNORE = -100  # label of unsupervised positions

# Largest number of logits in memory, unless a run finds memory for more; others are computed in chunks.
MAX_LOGITS = 32 * 1024 * 1024
_TILE = 128  # rows that matrix kernels compute at once; other numbers of rows waste part of the product
_MIN_ROWS = 256

# ``num_copies`` of a divergence from a teacher in the process, over the full vocabulary.
TEACHER_COPIES = 6


class Criterion(ABC):
    """Loss of a position, given its logits and what else belongs to it.

    Attributes:
        per_row: Tensors with a row for each supervised position, ``[n, ...]``.
        num_copies: Tensors of the size of the logits that computing a loss holds in memory, in units of those of the
            cross-entropy.
    """

    per_row: tuple[Tensor, ...]
    num_copies: int = 1

    @abstractmethod
    def losses(self, logits: Tensor, *per_row: Tensor) -> Tensor:
        """Return the loss of each position, ``[m]``, in the wide dtype of the logits ``[m, vocab]``."""

    def losses_and_slopes(self, logits: Tensor, *per_row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses without a graph, ``[m]``, and their gradients by the logits, ``[m, vocab]``."""
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            losses = self.losses(leaf, *per_row)
            (slopes,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), slopes


class CrossEntropy(Criterion):
    """Cross-entropy of target tokens, int64 ``[n]``."""

    def __init__(self, targets: Tensor):
        self.per_row = (targets,)

    def losses(self, logits: Tensor, *per_row: Tensor) -> Tensor:
        """Return minus the log-probabilities of the targets."""
        (targets,) = per_row
        return cross_entropy(logits.to(wide_dtype(logits.dtype)), targets, reduction="none")

    def losses_and_slopes(self, logits: Tensor, *per_row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses and the softmax minus the targets, with one tensor of the size of the logits."""
        log_p = log_softmax(logits.detach(), dim=1, dtype=wide_dtype(logits.dtype))
        chosen = per_row[0][:, None]
        losses = -log_p.gather(1, chosen).squeeze(1)
        slopes = log_p.exp_().scatter_add_(1, chosen, log_p.new_full((), -1.0).expand(chosen.shape))
        return losses, slopes.to(logits.dtype)


def supervised_losses(
    hidden: Tensor,
    project: Projection,
    num_vocab: int,
    labels: Tensor,
    token_keys: Tensor | None = None,
    supervised: Tensor | None = None,
    max_logits: int = MAX_LOGITS,
    criterion: Criterion | None = None,
) -> Tensor:
    """Return the loss at each supervised position, ``[n]``; float32 (float64 for float64 hidden states).

    The head runs only at supervised positions, a sixth to a quarter of the tokens in function-calling data, because
    logits are the largest tensor of a step. A batch without any returns an empty tensor that depends on every
    parameter, because sharded ranks must run the same collectives in backward.

    Args:
        hidden: Final hidden states, ``[b, s, d]``.
        project: Returns the logits ``[n, vocab]`` of hidden states ``[n, d]`` and token keys ``[n]``, if any.
        num_vocab: Number of logits of a position.
        labels: Token ids or ``IGNORE``, int64 ``[b, s]``.
        token_keys: int64 ``[b, s]``, passed to ``project``.
        supervised: Indices of the supervised positions in the flattened batch, int64 ``[n]``; None finds them.
        max_logits: Largest number of logits in memory at once.
        criterion: Loss of a position, in the order of ``supervised``; None is the cross-entropy of the labels.
    """
    if supervised is None:
        supervised = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    rows = hidden.flatten(0, 1).index_select(0, supervised)
    keys = None if token_keys is None else token_keys.flatten()[supervised]
    if not len(rows):
        # A dummy row through the head keeps an adapter on it in the graph. A view would cause a warning of FSDP.
        logits = project(hidden[:1, 0], None if token_keys is None else token_keys[:1, 0])
        return (logits[:0] * 0.0).sum(1).to(wide_dtype(hidden.dtype))
    score = CrossEntropy(labels.flatten()[supervised]) if criterion is None else criterion
    max_logits //= score.num_copies
    chunk = len(rows) if len(rows) * num_vocab <= max_logits else chunk_rows(num_vocab, max_logits)
    parts = rows, keys, *score.per_row
    if not torch.is_grad_enabled():
        return torch.cat([_chunk_losses(project, score, *part) for part in _split(chunk, *parts)])
    if rows.requires_grad and not _trains(project, rows, keys):
        losses: Tensor = _FrozenHeadLosses.apply(rows, keys, project, chunk, score)  # type: ignore[no-untyped-call]
        return losses
    if chunk == len(rows):
        return _chunk_losses(project, score, rows, keys, *score.per_row)
    again = functools.partial(checkpoint, _chunk_losses, project, score, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*part) for part in _split(chunk, *parts)])


def chunk_rows(num_vocab: int, max_logits: int = MAX_LOGITS) -> int:
    """Return the number of positions whose logits are computed at once."""
    return max(_MIN_ROWS, max_logits // num_vocab // _TILE * _TILE)


class _FrozenHeadLosses(torch.autograd.Function):
    """Losses for a frozen head, computed together with the gradients of the hidden states.

    A loss depends only on the hidden state of its own position. Its gradient is therefore computed while the logits are
    in memory, and backward multiplies it by the gradient of the loss; a head that trains needs all logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, keys: Tensor | None, project: Projection, chunk: int, score: Criterion
    ) -> Tensor:
        """Return the losses ``[n]``; see ``supervised_losses``."""
        losses = rows.new_empty(len(rows), dtype=wide_dtype(rows.dtype))
        slopes = torch.empty_like(rows)
        for part_losses, part_slopes, part_rows, *part in _split(chunk, losses, slopes, rows, keys, *score.per_row):
            padded, padded_keys, *per_row = _pad_to_tile(part_rows, *part)
            with torch.enable_grad():
                leaf = padded.detach().requires_grad_()
                logits = project(leaf.view_as(leaf), padded_keys)  # hooks of modules reject leaves in autograd.grad
            found, slope = score.losses_and_slopes(logits, *per_row)
            part_losses.copy_(found[: len(part_rows)])
            part_slopes.copy_(torch.autograd.grad(logits, leaf, slope)[0][: len(part_rows)])
            del logits, slope
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradients of the hidden states."""
        (slopes,) = ctx.saved_tensors
        return (slopes * grad_losses[:, None]).to(slopes.dtype), None, None, None, None


def _trains(project: Projection, rows: Tensor, keys: Tensor | None) -> bool:
    """Return True if the head trains, that is, if the logits of constant hidden states have gradients."""
    return project(rows[:0].detach(), None if keys is None else keys[:0]).requires_grad


def _split(chunk: int, *tensors: Tensor | None) -> Iterator[Any]:
    """Iterate over chunks of some rows of all tensors."""
    num_rows = next(len(t) for t in tensors if t is not None)
    for start in range(0, num_rows, chunk):
        yield tuple(None if t is None else t[start : start + chunk] for t in tensors)


def _chunk_losses(project: Projection, score: Criterion, rows: Tensor, keys: Tensor | None, *per_row: Tensor) -> Tensor:
    count = len(rows)
    rows, keys, *per_row = _pad_to_tile(rows, keys, *per_row)  # type: ignore[assignment]
    losses = score.losses(project(rows, keys), *per_row)
    return losses if len(losses) == count else losses[:count].clone()


def _pad_to_tile(rows: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Append zeros up to a multiple of ``CPU_TILE`` rows if each number of rows would compile a kernel of its own."""
    if not keeps_kernels(rows) or not (missing := -len(rows) % CPU_TILE):
        return rows, *others
    tensors = (rows, *others)
    return tuple(None if one is None else pad(one, (0, 0) * (one.ndim - 1) + (0, missing)) for one in tensors)
