"""One optimizer step, and the objective over a validation set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.data.loader import Batch, StepTotals
from fctune.models.causal_lm import CausalLM
from fctune.models.router_balance import RouterBalance
from fctune.parallel.sharding import GradientSync, reshard_
from fctune.runs.metrics import SpanTimer
from fctune.training.objective import Objective
from fctune.training.prefetch import StepData, make_inputs

# A user's optimizer may take ``found_inf`` otherwise.
_SKIPPING_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_NUM_CHECKED = 3  # first numbers of a rank's results: loss, norm, and the routers' loss


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step, over all ranks.

    Attributes:
        loss: Loss of the objective over the global batch.
        metrics: Metrics of the objective, by name.
        grad_norm: Total norm before clipping.
        num_tokens: Tokens without padding.
        num_supervised: Tokens with a label.
        num_slots: Positions computed, including padding.
        compute_s: Seconds of forward and backward on each rank in the last step whose results were known when the
            ranks exchanged those of this one.
        router_aux_loss: Load-balancing loss of the routers, without its coefficient; None if the run has none.
        rank_0_s: Rank 0's ``time.monotonic`` at the exchange, so that all ranks can decide by one clock.
        is_applied: False if the loss or norm was not finite, so that no weight changed.
    """

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    num_tokens: int
    num_supervised: int
    num_slots: int
    compute_s: tuple[float, ...]
    router_aux_loss: float | None
    rank_0_s: float
    is_applied: bool


class UpdateGuard:
    """Decides on the device whether the update of a step is applied, so that the host need not wait for its results.

    After ``limit`` steps in a row that were not finite, no update is applied any more: the host, which may have started
    the next step by then, finds the weights from before.

    Args:
        limit: Steps in a row that end the run.
        device: Device of the results.
    """

    def __init__(self, limit: int, device: torch.device):
        self._limit = limit
        self._num_in_row = torch.zeros((), dtype=torch.float32, device=device)  # as the fused kernels read it

    def skip(self, rows: Tensor) -> Tensor:
        """Return 1.0 if the update is to be skipped, else 0.0, a scalar on the device.

        Args:
            rows: Exchanged results of the step, which begin with the numbers that must be finite.
        """
        is_bad = _is_bad(rows).to(self._num_in_row.dtype)
        is_ended = self._num_in_row >= self._limit
        self._num_in_row = torch.where(is_ended, self._num_in_row, (self._num_in_row + is_bad) * is_bad)
        return torch.maximum(is_bad, is_ended.to(is_bad.dtype))


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips its update, state and all, where a tensor ``found_inf`` on the device is 1.

    torch's fused optimizers do, for ``torch.amp.GradScaler``, except that SGD keeps a momentum of undefined numbers if
    its first step is skipped (``_fused_sgd`` in torch 2.13).
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return is_fused and not has_momentum and type(optimizer) in _SKIPPING_OPTIMIZERS


class LaunchedStep:
    """A step that was launched, whose results the device may not have computed yet.

    Args:
        rows: Results of all ranks, on the device or, where they are known, as numbers.
        clock: Timer, one of whose spans is this step's.
        describe: Turns the numbers into the step's result.
    """

    def __init__(
        self,
        rows: Tensor | list[list[float]],
        clock: SpanTimer,
        describe: Callable[[list[list[float]]], StepResult],
    ):
        self._clock, self._describe = clock, describe
        self._rows, self._copied = rows, None
        if isinstance(rows, Tensor) and rows.device.type == "cuda":
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
            copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied = copied

    def read(self) -> StepResult:
        """Wait for the results and return them; call it once."""
        if self._copied is not None:
            self._copied.synchronize()
        self._clock.settle()
        return self._describe(self._rows.tolist() if isinstance(self._rows, Tensor) else self._rows)


def launch_step(
    model: CausalLM,
    optimizer: Optimizer,
    data: StepData,
    world: World,
    gradient_sync: GradientSync,
    objective: Objective,
    *,
    clip_grad_norm: float | None,
    clock: SpanTimer | None = None,
    before_update: Callable[[], None] = lambda: None,
    guard: UpdateGuard | None = None,
) -> LaunchedStep:
    """Accumulate gradients over this rank's micro-batches, reduce them over ranks, clip and update.

    The loss is one mean over the global step, such as the weighted mean over all of its supervised tokens, to which
    each micro-batch of each rank adds its part. The divisor is known before the first backward pass, so gradients need
    no rescaling. Gradients are averaged over ranks, hence the factor ``world_size``. A mixture of experts may add the
    load-balancing loss of the global batch, which is not part of the loss that is returned.

    The host waits for the device once, for the numbers that are logged and that decide whether the update is applied;
    with a guard, it does not wait until the results are read.

    Args:
        model: Model to train, in place.
        optimizer: Optimizer of its trainable parameters.
        data: This rank's share of the global step.
        world: This rank.
        gradient_sync: Defers the reduction of gradients to the last micro-batch.
        objective: Computes the loss.
        clip_grad_norm: Largest total norm; None does not clip.
        clock: Times forward and backward.
        before_update: Called when the gradients are ready, or under way, and the weights are about to change.
        guard: Decides about the update on the device; the optimizer must have ``can_skip_on_device``.
    """
    totals, clock = data.totals, clock or SpanTimer(world.device)
    optimizer.zero_grad(set_to_none=True)
    clock.start()
    measured = _Measured(objective, world.device)
    balance = model.router_balance
    _accumulate_gradients(model, data, world, gradient_sync, measured)
    clock.stop()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = _clip_(parameters, clip_grad_norm)
    num_slots = sum(inputs.tokens.numel() for inputs in data.inputs)
    loss_sum = measured.loss
    aux_sum = loss_sum.new_zeros(()) if balance is None or balance.value is None else balance.value
    computed = torch.cat([torch.stack([loss_sum, norm.to(loss_sum), aux_sum]), measured.metrics])
    known = [num_slots, clock.last_s, time.monotonic()]

    def describe(rows: list[list[float]]) -> StepResult:
        return StepResult(
            loss=sum(row[0] for row in rows),
            metrics=measured.combine([row[_NUM_CHECKED:] for row in rows]),
            grad_norm=rows[0][1],
            num_tokens=totals.num_tokens,
            num_supervised=totals.num_supervised,
            num_slots=int(sum(row[-3] for row in rows)),
            compute_s=tuple(row[-2] for row in rows),
            router_aux_loss=None if balance is None else sum(row[2] for row in rows),
            rank_0_s=rows[0][-1],
            is_applied=_is_finite(rows),
        )

    if guard is None:
        numbers = _exchange(computed, known, world)
        before_update()
        if _is_finite(numbers):
            optimizer.step()
        return LaunchedStep(numbers, clock, describe)
    rows = _gather(computed, known, world)
    before_update()
    scaled: Any = optimizer
    scaled.found_inf = guard.skip(rows)
    optimizer.step()
    del scaled.found_inf
    return LaunchedStep(rows, clock, describe)


def _is_finite(rows: Sequence[Sequence[float]]) -> bool:
    return all(math.isfinite(value) for row in rows for value in row[:_NUM_CHECKED])


def _is_bad(rows: Tensor) -> Tensor:
    """Return whether a step is not finite, as ``_is_finite`` decides it on the host."""
    return torch.isfinite(rows[:, :_NUM_CHECKED]).logical_not().any()


class _Measured:
    """Loss and metrics of an objective, summed over micro-batches and ranks; of some metrics the maximum.

    Attributes:
        loss: This rank's loss, a float64 scalar on the device.
        metrics: Its metrics, float64 ``[k]``.
    """

    def __init__(self, objective: Objective, device: torch.device):
        self.objective = objective
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics = torch.zeros(len(objective.metrics), dtype=torch.float64, device=device)
        self._num_sums = len(objective.metrics) - len(objective.maxima)

    def add(self, loss: Tensor, metrics: Tensor) -> None:
        """Add the parts of a micro-batch."""
        sums, maxima = self.metrics[: self._num_sums], self.metrics[self._num_sums :]
        self.loss += loss.detach()
        sums += metrics[: self._num_sums]
        torch.maximum(maxima, metrics[self._num_sums :], out=maxima)

    def combine(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the metrics of all ranks by name, from rows that start with those of each."""
        return {
            name: (sum if index < self._num_sums else max)(row[index] for row in rows)
            for index, name in enumerate(self.objective.metrics)
        }


def _accumulate_gradients(
    model: CausalLM, data: StepData, world: World, gradient_sync: GradientSync, measured: _Measured
) -> None:
    """Run forward and backward of each micro-batch, and add what the objective returns to ``measured``."""
    balance = model.router_balance
    if balance is not None:
        _count_choices(model, balance, data, world)
    for num_left, inputs in zip(reversed(range(len(data.inputs))), data.inputs, strict=True):
        gradient_sync.defer(num_left > 0)
        loss, metrics = measured.objective.compute(model, inputs, data.totals, world.device)
        measured.add(loss, metrics)
        if balance is not None:
            loss = loss + balance.loss()
        (world.world_size * loss).backward()  # type: ignore[no-untyped-call]
    gradient_sync.finish()


def _count_choices(model: CausalLM, balance: RouterBalance, data: StepData, world: World) -> None:
    """Count the choices of the routers over the global batch, in a forward pass of its own if it takes several."""
    balance.start_step()
    if len(data.inputs) == 1:
        return  # counted in the only forward pass
    nothing = torch.empty(0, dtype=torch.int64, device=world.device)
    with torch.no_grad():
        for inputs in data.inputs:
            model(**inputs.arguments(world.device) | {"supervised": nothing})  # no logits
            balance.add_counts()
    balance.finish_counts()


@torch.no_grad()
def evaluate_objective(
    model: CausalLM, objective: Objective, batches: Iterable[Batch], totals: StepTotals, world: World
) -> tuple[float, dict[str, float]]:
    """Return the loss and the metrics of an objective without dropout; the training mode is restored.

    Args:
        model: Model to evaluate.
        objective: Computes the loss.
        batches: Batches of this rank.
        totals: Totals over the batches of all ranks.
        world: This rank.
    """
    was_training = model.training
    model.eval()
    measured = _Measured(objective, world.device)
    for batch in batches:
        inputs = make_inputs(batch, model.make_bounds, group=model.context_group)
        measured.add(*objective.compute(model, inputs, totals, world.device))
    model.train(was_training)
    reshard_(model)
    rows = _exchange(torch.cat([measured.loss[None], measured.metrics]), [], world)
    return sum(row[0] for row in rows), measured.combine([row[1:] for row in rows])


def _exchange(measured: Tensor, known: Sequence[float], world: World) -> list[list[float]]:
    """Return what ``_gather`` does as numbers; waits for the device."""
    rows: list[list[float]] = _gather(measured, known, world).tolist()
    return rows


def _gather(measured: Tensor, known: Sequence[float], world: World) -> Tensor:
    """Gather every rank's numbers, ``[world_size, n]``: those on the device first, then those on the host."""
    host = torch.tensor(known, dtype=measured.dtype, pin_memory=world.device.type == "cuda")
    row = torch.cat([measured, host.to(world.device, non_blocking=True)])
    return distributed.all_gather_rows(row)


@torch.no_grad()
def _clip_(parameters: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Clip gradients to a total norm in place; returns the norm before, over all shards, as a plain scalar tensor.

    As ``torch.nn.utils.clip_grad_norm_``, but on each rank's own shards: to plan an operation on n DTensors takes time
    that grows with n squared, eight seconds for 960 of them on a two-dimensional mesh.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_layout.setdefault(layout, []).append(local)
    norms = []
    for layout, gradients in by_layout.items():
        norm = get_total_norm(gradients)
        if layout is not None:
            mesh, placements = layout
            parts = [placement if placement.is_replicate() else Partial() for placement in placements]
            norm = DTensor.from_local(norm.square(), mesh, parts).full_tensor().sqrt()
        norms.append(norm)
    total: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's
        for gradients in by_layout.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return total
