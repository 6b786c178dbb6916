"""Rows that are split over ranks, of which attention sees all tokens for a part of the heads.

Each rank of a group has an equal part of a row's tokens. Around attention, an all-to-all turns its part of the tokens
with all heads into all tokens with its part of the heads, and back (Ulysses, https://arxiv.org/abs/2309.14509). The
tokens stay in their order, so attention has the bounds of whole rows, and every rank has the same work. Where there are
fewer key heads than ranks, they are repeated.

More ranks than heads would need ring attention. ring-flash-attn's functions for packed rows call the CUDA kernels of
flash-attn, of which PyPI has no wheels, and lack windows and sinks; so it is not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fctune.base.distributed import World


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Ranks that share each row, next to one another; ``name`` is that of their process group."""

    rank: int = 0
    size: int = 1
    name: str = ""

    def find_share(self, world: World) -> tuple[int, int]:
        """Return the index of this group among all groups, and their number: whose rows it has."""
        return world.rank // self.size, world.world_size // self.size


# A rank that has whole rows.
WHOLE_ROWS = ContextGroup()


def count_repeats(num_heads: int, num_kv_heads: int, num_ranks: int) -> int | None:
    """Return how often key heads are repeated so that each rank has as many; None if heads cannot be divided."""
    repeats = num_ranks // math.gcd(num_kv_heads, num_ranks)
    fits = num_heads % num_ranks == 0 and num_heads % (num_kv_heads * repeats) == 0
    return repeats if fits else None


def to_heads(x: Tensor, group: ContextGroup) -> Tensor:
    """Return all tokens of this rank's part of the heads, ``[b, n s, h / n, d]`` from ``[b, s, h, d]``."""
    b, s, h, d = x.shape
    parts = x.view(b, s, group.size, h // group.size, d).permute(2, 0, 1, 3, 4)
    return _exchange(parts, group).permute(1, 0, 2, 3, 4).reshape(b, group.size * s, h // group.size, d)


def to_tokens(x: Tensor, group: ContextGroup) -> Tensor:
    """Return all heads of this rank's part of the tokens, ``[b, s, h, d]`` from ``[b, n s, h / n, d]``."""
    b, s, h, d = x.shape
    parts = x.view(b, group.size, s // group.size, h, d).permute(1, 0, 2, 3, 4)
    return _exchange(parts, group).permute(1, 2, 0, 3, 4).reshape(b, s // group.size, group.size * h, d)


def _exchange(parts: Tensor, group: ContextGroup) -> Tensor:
    """Send ``parts[i]`` to rank i of the group, and return what the ranks sent, in their order; gradients go back."""
    name: Any = group.name  # torch has a type of its own for names
    received = collectives.all_to_all_single_autograd(parts.contiguous().flatten(0, 1), None, None, name)
    exchanged: Tensor = collectives.wait_tensor(received)  # type: ignore[no-untyped-call]
    return exchanged.view(parts.shape)
