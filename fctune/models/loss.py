"""Cross-entropy of the supervised positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from fctune.models.document_attention import CPU_TILE, keeps_kernels

Projection = Callable[[Tensor, Tensor | None], Tensor]

IGNORE = -100  # label of unsupervised positions

# Largest number of logits in memory; more are computed in chunks, and again in backward.
MAX_LOGITS = 32 * 1024 * 1024
_TILE = 128  # rows that matrix kernels compute at once, so that other numbers of rows waste a part of the product


def supervised_losses(
    hidden: Tensor,
    project: Projection,
    num_vocab: int,
    labels: Tensor,
    token_keys: Tensor | None = None,
    supervised: Tensor | None = None,
    max_logits: int = MAX_LOGITS,
) -> Tensor:
    """Return the cross-entropy at each supervised position, ``[n]``; float32 (float64 for float64 hidden states).

    The head runs only at supervised positions, a sixth to a quarter of the tokens in function-calling data, because
    logits are the largest tensor of a step. A batch without any returns no losses, but connected to every parameter,
    because sharded ranks must run the same collectives in backward.

    Args:
        hidden: final hidden states, ``[b, s, d]``.
        project: returns the logits ``[n, vocab]`` of hidden states ``[n, d]`` and token keys ``[n]``, if any.
        num_vocab: number of logits of a position.
        labels: token ids or ``IGNORE``, int64 ``[b, s]``.
        token_keys: int64 ``[b, s]``, passed to ``project``.
        supervised: indices of the supervised positions in the flattened batch, int64 ``[n]``; None finds them.
        max_logits: largest number of logits in memory at once.
    """
    if supervised is None:
        supervised = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    rows, targets = hidden.flatten(0, 1).index_select(0, supervised), labels.flatten()[supervised]
    keys = None if token_keys is None else token_keys.flatten()[supervised]
    if not len(targets):
        # A dummy row through the head keeps an adapter on it in the graph.
        logits = project(hidden[:1, 0], None if token_keys is None else token_keys[:1, 0])
        return (logits * 0.0).sum(1).to(_wide(hidden.dtype))[:0]
    if len(targets) * num_vocab <= max_logits:
        return _chunk_losses(project, rows, targets, keys)
    chunk = chunk_rows(num_vocab, max_logits)
    losses: list[Tensor] = []
    for start in range(0, len(targets), chunk):
        part = [None if t is None else t[start : start + chunk] for t in (rows, targets, keys)]
        losses.append(checkpoint(_chunk_losses, project, *part, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(losses)


def chunk_rows(num_vocab: int, max_logits: int = MAX_LOGITS) -> int:
    """Return the number of positions whose logits are computed at once."""
    return max(256, max_logits // num_vocab // _TILE * _TILE)


def _chunk_losses(project: Projection, rows: Tensor, targets: Tensor, keys: Tensor | None) -> Tensor:
    count = len(rows)
    if keeps_kernels(rows) and (missing := -count % CPU_TILE):
        rows, targets = pad(rows, (0, 0, 0, missing)), pad(targets, (0, missing), value=IGNORE)
        keys = None if keys is None else pad(keys, (0, missing))
    losses = cross_entropy(project(rows, keys).to(_wide(rows.dtype)), targets, reduction="none", ignore_index=IGNORE)
    return losses[:count]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
