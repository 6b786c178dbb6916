"""Random choice of words and sentences, some of which are reserved for held-out tasks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from fctune.tasks.environments.base import Split

T = TypeVar("T")

_OPENINGS = {
    "train": ("{}.", "Please {}.", "Could you {}?", "I need you to {}.", "Can you {}, please?", "Hi! {}, please."),
    "test": ("Would you mind doing this for me: {}.", "Quick favour: {}.", "{}, thanks!"),
}


class Writer:
    """Draws the words of one task.

    Every fourth name of a list, and every fourth phrasing, is reserved for held-out tasks.

    Args:
        seed: Seed of the task.
        split: ``train`` or ``test``.
        environment: Name of the environment, so that equal seeds of others draw differently.
    """

    def __init__(self, seed: int, split: Split, environment: str):
        self.random = random.Random(f"{environment}/{split}/{seed}")
        self._split = split

    def own(self, items: Sequence[T]) -> list[T]:
        """Return the items of a list that belong to this split."""
        return [item for index, item in enumerate(items) if (index % 4 == 3) == (self._split == "test")]

    def pick(self, items: Sequence[T]) -> T:
        """Return a random item of this split."""
        return self.random.choice(self.own(items))

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return several different items of this split."""
        return self.random.sample(self.own(items), count)

    def request(self, phrasings: Sequence[str], **words: object) -> str:
        """Return a request in one of these phrasings (imperatives without a full stop), politely or not."""
        opening = self.random.choice(_OPENINGS[self._split])
        text = opening.format(self.pick(phrasings).format(**words))
        return text[0].upper() + text[1:]

    def ask(self, phrasings: Sequence[str], **words: object) -> str:
        """Return a question in one of these phrasings."""
        return self.pick(phrasings).format(**words)
