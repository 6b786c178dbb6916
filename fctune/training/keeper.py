"""What happens between two steps of a run: saving when it is due, and stopping when it is asked to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fctune import distributed
from fctune.checkpoint.elastic import write_files, write_json
from fctune.checkpoint.fault_hooks import reached
from fctune.checkpoint.files import write_tensors
from fctune.checkpoint.saver import Saver, SaveResult
from fctune.checkpoint.sharded import write_shards
from fctune.checkpoint.snapshot import collect_rng, collect_tensors
from fctune.checkpoint.store import CheckpointStore, FileRecord, Kind
from fctune.config.schema import RunConfig
from fctune.distributed import World
from fctune.errors import CheckpointError
from fctune.evaluation.live import LiveEvaluation
from fctune.training.hang_watch import StepWatch
from fctune.training.loop import StepKeeper, TrainState
from fctune.training.preemption import Stopped, StopRequest
from fctune.training.recovery import STATE

logger = logging.getLogger("fctune")

# Writes the portable form of the weights that train: (folder, tensors by our names, group) -> this rank's files.
WritePortable = Callable[[Path, dict[str, Tensor], dist.ProcessGroup], list[FileRecord]]

GRACE_S = 30.0  # torchrun kills its workers this long after SIGTERM


@dataclass(slots=True)
class SavedCost:
    """What the saves of a run have cost training so far."""

    wait_s: float = 0.0  # within steps, until a save had its copy of the weights
    start_s: float = 0.0  # between steps
    num_saves: int = 0

    @property
    def stall_s(self) -> float:
        """All that training waited."""
        return self.wait_s + self.start_s


class Keeper(StepKeeper):
    """Keeps a run safe. The loop tells it where it is; every rank calls every method at the same step.

    Args:
        config: of the run.
        state: what is saved.
        store: where.
        describe: what a checkpoint after a step must know beside tensors, as JSON.
        write_portable: writes the model's part of an elastic checkpoint.
        request: hears requests to stop.
        watch: ends a step that hangs.
        world: this rank.
        evaluation: measures the model on held-out cases.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        store: CheckpointStore,
        describe: Callable[[int], dict[str, Any]],
        write_portable: WritePortable,
        request: StopRequest,
        watch: StepWatch,
        world: World,
        evaluation: LiveEvaluation | None = None,
    ):
        self.config, self.state, self.store, self.world = config.checkpoint, state, store, world
        self.eval_config, self.evaluation = config.eval, evaluation
        self.best: dict[str, Any] | None = None  # step and accuracy of the best evaluation, evaluations since
        self._describe, self._write_portable = describe, write_portable
        self._request, self._watch = request, watch
        self.saver = Saver(store, world, config.checkpoint.async_save)
        self.cost = SavedCost()
        self._told = SavedCost()  # what of it stands in metrics already
        self._saved_at: dict[Kind, int] = {}
        self._warned_of_grace = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the part of a step that must not hang."""
        self._watch.start_step()
        reached("step", str(self.state.step + 1))
        yield
        self._watch.end_step()

    def before_update(self) -> None:
        """Wait until a running save has its copy of the weights that are about to change."""
        reached("update", str(self.state.step + 1))
        started = time.perf_counter()
        self.saver.wait_staged()
        self.cost.wait_s += time.perf_counter() - started

    def take_costs(self) -> dict[str, float]:
        """What saves took within the step that was taken, and between it and the one before."""
        told, self._told = self._told, replace(self.cost)
        return {"save_wait_s": self.cost.wait_s - told.wait_s, "save_time_s": self.cost.start_s - told.start_s}

    def measure(self, step: int, is_last: bool) -> dict[str, Any]:
        """Tool-call accuracy where it is due and affordable; the step with the best is remembered."""
        every = self.eval_config.every_n_steps
        if self.evaluation is None or not (step % every == 0 or is_last):
            return {}
        if not is_last and not self.evaluation.is_within_budget():
            return {"eval_skipped": "max_share_of_time"}
        found = self.evaluation.measure(self.state.model)
        if self.best is None or found["eval_accuracy"] > self.best["accuracy"]:
            self.best = {"step": step, "accuracy": found["eval_accuracy"], "evaluations_since": 0}
        else:
            self.best["evaluations_since"] += 1
        return found

    def after_step(self, step: int, is_last: bool) -> bool:
        """Save what is due; stop if any rank was asked to. Whether to go on: not where the accuracy rises no more.

        Raises:
            Stopped: by request; the run is saved.
            CheckpointError: a save failed and ``checkpoint.on_error`` is stop.
        """
        has_failed = self.saver.failure is not None and self.config.on_error == "stop"
        wants_stop, must_stop = distributed.any_rank([self._request.reason is not None, has_failed])
        if must_stop:
            self._raise_failure()
        if wants_stop:
            self.stop(step)
        every, elastic_every = self.config.every_n_steps, self.config.elastic_every_n_steps
        if self.best is not None and self.best["step"] == step:
            self.save("elastic", step)
            self._keep_best(self._wait())
        if not is_last:  # the end has a save of its own
            if elastic_every and step % elastic_every == 0:
                self.save("elastic", step)
            if every and step % every == 0:
                self.save("sharded", step)
        result = self.saver.last
        if self.world.is_main and result is not None and not self._warned_of_grace and result.seconds > 0.8 * GRACE_S:
            self._warned_of_grace = True
            logger.warning(
                "a save takes %.0f s; a launcher that kills %.0f s after its signal would cut it. Ask for a stop ahead "
                "of time: a `stop` file in the run's directory, or SIGUSR1.",
                result.seconds,
                GRACE_S,
            )
        patience = self.eval_config.early_stop
        if patience is not None and self.best is not None and self.best["evaluations_since"] >= patience:
            logger.info("early stop: no better accuracy than that of step %d since", self.best["step"])
            return False
        return True

    def save(self, kind: Kind, step: int) -> None:
        """Begin a save of the state after ``step``, unless it is there already."""
        if self._saved_at.get(kind) == step:
            return
        started = time.perf_counter()
        tensors = collect_tensors(self.state.model, self.state.optimizer)
        rng = collect_rng(self.world.rank)
        state = self._describe(step)
        if kind == "sharded":
            self.saver.start(kind, step, tensors | rng, state, self._write_sharded)
        else:
            self.saver.start(kind, step, tensors | rng, state, self._write_elastic)
        self._saved_at[kind] = step
        self.cost.start_s += time.perf_counter() - started
        self.cost.num_saves += 1

    def stop(self, step: int) -> None:
        """Save, wait for it, and leave the loop.

        Raises:
            Stopped: always.
        """
        reasons = [reason for reason in distributed.all_gather_objects(self._request.reason) if reason]
        if self._saved_at.get("sharded") != step and self._saved_at.get("elastic") != step:
            self.save("sharded", step)
        result = self.saver.finish()
        good = self.saver.last_good
        done = "saved" if result is not None and result.error is None else "NOT saved"
        raise Stopped(
            f"stopped after step {step} by {reasons[0]}, {done}; run the same command to go on",
            good.path if good else None,
        )

    def finish(self, step: int) -> Path | None:
        """The last save of the run: elastic, waited for, with ``final`` pointing to it.

        Raises:
            CheckpointError: it failed and ``checkpoint.on_error`` is stop.
        """
        self.save("elastic", step)
        result = self._wait()
        if result is not None and result.error is not None and self.config.on_error == "stop":
            self._raise_failure()
        if result is not None and result.checkpoint is not None and self.world.is_main:
            self.store.point_to(result.checkpoint, "final")
        return self.saver.last_good.path if self.saver.last_good else None

    def _wait(self) -> SaveResult | None:
        """Wait for the running save; how it ended."""
        started = time.perf_counter()
        result = self.saver.finish()
        self.cost.start_s += time.perf_counter() - started
        return result

    def _keep_best(self, result: SaveResult | None) -> None:
        if self.world.is_main and result is not None and result.checkpoint is not None:
            self.store.point_to(result.checkpoint, "best")

    def close(self) -> None:
        """Wait for a running save and let go of buffers and signals."""
        self.saver.close()
        self._watch.close()
        self._request.close()

    def _raise_failure(self) -> None:
        self.saver.finish()  # another rank may have heard of it sooner
        result = self.saver.failure
        assert result is not None
        raise CheckpointError(
            f"the checkpoint of step {result.step} could not be saved: {result.error}. The last good one stands: "
            f"{self.saver.last_good.path if self.saver.last_good else 'there is none'}. Make room and run again, "
            "or set checkpoint.on_error=continue to train on without."
        )

    def _write_sharded(
        self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], group: dist.ProcessGroup
    ) -> list[FileRecord]:
        records = write_shards(folder, tensors, group)
        if self.world.is_main:
            records.append(write_json(folder / STATE, state))
        return records

    def _write_elastic(
        self, folder: Path, tensors: dict[str, Tensor], state: dict[str, Any], group: dist.ProcessGroup
    ) -> list[FileRecord]:
        def of(prefix: str) -> dict[str, Tensor]:
            return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        models = {name.removeprefix("model."): tensor for name, tensor in of("model.").items()}
        records: list[FileRecord] = []
        errors: list[OSError] = []
        parts: list[Callable[[], list[FileRecord]]] = [
            lambda: self._write_portable(folder, models, group),
            lambda: write_files(folder, "optimizer", of("optimizer."), group),
            lambda: self._write_rest(folder, of("rng."), state),
        ]
        for part in parts:  # all of them on every rank, since the first two are collective
            try:
                records += part()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return records

    def _write_rest(self, folder: Path, rng: dict[str, Tensor], state: dict[str, Any]) -> list[FileRecord]:
        file = folder / f"rng-{self.world.rank}.safetensors"
        digest = write_tensors(file, rng)
        records = [FileRecord(file.name, file.stat().st_size, digest)]
        if self.world.is_main:
            records.append(write_json(folder / STATE, state))
            keys = ("step", "epoch", "world_size", "parallel", "tokens_total", "base_fingerprint", "versions", "loader")
            records.append(write_json(folder / "elastic_metadata.json", {key: state[key] for key in keys}))
        return records
