"""Deciding when to save: at intervals, at a new best accuracy, before a stop and at the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.checkpoint.saver import Guard, Saver, SaveResult, no_guard
from fctune.checkpoint.state import Checkpointer
from fctune.checkpoint.store import Checkpoint, CheckpointStore, Kind
from fctune.config.intervals import AUTO, parse_interval_or_auto
from fctune.config.schema import CheckpointConfig
from fctune.training.callbacks.base import Callback

logger = logging.getLogger("fctune")

GRACE_S = 30.0  # torchrun kills its workers this long after SIGTERM

# Least time between elastic checkpoints at an interval of ``auto``; a failure loses less than a restart takes.
AUTO_PAUSE_S = 60.0

_RETRY_S = 30.0  # of training time, after a failed save
_PAUSE_S = 10.0  # between attempts to write the end of a run


class SaveError(Exception):
    """A save failed for good. The same command resumes from ``checkpoint``, the newest that is safe."""

    def __init__(self, reason: str, checkpoint: Path | None = None):
        super().__init__(reason)
        self.checkpoint = checkpoint


class DiskWait:
    """Pauses between attempts to write the end of a run, up to ``limit_s`` in all, or until ``should_stop``.

    Every rank calls ``pause`` at the same point.
    """

    def __init__(self, limit_s: float, should_stop: Callable[[], bool]):
        self._limit_s, self._should_stop = limit_s, should_stop
        self._deadline: float | None = None

    def pause(self, problem: str) -> bool:
        """Report a problem and wait a moment; returns False if there is no time left."""
        left_s = distributed.run_on_rank_0(self._count_left)
        if left_s <= 0 or distributed.any_rank([self._should_stop()])[0]:
            return False
        logger.info("%s; trying again for up to %.0f s: free some space", problem, left_s)
        time.sleep(min(_PAUSE_S, left_s))
        return True

    def _count_left(self) -> float:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._limit_s
        return self._deadline - now


@dataclass(slots=True)
class SaveCosts:
    """Seconds that training has waited for saves, and their number."""

    wait_s: float = 0.0  # within steps, until a save had copied the weights
    start_s: float = 0.0  # between steps
    num_saves: int = 0


class CheckpointCallback(Callback):
    """Saves checkpoints when they are due, and stops the run when saves keep failing.

    Args:
        config: Intervals, and what to do when a save fails.
        checkpointer: Collects and writes the state.
        store: Publishes checkpoints.
        world: This rank.
        fallback: Publishes the last checkpoint if ``store`` cannot; None: there is no other disk.
        guard: Ends the process if a save hangs.
        elastic_s: Seconds between elastic checkpoints if their interval is ``auto``.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        checkpointer: Checkpointer,
        store: CheckpointStore,
        world: World,
        fallback: CheckpointStore | None = None,
        guard: Guard = no_guard,
        elastic_s: float = math.inf,
    ):
        self._elastic_s = elastic_s
        self.config, self.checkpointer, self.store, self.world = config, checkpointer, store, world
        self.fallback = fallback
        self.saver = Saver(store, world, config.async_save, guard)
        self.costs = SaveCosts()
        self._reported_costs = SaveCosts()
        self._saved_steps: dict[Kind, int] = {}
        self._is_in_flight = False  # a save was started whose outcome was not looked at
        self._failed: SaveResult | None = None  # the newest save, if it failed
        self._num_failed = 0  # in a row
        self._retry_at_s = 0.0
        self._has_warned_of_grace = False

    def before_optimizer_update(self, step: int) -> None:
        """Wait until a running save has copied the weights."""
        started = time.perf_counter()
        self.saver.wait_staged()
        self.costs.wait_s += time.perf_counter() - started

    def step_costs(self) -> dict[str, float]:
        """Return ``save_wait_s``, within the step, and ``save_time_s``, between it and the step before."""
        reported, self._reported_costs = self._reported_costs, replace(self.costs)
        return {
            "save_wait_s": self.costs.wait_s - reported.wait_s,
            "save_time_s": self.costs.start_s - reported.start_s,
        }

    def on_step_end(self, step: int, is_last: bool) -> bool:
        """Save what is due; a new best accuracy is saved and linked as ``best``, a failed save is tried again.

        Raises:
            SaveError: ``checkpoint.max_failed_saves`` saves in a row have failed.
        """
        if self._is_in_flight and not distributed.any_rank([self.saver.is_running])[0]:
            self._conclude()
        best, timers = self.checkpointer.state.best, self.checkpointer.state.timers
        if best is not None and best["step"] == step:
            self.save("elastic", step)
            self._link(self._conclude(), "best")
        if not is_last:  # ``finish`` saves the last step
            if self._is_elastic_due(step):
                self.save("elastic", step)
            if timers.is_due("checkpoint", self.config.every, step):
                self.save("sharded", step)
            if self._failed is not None and not self._is_in_flight and timers.elapsed_s >= self._retry_at_s:
                self.save(self._failed.kind, step)
            if self._failed is not None and self._num_failed >= self.config.max_failed_saves:
                self._give_up(step, self._failed)
        self._warn_of_grace()
        return False

    def _is_elastic_due(self, step: int) -> bool:
        timers, action = self.checkpointer.state.timers, "elastic checkpoint"
        if self.config.elastic_every != AUTO:
            return timers.is_due(action, self.config.elastic_every, step)
        third = parse_interval_or_auto(AUTO).in_steps(timers.num_steps) or 1
        return timers.is_due_by_either(action, self._elastic_s, third, step, AUTO_PAUSE_S)

    def save(self, kind: Kind, step: int, store: CheckpointStore | None = None) -> None:
        """Start saving the state after ``step``, to ``store`` if given, unless it is saved already."""
        if self._saved_steps.get(kind) == step:
            return
        self._conclude()
        started = time.perf_counter()
        tensors, description = self.checkpointer.collect(), self.checkpointer.describe()
        self.saver.start(kind, step, tensors, description, self.checkpointer.writer(kind), store)
        self._is_in_flight = True
        self._saved_steps[kind] = step
        self.costs.start_s += time.perf_counter() - started
        self.costs.num_saves += 1
        if not self.config.async_save:
            self._conclude()

    def save_before_stop(self, step: int) -> Path:
        """Save the state after ``step``, trying twice and then the other disk; returns the checkpoint.

        Raises:
            SaveError: It cannot be saved.
        """
        for _ in range(2):
            if step not in self._saved_steps.values():
                self.save("sharded", step)
            result = self._conclude()
            if result is not None and result.checkpoint is not None:
                return result.checkpoint.path
        if (elsewhere := self._save_elsewhere(step)) is None:
            raise self._describe_unsaved(step)
        return elsewhere

    def finish(self, step: int, wait: DiskWait) -> None:
        """Save the run's last state as an elastic checkpoint, wait for it, and link it as ``final``.

        Raises:
            SaveError: It cannot be saved, neither within the time that ``wait`` allows nor on the other disk.
        """
        while True:
            self.save("elastic", step)
            result = self._conclude()
            if result is None or result.error is None:
                self._link(result, "final")
                return
            if not wait.pause(f"the checkpoint of step {step} could not be saved: {result.error}"):
                break
        if self._save_elsewhere(step) is None:
            raise self._describe_unsaved(step)
        self._link(self.saver.last, "final")

    def describe_safe(self) -> str:
        """Return which step is safe, and where, as a sentence."""
        newest = self._newest()
        if newest is None:
            return "No step is saved."
        return f"Step {newest.step} is safe in {newest.path}."

    def close(self) -> None:
        """Wait for a running save and free its buffers."""
        self.saver.close()

    def _conclude(self) -> SaveResult | None:
        """Wait for a running save and take its outcome; returns that of the last save, equal on all ranks."""
        started, has_to_wait = time.perf_counter(), self.saver.is_running
        result = self.saver.finish()
        self.costs.start_s += time.perf_counter() - started if has_to_wait else 0.0
        if not self._is_in_flight or result is None:
            return result
        self._is_in_flight = False
        if result.error is None:
            self._failed, self._num_failed = None, 0
            return result
        self._failed, self._num_failed = result, self._num_failed + 1
        self._saved_steps.pop(result.kind, None)
        self._retry_at_s = self.checkpointer.state.timers.elapsed_s + _RETRY_S
        if self.world.is_main:
            logger.warning(
                "checkpoint of step %d FAILED (%d of at most %d in a row): %s. %s",
                *(result.step, self._num_failed, self.config.max_failed_saves, result.error, self.describe_safe()),
            )
        return result

    def _give_up(self, step: int, failed: SaveResult) -> None:
        """End training after too many failed saves, with the state on the other disk if there is one.

        Raises:
            SaveError: Always; says what is safe.
        """
        why = "a save" if self._num_failed == 1 else f"{self._num_failed} saves in a row"
        self._save_elsewhere(step)
        raise self._describe_failure(f"stopped after step {step}, because {why} failed: {failed.error}.")

    def _save_elsewhere(self, step: int) -> Path | None:
        """Save the state after ``step`` on the other disk, if there is one, and link it from the run's own."""
        if self.fallback is None:
            return None
        self._saved_steps.clear()
        self.save("elastic", step, self.fallback)
        result = self._conclude()
        if result is None or result.checkpoint is None:
            return None
        self._adopt(result.checkpoint)
        return result.checkpoint.path

    def _describe_unsaved(self, step: int) -> SaveError:
        error = None if self._failed is None else self._failed.error
        return self._describe_failure(f"the state of step {step} could not be saved: {error}.")

    def _describe_failure(self, what: str) -> SaveError:
        newest = self._newest()
        return SaveError(
            f"{what} {self.describe_safe()} Free some space in {self.store.root}, or set checkpoint.fallback_dir to a "
            "directory on another disk, and re-run the same command to resume.",
            newest.path if newest else None,
        )

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """Link a checkpoint on the other disk from the run's own, so that a re-run finds it."""
        logger.info("step %d is saved in %s", checkpoint.step, checkpoint.path)
        if self.world.is_main:
            try:
                (self.store.root / checkpoint.path.name).symlink_to(checkpoint.path.resolve())
            except OSError as error:
                logger.warning(
                    "it cannot be linked from %s (%s): to resume, pass resume=%s",
                    *(self.store.root, error.strerror, checkpoint.path),
                )

    def _newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is safe: of this launch, or the one it resumed from."""
        complete = self.store.list_complete() if self.saver.last_good is None else []
        return self.saver.last_good or (complete[0] if complete else None)

    def _link(self, result: SaveResult | None, name: Literal["final", "best"]) -> None:
        if self.world.is_main and result is not None and result.checkpoint is not None:
            self.store.link(result.checkpoint, name)

    def _warn_of_grace(self) -> None:
        result = self.saver.last
        if self._has_warned_of_grace or result is None or result.seconds <= 0.8 * GRACE_S:
            return
        self._has_warned_of_grace = True
        if self.world.is_main:
            logger.warning(
                "a save takes %.0f s; a launcher that kills its workers %.0f s after its signal would interrupt it. "
                "Request a stop earlier: with a `stop` file in the run's directory, or SIGUSR1.",
                result.seconds,
                GRACE_S,
            )
