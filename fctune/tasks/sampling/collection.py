"""Batches of rollouts: groups of answers to the next cases; groups that teach nothing are replaced by more cases.

A batch depends only on its position in the list of cases and on the answers, so a resumed run rebuilds it from the
answers in the checkpoint and generates only the missing ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.config.sections.grpo import GRPOConfig
from fctune.tasks.rollouts import Request, Rollout
from fctune.tasks.sampling.task_order import Position, TaskOrder

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
        config: The ``grpo`` section.
        order: Order of the tasks, with the seeds of their answers.
        play: Function that generates and rewards the answers to requests.
    """

    def __init__(self, config: GRPOConfig, order: TaskOrder, play: Play):
        self._config, self._order, self._play = config, order, play

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
        if all(is_flat(group) for group in batch.groups):  # kept, since drop_flat_groups is off
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
        if sum(one.error is None for one in group) < 2 or not any(self.is_trained(one) for one in group):
            return True
        return self._config.drop_flat_groups and is_flat(group)

    def is_trained(self, rollout: Rollout) -> bool:
        """Return True for an answer with generated tokens that is not masked because it was cut off."""
        is_masked = self._config.mask_cut and rollout.is_cut
        return rollout.error is None and rollout.num_generated > 0 and not is_masked

    def _check_flat(self, batch: RolloutBatch, num_flat: int) -> None:
        if num_flat < self._config.max_flat_batches:
            return
        rewards, failures = [one.reward for one in batch.rollouts if one.error is None], batch.describe_failures()
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
