"""The figures of a run that are said in one number each, for a page, a terminal and a verdict."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from fctune.runs.metrics_file import MetricsFile
from fctune.runs.record import RunRecord
from fctune.runs.time_use import TimeUse, account_for_time

FINAL_STEPS = 20  # that the final loss is the mean of


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers; None where it was not measured."""

    num_steps: int
    final_loss: float | None  # mean over the last ``FINAL_STEPS`` steps
    validation_loss: float | None  # the last
    accuracy: tuple[float, float, float] | None  # the last while training, with its interval
    tokens_total: float | None  # trained on, padding aside
    supervised_share: float | None
    padding_share: float | None
    tokens_per_s: float | None  # median of steps, over all ranks
    tokens_per_s_per_rank: float | None
    step_time_p50_s: float | None
    step_time_p99_s: float | None
    data_share: float | None  # of step time
    peak_memory_gib: float | None  # of the rank with the most, where all told it
    tflops_per_device: float | None  # median of steps
    hardware_tflops_per_device: float | None
    mfu: float | None
    gpu_utilization: float | None  # mean over ranks and the run
    gpu_temperature_c: float | None  # highest
    gpu_power_w: float | None  # of all, mean
    time: TimeUse
    price: float | None  # of a GPU-hour

    @property
    def cost(self) -> float | None:
        """Of its GPU-hours, in the currency of the price."""
        return None if self.price is None or self.time.gpu_hours is None else self.price * self.time.gpu_hours


def describe_run(record: RunRecord, price: float | None = None) -> Figures:
    """The figures of what a run has written; ``price`` of a GPU-hour goes before that of its config."""
    metrics = record.metrics
    tokens, supervised = total(metrics, "tokens_total"), total(metrics, "tokens_supervised")
    padding = total(metrics, "tokens_padding")
    step_s, data_s = total(metrics, "step_time_s"), total(metrics, "data_time_s")
    validation = metrics.last("validation_loss")
    return Figures(
        num_steps=metrics.steps[-1] if metrics.steps else 0,
        final_loss=mean(metrics, "loss", FINAL_STEPS),
        validation_loss=validation[1] if validation else None,
        accuracy=_with_bounds(metrics),
        tokens_total=tokens,
        supervised_share=_ratio(supervised, tokens),
        padding_share=None if tokens is None or padding is None else _ratio(padding, tokens + padding),
        tokens_per_s=median(metrics, "tokens_per_s"),
        tokens_per_s_per_rank=_speed_of_a_rank(record),
        step_time_p50_s=median(metrics, "step_time_s"),
        step_time_p99_s=quantile(metrics, "step_time_s", 0.99),
        data_share=_ratio(data_s, step_s),
        peak_memory_gib=max(
            filter(None, (_most(metrics, f"peak_memory_{of}gib") for of in ("", "max_"))), default=None
        ),
        tflops_per_device=median(metrics, "tflops_per_device"),
        hardware_tflops_per_device=median(metrics, "hardware_tflops_per_device"),
        mfu=median(metrics, "mfu"),
        gpu_utilization=mean(metrics, "gpu_utilization"),
        gpu_temperature_c=_most(metrics, "gpu_temperature_c"),
        gpu_power_w=mean(metrics, "gpu_power_w"),
        time=account_for_time(record),
        price=record.config.get("price_per_gpu_hour") if price is None else price,
    )


def median(metrics: MetricsFile, name: str, last: int | None = None) -> float | None:
    """Of a metric over the last steps; None: over all."""
    return quantile(metrics, name, 0.5, last)


def quantile(metrics: MetricsFile, name: str, share: float, last: int | None = None) -> float | None:
    """The value that ``share`` of the steps are at most at (nearest rank); the median is of the two in the middle."""
    values = sorted(value for value in metrics.column(name)[-last if last else 0 :] if value is not None)
    if not values:
        return None
    if share == 0.5:
        return statistics.median(values)
    return values[math.ceil(share * len(values)) - 1]


def mean(metrics: MetricsFile, name: str, last: int | None = None) -> float | None:
    """Of a metric over the last steps; None: over all."""
    values = [value for value in metrics.column(name)[-last if last else 0 :] if value is not None]
    return statistics.fmean(values) if values else None


def total(metrics: MetricsFile, name: str) -> float | None:
    """Sum of a metric over the steps; None where none has it."""
    values = [value for value in metrics.column(name) if value is not None]
    return sum(values) if values else None


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested plain values by dotted key, as an override names them."""
    pairs = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    found: dict[str, Any] = {}
    for key, value in pairs:
        is_nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        found |= flatten(value, f"{prefix}{key}.") if is_nested and value else {f"{prefix}{key}": value}
    return found


def _most(metrics: MetricsFile, name: str) -> float | None:
    return max((value for value in metrics.column(name) if value is not None), default=None)


def _speed_of_a_rank(record: RunRecord) -> float | None:
    """Median tokens/s over the ranks that each step had; of older metrics, only where all parts had as many."""
    told = median(record.metrics, "tokens_per_s_per_device")
    if told is not None:
        return told
    speed, sizes = median(record.metrics, "tokens_per_s"), {part.world_size for part in record.segments} - {None}
    return speed / size if speed is not None and len(sizes) == 1 and (size := sizes.pop()) else None


def _with_bounds(metrics: MetricsFile) -> tuple[float, float, float] | None:
    accuracy, low, high = (metrics.last(f"eval_accuracy{end}") for end in ("", "_low", "_high"))
    if accuracy is None:
        return None
    return accuracy[1], low[1] if low else accuracy[1], high[1] if high else accuracy[1]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
