"""Inputs of a plan other than the config: machines, price, and assumptions about the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fctune.base.errors import ConfigProblems
from fctune.base.gpus import FAILURES_PER_GPU_DAY, Gpu
from fctune.runs.prices import NETWORK_GIB, Prices

# Gigabytes per second from the hub and the registry to a node. An assumption; ``--download-gb-s``.
DOWNLOAD_GB_S = 0.25


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Machines and data to plan for; None takes what is found on disk, or a stated assumption.

    Raises:
        ConfigError: Numbers are out of range, one line each.
    """

    gpu: Gpu
    nodes: int = 1
    gpus_per_node: int = 8
    model: str | None = None  # directory with a config.json, instead of the config's model.path
    rows: int | None = None  # rows of the data, if no prepared set exists
    mean_tokens: float | None = None  # mean tokens per row
    price: float | None = None  # of a GPU-hour; None takes the config's
    efficiency: float | None = None  # share of the peak rate that a step reaches; None takes the rates of kernels
    disk_gb_s: float = 1.0
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY
    is_searching: bool = False  # try other numbers of nodes too
    prices: Prices = field(default_factory=Prices)  # of GPUs without ``price``, disks and traffic
    shared_gib: float = 2000.0  # size of the shared disk to pay for
    network_gib: float = NETWORK_GIB  # size of each node's network disk
    server_gpus: int | None = None  # GPUs of the server in reinforcement; None takes those of one node
    egress_gib: float | None = None  # traffic to the internet; None takes the export's size, published once
    download_gb_s: float = DOWNLOAD_GB_S  # from the hub and the registry
    startup_min: float | None = None  # from the first paid minute to the first step; None estimates it
    deadline_hours: float | None = None  # of the search

    def __post_init__(self) -> None:
        problems = ConfigProblems()

        def check(option: str, value: float | None, is_valid: Callable[[float], bool], expected: str) -> None:
            if value is not None and not is_valid(value):
                shown = f"{value:g}" if isinstance(value, float) else value
                problems.add(f"{option} {shown}: expected {expected}.")

        def is_positive(value: float) -> bool:
            return value > 0 and math.isfinite(value)

        def is_size(value: float) -> bool:
            return value >= 0 and math.isfinite(value)

        counts = {"nodes": self.nodes, "gpus-per-node": self.gpus_per_node, "server-gpus": self.server_gpus}
        for name, count in counts.items():
            check(f"--{name}", count, lambda value: value >= 1, "1 or more")
        check("--efficiency", self.efficiency, lambda value: 0 < value <= 1, "more than 0 and at most 1")
        check("--price", self.price, is_size, "a finite number, 0 or more")
        check("--disk-gb-s", self.disk_gb_s, is_positive, "a finite number greater than 0")
        check("--download-gb-s", self.download_gb_s, is_positive, "a finite number greater than 0")
        check("--deadline-hours", self.deadline_hours, is_positive, "a finite number greater than 0")
        if self.deadline_hours is not None and not self.is_searching:
            problems.add("--deadline-hours: only --search chooses a number of nodes; add --search.")
        check("--failures-per-gpu-day", self.failures_per_gpu_day, is_size, "0 or more")
        check("--shared-gib", self.shared_gib, is_size, "0 or more")
        check("--network-gib", self.network_gib, is_size, "0 or more")
        check("--egress-gib", self.egress_gib, is_size, "0 or more")
        check("--startup-min", self.startup_min, is_size, "0 or more")
        problems.raise_all()
