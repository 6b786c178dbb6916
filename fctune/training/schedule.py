"""Learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fctune.config.schema import LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, num_steps: int) -> Callable[[int], float]:
    """Factor on the optimizer's lr at each step, counted from 0.

    It rises linearly over the warm-up, the first step already above 0, then follows half a cosine
    (https://arxiv.org/abs/1608.03983) or a line down to ``min_factor`` at the last step, or stays.
    """
    warmup = config.num_warmup_steps
    if config.warmup_share is not None:
        warmup = math.ceil(config.warmup_share * num_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.name == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
        return config.min_factor + (1 - config.min_factor) * falling

    return factor


def build_scheduler(optimizer: Optimizer, config: LRSchedulerConfig, num_steps: int) -> LambdaLR:
    """A torch scheduler for a run of ``num_steps``."""
    return LambdaLR(optimizer, lr_factor(config, num_steps))


def move_schedule_(scheduler: LambdaLR, step: int) -> None:
    """Put a schedule where it is after ``step`` optimizer steps, in place."""
    scheduler.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, lr in zip(scheduler.optimizer.param_groups, rates, strict=True):
        set_lr_(group, lr)
    scheduler._last_lr = rates


def set_lr_(group: dict[str, Any], lr: float | Tensor) -> None:
    """Set the rate of an optimizer's group, in place."""
    if isinstance(group["lr"], Tensor):  # torchao's optimizers hold it in a tensor and refuse a number
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
