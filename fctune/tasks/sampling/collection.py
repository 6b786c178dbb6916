"""Batches of rollouts: the order of cases, and groups of answers; groups that teach nothing are replaced by more cases.

Cases are drawn in an order that does not depend on answers. Without batches ahead, neither does the composition of a
batch on the order in which answers arrive. With some, a batch has the groups that were complete first, but each group
is in time for its staleness; a resumed run continues with the groups and answers in the checkpoint.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def make_requests(self, draw: Draw, num_samples: int) -> list[Request]:
        """Return the requests of a drawn task; answers to it in a later pass have further numbers."""
        first = draw.number // len(self._pools[draw.pool]) * num_samples
        seeds = self.make_seeds(draw, num_samples)
        return [Request(draw.case_id, first + sample, seed) for sample, seed in enumerate(seeds)]

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
        start: Cases of each pool in the batches before, since the start of the run.
        stop: Cases of each pool up to its end.
        groups: Groups to learn from.
        dropped: Groups with equal rewards, or with fewer than two answers.
        num_rounds: Rounds of additional cases; with batches ahead, as many as its answers would make.
        num_flat: Batches in a row, this one included, without a group to learn from.
        seconds: Seconds from the batch before, or from the first request, to the last answer of this one.
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


@dataclass(slots=True)
class _Group:
    """A drawn task whose answers are not in a batch yet.

    Attributes:
        draw: The task.
        batch: Number of the next batch when it was asked.
        rollouts: Its answers, None where one is missing.
        is_dropped: It is complete and will not be trained.
    """

    draw: Draw
    batch: int
    rollouts: list[Rollout | None]
    is_dropped: bool = False

    @property
    def is_complete(self) -> bool:
        return None not in self.rollouts

    @property
    def answers(self) -> list[Rollout]:
        return [one for one in self.rollouts if one is not None]


class RolloutCollector:
    """Draws groups and forms batches of them, for whoever generates the answers.

    Args:
        config: The section of the rollouts. In groups of one answer, nothing is compared, and none is flat.
        order: Order of the tasks, with the seeds of their answers.
        num_batches: Last batch of the run; nothing is asked for later ones. None: there is no last one.
        num_ahead: Batches after the next that are asked for, too. A group is in one of these at the latest.
        log: Called with a line if all answers of the first batch, or of one after a batch to learn from, have one
            reward.
    """

    def __init__(
        self,
        config: GRPOConfig | DistillConfig,
        order: TaskOrder,
        num_batches: int | None = None,
        num_ahead: int = 0,
        log: Callable[[str], None] = lambda line: None,
    ):
        self._config, self._order, self._log = config, order, log
        self._num_batches, self._num_ahead = num_batches, num_ahead
        self._start = self._drawn = order.start
        self._number = self._asked_for = 1  # the next batch; the one that was next when the policy was last updated
        self._groups: list[_Group] = []  # in the order of their draws
        self._missing: dict[tuple[str, int], tuple[_Group, int]] = {}
        self._unasked: list[Request] = []  # of groups from a checkpoint
        self._unchecked: list[Rollout] = []  # of complete groups, since it was last checked that answers arrive
        self._num_rounds = -1
        self._num_flat = self._num_flat_now = 0  # after the last batch, and with the rounds of the next
        self._began = self._arrived = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return, ready for JSON, what ``restore`` continues with: positions, and the answers in no batch yet."""
        groups = [
            {
                "pool": group.draw.pool,
                "number": group.draw.number,
                "batch": group.batch,
                "rollouts": [None if one is None else one.to_json() for one in group.rollouts],
            }
            for group in self._groups
        ]
        return {"position": list(self._start), "num_flat": self._num_flat, "groups": groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; earlier versions have no groups, and their untrained answers are asked again."""
        self._start = self._drawn = tuple(state["position"])
        self._num_flat = self._num_flat_now = int(state["num_flat"])
        for row in state.get("groups", ()):
            position = tuple(row["number"] if pool == row["pool"] else 0 for pool in range(len(self._start)))
            ((draw,), _) = self._order.draw(position, [int(pool == row["pool"]) for pool in range(len(position))])
            self._add_group(draw, row["batch"])
            for one in row["rollouts"]:
                if one is not None:
                    self._put(Rollout.from_json(one))
            requests = self._order.make_requests(draw, self._config.group_size)
            self._unasked += [one for one in requests if (one.case_id, one.sample) in self._missing]
        self._drawn = self._add_counts(self._start, self._groups)

    def update(self, number: int) -> None:
        """Note that the policy was updated for batch ``number``, the next: more may be asked."""
        if self._number != number or not self._groups:
            self._began = time.perf_counter()
        self._number = self._asked_for = number

    def ask(self) -> list[Request]:
        """Return the requests to send now: of the next batches, and in place of dropped groups."""
        requests, self._unasked = self._unasked, []
        if self._num_ahead == 0 and self._missing:  # so that replacements do not depend on who answers first
            return requests
        last = self._asked_for + self._num_ahead
        last = last if self._num_batches is None else min(last, self._num_batches)
        counts = [0] * len(self._start)
        for number in range(self._number, last + 1):
            for pool, count in enumerate(self._count_prompts(number)):
                counts[pool] += count
        for group in self._groups:
            counts[group.draw.pool] -= not group.is_dropped
        draws, self._drawn = self._order.draw(self._drawn, [max(0, count) for count in counts])
        for draw in draws:
            self._add_group(draw, self._asked_for)
            requests += self._order.make_requests(draw, self._config.group_size)
        self._num_rounds += bool(draws)
        return requests

    def add(self, rollout: Rollout) -> None:
        """Take an answer to one of the requests.

        Raises:
            DataError: No answer arrives, every answer is empty, or too many batches in a row teach nothing.
        """
        group = self._put(rollout)
        self._arrived = time.perf_counter()
        if not group.is_complete:
            return
        self._unchecked += group.answers
        is_round = len(self._unchecked) >= self._config.answers_per_batch if self._num_ahead else not self._missing
        if is_round:
            self._check_arrival()
        self._check_rounds()

    def take(self) -> RolloutBatch | None:
        """Return the next batch, or None if answers are missing.

        It has ``prompts_per_step`` groups, or fewer once ``max_refills`` is reached. A dropped group is replaced by a
        case of the same pool, so that the groups to learn from keep the pools' shares.

        Raises:
            DataError: Too many batches in a row teach nothing.
        """
        if (self._num_ahead == 0 and self._missing) or not self._groups:
            return None
        counts = self._count_prompts(self._number)
        chosen = [one for pool, count in enumerate(counts) for one in self._choose(pool, count)]
        is_refilled = self._count_rounds() >= self._config.max_refills
        if not chosen or (len(chosen) < sum(counts) and not is_refilled) or self._must_wait(chosen):
            return None
        ids = set(map(id, chosen))
        groups = [group for group in self._groups if id(group) in ids]
        dropped = [group for group in self._groups if group.is_dropped]
        self._groups = [group for group in self._groups if id(group) not in ids and not group.is_dropped]
        batch = RolloutBatch(self._number, self._start, self._add_counts(self._start, [*groups, *dropped]))
        batch.groups, batch.dropped = [one.answers for one in groups], [one.answers for one in dropped]
        batch.num_rounds = self._num_rounds
        if self._num_ahead:
            batch.num_rounds = (len(groups) + len(dropped) - 1) // self._config.prompts_per_step
        batch.num_flat = self._num_flat_now
        # Flat groups are kept if drop_flat_groups is off.
        if self._config.group_size > 1 and all(map(is_flat, batch.groups)):
            batch.num_flat += 1
            self._check_flat(batch, batch.num_flat)
        else:
            batch.num_flat = 0
        batch.seconds = max(0.0, self._arrived - self._began)
        self._start, self._num_flat, self._num_flat_now = batch.stop, batch.num_flat, batch.num_flat
        self._number, self._num_rounds, self._began = self._number + 1, -1, time.perf_counter()
        return batch

    def collect(self, number: int, play: Play) -> RolloutBatch:
        """Return batch ``number`` with the answers that ``play`` generates to each round of requests.

        Raises:
            DataError: As ``add``.
        """
        self.update(number)
        while (batch := self.take()) is None:
            requests = self.ask()
            assert requests, "a batch is complete, or answers are missing"
            for rollout in play(requests):
                self.add(rollout)
        return batch

    def _add_group(self, draw: Draw, batch: int) -> _Group:
        group = _Group(draw, batch, [None] * self._config.group_size)
        self._groups.append(group)
        for index, one in enumerate(self._order.make_requests(draw, self._config.group_size)):
            self._missing[one.case_id, one.sample] = group, index
        return group

    def _put(self, rollout: Rollout) -> _Group:
        group, index = self._missing.pop((rollout.case_id, rollout.sample))
        group.rollouts[index] = rollout
        group.is_dropped = group.is_complete and self._is_dropped(group.answers)
        return group

    def _count_prompts(self, batch: int) -> list[int]:
        return self._order.count_prompts(batch, self._config.prompts_per_step)

    def _add_counts(self, position: Position, groups: Iterable[_Group]) -> Position:
        added = Counter(group.draw.pool for group in groups)
        return tuple(count + added[pool] for pool, count in enumerate(position))

    def _count_rounds(self) -> int:
        """Return the rounds of further cases so far; with batches ahead, each ``prompts_per_step`` complete groups."""
        if self._num_ahead == 0:
            return self._num_rounds
        return sum(group.is_complete for group in self._groups) // self._config.prompts_per_step - 1

    def _choose(self, pool: int, count: int) -> list[_Group]:
        """Return up to ``count`` groups to learn from, those asked first before others."""
        ready = [one for one in self._groups if one.draw.pool == pool and one.is_complete and not one.is_dropped]
        return sorted(ready, key=lambda group: group.batch)[:count]

    def _must_wait(self, chosen: Sequence[_Group]) -> bool:
        """Return True if the groups that are left could not all be trained in time."""
        ids = set(map(id, chosen))
        left = [group for group in self._groups if id(group) not in ids and not group.is_dropped]
        room = [0] * len(self._start)
        for number in range(self._number, self._number + self._num_ahead + 1):
            if number > self._number:
                room = [a + b for a, b in zip(room, self._count_prompts(number), strict=True)]
            due = [group for group in left if self._find_last_batch(group) <= number]
            for pool, most in enumerate(room):
                of_pool = [group for group in due if group.draw.pool == pool]
                if len(of_pool) > most and not all(group.is_complete for group in of_pool):
                    return True
        return False

    def _find_last_batch(self, group: _Group) -> int:
        last = group.batch + self._num_ahead
        return last if self._num_batches is None else min(last, self._num_batches)

    def _check_arrival(self) -> None:
        """Check that answers arrive, and that they have tokens."""
        flat, self._unchecked = self._unchecked, []
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

    def _check_rounds(self) -> None:
        """Count rounds without a group to learn from as flat batches, once further cases are used up."""
        if (self._num_ahead == 0 and self._missing) or any(
            group.is_complete and not group.is_dropped for group in self._groups
        ):
            return
        num_flat = self._num_flat + max(0, self._count_rounds() - self._config.max_refills + 1)
        if num_flat > self._num_flat_now:
            self._num_flat_now = num_flat
            dropped = [group.answers for group in self._groups if group.is_dropped]
            self._check_flat(RolloutBatch(self._number, self._start, self._start, dropped=dropped), num_flat)

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
