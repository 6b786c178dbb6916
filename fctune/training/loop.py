"""The training loop: the order of things. What a step computes is in ``step``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fctune.config.schema import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared_set import PreparedSet
from fctune.distributed import World
from fctune.errors import ConfigError, DataError
from fctune.models.torchtune.build import CausalLM
from fctune.telemetry.sinks import SinkGroup
from fctune.training.meter import Meter
from fctune.training.prefetch import Feeder
from fctune.training.step import StepResult, mean_loss, train_step


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm of a step is not finite, on all ranks alike; the weights are those before it."""


@dataclass(slots=True)
class TrainState:
    """All that a step changes."""

    model: CausalLM
    optimizer: Optimizer
    scheduler: LambdaLR
    step: int = 0
    num_tokens: int = 0  # real ones, over all ranks, since the run began


class StepKeeper:
    """What the loop tells where it is; this one does nothing of it. ``fctune.training.keeper`` saves and stops."""

    def step(self) -> AbstractContextManager[None]:
        """Around the part of a step that must not hang."""
        return nullcontext()

    def before_update(self) -> None:
        """The weights are about to change."""

    def take_costs(self) -> Mapping[str, float]:
        """What saves took since this was last asked, by metric."""
        return {}

    def measure(self, step: int, is_last: bool) -> dict[str, Any]:
        """A step is taken; what is to stand in its metrics beside what the loop knows."""
        return {}

    def after_step(self, step: int, is_last: bool) -> bool:
        """The metrics of a step are written; whether to go on."""
        return True


def count_steps(config: RunConfig, prepared: PreparedSet, world: World) -> int:
    """Optimizer steps of the run.

    Raises:
        DataError: fewer packs than ranks, so that some would have nothing to do in any step.
        ConfigError: fewer packs in a step than ranks.
    """
    num_packs = prepared.num_packs("train")
    if num_packs < world.world_size:
        raise DataError(
            f"the training split has {num_packs:,} {'packs' if prepared.is_packed else 'conversations'}, fewer than "
            f"the {world.world_size} ranks of this run. Add rows, use fewer ranks, or set data.packed=false."
        )
    if config.global_batch_size < world.world_size:
        raise ConfigError(
            f"global_batch_size={config.global_batch_size}: under the {world.world_size} ranks of this run; "
            f"use {world.world_size} or more, or fewer ranks."
        )
    steps = config.epochs * GlobalLoader(prepared, "train", config.global_batch_size, config.seed).steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


def train(
    config: RunConfig,
    state: TrainState,
    prepared: PreparedSet,
    num_steps: int,
    world: World,
    sinks: SinkGroup,
    keeper: StepKeeper | None = None,
    gpu_hours: float = 0.0,
) -> None:
    """Take the run from ``state.step`` to ``num_steps``, in place; ``gpu_hours`` are those it took before.

    Raises:
        NonFiniteError: a step was not finite and ``on_nonfinite`` is stop.
    """
    keeper = keeper or StepKeeper()
    loader = GlobalLoader(prepared, "train", config.global_batch_size, config.seed, pad_to=config.data.pad_to)
    state.model.train()
    nonfinite_in_row = 0
    feeder = Feeder(loader, world, config.micro_batch_size, state.model.kernel, num_steps)
    with feeder, Meter(config, state.model, world, gpu_hours) as meter:
        while state.step < num_steps:
            started = time.perf_counter()
            data = feeder.take(state.step + 1)
            step, waited = data.step, time.perf_counter() - started
            lr = float(state.scheduler.get_last_lr()[0])
            with meter.step(step.step), keeper.step():
                result = train_step(
                    state.model,
                    state.optimizer,
                    data,
                    world,
                    clip_grad_norm=config.clip_grad_norm,
                    clock=meter.clock,
                    before_update=keeper.before_update,
                )
            state.scheduler.step()
            state.step = step.step
            state.num_tokens += result.num_tokens
            elapsed = time.perf_counter() - started
            metrics = meter.describe(data, result, lr, waited, elapsed, keeper.take_costs())
            if _is_validation_due(config, prepared, step.step, num_steps):
                started = time.perf_counter()
                metrics["validation_loss"] = validation_loss(config, state.model, prepared, world)
                metrics["validation_time_s"] = time.perf_counter() - started
            metrics |= keeper.measure(step.step, step.step == num_steps)
            sinks.write(metrics)
            nonfinite_in_row = 0 if result.is_applied else nonfinite_in_row + 1
            if nonfinite_in_row:
                _stop_at_nonfinite(config, step.step, result, nonfinite_in_row)
            if not keeper.after_step(step.step, step.step == num_steps):
                break


def validation_loss(config: RunConfig, model: CausalLM, prepared: PreparedSet, world: World) -> float:
    """Weighted mean loss over the validation split; the same at any world size."""
    num_packs = prepared.num_packs("validation")
    loader = GlobalLoader(prepared, "validation", num_packs, config.seed, is_shuffled=False)
    batches = loader.micro_batches(loader.step_at(1), world.rank, world.world_size, config.micro_batch_size)
    return mean_loss(model, batches, world)


def _is_validation_due(config: RunConfig, prepared: PreparedSet, step: int, num_steps: int) -> bool:
    every = config.validation.every_n_steps
    return bool(every and prepared.num_packs("validation") and (step % every == 0 or step == num_steps))


def _stop_at_nonfinite(config: RunConfig, step: int, result: StepResult, in_row: int) -> None:
    if config.on_nonfinite == "skip" and in_row < config.max_nonfinite:
        return
    remedy = "set on_nonfinite=skip to leave such steps out"
    if config.on_nonfinite == "skip":
        remedy = f"look at the data: {in_row} steps in a row were so (max_nonfinite)"
    raise NonFiniteError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, stopped before the update. "
        f"Lower optimizer.lr, or {remedy}."
    )
