"""Synthetic conversations: a curriculum for the tiny base, rows that teach it to call tools, and held-out cases.

The three do not overlap: the curriculum has invented tools only and no calls; fine-tuning rows and held-out cases use
the same target tools, but neither the same phrasings nor the same open argument values. ``varied`` rows call tools
that are invented as the curriculum's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from fctune.data.conversation import Conversation
from fctune.data.synthetic.cases import Case, iter_held_out, iter_reasoned, iter_shuffled, iter_train
from fctune.data.synthetic.curriculum import iter_curriculum, iter_varied

__all__ = ["Case", "Split", "iter_cases", "iter_conversations"]

Split = Literal["pretrain", "train", "varied", "reasoned", "shuffled"]

_SPLITS: dict[Split, Callable[[int, int], Iterator[Conversation]]] = {
    "pretrain": iter_curriculum,
    "train": iter_train,
    "varied": iter_varied,
    "reasoned": iter_reasoned,
    "shuffled": iter_shuffled,
}


def iter_conversations(split: Split, num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield the conversations of a split, the same ones for the same seed.

    Args:
        split: ``pretrain`` is the base's curriculum; ``train`` teaches calls; ``varied`` does with tools that
            change from row to row; ``reasoned`` is ``train`` with reasoning
            in half of the rows; ``shuffled`` is ``train`` with every call turn replaced by another row's, so that a
            model can learn the form of calls from it and nothing else.
        num_rows: Number of conversations.
        seed: Seed of the random choices.
    """
    return _SPLITS[split](num_rows, seed)


def iter_cases(num_cases: int, seed: int) -> Iterator[Case]:
    """Yield held-out cases, the same ones for the same seed; the mix of kinds is exact rather than random."""
    return iter_held_out(num_cases, seed)
