"""A few numbers that each rank knows of itself alone, and what is told of all ranks together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's since it last told them; NaN where it has no such figure."""

    data_s: float = math.nan  # waited for data
    save_wait_s: float = math.nan  # waited for saves
    memory_active_gib: float = math.nan  # now
    memory_reserved_gib: float = math.nan  # now
    peak_memory_gib: float = math.nan  # since the start
    num_alloc_retries: float = math.nan  # since the start
    gpu_utilization: float = math.nan
    gpu_temperature_c: float = math.nan
    gpu_power_w: float = math.nan

    def to_row(self) -> list[float]:
        """The numbers in their order, for a collective."""
        return list(astuple(self))

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankFigures:
        """What ``to_row`` gave."""
        return cls(*row)


def describe_ranks(figures: Sequence[RankFigures]) -> dict[str, Any]:
    """The metrics of all ranks together; without those that no rank has."""

    def over(reduce: Callable[[list[float]], float], name: str) -> float | None:
        values = [value for one in figures if not math.isnan(value := getattr(one, name))]
        return reduce(values) if values else None

    found = {
        "data_time_max_s": over(max, "data_s"),
        "save_wait_max_s": over(max, "save_wait_s"),
        "memory_active_gib": over(max, "memory_active_gib"),
        "memory_reserved_gib": over(max, "memory_reserved_gib"),
        "peak_memory_max_gib": over(max, "peak_memory_gib"),
        "alloc_retries": over(sum, "num_alloc_retries"),
        "gpu_utilization": over(statistics.fmean, "gpu_utilization"),
        "gpu_utilization_min": over(min, "gpu_utilization"),
        "gpu_temperature_c": over(max, "gpu_temperature_c"),
        "gpu_power_w": over(sum, "gpu_power_w"),
    }
    return {name: value for name, value in found.items() if value is not None}
