"""The training loop; ``step`` computes one optimizer step, and ``callbacks`` hold everything around it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import DataError
from fctune.checkpoint.fault_hooks import fire
from fctune.checkpoint.state import TrainState
from fctune.config.intervals import format_count, is_never
from fctune.config.schema import RunConfig
from fctune.data.loader import ROW_MULTIPLE, GlobalLoader
from fctune.data.prepared_set import PreparedSet, Split
from fctune.models.causal_lm import CausalLM
from fctune.models.document_attention import CPU_TILE
from fctune.parallel.activations import count_graphs
from fctune.runs.sinks import SinkGroup
from fctune.training.callbacks.base import Callback
from fctune.training.meter import Meter
from fctune.training.objective import Objective, SupervisedObjective
from fctune.training.prefetch import Prefetcher, StepData, StepSource
from fctune.training.step import StepResult, evaluate_objective, train_step

logger = logging.getLogger("fctune")


class NonFiniteError(RuntimeError):
    """A step's loss or gradient norm is NaN or infinite; every rank keeps the weights from before the step."""


def build_loader(config: RunConfig, prepared: PreparedSet, split: Split = "train") -> GlobalLoader:
    """Build the loader of the training split, or of the validation split, all of which is one step.

    Use one batch shape if kernels are compiled or memory is cached for each shape.
    """
    return GlobalLoader(
        prepared,
        split,
        config.global_batch_size if split == "train" else prepared.num_packs(split),
        config.seed,
        is_shuffled=split == "train",
        pad_to=config.data.pad_to,
        has_full_batches=config.compile or torch.cuda.is_available(),
        row_multiple=_find_row_multiple(config),
    )


def _find_row_multiple(config: RunConfig) -> int:
    """Return the number that lengths of unpacked rows are padded to a multiple of.

    On CPUs, 16-bit products keep a kernel for each length.

    A model of two small blocks keeps 11 MiB for a shape of its batch, until the process ends.
    """
    keeps = not torch.cuda.is_available() and config.precision in ("bf16", "bf16_mixed")
    return CPU_TILE if keeps else ROW_MULTIPLE


def count_steps(config: RunConfig, loader: GlobalLoader, world: World) -> int:
    """Return the number of optimizer steps of the run, and warn of ranks that have no data in any of them.

    Such a rank computes one row of padding without weight, so it changes no result.

    Raises:
        DataError: The training split is empty.
    """
    if not loader.prepared.num_packs("train"):
        raise DataError("the training split has no conversations. Add rows, or lower data.validation_share.")
    num_packs = min(loader.prepared.num_packs("train"), config.global_batch_size)
    num_shares = world.world_size // (config.parallel.context or 1)
    if num_packs < num_shares and world.is_main:
        logger.warning(
            "%d of %d ranks have no data: a step has %d %s. Use fewer ranks, or a larger global_batch_size.",
            (num_shares - num_packs) * (config.parallel.context or 1),
            world.world_size,
            num_packs,
            "packs" if loader.prepared.is_packed else "conversations",
        )
    steps = config.epochs * loader.steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


def train(
    config: RunConfig,
    state: TrainState,
    loader: GlobalLoader | None,
    num_steps: int,
    world: World,
    sinks: SinkGroup,
    callbacks: Sequence[Callback] = (),
    gpu_hours: float = 0.0,
    objective: Objective | None = None,
    source: StepSource | None = None,
) -> None:
    """Train from ``state.step`` to ``num_steps``, in place, or until a callback ends training.

    Args:
        config: Config of the run.
        state: State that training changes.
        loader: Loader of the training split, whose prepared set also has the validation split; None with a ``source``
            of other data, of which nothing is held out.
        num_steps: Last optimizer step.
        world: This rank.
        sinks: Receive the metrics of each step.
        callbacks: Hooks, called in this order; see ``Callback``.
        gpu_hours: GPU-hours of the run before this process started.
        objective: Computes the loss; None is that of supervised tokens.
        source: Where the data of the steps comes from; None prefetches the loader's.

    Raises:
        NonFiniteError: A step was not finite and ``on_nonfinite`` is stop.
    """
    objective = objective or SupervisedObjective()
    state.model.train()
    state.timers.start(num_steps, distributed.run_on_rank_0(time.monotonic))
    num_nonfinite = 0  # in a row
    if source is None:
        assert loader is not None
        model = state.model
        shape = model.make_bounds, num_steps, model.context_group, model.row_cost
        source = Prefetcher(loader, world, config.micro_batch_packs, *shape)
    with source, Meter(config, state.model, world, gpu_hours) as meter:
        while state.step < num_steps:
            started = time.perf_counter()
            data = source.take(state.step + 1)
            step, is_last, wait_s = data.step.step, data.step.step == num_steps, time.perf_counter() - started
            lr = float(state.scheduler.get_last_lr()[0])
            result = _take_step(config, state, data, world, objective, callbacks, meter)
            elapsed_s = time.perf_counter() - started
            costs = {name: seconds for callback in callbacks for name, seconds in callback.step_costs().items()}
            metrics = meter.measure(data, result, lr, wait_s, elapsed_s, costs) | dict(data.metrics)
            if loader is not None and _is_validation_due(config, loader.prepared, state, is_last):
                started = time.perf_counter()
                metrics |= validate(config, state.model, objective, loader.prepared, world)
                metrics["validation_time_s"] = time.perf_counter() - started
            for callback in callbacks:
                metrics |= callback.measure(step, is_last)
            if config.compile:
                metrics["compiled_graphs"] = count_graphs()
            sinks.write(metrics)
            num_nonfinite = 0 if result.is_applied else num_nonfinite + 1
            if num_nonfinite:
                _check_nonfinite(config, step, result, num_nonfinite)
            should_stop = [callback.on_step_end(step, is_last) for callback in callbacks]
            if any(should_stop):
                break


def _take_step(
    config: RunConfig,
    state: TrainState,
    data: StepData,
    world: World,
    objective: Objective,
    callbacks: Sequence[Callback],
    meter: Meter,
) -> StepResult:
    """Take an optimizer step between its hooks, and advance the schedule and the counters, in place."""
    step = data.step.step
    for callback in callbacks:
        callback.on_step_start(step)
    fire("step", str(step))

    def before_update() -> None:
        fire("update", str(step))
        for callback in callbacks:
            callback.before_optimizer_update(step)

    with meter.profile(step):
        result = train_step(
            state.model,
            state.optimizer,
            data,
            world,
            state.gradient_sync,
            objective,
            clip_grad_norm=config.clip_grad_norm,
            clock=meter.clock,
            before_update=before_update,
        )
    for callback in callbacks:
        callback.after_optimizer_update(step)
    state.scheduler.step()
    state.step = step
    state.num_tokens += result.num_tokens
    state.timers.advance(result.rank_0_s)
    return result


def validate(
    config: RunConfig, model: CausalLM, objective: Objective, prepared: PreparedSet, world: World
) -> dict[str, float]:
    """Return the objective's loss and metrics over the validation split; independent of the world size."""
    loader = build_loader(config, prepared, "validation")
    step = loader.step_at(1)
    share = model.context_group.find_share(world)
    batches = loader.micro_batches(step, *share, config.micro_batch_packs, model.row_cost)
    loss, metrics = evaluate_objective(model, objective, batches, loader.totals(step), world)
    return {"validation_loss": loss} | {f"validation_{name}": value for name, value in metrics.items()}


def _is_validation_due(config: RunConfig, prepared: PreparedSet, state: TrainState, is_last: bool) -> bool:
    every = config.validation.every
    if is_never(every) or not prepared.num_packs("validation"):
        return False
    return state.timers.is_due("validation", every, state.step) or is_last


def _check_nonfinite(config: RunConfig, step: int, result: StepResult, num_in_row: int) -> None:
    if config.on_nonfinite == "skip" and num_in_row < config.max_nonfinite:
        return
    remedy = "set on_nonfinite=skip to skip such steps"
    if config.on_nonfinite == "skip":
        remedy = f"check the data: {format_count(num_in_row, 'step')} in a row not finite (limit: max_nonfinite)"
    raise NonFiniteError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, stopped before the update. "
        f"Lower optimizer.lr, or {remedy}."
    )
