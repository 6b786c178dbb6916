"""Rows for ``data.replay``, drawn at random from sources that may be much larger than what is needed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fctune.data.sources import UnreadRow


def count_replayed(num_trained: int, share: float) -> int:
    """Return the number of conversations that are a share of all, if the others are ``num_trained``."""
    return max(1, round(num_trained * share / (1 - share))) if num_trained else 0


def divide_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a number of rows between sources in proportion to their weights; the parts add up to it."""
    ends = [round(total * sum(weights[: number + 1]) / sum(weights)) for number in range(len(weights))]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class RowDraw:
    """Draws the rows of a source in random order, each once, and scans the source for each draw.

    Args:
        scan: Yields the rows of the source, in the same order each time.
        seed: Seed of the order.
    """

    def __init__(self, scan: Callable[[], Iterator[UnreadRow]], seed: int):
        self._scan = scan
        self.num_rows = sum(1 for _ in scan())
        self._order = np.random.default_rng(seed).permutation(self.num_rows)
        self._num_drawn = 0

    def draw(self, count: int) -> Iterator[UnreadRow]:
        """Yield the next ``count`` rows, or those that are left, in the order of the source."""
        drawn = set(self._order[self._num_drawn : self._num_drawn + count].tolist())
        self._num_drawn += len(drawn)
        for number, row in enumerate(self._scan()):
            if number in drawn:
                drawn.remove(number)
                yield row
            if not drawn:
                return

    @property
    def is_exhausted(self) -> bool:
        """True if every row was drawn."""
        return self._num_drawn >= self.num_rows
