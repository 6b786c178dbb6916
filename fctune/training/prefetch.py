"""Prefetching of batches: the next step's are built and pinned while the current one runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from fctune.base.distributed import World
from fctune.checkpoint.state import DataCursor
from fctune.data.loader import DEFAULT_COST, IGNORE, ROW_MULTIPLE, Batch, GlobalLoader, GlobalStep, RowCost, StepTotals
from fctune.models.attention import DocumentBounds, MakeBounds
from fctune.models.context_exchange import WHOLE_ROWS, ContextGroup
from fctune.models.dropout import row_key


@dataclass(frozen=True, slots=True)
class Inputs:
    """Model inputs of one micro-batch, on the CPU; fields as in ``CausalLM.forward``.

    ``answer_lengths`` are the numbers of supervised tokens of each answer, int64 ``[a]``, if the objective compares
    answers; the supervised positions are in their order. Rollouts also have their ``advantages``, float64 ``[a]``, and
    ``logprobs``, those of the supervised tokens under the policy that generated them, float64 ``[n]``. A server of a
    teacher sends ``teacher_ids``, its most likely tokens at each supervised position, int64 ``[n, k]``, with
    ``teacher_logprobs``, float32 ``[n, k]``.
    """

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    supervised: Tensor
    row_keys: Tensor
    row_lengths: Tensor
    positions: Tensor | None
    bounds: DocumentBounds | None
    start: int = 0
    answer_lengths: Tensor | None = None
    advantages: Tensor | None = None
    logprobs: Tensor | None = None
    teacher_ids: Tensor | None = None
    teacher_logprobs: Tensor | None = None

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Return the model's keyword arguments on its device; the host does not wait for the copies."""
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device, non_blocking=True)
            for name in ("tokens", "labels", "loss_weights", "supervised", "row_keys", "row_lengths", "positions")
        }
        return moved | {"bounds": None if self.bounds is None else self.bounds.to(device), "start": self.start}


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's share of a global step, and metrics of its preparation."""

    step: GlobalStep
    totals: StepTotals
    inputs: list[Inputs]
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepSource(AbstractContextManager["StepSource"], Protocol):
    """Source of the data of a run's steps; entered before the first step and exited after the last."""

    def take(self, step: int) -> StepData:
        """Return this rank's inputs of global step ``step``; every rank asks for the same steps in the same order."""


class ResumableSource(StepSource, DataCursor, Protocol):
    """Source of the data of a run's steps whose position is saved in checkpoints."""


class Prefetcher:
    """Builds a rank's inputs one step ahead, on a thread; the inputs of a step do not depend on timing.

    Args:
        loader: Assigns packs to steps and ranks.
        world: This rank.
        micro_batch_size: Packs per forward pass.
        make_bounds: Makes the boundaries of the documents of a batch's rows.
        num_steps: Last step of the run.
        group: Ranks that share each row.
        cost: Cost of the rows that are dealt to ranks.
    """

    def __init__(
        self,
        loader: GlobalLoader,
        world: World,
        micro_batch_size: int,
        make_bounds: MakeBounds,
        num_steps: int,
        group: ContextGroup = WHOLE_ROWS,
        cost: RowCost = DEFAULT_COST,
    ):
        self._loader, self._world, self._make_bounds, self._group = loader, world, make_bounds, group
        self._num_steps, self._cost = num_steps, cost
        # No more than a share of a step has, which batches of one shape would fill up with rows of padding.
        share = math.ceil(loader.global_batch_size / group.find_share(world)[1])
        self._micro_batch_size = min(micro_batch_size, share)
        # Pinned memory belongs to the thread's current device, and a new thread starts with device 0 on every rank.
        initializer: dict[str, Any] = {}
        if world.device.type == "cuda":
            initializer = {"initializer": torch.cuda.set_device, "initargs": (world.device,)}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch", **initializer)
        self._ahead: tuple[int, Future[StepData]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepData:
        """Return the inputs of global step ``step`` and start building those of the next."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._build, step))
        data = self._ahead[1].result()
        if step < self._num_steps:
            self._ahead = (step + 1, self._thread.submit(self._build, step + 1))
        return data

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the loader's state for a checkpoint after ``step``."""
        return self._loader.state_at(step)

    def resume_at(self, state: dict[str, Any]) -> None:
        """Check that a saved state is of the loader's data; ``take`` names the step to continue with.

        Raises:
            DataError: It is not.
        """
        self._loader.resume_at(state)

    def _build(self, number: int) -> StepData:
        step, world = self._loader.step_at(number), self._world
        totals = self._loader.totals(step)
        share = self._group.find_share(world)
        batches = self._loader.micro_batches(step, *share, self._micro_batch_size, self._cost)
        options: dict[str, Any] = {"seed": self._loader.seed, "step": number, "group": self._group}
        options["is_pinned"] = world.device.type == "cuda"
        inputs = [make_inputs(batch, self._make_bounds, **options) for batch in batches]
        return StepData(step, totals, inputs)


def make_inputs(
    batch: Batch,
    make_bounds: MakeBounds,
    *,
    seed: int = 0,
    step: int = 0,
    is_pinned: bool = False,
    group: ContextGroup = WHOLE_ROWS,
) -> Inputs:
    """Build the model inputs of a batch on the CPU; dropout is a function of (seed, step, row).

    Ranks that share rows get an equal part of the tokens of each, and the bounds of whole rows.

    Args:
        batch: Batch from the loader.
        make_bounds: Makes the boundaries of the documents of its rows, such as ``CausalLM.make_bounds``.
        seed: Seed of the run.
        step: Global step.
        is_pinned: Use pinned memory, from which copies to a CUDA device are asynchronous.
        group: Ranks that share each row.
    """
    if group.size > 1:
        batch = _pad_row_ends(batch, group.size * ROW_MULTIPLE)
    bounds = None if batch.lengths is None else replace(make_bounds(batch.lengths), group=group)
    lengths, num_tokens = batch.answer_lengths, batch.tokens.shape[1] // group.size
    start = group.rank * num_tokens
    tokens, labels, loss_weights, positions = (
        None if tensor is None else tensor[:, start : start + num_tokens].contiguous()
        for tensor in (batch.tokens, batch.labels, batch.loss_weights, batch.positions)
    )
    assert labels is not None
    tensors: dict[str, Tensor | None] = {
        "tokens": tokens,
        "labels": labels,
        "loss_weights": loss_weights,
        "supervised": (labels.flatten() != IGNORE).nonzero().squeeze(1),
        "row_keys": torch.tensor([row_key(seed, step, row) for row in batch.rows]),
        "row_lengths": (torch.tensor(batch.row_lengths) - start).clamp(0, num_tokens),
        "positions": positions,
        "answer_lengths": None if lengths is None else torch.tensor(lengths, dtype=torch.int64),
    }
    if is_pinned:
        tensors = {name: None if tensor is None else tensor.pin_memory() for name, tensor in tensors.items()}
        bounds = None if bounds is None else bounds.pin()
    return Inputs(bounds=bounds, start=start, **tensors)  # type: ignore[arg-type]


def _pad_row_ends(batch: Batch, multiple: int) -> Batch:
    """Return a batch with as many tokens a row as can be divided, whose rows have positions and lengths."""
    length = batch.tokens.shape[1]
    more = -length % multiple
    positions = torch.arange(length).expand_as(batch.tokens) if batch.positions is None else batch.positions
    lengths = batch.lengths or tuple((real, length - real) for real in batch.row_lengths)
    return replace(
        batch,
        tokens=pad(batch.tokens, (0, more)),
        labels=pad(batch.labels, (0, more), value=IGNORE),
        loss_weights=pad(batch.loss_weights, (0, more)),
        positions=pad(positions, (0, more)),
        lengths=tuple((*row, more) for row in lengths) if more else lengths,
    )
