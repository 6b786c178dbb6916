"""Order in which tasks are asked: shuffled in each pass, with given shares of their categories if there are any."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fctune.base.errors import ConfigError
from fctune.config.parsing import suggest
from fctune.data.loader import shuffled
from fctune.tasks.episode import make_seed

Position = tuple[int, ...]
"""Tasks drawn of each pool since the start of the run."""

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Draw:
    """A task to ask: ``number`` counts those drawn of its pool before, and ``pool`` is the pool's index."""

    case_id: str
    pool: int
    number: int


class TaskOrder:
    """Draws tasks from one pool, or from a pool of each category that has a share and one of all others.

    Draws depend on the position alone, so they are the same on every rank and after a restart. Each pool is shuffled
    anew in each pass.

    Args:
        ids: Ids of the tasks.
        seed: Seed of the run.
        categories: Category of each task; only needed with shares.
        shares: Share of each category among the prompts of a batch; categories without one share the rest by their
            numbers of tasks. None draws from all tasks alike.
        where: Config key of the shares, for messages.

    Raises:
        ConfigError: A category does not exist, or the shares leave a part of a batch without tasks, or tasks without
            a part of a batch.
    """

    def __init__(
        self,
        ids: Sequence[str],
        seed: int,
        categories: Mapping[str, str] | None = None,
        shares: Mapping[str, float] | None = None,
        where: str = "grpo.category_shares",
    ):
        self.seed, self.shares = seed, dict(sorted(shares.items())) if shares else None
        self._names: list[str | None] = [None]
        self._pools, self._parts = [list(ids)], [1.0]
        if shares:
            assert categories is not None, "shares need categories"
            self._split(categories, shares, where)
        self._shuffled: dict[int, tuple[int, np.ndarray]] = {}

    @property
    def start(self) -> Position:
        """Position before the first draw."""
        return (0,) * len(self._pools)

    def epoch_at(self, position: Position) -> int:
        """Return the number of passes before a position: draws divided by tasks."""
        return sum(position) // sum(map(len, self._pools))

    def count_prompts(self, batch: int, num_prompts: int) -> list[int]:
        """Return the prompts of each pool in a batch, each at most one off its share.

        This is systematic sampling: equally spaced points fall into intervals as long as the shares. The first point
        moves from batch to batch by the golden ratio, so that rounding evens out.
        """
        counts, offset = [0] * len(self._pools), batch * _GOLDEN % 1
        ends = list(itertools.accumulate(self._parts[:-1]))
        for number in range(num_prompts):
            counts[bisect_right(ends, (number + offset) / num_prompts)] += 1
        return counts

    def draw(self, position: Position, counts: Sequence[int]) -> tuple[list[Draw], Position]:
        """Return the next tasks of each pool, and the position after them."""
        draws = [
            Draw(self._pools[pool][self._index_at(pool, number)], pool, number)
            for pool, (first, count) in enumerate(zip(position, counts, strict=True))
            for number in range(first, first + count)
        ]
        return draws, tuple(first + count for first, count in zip(position, counts, strict=True))

    def make_seeds(self, draw: Draw, num_samples: int) -> list[int]:
        """Return the seed of each answer to a drawn task."""
        name = self._names[draw.pool]
        key = (self.seed, draw.number) if self.shares is None else (self.seed, name, draw.number)
        return [make_seed(*key, sample) for sample in range(num_samples)]

    def _index_at(self, pool: int, number: int) -> int:
        size = len(self._pools[pool])
        epoch, index = divmod(number, size)
        known = self._shuffled.get(pool)
        if known is None or known[0] != epoch:
            known = self._shuffled[pool] = (epoch, shuffled(size, self.seed, epoch))
        return int(known[1][index])

    def _split(self, categories: Mapping[str, str], shares: Mapping[str, float], where: str) -> None:
        """Make the pools of the shares."""
        (ids,) = self._pools
        known = sorted({categories[one] for one in ids})
        for name in shares:
            if name not in known:
                raise ConfigError(
                    f"{where}.{name}: no case has this category{suggest(name, known)} (categories: {', '.join(known)})."
                )
        rest, total = [name for name in known if name not in shares], math.fsum(shares.values())
        has_rest = not math.isclose(total, 1)
        if has_rest and not rest:
            raise ConfigError(f"{where}: the shares of all categories sum to {total:g}; expected 1.")
        if rest and not has_rest:
            raise ConfigError(
                f"{where}: the shares sum to 1, so that cases of {', '.join(rest)} would never be asked. Lower the "
                "shares, or give these categories 0 to leave them out."
            )
        named = [(name, [one for one in ids if categories[one] == name], share) for name, share in shares.items()]
        pools: list[tuple[str | None, list[str], float]] = [pool for pool in sorted(named) if pool[2] > 0]
        if has_rest:
            pools.append((None, [one for one in ids if categories[one] not in shares], 1 - total))
        self._names, self._pools, self._parts = ([*column] for column in zip(*pools, strict=True))
