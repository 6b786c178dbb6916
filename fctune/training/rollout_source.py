"""Training data from rollouts: publishes the policy, waits for its answers, and packs them into steps.

With a server, dialogues run on threads of rank 0 across the borders of steps: a slow one delays no other, and the
policy that answers is replaced while they run. In process, every rank generates a share between steps. Every checkpoint
contains the answers that have not been trained yet.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import DataError
from fctune.checkpoint.fault_hooks import fire
from fctune.config.schema import RunConfig
from fctune.config.sections.grpo import GRPOConfig
from fctune.data.loader import DEFAULT_COST, RowCost
from fctune.engines.engine import PolicyEngine
from fctune.models.attention import MakeBounds
from fctune.tasks.opinions import summarise_opinions
from fctune.tasks.rollouts import Request, Rollout, TaskSet
from fctune.tasks.sampling.collection import RolloutBatch, RolloutCollector, TaskOrder
from fctune.training.policy_gradient import compute_advantages
from fctune.training.prefetch import StepData
from fctune.training.rollout_steps import TrainedRollout, make_step_data

logger = logging.getLogger("fctune")

# The part of the reward that says whether an answer is right, by kind of task.
_RIGHT = ("strict", "solved")


class RolloutSource:
    """Supplies the inputs of each step of a run with rollouts. Every rank calls every method.

    Args:
        config: Config of the run.
        tasks: Tasks to draw from.
        order: Order in which they are asked.
        engine: Engine that generates; None on ranks other than 0 if it is shared.
        world: This rank.
        make_bounds: Function that returns the boundaries of the rollouts in packed rows.
        publish: Function that gives the engine the current policy under a version; every rank calls it.
        log: File of all answers, which rank 0 writes.
        num_steps: Last step of the run; nothing is generated for later ones.
        is_shared: One engine answers for all ranks, while they train.
        set_awake: Wakes a shared engine that uses the ranks' memory up (True), or puts it to sleep (False), so that it
            answers between steps alone; every rank calls it. None: the engine is always awake.
        meanwhile: Called on every rank while they wait for a shared engine; may end the wait with an error.
        cost: Cost of the rows that are dealt to ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: TaskSet,
        order: TaskOrder,
        engine: PolicyEngine | None,
        world: World,
        make_bounds: MakeBounds,
        publish: Callable[[int], None],
        log: Path,
        num_steps: int,
        is_shared: bool = False,
        set_awake: Callable[[bool], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        cost: RowCost = DEFAULT_COST,
    ):
        section = config.rollouts
        assert section is not None
        self._config, self._section, self._world = config, section, world
        self._tasks, self._order, self._engine, self._publish = tasks, order, engine, publish
        self._make_bounds, self._log, self._is_shared = make_bounds, log, is_shared
        num_batches = math.ceil(num_steps / self._section.updates_per_batch)
        self._set_awake, self._meanwhile, self._cost = set_awake, meanwhile, cost
        log_once = logger.warning if world.is_main else lambda line: None
        num_ahead = self._section.max_staleness if is_shared else 0
        self._collector = RolloutCollector(self._section, order, num_batches, num_ahead, log_once)
        self._digest = tasks.digest()
        self._batch: RolloutBatch | None = None  # in training
        self._trained: list[TrainedRollout] = []
        self._lock = threading.Lock()  # of the collector and the fields below
        self._due: Future[RolloutBatch] | None = None  # the batch that is waited for
        self._failure: BaseException | None = None  # of a thread
        self._threads: ThreadPoolExecutor | None = None
        if is_shared and world.is_main:
            num_at_once = self._section.num_at_once
            num_at_once = num_at_once if tasks.num_at_once is None else min(num_at_once, tasks.num_at_once)
            self._threads = ThreadPoolExecutor(num_at_once, thread_name_prefix="rollouts")
        self._published: int | None = None
        self._publish_s = self._switch_s = 0.0  # of this batch

    def __enter__(self) -> RolloutSource:
        if self._set_awake is not None:
            try:
                self._set_awake(False)  # a resumed step may need no answers
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._set_awake is not None:
            torch.cuda.empty_cache()  # for the server, which is woken up as it is closed
            if error is None:
                distributed.barrier()
        for opened in (self._engine, self._tasks):
            if (close := getattr(opened, "close", None)) is not None:  # only environments have processes to close
                close()

    def take(self, step: int) -> StepData:
        """Return this rank's inputs of global step ``step``; waits for the answers of its batch."""
        trained, epoch, metrics = self.take_answers(step)
        options: dict[str, Any] = {"step": step, "epoch": epoch, "metrics": metrics, "cost": self._cost}
        return make_step_data(trained, self._config, self._world, self._make_bounds, **options)

    def take_answers(self, step: int) -> tuple[Sequence[TrainedRollout], int, dict[str, float]]:
        """Return the answers of all ranks that step ``step`` trains, passes over the tasks before, and metrics."""
        number = (step - 1) // self._section.updates_per_batch + 1
        metrics: dict[str, float] = {}
        if self._batch is None or self._batch.number != number:
            self._set_batch(self._next_batch(number, step))
            assert self._batch is not None
            metrics = self._measure(self._batch, step)
            if self._world.is_main:
                if (failures := self._batch.describe_failures()) is not None:
                    logger.warning("step %d: %s", step, failures)
                self._write_log(self._batch, step)
        assert self._batch is not None
        return self._trained, self._order.epoch_at(self._batch.start), metrics

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint after ``step``: the position, and the answers not trained yet."""
        is_unfinished = self._batch is not None and step % self._section.updates_per_batch != 0
        with self._lock:
            state = self._collector.state()
        return {
            "epoch": self._order.epoch_at(state["position"]),
            **state,
            "seed": self._config.seed,
            "cases": self._digest,
            "category_shares": self._order.shares,
            "batch": _to_json(self._batch) if is_unfinished and self._batch is not None else None,
        }

    def resume_at(self, state: dict[str, Any]) -> None:
        """Continue after the step at which this state was saved.

        Raises:
            DataError: The state belongs to other cases, shares or another seed.
        """
        mine = self.state_at(0)
        changes = [
            f"{name}: was {state[name]}, is {mine[name]}"
            for name in ("cases", "category_shares", "seed")
            if state[name] != mine[name]
        ]
        if changes:
            raise DataError(
                f"the cases, their shares or the reward differ from those of the checkpoint ({', '.join(changes)}). "
                "Restore the previous ones, or start a new run in another output_dir."
            )
        self._collector.restore(state)
        if state["batch"] is not None:
            self._set_batch(_from_json(state["batch"]))

    def _set_batch(self, batch: RolloutBatch) -> None:
        self._batch = batch
        self._trained = [one for group in batch.groups for one in self._weigh(group)]

    def _weigh(self, group: Sequence[Rollout]) -> list[TrainedRollout]:
        """Return a group's answers that are trained; their advantages take all of its answers into account."""
        answered = [one for one in group if one.error is None]
        advantages = compute_advantages([one.reward for one in answered], self._section.advantage)
        pairs = zip(answered, advantages, strict=True)
        return [
            TrainedRollout(sequence, value)
            for one, value in pairs
            if self._collector.is_trained(one)
            for sequence in one.sequences
        ]

    def _next_batch(self, number: int, step: int) -> RolloutBatch:
        """Return the batch to train next; answers from now on are those of the current weights."""
        if self._set_awake is not None:
            started = time.perf_counter()
            self._set_awake(True)
            self._switch_s = time.perf_counter() - started
        self._publish_now(step)
        if not self._is_shared:
            assert self._engine is not None
            batch = self._collector.collect(number, self._play_together)
            self._engine.close()
            return batch
        if self._world.is_main:
            with self._lock:
                self._due = Future()
                self._collector.update(number)
                self._go_on()
        batch = distributed.wait_for_rank_0(self._due, self._meanwhile)
        if self._set_awake is not None:
            started = time.perf_counter()
            self._set_awake(False)
            self._switch_s += time.perf_counter() - started
        return batch

    def _publish_now(self, step: int) -> None:
        """Publish the policy with all updates before ``step``, unless that has been done."""
        self._publish_s = 0.0
        if self._published == step - 1:
            return
        fire("policy", str(step - 1))
        started = time.perf_counter()
        self._publish(step - 1)
        self._published = step - 1
        self._publish_s = time.perf_counter() - started

    def _go_on(self) -> None:
        """Ask what is to be asked now, and deliver the batch that is waited for if it is complete; under the lock."""
        assert self._threads is not None
        assert self._due is not None
        if requests := self._collector.ask():
            fire("sample", str(len(requests)))
        for one in requests:
            self._threads.submit(self._play_alone, one)
        if self._due.done():
            return
        if self._failure is not None:
            self._due.set_exception(self._failure)
        elif (batch := self._collector.take()) is not None:
            self._due.set_result(batch)

    def _play_alone(self, request: Request) -> None:
        """Run one dialogue with rank 0's engine, on a thread."""
        assert self._engine is not None
        try:
            (rollout,) = self._tasks.play(self._engine, [request])
            with self._lock:
                self._collector.add(rollout)
                self._go_on()
        except BaseException as error:  # raised where the batch is waited for
            with self._lock:
                self._failure = error
                if self._due is not None and not self._due.done():
                    self._due.set_exception(error)

    def _play_together(self, requests: Sequence[Request]) -> Iterable[Rollout]:
        """Generate each rank's share with its engine, and return all answers on every rank."""
        assert self._engine is not None
        engine, share = self._engine, requests[self._world.rank :: self._world.world_size]
        fire("sample", str(len(requests)))
        mine = distributed.run_on_all_ranks(lambda: list(self._tasks.play(engine, share)) if share else [])
        fire("judged", str(len(requests)))
        return [one for of_rank in distributed.all_gather_objects(mine) for one in of_rank]

    def _measure(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        rollouts = batch.rollouts
        answered = [one for one in rollouts if one.error is None]
        metrics = {
            "reward_mean": _mean([one.reward for one in answered]),
            "answer_tokens_mean": _mean([one.num_generated for one in answered]),
            "answers": len(rollouts),
            "answers_trained": len({(one.rollout.case_id, one.rollout.sample) for one in self._trained}),
            "answers_masked": sum(self._section.mask_cut and one.is_cut for one in answered),
            "answers_failed": len(rollouts) - len(answered),
            "answers_rejected": (rejected := batch.count_rejected()).total(),
            "groups_dropped": len(batch.dropped),
            "refill_rounds": batch.num_rounds,
            "staleness": step - 1 - min(one.rollout.version for one in self._trained),
            "generation_time_s": batch.seconds,
            "judging_time_s": sum(one.judging_s for one in rollouts),
            "publish_time_s": self._publish_s,
        }
        if self._set_awake is not None:
            metrics["sleep_time_s"] = self._switch_s
        metrics |= {f"answers_rejected/{kind}": count for kind, count in sorted(rejected.items())}
        if any(one.further for one in rollouts):
            metrics["sequences_trained"] = len(self._trained)
        if isinstance(self._section, GRPOConfig) and self._section.judge is not None:
            metrics |= summarise_opinions(one.opinion for one in rollouts if one.opinion is not None)
        for name in answered[0].parts:
            metrics[f"reward/{name}"] = _mean([one.parts[name] for one in answered])
        if (right := next((name for name in _RIGHT if name in answered[0].parts), None)) is not None:
            metrics["pass_rate"] = _mean([one.parts[right] for one in answered])
            for category in sorted({one.category for one in answered}):
                shares = [one.parts[right] for one in answered if one.category == category]
                metrics[f"pass_rate/{category}"] = _mean(shares)
        num_groups = Counter(group[0].category for group in batch.groups)
        for category in sorted({one.category for one in rollouts}):
            metrics[f"groups/{category}"] = num_groups[category]
        return metrics

    def _write_log(self, batch: RolloutBatch, step: int) -> None:
        """Append every answer of the batch to the log, without prompt ids, which follow from the case."""
        fire("log", str(step))
        advantages = {(one.rollout.case_id, one.rollout.sample): one.advantage for one in self._trained}
        with open(self._log, "a", encoding="utf-8") as log:
            for one in batch.rollouts:
                row = {"step": step, "batch": batch.number, **one.to_json()}
                row["advantage"] = advantages.get((one.case_id, one.sample))
                for sequence in (row, *row.get("further", ())):
                    del sequence["prompt_ids"]
                log.write(json.dumps(row) + "\n")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _to_json(batch: RolloutBatch) -> dict[str, Any]:
    def rows(groups: Sequence[Sequence[Rollout]]) -> list[list[dict[str, Any]]]:
        return [[one.to_json() for one in group] for group in groups]

    names = ("number", "start", "stop", "num_rounds", "num_flat", "seconds")
    return {name: getattr(batch, name) for name in names} | {"groups": rows(batch.groups)}


def _from_json(row: dict[str, Any]) -> RolloutBatch:
    """Return the batch without its dropped groups, which are needed only for the log."""
    groups = [[Rollout.from_json(one) for one in group] for group in row["groups"]]
    positions = {name: tuple(row[name]) for name in ("start", "stop")}
    return RolloutBatch(**row | positions | {"groups": groups})
