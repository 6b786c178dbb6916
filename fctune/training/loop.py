"""The training loop; ``step`` computes one optimizer step, and ``callbacks`` hold everything around it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

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
from fctune.training.step import (
    LaunchedStep,
    StepResult,
    UpdateGuard,
    can_skip_on_device,
    evaluate_objective,
    launch_step,
)

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
    *,
    runs_ahead: bool | None = None,
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
        runs_ahead: Start each step before the results of the one before are known, which takes an optimizer that
            ``can_skip_on_device``. None: with the config's ``run_ahead``, on CUDA devices, where the data does not
            depend on the policy.

    Raises:
        NonFiniteError: A step was not finite and ``on_nonfinite`` is stop.
    """
    objective = objective or SupervisedObjective()
    state.model.train()
    state.timers.start(num_steps, distributed.run_on_rank_0(time.monotonic))
    if runs_ahead is None:
        runs_ahead = config.run_ahead and _can_run_ahead(config, state, world)
    guard = UpdateGuard(_max_nonfinite(config), world.device) if runs_ahead else None
    if source is None:
        assert loader is not None
        model = state.model
        shape = model.make_bounds, num_steps, model.context_group, model.row_cost
        source = Prefetcher(loader, world, config.micro_batch_packs, *shape)
    with source, Meter(config, state.model, world, gpu_hours) as meter:
        steps = _StepsUnderWay(config, state, meter, sinks, callbacks)
        while state.step < num_steps:
            started = time.perf_counter()
            data = source.take(state.step + 1)
            step, is_last, wait_s = data.step.step, data.step.step == num_steps, time.perf_counter() - started
            lr = float(state.scheduler.get_last_lr()[0])
            launched = _take_step(config, state, data, world, objective, callbacks, meter, guard, steps.settle)
            taken = _Taken(launched, data, lr, wait_s, started)
            steps.begin(taken)
            if guard is None:
                steps.read_(taken)
            taken.costs = {name: seconds for callback in callbacks for name, seconds in callback.step_costs().items()}
            if loader is not None and _is_validation_due(config, loader.prepared, state, is_last):
                steps.wait()
                started = time.perf_counter()
                taken.metrics |= validate(config, state.model, objective, loader.prepared, world)
                taken.metrics["validation_time_s"] = time.perf_counter() - started
            for callback in callbacks:
                taken.metrics |= callback.measure(step, is_last)
            if config.compile:
                taken.metrics["compiled_graphs"] = count_graphs()
            steps.add(taken)
            if guard is None or is_last:
                steps.settle()
            should_stop = [callback.on_step_end(step, is_last) for callback in callbacks]
            if any(should_stop):
                break
        steps.settle()


def _can_run_ahead(config: RunConfig, state: TrainState, world: World) -> bool:
    """Return whether the host need not wait for a step's results before it starts the next one."""
    is_offloaded = config.parallel.cpu_offload
    is_cuda = world.device.type == "cuda"
    # Rollouts are of the policy after each update, and take so long that nothing is gained.
    return is_cuda and not is_offloaded and config.rollouts is None and can_skip_on_device(state.optimizer)


def _max_nonfinite(config: RunConfig) -> int:
    """Return how many steps in a row that are not finite end the run."""
    return config.max_nonfinite if config.on_nonfinite == "skip" else 1


@dataclass(slots=True)
class _Taken:
    """A step that was launched, and what is known of it without its results.

    Attributes:
        launched: The step.
        data: Its data.
        lr: Learning rate of its update.
        wait_s: Wait for the data.
        started: ``time.perf_counter`` when its data was requested.
        costs: Seconds spent by callbacks, by metric.
        metrics: Validation and what callbacks measured.
        result: Its results, once they were read.
        elapsed_s: Seconds that it took, known from then on.
    """

    launched: LaunchedStep
    data: StepData
    lr: float
    wait_s: float
    started: float
    costs: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    result: StepResult | None = None
    elapsed_s: float = 0.0


class _StepsUnderWay:
    """Steps whose metrics are not written yet, in order; at most one when the next is launched.

    Sets ``state.settle`` and ``state.wait``. Every rank settles at the same points.
    """

    def __init__(
        self, config: RunConfig, state: TrainState, meter: Meter, sinks: SinkGroup, callbacks: Sequence[Callback]
    ):
        self._config, self._state, self._meter, self._sinks, self._callbacks = config, state, meter, sinks, callbacks
        self._steps: deque[_Taken] = deque()
        self._num_nonfinite = 0  # in a row
        self._read_at = 0.0  # when the newest results were known
        self._newest: _Taken | None = None
        state.settle, state.wait = self.settle, self.wait

    def begin(self, taken: _Taken) -> None:
        """Note the step that was launched last, which is not complete yet."""
        self._newest = taken

    def wait(self) -> None:
        """Wait for the results of the step that was launched last, so that its time ends before what follows."""
        if self._newest is not None:
            self._read_under_limit_(self._newest)

    def add(self, taken: _Taken) -> None:
        """Add a step that is complete but for its results."""
        self._steps.append(taken)

    def read_(self, taken: _Taken) -> StepResult:
        """Wait for the results of a step unless they were read, and set the training time, in place."""
        if taken.result is None:
            taken.result = taken.launched.read()
            now = time.perf_counter()
            # A step that was launched while the device computed the one before began when that one ended.
            taken.elapsed_s = now - max(taken.started, self._read_at)
            self._read_at = now
            self._state.timers.advance(taken.result.rank_0_s)
        return taken.result

    def _read_under_limit_(self, taken: _Taken) -> StepResult:
        with ExitStack() as waits:
            for callback in self._callbacks:
                waits.enter_context(callback.waiting(taken.data.step.step))
            return self.read_(taken)

    def settle(self) -> None:
        """Wait for the results of all steps and write their metrics.

        Raises:
            NonFiniteError: A step was not finite and ends the run.
        """
        while self._steps:
            taken = self._steps.popleft()
            step, result = taken.data.step.step, self._read_under_limit_(taken)
            measured = self._meter.measure(taken.data, result, taken.lr, taken.wait_s, taken.elapsed_s, taken.costs)
            self._sinks.write(measured | dict(taken.data.metrics) | taken.metrics)
            self._num_nonfinite = 0 if result.is_applied else self._num_nonfinite + 1
            if self._num_nonfinite:
                _check_nonfinite(self._config, step, result, self._num_nonfinite)


def _take_step(
    config: RunConfig,
    state: TrainState,
    data: StepData,
    world: World,
    objective: Objective,
    callbacks: Sequence[Callback],
    meter: Meter,
    guard: UpdateGuard | None,
    settle_earlier: Callable[[], None],
) -> LaunchedStep:
    """Take an optimizer step between its hooks, and advance the schedule and the counters, in place.

    What was launched before is settled while the device computes the step.
    """
    step = data.step.step
    for callback in callbacks:
        callback.on_step_start(step)
    fire("step", str(step))

    def before_update() -> None:
        fire("update", str(step))
        for callback in callbacks:
            callback.before_optimizer_update(step)

    with meter.profile(step):
        launched = launch_step(
            state.model,
            state.optimizer,
            data,
            world,
            state.gradient_sync,
            objective,
            clip_grad_norm=config.clip_grad_norm,
            clock=meter.clock,
            before_update=before_update,
            guard=guard,
        )
    settle_earlier()
    for callback in callbacks:
        callback.after_optimizer_update(step)
    state.scheduler.step()
    state.step = step
    state.num_tokens += data.totals.num_tokens
    return launched


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
    if num_in_row < _max_nonfinite(config):
        return
    remedy = "set on_nonfinite=skip to skip such steps"
    if config.on_nonfinite == "skip":
        remedy = f"check the data: {format_count(num_in_row, 'step')} in a row not finite (limit: max_nonfinite)"
    raise NonFiniteError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite, stopped before the update. "
        f"Lower optimizer.lr, or {remedy}."
    )
