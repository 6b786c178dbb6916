"""One optimizer step: what is computed, in which order, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fctune.data.loader import Batch
from fctune.modeling.attention import DocumentBounds
from fctune.modeling.dropout import row_key
from fctune.training import distributed
from fctune.training.distributed import World


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step measured, over all ranks; where it was not finite, ``is_applied`` is False and no weight changed."""

    loss: float
    grad_norm: float
    num_tokens: int
    num_supervised: int
    is_applied: bool


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    world: World,
    *,
    clip_grad_norm: float | None,
    seed: int,
    step: int,
) -> StepResult:
    """Accumulate over this rank's micro-batches, reduce over ranks, clip, update.

    The loss is one weighted mean over all supervised tokens of the global step: sum over micro-batches and ranks of
    weight x cross-entropy, divided by the sum of weights. The divisor is known before the first backward, so gradients
    need no scaling after. Sharded gradients come back averaged over ranks, hence the factor ``world_size``.
    """
    sums = torch.tensor(
        [
            sum(batch.weight_sum for batch in batches),
            sum(batch.num_tokens for batch in batches),
            sum(batch.num_supervised for batch in batches),
        ],
        dtype=torch.float64,
    )
    weight_sum, num_tokens, num_supervised = distributed.sum_(sums).tolist()
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for batch in batches:
        loss = batch_loss(model, batch, world.device, seed=seed, step=step)
        (loss * (world.world_size / weight_sum)).backward()
        loss_sum += loss.detach()
    loss_value = float(distributed.sum_(loss_sum)) / weight_sum
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = float(_clip_(parameters, clip_grad_norm))
    is_finite = math.isfinite(loss_value) and math.isfinite(grad_norm)
    if is_finite:
        optimizer.step()
    return StepResult(loss_value, grad_norm, int(num_tokens), int(num_supervised), is_finite)


def batch_loss(model: nn.Module, batch: Batch, device: torch.device, *, seed: int = 0, step: int = 0) -> Tensor:
    """Sum over a batch's supervised tokens of weight x cross-entropy; dropout is a function of (seed, step, row)."""
    keys = torch.tensor([row_key(seed, step, row) for row in batch.rows])
    loss: Tensor = model(
        batch.tokens.to(device, non_blocking=True),
        positions=None if batch.positions is None else batch.positions.to(device, non_blocking=True),
        bounds=None if batch.lengths is None else DocumentBounds(batch.lengths),
        labels=batch.labels.to(device, non_blocking=True),
        loss_weights=batch.loss_weights.to(device, non_blocking=True),
        row_keys=keys.to(device, non_blocking=True),
    )
    return loss


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Batch], world: World) -> float:
    """Weighted mean loss over all ranks' batches, without dropout; the training mode is put back after."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        sums += torch.tensor([float(batch_loss(model, batch, world.device)), batch.weight_sum], dtype=torch.float64)
    model.train(was_training)
    loss_sum, weight_sum = distributed.sum_(sums).tolist()
    return float(loss_sum / weight_sum)


def _clip_(parameters: Sequence[Tensor], max_norm: float | None) -> Tensor:
    """Total norm of the gradients, which are scaled down to ``max_norm`` in place; of all shards, as a plain scalar."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
