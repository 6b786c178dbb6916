"""What a plan is asked for, beside the config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fctune.errors import ConfigError
from fctune.gpus import Gpu
from fctune.planner.storage import FAILURES_PER_GPU_DAY


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The machines and what is known of the data; None takes what is found, or a stated assumption."""

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    model: str | None = None  # a directory with config.json
    rows: int | None = None
    mean_tokens: float | None = None
    price: float | None = None  # of a GPU-hour; else the config's
    efficiency: float | None = None
    disk_gb_s: float = 1.0
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY
    is_searching: bool = False

    def __post_init__(self) -> None:
        for option, number in (("--nodes", self.nodes), ("--gpus-per-node", self.gpus_per_node)):
            if number < 1:
                raise ConfigError(f"{option} {number}: expected 1 or more.")
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ConfigError(f"--efficiency {self.efficiency:g}: expected over 0 and at most 1.")
        if self.price is not None and not (self.price >= 0 and math.isfinite(self.price)):
            raise ConfigError(f"--price {self.price:g}: expected a finite number, 0 or more.")
        if not (self.disk_gb_s > 0 and math.isfinite(self.disk_gb_s)):
            raise ConfigError(f"--disk-gb-s {self.disk_gb_s:g}: expected a finite number over 0.")
        if not (self.failures_per_gpu_day >= 0 and math.isfinite(self.failures_per_gpu_day)):
            raise ConfigError(f"--failures-per-gpu-day {self.failures_per_gpu_day:g}: expected 0 or more.")
