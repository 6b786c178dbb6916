"""Learning-rate schedules: warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fctune.config.intervals import parse_interval
from fctune.config.schema import LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, num_steps: int) -> Callable[[int], float]:
    """Return the factor on the optimizer's lr as a function of the step (from 0).

    It rises linearly over the warm-up, starting above 0, then follows half a cosine (https://arxiv.org/abs/1608.03983)
    or a line down to ``min_factor`` at the last step, or stays at 1.
    """
    warmup = parse_interval(config.warmup).in_steps(num_steps) or 0

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
    """Build the torch scheduler of a run of ``num_steps``."""
    return LambdaLR(optimizer, lr_factor(config, num_steps))
