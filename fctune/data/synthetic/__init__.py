"""Synthetic conversations: a curriculum for the tiny base, rows that teach it to call tools, and held-out cases.

Three word worlds are kept apart: the curriculum has invented tools only and never a call; training rows and held-out
cases share the target tools, and share neither a phrasing nor an open argument value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fctune.data.conversation import Conversation
from fctune.data.synthetic.cases import Case, iter_held_out, iter_shuffled, iter_train
from fctune.data.synthetic.curriculum import iter_curriculum

__all__ = ["Case", "iter_cases", "iter_conversations"]

_SPLITS = {"pretrain": iter_curriculum, "train": iter_train, "shuffled": iter_shuffled}


def iter_conversations(
    split: Literal["pretrain", "train", "shuffled"], num_rows: int, seed: int
) -> Iterator[Conversation]:
    """Conversations of a split, the same ones for the same seed.

    Args:
        split: ``pretrain`` is the base's curriculum, ``train`` teaches calls, ``shuffled`` is ``train`` with every call
            turn replaced by another row's: what a model scores after it is what the form alone is worth.
        num_rows: How many conversations.
        seed: Chooses them.
    """
    return _SPLITS[split](num_rows, seed)


def iter_cases(num_cases: int, seed: int) -> Iterator[Case]:
    """Held-out cases, the same ones for the same seed; the mix of kinds is exact rather than drawn."""
    return iter_held_out(num_cases, seed)
