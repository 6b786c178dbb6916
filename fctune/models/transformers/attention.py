"""Our attention within the conversations of packed rows, as transformers' models call it.

It is registered once, without a function for masks, so that transformers builds none. The bounds of the conversations
do not pass through the models' code, of which some drop arguments that they do not know: a block's wrapper sets them
while the block runs, in forward and in recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from fctune.models.attention import DocumentBounds, attend

# Name of our attention among transformers' implementations.
ATTENTION = "fctune"


class _Running:
    """The bounds of the batch whose block is running."""

    bounds: DocumentBounds | None = None


_RUNNING = _Running()


def run_block(forward: Callable[..., Any], *arguments: Any, bounds: DocumentBounds | None, **options: Any) -> Any:
    """Call a block's own forward with the bounds of its batch."""
    before = _RUNNING.bounds
    _RUNNING.bounds = bounds
    try:
        return forward(*arguments, **options)
    finally:
        _RUNNING.bounds = before


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for a layer of transformers: ``[b, h, s, d]`` to ``[b, s, h, d]``."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if scaling is not None and scaling != q.shape[-1] ** -0.5:
        q = q * (scaling * q.shape[-1] ** 0.5)
    return attend(q, k, v, _RUNNING.bounds), None


AttentionInterface.register(ATTENTION, attend_packed)
