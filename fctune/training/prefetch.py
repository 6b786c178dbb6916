"""Batches on their way to the device: the next step's are made while this one runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fctune.data.loader import IGNORE, Batch, GlobalLoader, GlobalStep, StepTotals
from fctune.distributed import World
from fctune.models.attention import DocumentBounds, Kernel, make_bounds
from fctune.models.dropout import row_key


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model is given of one micro-batch; fields as in ``CausalLM.forward``."""

    tokens: Tensor
    labels: Tensor
    loss_weights: Tensor
    supervised: Tensor
    row_keys: Tensor
    positions: Tensor | None
    bounds: DocumentBounds | None

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments of the model, on its device; the host does not wait for the copies."""
        moved = {
            name: None if (value := getattr(self, name)) is None else value.to(device, non_blocking=True)
            for name in ("tokens", "labels", "loss_weights", "supervised", "row_keys", "positions")
        }
        return moved | {"bounds": None if self.bounds is None else self.bounds.to(device)}


@dataclass(frozen=True, slots=True)
class StepData:
    """One rank's share of a global step."""

    step: GlobalStep
    totals: StepTotals
    inputs: list[Inputs]


class Feeder:
    """Makes a rank's inputs step by step, one step ahead, on one thread: what is made does not depend on when.

    Args:
        loader: deals the packs.
        world: this rank.
        micro_batch_size: packs at a time.
        kernel: that attends within packed rows.
        num_steps: the last step.
    """

    def __init__(self, loader: GlobalLoader, world: World, micro_batch_size: int, kernel: Kernel, num_steps: int):
        self._loader, self._world, self._kernel = loader, world, kernel
        self._micro_batch_size, self._num_steps = micro_batch_size, num_steps
        # Pinned memory belongs to the thread's device, which for a new thread is the first one whatever the rank.
        starts: dict[str, Any] = {}
        if world.device.type == "cuda":
            starts = {"initializer": torch.cuda.set_device, "initargs": (world.device,)}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feeder", **starts)
        self._ahead: tuple[int, Future[StepData]] | None = None

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def take(self, step: int) -> StepData:
        """The inputs of global step ``step``; the one after it is begun."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._thread.submit(self._make, step))
        data = self._ahead[1].result()
        if step < self._num_steps:
            self._ahead = (step + 1, self._thread.submit(self._make, step + 1))
        return data

    def _make(self, number: int) -> StepData:
        step, world = self._loader.step_at(number), self._world
        totals = self._loader.totals(step)
        batches = self._loader.micro_batches(step, world.rank, world.world_size, self._micro_batch_size)
        pins = world.device.type == "cuda"
        inputs = [make_inputs(b, self._kernel, seed=self._loader.seed, step=number, pins=pins) for b in batches]
        return StepData(step, totals, inputs)


def make_inputs(batch: Batch, kernel: Kernel, *, seed: int = 0, step: int = 0, pins: bool = False) -> Inputs:
    """A batch as the model takes it, on the CPU; dropout is a function of (seed, step, row).

    Args:
        batch: of the loader.
        kernel: that attends within packed rows.
        seed: of the run.
        step: global step.
        pins: whether to put it in pinned memory, from which copies to a CUDA device do not wait.
    """
    bounds = None if batch.lengths is None else make_bounds(batch.lengths, kernel)
    tensors: dict[str, Tensor | None] = {
        "tokens": batch.tokens,
        "labels": batch.labels,
        "loss_weights": batch.loss_weights,
        "supervised": (batch.labels.flatten() != IGNORE).nonzero().squeeze(1),
        "row_keys": torch.tensor([row_key(seed, step, row) for row in batch.rows]),
        "positions": batch.positions,
    }
    if pins:
        tensors = {name: None if tensor is None else tensor.pin_memory() for name, tensor in tensors.items()}
        bounds = None if bounds is None else bounds.pin()
    return Inputs(bounds=bounds, **tensors)  # type: ignore[arg-type]
