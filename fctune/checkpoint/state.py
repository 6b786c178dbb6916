"""The state of a training run: what a checkpoint holds, how it is saved, and how it is restored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import CheckpointError
from fctune.checkpoint.fault_hooks import fire
from fctune.checkpoint.files import FileRecord, read_tensor, write_json, write_tensors
from fctune.checkpoint.hf_checkpoint import HFWeights, locate_tensors, write_files
from fctune.checkpoint.resume import STATE_FILE, Resume, RunFacts, check_same_run
from fctune.checkpoint.saver import WriteFiles
from fctune.checkpoint.sharded import list_tensors, read_shards_, write_shards
from fctune.checkpoint.store import Kind
from fctune.checkpoint.tensors import (
    collect_rng,
    collect_tensors,
    init_optimizer_state_,
    iter_optimizer_state,
    named_trainable,
    restore_rng,
    set_lr_,
)
from fctune.config.intervals import parse_interval
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import copy_full_
from fctune.parallel.sharding import GradientSync


@dataclass(slots=True)
class RunTimers:
    """Training time of a run over its restarts, and the time at which each timed action was last due.

    Ranks decide alike because ``elapsed_s`` is that of rank 0, exchanged with the results of each step. A checkpoint
    holds the timers, so that restarts that come more often than an interval do not put it off for ever.
    """

    num_steps: int = 0  # of the run
    elapsed_s: float = 0.0  # when the newest step's results were exchanged
    last_s: dict[str, float] = field(default_factory=dict)  # elapsed_s at which an action was last due
    _origin_s: float = 0.0  # of rank 0's clock, where elapsed_s is 0

    def start(self, num_steps: int, clock_s: float) -> None:
        """Continue at ``clock_s``, the reading of rank 0's clock."""
        self.num_steps, self._origin_s = num_steps, clock_s - self.elapsed_s

    def advance(self, clock_s: float) -> None:
        """Set the time to a later reading of rank 0's clock."""
        self.elapsed_s = clock_s - self._origin_s

    def is_due(self, action: str, every: int | str, step: int) -> bool:
        """Return True if an action is due after ``step``; a timed one then waits for another interval."""
        interval = parse_interval(every)
        if interval.seconds is None:
            steps = interval.in_steps(self.num_steps)
            return bool(steps) and step % (steps or 1) == 0
        if self.elapsed_s - self.last_s.get(action, 0.0) < interval.seconds:
            return False
        self.last_s[action] = self.elapsed_s
        return True

    def is_due_by_either(self, action: str, every_s: float, every_steps: int, step: int, pause_s: float) -> bool:
        """Return True if an action is due after ``step``: by its time, or by its steps.

        It is never due within ``pause_s`` of the last time.
        """
        waited_s = self.elapsed_s - self.last_s.get(action, 0.0)
        if waited_s < pause_s or (waited_s < every_s and step % every_steps):
            return False
        self.last_s[action] = self.elapsed_s
        return True

    def describe(self) -> dict[str, Any]:
        """Return the state that a checkpoint records."""
        return {"elapsed_s": self.elapsed_s, "last_s": dict(self.last_s)}

    def restore_(self, recorded: dict[str, Any]) -> None:
        """Restore the state that a checkpoint recorded, in place."""
        self.elapsed_s, self.last_s = float(recorded["elapsed_s"]), dict(recorded["last_s"])


# Part of the description that an elastic checkpoint repeats for other tools.
_METADATA_KEYS = ("step", "epoch", "world_size", "parallel", "tokens_total", "base_fingerprint", "versions", "loader")


@dataclass(slots=True)
class TrainState:
    """Everything that a training step changes; a checkpoint saves all but ``gradient_sync`` and the two functions.

    ``settle`` waits for the results of steps that the device still computes and writes their metrics; it raises an
    error if one ends the run. ``wait`` waits for those of the newest step alone, before long work that is not part of
    the step. The loop sets both.
    """

    model: CausalLM
    optimizer: Optimizer
    scheduler: LambdaLR
    gradient_sync: GradientSync
    step: int = 0  # optimizer steps taken
    num_tokens: int = 0  # without padding, over all ranks, since the run began
    best: dict[str, Any] | None = None  # step and accuracy of the best evaluation, evaluations since
    timers: RunTimers = field(default_factory=RunTimers)
    settle: Callable[[], None] = lambda: None
    wait: Callable[[], None] = lambda: None


class DataCursor(Protocol):
    """Position of a run in its data, with what it needs to continue there."""

    def state_at(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint after ``step`` records, ready for JSON; ``epoch`` is part of it."""

    def resume_at(self, state: dict[str, Any]) -> None:
        """Continue after the step at which a state was recorded; raises ``DataError`` if it is of other data."""


class Checkpointer:
    """Saves and restores the state of one run. Every rank calls every method.

    Args:
        state: Live state of the run.
        weights: Hugging Face form of the trainable weights.
        data: Data of the run; a checkpoint holds its position.
        facts: Config and inputs of the run, which a resumed run must share.
        world: This rank.
    """

    def __init__(self, state: TrainState, weights: HFWeights, data: DataCursor, facts: RunFacts, world: World):
        self.state, self.weights, self.data, self.facts, self.world = state, weights, data, facts, world

    def collect(self) -> dict[str, Tensor]:
        """Return the live tensors to save: weights, optimizer state and this rank's random generators.

        A step whose results are not known yet is settled first, so that no checkpoint is of a step that ends the run.
        """
        self.state.settle()
        return collect_tensors(self.state.model, self.state.optimizer) | collect_rng(self.world.rank)

    def describe(self) -> dict[str, Any]:
        """Return what a checkpoint records besides tensors, ready for JSON."""
        state, facts = self.state, self.facts
        cursor = self.data.state_at(state.step)
        return {
            "version": 1,
            "step": state.step,
            "epoch": cursor["epoch"],
            "loader": cursor,
            "num_steps": facts.num_steps,
            "tokens_total": state.num_tokens,
            "best": state.best,
            "timers": state.timers.describe(),
            "world_size": self.world.world_size,
            "parallel": facts.config["parallel"],
            "config": facts.config,
            "base_fingerprint": facts.base_digest,
            "versions": facts.versions,
            "trained_tokens": list(facts.token_ids),
        }

    def writer(self, kind: Kind) -> WriteFiles:
        """Return the function that writes this rank's files of a sharded or an elastic checkpoint."""
        return self._write_sharded if kind == "sharded" else self._write_elastic

    def restore_(self, resume: Resume) -> None:
        """Restore weights, optimizer, schedule, random generators and counters from a checkpoint, in place.

        Random generators are restored only on the world size they were saved on.

        Raises:
            CheckpointError: The checkpoint belongs to another run, or tensors are missing or have other shapes.
            DataError: The data is not that of the run.
        """
        distributed.run_on_all_ranks(lambda: check_same_run(resume, self.facts))
        distributed.run_on_all_ranks(lambda: self.data.resume_at(resume.state["loader"]))
        folder, state = resume.checkpoint.path, self.state
        fire("read", folder.name)
        init_optimizer_state_(state.optimizer)
        parts = list(iter_optimizer_state(state.model, state.optimizer))
        is_sharded = resume.checkpoint.kind == "sharded"
        stored = distributed.run_on_all_ranks(
            lambda: list_tensors(folder) if is_sharded else set(locate_tensors(folder, "optimizer"))
        )
        optimizer = {name: tensor for part in parts for name, tensor in part.to_read(stored).items()}
        has_rng = resume.state["world_size"] == self.world.world_size
        rng = collect_rng(self.world.rank) if has_rng else {}
        if is_sharded:
            tensors = optimizer | {f"model.{name}": p.detach() for name, p in named_trainable(state.model).items()}
            distributed.run_on_all_ranks(lambda: _check_names(folder, set(tensors), stored))
            read_shards_(folder, tensors | rng)
        else:
            distributed.run_on_all_ranks(lambda: self.weights.read_(folder, state.model))
            distributed.run_on_all_ranks(lambda: _read_optimizer_(folder, optimizer))
            rng = {name: read_tensor(folder / f"rng-{self.world.rank}.safetensors", name) for name in rng}
        for part in parts:
            part.load_(optimizer)
        if has_rng:
            restore_rng(rng, self.world.rank)
        _restore_schedule_(state.scheduler, resume.checkpoint.step)
        state.step = resume.checkpoint.step
        state.num_tokens = int(resume.state["tokens_total"])
        state.best = resume.state["best"]
        state.timers.restore_(resume.state["timers"])

    def _write_sharded(
        self, folder: Path, tensors: dict[str, Tensor], description: dict[str, Any], group: dist.ProcessGroup
    ) -> list[FileRecord]:
        records = write_shards(folder, tensors, group)
        if self.world.is_main:
            records.append(write_json(folder / STATE_FILE, description))
        return records

    def _write_elastic(
        self, folder: Path, tensors: dict[str, Tensor], description: dict[str, Any], group: dist.ProcessGroup
    ) -> list[FileRecord]:
        def select(prefix: str) -> dict[str, Tensor]:
            return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}

        weights = {name.removeprefix("model."): tensor for name, tensor in select("model.").items()}
        parts: list[Callable[[], list[FileRecord]]] = [
            lambda: self.weights.write(folder, weights, group),
            lambda: write_files(folder, "optimizer", select("optimizer."), group),
            lambda: self._write_rest(folder, select("rng."), description),
        ]
        records: list[FileRecord] = []
        errors: list[OSError] = []
        for part in parts:  # every rank runs all of them, because the first two are collective
            try:
                records += part()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return records

    def _write_rest(self, folder: Path, rng: dict[str, Tensor], description: dict[str, Any]) -> list[FileRecord]:
        records = [write_tensors(folder / f"rng-{self.world.rank}.safetensors", rng)]
        if self.world.is_main:
            records.append(write_json(folder / STATE_FILE, description))
            metadata = {key: description[key] for key in _METADATA_KEYS}
            records.append(write_json(folder / "elastic_metadata.json", metadata))
        return records


def _restore_schedule_(scheduler: LambdaLR, step: int) -> None:
    """Put a schedule in its state after ``step`` optimizer steps, in place."""
    scheduler.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, lr in zip(scheduler.optimizer.param_groups, rates, strict=True):
        set_lr_(group, lr)
    scheduler._last_lr = rates


def _read_optimizer_(folder: Path, tensors: dict[str, Tensor]) -> None:
    files = locate_tensors(folder, "optimizer")
    _check_names(folder, set(tensors), set(files))
    for name, tensor in tensors.items():
        copy_full_(tensor, read_tensor(files[name], name))


def _check_names(folder: Path, expected: set[str], stored: set[str]) -> None:
    missing = sorted(expected - stored)
    extra = sorted(name for name in stored - expected if not name.startswith("rng."))
    if missing or extra:
        problems = [
            f"{len(names)} {kind}, such as {names[0]}"
            for kind, names in (("missing", missing), ("unexpected", extra))
            if names
        ]
        raise CheckpointError(
            f"{folder}: its tensors do not match this run's model and optimizer ({'; '.join(problems)}). "
            "Resume with the settings it was saved with, or start a new run: another output_dir, or resume=never."
        )
