"""The training loop: the order of things. What a step computes is in ``step``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fctune.config import RunConfig
from fctune.data.loader import GlobalLoader
from fctune.data.prepared import PreparedSet
from fctune.errors import ConfigError, DataError
from fctune.telemetry.sinks import Sinks
from fctune.training.distributed import World
from fctune.training.step import StepResult, mean_loss, train_step


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm of a step is not finite, on all ranks alike; the weights are those before it."""


@dataclass(slots=True)
class TrainState:
    """All that a step changes."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    step: int = 0


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
    config: RunConfig, state: TrainState, prepared: PreparedSet, num_steps: int, world: World, sinks: Sinks
) -> None:
    """Take the run from ``state.step`` to ``num_steps``, in place.

    Raises:
        NonFiniteError: a step was not finite and ``on_nonfinite`` is stop.
    """
    loader = GlobalLoader(prepared, "train", config.global_batch_size, config.seed, pad_to=config.data.pad_to)
    state.model.train()
    while state.step < num_steps:
        started = time.perf_counter()
        step = loader.step_at(state.step + 1)
        batches = loader.micro_batches(step, world.rank, world.world_size, config.micro_batch_size)
        lr = float(state.scheduler.get_last_lr()[0])
        result = train_step(
            state.model,
            state.optimizer,
            batches,
            world,
            clip_grad_norm=config.clip_grad_norm,
            seed=config.seed,
            step=step.step,
        )
        state.scheduler.step()
        state.step = step.step
        elapsed = time.perf_counter() - started
        metrics = _describe_step(result, lr, elapsed) | {"step": step.step, "epoch": step.epoch}
        metrics["data_digest"] = step.data_digest
        if _is_validation_due(config, prepared, step.step, num_steps):
            metrics["validation_loss"] = validation_loss(config, state.model, prepared, world)
        sinks.write(metrics)
        if not result.is_applied and config.on_nonfinite == "stop":
            raise NonFiniteError(
                f"step {step.step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, stopped before "
                "the update. Lower optimizer.lr, or set on_nonfinite=skip to leave such steps out."
            )


def validation_loss(config: RunConfig, model: nn.Module, prepared: PreparedSet, world: World) -> float:
    """Weighted mean loss over the validation split; the same at any world size."""
    num_packs = prepared.num_packs("validation")
    loader = GlobalLoader(prepared, "validation", num_packs, config.seed, is_shuffled=False)
    batches = loader.micro_batches(loader.step_at(1), world.rank, world.world_size, config.micro_batch_size)
    return mean_loss(model, batches, world)


def _is_validation_due(config: RunConfig, prepared: PreparedSet, step: int, num_steps: int) -> bool:
    every = config.validation.every_n_steps
    return bool(every and prepared.num_packs("validation") and (step % every == 0 or step == num_steps))


def _describe_step(result: StepResult, lr: float, elapsed_s: float) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "loss": result.loss,
        "lr": lr,
        "grad_norm": result.grad_norm,
        "tokens_total": result.num_tokens,
        "tokens_supervised": result.num_supervised,
        "tokens_per_s": result.num_tokens / elapsed_s,
        "step_time_s": elapsed_s,
    }
    return metrics if result.is_applied else metrics | {"is_skipped": True}
