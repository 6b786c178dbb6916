"""Batches of rollouts: the order of cases, and groups of answers; groups that teach nothing are replaced by more cases.

A batch depends only on its position in the list of cases and on the answers, so a resumed run rebuilds it from the
answers in the checkpoint and generates only the missing ones.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.config.parsing import suggest
from fctune.config.sections.distill import DistillConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.data.loader import shuffled
from fctune.tasks.episode import make_seed
from fctune.tasks.rollouts import Request, Rollout

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
        section: Config section of the shares, for messages.

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
        section: str = "grpo",
    ):
        self.seed, self.shares = seed, dict(sorted(shares.items())) if shares else None
        self._names: list[str | None] = [None]
        self._pools, self._parts = [list(ids)], [1.0]
        if shares:
            assert categories is not None, "shares need categories"
            self._split(categories, shares, f"{section}.category_shares")
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


Play = Callable[[Sequence[Request]], Iterable[Rollout]]

# Rewards of a group that differ by less than this share of the range count as equal: weighted sums are rounded.
_FLAT = 1e-9


@dataclass(slots=True)
class RolloutBatch:
    """One batch of answers.

    Attributes:
        number: Position of the batch in the run, from 1.
        start: Cases drawn of each pool before the batch, since the start of the run.
        stop: Cases drawn of each pool up to its end.
        groups: Groups to learn from.
        dropped: Groups with equal rewards, or with fewer than two answers.
        num_rounds: Rounds of additional cases.
        num_flat: Batches in a row, this one included, without a group to learn from.
        seconds: Duration of generation and judging.
    """

    number: int
    start: Position
    stop: Position
    groups: list[list[Rollout]] = field(default_factory=list)
    dropped: list[list[Rollout]] = field(default_factory=list)
    num_rounds: int = 0
    num_flat: int = 0
    seconds: float = 0.0

    @property
    def rollouts(self) -> list[Rollout]:
        """All answers, including failed ones and those of dropped groups."""
        return [one for group in (*self.groups, *self.dropped) for one in group]

    def count_rejected(self) -> Counter[str]:
        """Return how many unusable answers a server sent, by kind; each was asked for again, within bounds."""
        return Counter(kind for one in self.rollouts for kind in one.rejected)

    def describe_failures(self) -> str | None:
        """Return how many answers failed, with the reason of one, and which the server spoiled; None if none did."""
        failed, rejected, said = [one for one in self.rollouts if one.error is not None], self.count_rejected(), []
        if failed:
            of_all = f"{len(failed):,} of {len(self.rollouts):,} answers failed"
            said.append(f"{of_all}, for example {_show_failure(failed[0])}")
        if rejected:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in rejected.most_common())
            said.append(f"the server sent {format_count(rejected.total(), 'unusable answer')} ({kinds})")
        return "; ".join(said) or None


class RolloutCollector:
    """Collects batches of rollouts.

    Args:
        config: The section of the rollouts. In groups of one answer, nothing is compared, and none is flat.
        order: Order of the tasks, with the seeds of their answers.
        play: Function that generates and rewards the answers to requests.
        log: Called with a line if all answers of the first batch, or of one after a batch to learn from, have one
            reward.
    """

    def __init__(
        self,
        config: GRPOConfig | DistillConfig,
        order: TaskOrder,
        play: Play,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._config, self._order, self._play, self._log = config, order, play, log

    def collect(self, number: int, start: Position, num_flat: int = 0, done: Iterable[Rollout] = ()) -> RolloutBatch:
        """Return a batch with ``prompts_per_step`` groups, or fewer once ``max_refills`` is reached.

        A dropped group is replaced by a case of the same pool, so that the groups to learn from keep the pools' shares.

        Args:
            number: Number of the batch.
            start: Cases drawn of each pool before it.
            num_flat: Batches in a row before it that had nothing to learn from.
            done: Answers to its requests from before a restart.

        Raises:
            DataError: No answer arrives, every answer is empty, or too many batches in a row teach nothing.
        """
        began = time.perf_counter()
        config, batch = self._config, RolloutBatch(number, start, start)
        known = {(one.case_id, one.sample): one for one in done}
        asked: Counter[str] = Counter()
        missing = self._order.count_prompts(number, config.prompts_per_step)
        while True:
            for pool, group in self._ask(batch, missing, asked, known):
                is_dropped = self._is_dropped(group)
                (batch.dropped if is_dropped else batch.groups).append(group)
                missing[pool] -= not is_dropped
            if not any(missing) or (batch.groups and batch.num_rounds >= config.max_refills):
                break
            if not batch.groups and batch.num_rounds >= config.max_refills:
                num_flat += 1
                self._check_flat(batch, num_flat)
            batch.num_rounds += 1
        # Flat groups are kept if drop_flat_groups is off.
        if config.group_size > 1 and all(is_flat(group) for group in batch.groups):
            num_flat += 1
            self._check_flat(batch, num_flat)
        else:
            num_flat = 0
        batch.num_flat = num_flat
        batch.seconds = time.perf_counter() - began
        return batch

    def _ask(
        self, batch: RolloutBatch, counts: Sequence[int], asked: Counter[str], known: dict[tuple[str, int], Rollout]
    ) -> list[tuple[int, list[Rollout]]]:
        """Return the groups of the next cases of each pool, with the pool's index.

        When a case repeats within a batch, its samples are numbered on.
        """
        size = self._config.group_size
        groups: list[list[Request]] = []
        draws, batch.stop = self._order.draw(batch.stop, counts)
        for draw in draws:
            first = asked[draw.case_id]
            asked[draw.case_id] += size
            seeds = self._order.make_seeds(draw, size)
            groups.append([Request(draw.case_id, first + sample, seed) for sample, seed in enumerate(seeds)])
        requests = [one for group in groups for one in group if (one.case_id, one.sample) not in known]
        if requests:
            known |= {(one.case_id, one.sample): one for one in self._play(requests)}
        answered = [[known[one.case_id, one.sample] for one in group] for group in groups]
        flat = [one for group in answered for one in group]
        if all(one.error is not None for one in flat):
            raise DataError(
                f"none of {len(flat):,} answers arrived, for example {_show_failure(flat[0])}. Fix the cause and run "
                "the same command again to resume."
            )
        if not any(one.num_generated for one in flat):
            raise DataError(
                f"none of {len(flat):,} answers has a generated token, for example that to {flat[0].case_id}. Check "
                "the model and its chat template."
            )
        return [(draw.pool, group) for draw, group in zip(draws, answered, strict=True)]

    def _is_dropped(self, group: Sequence[Rollout]) -> bool:
        num_answered, num_needed = sum(one.error is None for one in group), min(2, self._config.group_size)
        if num_answered < num_needed or not any(self.is_trained(one) for one in group):
            return True
        return self._config.drop_flat_groups and is_flat(group)

    def is_trained(self, rollout: Rollout) -> bool:
        """Return True for an answer with generated tokens that is not masked because it was cut off."""
        is_masked = self._config.mask_cut and rollout.is_cut
        return rollout.error is None and rollout.num_generated > 0 and not is_masked

    def _check_flat(self, batch: RolloutBatch, num_flat: int) -> None:
        rewards, failures = [one.reward for one in batch.rollouts if one.error is None], batch.describe_failures()
        if num_flat == 1 and len(rewards) > 1 and is_flat(batch.rollouts):
            answers = format_count(len(rewards), "answer")
            self._log(f"batch {batch.number}: all {answers} have the reward {rewards[0]:g}, which teaches nothing")
        if num_flat < self._config.max_flat_batches:
            return
        failed = "" if failures is None else f"; {failures}"
        raise DataError(
            f"{num_flat} batches in a row had no group to learn from: in each, all answers had equal rewards or were "
            f"cut off (mean reward {sum(rewards) / len(rewards):g}){failed}. Use cases that the model sometimes gets "
            "right (fctune sample measures that), give finer parts a weight in grpo.reward, or raise "
            "grpo.max_new_tokens or grpo.temperature."
        )


def _show_failure(rollout: Rollout) -> str:
    return f"{rollout.case_id}: {(rollout.error or '').rstrip('.')}"


def is_flat(group: Sequence[Rollout]) -> bool:
    """Return True if all answers of a group that arrived have equal rewards."""
    rewards = [one.reward for one in group if one.error is None]
    return max(rewards) - min(rewards) <= _FLAT * max(1.0, *map(abs, rewards)) if rewards else True
