"""Deciding when to save: at intervals, at a new best accuracy, before a stop and at the end."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fctune import distributed
from fctune.checkpoint.saver import Saver, SaveResult
from fctune.checkpoint.state import Checkpointer
from fctune.checkpoint.store import CheckpointStore, Kind
from fctune.config.schema import CheckpointConfig
from fctune.distributed import World
from fctune.errors import CheckpointError
from fctune.training.callbacks.base import Callback

logger = logging.getLogger("fctune")

GRACE_S = 30.0  # torchrun kills its workers this long after SIGTERM


@dataclass(slots=True)
class SaveCosts:
    """Seconds that training has waited for saves, and their number."""

    wait_s: float = 0.0  # within steps, until a save had copied the weights
    start_s: float = 0.0  # between steps
    num_saves: int = 0


class CheckpointCallback(Callback):
    """Saves checkpoints when they are due.

    Args:
        config: Intervals and what to do when a save fails.
        checkpointer: Collects and writes the state.
        store: Publishes checkpoints.
        world: This rank.
    """

    def __init__(self, config: CheckpointConfig, checkpointer: Checkpointer, store: CheckpointStore, world: World):
        self.config, self.checkpointer, self.store, self.world = config, checkpointer, store, world
        self.saver = Saver(store, world, config.async_save)
        self.costs = SaveCosts()
        self._reported_costs = SaveCosts()
        self._saved_steps: dict[Kind, int] = {}
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
        """Save what is due; a new best accuracy is saved and linked as ``best``.

        Raises:
            CheckpointError: A save failed and ``checkpoint.on_error`` is stop.
        """
        self.raise_if_failed()
        best, timers = self.checkpointer.state.best, self.checkpointer.state.timers
        if best is not None and best["step"] == step:
            self.save("elastic", step)
            self._link(self._wait(), "best")
        if not is_last:  # ``finish`` saves the last step
            if timers.is_due("elastic checkpoint", self.config.elastic_every, step):
                self.save("elastic", step)
            if timers.is_due("checkpoint", self.config.every, step):
                self.save("sharded", step)
        self._warn_of_grace()
        return False

    def save(self, kind: Kind, step: int) -> None:
        """Start saving the state after ``step``, unless it is saved already."""
        if self._saved_steps.get(kind) == step:
            return
        started = time.perf_counter()
        tensors, description = self.checkpointer.collect(), self.checkpointer.describe()
        self.saver.start(kind, step, tensors, description, self.checkpointer.writer(kind))
        self._saved_steps[kind] = step
        self.costs.start_s += time.perf_counter() - started
        self.costs.num_saves += 1

    def save_before_stop(self, step: int) -> tuple[bool, Path | None]:
        """Save the state unless a save of it has started, and wait for it.

        Returns:
            Whether the last save succeeded, and the newest good checkpoint.
        """
        if step not in self._saved_steps.values():
            self.save("sharded", step)
        result, newest = self.saver.finish(), self.saver.last_good
        return result is not None and result.error is None, newest.path if newest else None

    def finish(self, step: int) -> None:
        """Save the run's last state as an elastic checkpoint, wait for it, and link it as ``final``.

        Raises:
            CheckpointError: The save failed and ``checkpoint.on_error`` is stop.
        """
        self.save("elastic", step)
        result = self._wait()
        if result is not None and result.error is not None and self.config.on_error == "stop":
            raise self._failure()
        self._link(result, "final")

    def raise_if_failed(self) -> None:
        """Raise on every rank if a save has failed and ``checkpoint.on_error`` is stop.

        Raises:
            CheckpointError: As above; names the last good checkpoint.
        """
        if self.config.on_error == "stop" and distributed.any_rank([self.saver.failure is not None])[0]:
            raise self._failure()

    def close(self) -> None:
        """Wait for a running save and free its buffers."""
        self.saver.close()

    def _wait(self) -> SaveResult | None:
        started = time.perf_counter()
        result = self.saver.finish()
        self.costs.start_s += time.perf_counter() - started
        return result

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

    def _failure(self) -> CheckpointError:
        self.saver.finish()  # another rank may have seen the failure earlier
        result, newest = self.saver.failure, self.saver.last_good
        assert result is not None
        return CheckpointError(
            f"the checkpoint of step {result.step} could not be saved: {result.error}. "
            f"Last good checkpoint: {newest.path if newest else 'none'}. Free disk space and re-run the same command, "
            "or set checkpoint.on_error=continue to train on without checkpoints that fail."
        )
