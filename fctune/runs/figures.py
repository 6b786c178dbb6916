"""Summary figures of a run, one number each, and the account of its time."""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fctune.base.gpus import match_gpu
from fctune.runs.leftovers import count_bytes
from fctune.runs.prices import CURRENCY, NETWORK_GIB, Cost, Price, Prices, compute_cost, read_prices
from fctune.runs.record import MetricsFile, RunRecord, RunSegment

_STALL = 3.0  # a step stalled if it took more than this many times the median

PART_DESCRIPTIONS = {
    "training": "training steps kept: forward, backward, update",
    "data": "waiting for data",
    "stalls": f"time beyond the median, of steps that took over {_STALL:.0f} times the median",
    "first steps": "time beyond the median, of the first step after each start: compilation and memory allocation",
    "skipped steps": "steps whose update was skipped",
    "saves": "waiting for checkpoints to copy the weights, and for the last one to be written",
    "validation": "loss on the validation split",
    "evaluation": "tool-call accuracy while training",
    "export": "exporting the model at the end",
    "restarts": "from the last step kept to the restart: lost steps, downtime and earlier start-up",
    "other": "start-up and unmeasured time of the last segment",
}


@dataclass(frozen=True, slots=True)
class TimeUse:
    """Seconds of a run by use; ``parts`` are disjoint and add up to ``elapsed_s`` if that is known."""

    elapsed_s: float | None  # from the first start to the end, including restarts
    parts: dict[str, float]  # keys of ``PART_DESCRIPTIONS``
    gpu_hours: float | None  # all ranks, while a segment was running; None on CPUs

    @property
    def goodput(self) -> float | None:
        """Share of ``elapsed_s`` spent computing training steps that were kept, as MegaScale and others define it.

        None if the elapsed time is unknown, or smaller than its parts because clocks disagree.
        """
        if not self.elapsed_s or self.parts["training"] > self.elapsed_s:
            return None
        return self.parts["training"] / self.elapsed_s


def account_for_time(record: RunRecord) -> TimeUse:
    """Split a run's time by use; what was not measured is part of ``other``."""
    metrics = record.metrics
    names = ("step_time_s", "data_time_s", "save_wait_s", "save_time_s", "eval_time_s", "validation_time_s")
    steps, data, save_waits, saves, evaluations, validations = (
        [value or 0.0 for value in metrics.column(name)] for name in names
    )
    skipped, indices = metrics.column("is_skipped"), record.segment_indices()
    compute = [max(0.0, step - wait - save) for step, wait, save in zip(steps, data, save_waits, strict=True)]
    sizes = _world_sizes(record.segments)
    medians = _median_by_size(compute, [sizes[index] for index in indices])
    parts = dict.fromkeys(("training", "data", "stalls", "first steps", "skipped steps"), 0.0)
    previous = -1
    for index, seconds, is_skipped in zip(indices, compute, skipped, strict=True):
        median, is_first, previous = medians[sizes[index]], index != previous, index
        excess = max(0.0, seconds - median) if is_first or seconds > _STALL * median else 0.0
        parts["first steps" if is_first else "stalls"] += excess
        parts["skipped steps" if is_skipped else "training"] += seconds - excess
    closing = record.run.get("closing", {}) if record.exit is not None else {}
    parts["data"], parts["saves"] = sum(data), sum(save_waits) + sum(saves) + closing.get("save_s", 0.0)
    parts["validation"], parts["evaluation"] = sum(validations), sum(evaluations)
    parts["export"] = closing.get("export_s", 0.0)
    elapsed_s = _elapsed_s(record)
    if elapsed_s is not None:
        kept = [0.0] * len(record.segments)
        for index, step_parts in zip(indices, zip(steps, saves, evaluations, validations, strict=True), strict=True):
            kept[index] += sum(step_parts)
        parts["restarts"] = _lost_to_restarts(record.segments, kept)
        parts["other"] = max(0.0, elapsed_s - sum(parts.values()))
    return TimeUse(elapsed_s, parts, _gpu_hours(record, elapsed_s))


def _elapsed_s(record: RunRecord) -> float | None:
    started_at, ended_at = record.segments[0].started_at, record.ended_at
    if started_at is None or ended_at is None or not record.metrics.steps:
        return None
    return max((ended_at - started_at).total_seconds(), 1.0) if ended_at >= started_at else None


def _lost_to_restarts(segments: list[RunSegment], kept_s: list[float]) -> float:
    """Sum the duration of each interrupted segment, downtime included, minus the steps of it that were kept."""
    lost = 0.0
    for (segment, following), kept in zip(itertools.pairwise(segments), kept_s, strict=False):
        if segment.started_at is not None and following.started_at is not None:
            lost += max(0.0, (following.started_at - segment.started_at).total_seconds() - kept)
    return lost


def _world_sizes(segments: list[RunSegment]) -> list[int | None]:
    """Return each segment's number of ranks; where it was not recorded, the next segment's."""
    sizes: list[int | None] = []
    for segment in reversed(segments):
        sizes.append(segment.world_size or (sizes[-1] if sizes else None))
    return sizes[::-1]


def _median_by_size(compute_s: list[float], sizes: list[int | None]) -> dict[int | None, float]:
    """Return the median step time for each world size: on half the ranks a step takes twice as long, and no stall."""
    by_size: dict[int | None, list[float]] = {}
    for seconds, size in zip(compute_s, sizes, strict=True):
        by_size.setdefault(size, []).append(seconds)
    return {size: statistics.median(values) for size, values in by_size.items()}


def _gpu_hours(record: RunRecord, elapsed_s: float | None) -> float | None:
    """Sum ranks x duration over segments, without the downtime before a restart where the segment's end is known.

    None for a run on CPUs.
    """
    if elapsed_s is None or record.is_cpu:
        return None
    segments = record.segments
    ends = [segment.ended_at or following.started_at for segment, following in itertools.pairwise(segments)]
    total = 0.0
    for segment, end, size in zip(segments, [*ends, record.ended_at], _world_sizes(segments), strict=True):
        if segment.started_at is None or end is None or size is None:
            return None
        total += max(0.0, (end - segment.started_at).total_seconds()) * size
    return total / 3600


FINAL_STEPS = 20  # steps that the final loss is averaged over


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices that a run's cost is computed with."""

    gpu_hour: float | None = None  # None: that of the run's config, else the list price of its GPUs
    prices_file: Path | None = None  # prices in the runs' currency, in place of the list prices
    network_gib: float = NETWORK_GIB  # network disk of each node


@dataclass(frozen=True, slots=True)
class Figures:
    """Summary of one run; None where a figure was not measured."""

    num_steps: int
    final_loss: float | None  # mean over the last ``FINAL_STEPS`` steps
    validation_loss: float | None  # latest
    accuracy: tuple[float, float, float] | None  # latest while training: rate, lower and upper end of its interval
    tokens_total: float | None  # trained on, without padding
    supervised_share: float | None
    padding_share: float | None
    tokens_per_s: float | None  # all ranks together, median over steps
    tokens_per_s_per_rank: float | None
    step_time_p50_s: float | None
    step_time_p99_s: float | None
    data_share: float | None  # share of step time spent waiting for data
    peak_memory_gib: float | None  # highest of the ranks that reported it
    tflops_per_device: float | None  # median over steps
    hardware_tflops_per_device: float | None
    mfu: float | None
    gpu_utilization: float | None  # mean over ranks and steps
    gpu_temperature_c: float | None  # highest
    gpu_power_w: float | None  # all GPUs together, mean over steps
    time: TimeUse
    price: Price  # of a GPU-hour
    currency: str  # of the price
    prices: Prices  # of disks and traffic
    files_gib: float  # of the run's directory
    export_gib: float  # of its exports, which may be published
    num_nodes: int
    network_gib: float  # of all nodes' network disks

    @property
    def cost(self) -> float | None:
        """Price of all GPU-hours, in ``currency``; None without a price or without GPUs."""
        price, gpu_hours = self.price.price, self.time.gpu_hours
        return None if price is None or gpu_hours is None else price * gpu_hours

    @property
    def costs(self) -> Cost | None:
        """Cost by part: GPUs, both disks while it ran, and its exports published once; None without a price of GPUs.

        Of the shared disk, only the run's own files are counted.
        """
        hours = (self.time.elapsed_s or 0.0) / 3600
        if self.cost is None or not hours:
            return None
        rest = compute_cost(self.prices, 0.0, hours, 0, self.files_gib, self.network_gib, self.export_gib)
        return replace(rest, gpus=self.cost)


def describe_run(record: RunRecord, pricing: Pricing | None = None) -> Figures:
    """Compute the summary figures of a run."""
    metrics, pricing = record.metrics, pricing or Pricing()
    currency = record.config.get("currency", CURRENCY)
    prices = read_prices(pricing.prices_file, currency)
    num_nodes = max(1, len(set(record.run.get("hosts") or [])))
    tokens, padding = metrics.total("tokens_total"), metrics.total("tokens_padding")
    validation = metrics.latest("validation_loss")
    return Figures(
        num_steps=metrics.steps[-1] if metrics.steps else 0,
        final_loss=metrics.mean("loss", FINAL_STEPS),
        validation_loss=validation[1] if validation else None,
        accuracy=_accuracy_interval(metrics),
        tokens_total=tokens,
        supervised_share=_ratio(metrics.total("tokens_supervised"), tokens),
        padding_share=None if tokens is None or padding is None else _ratio(padding, tokens + padding),
        tokens_per_s=metrics.median("tokens_per_s"),
        tokens_per_s_per_rank=_tokens_per_s_per_rank(record),
        step_time_p50_s=metrics.median("step_time_s"),
        step_time_p99_s=metrics.quantile("step_time_s", 0.99),
        data_share=_ratio(metrics.total("data_time_s"), metrics.total("step_time_s")),
        peak_memory_gib=max(metrics.values("peak_memory_gib") + metrics.values("peak_memory_max_gib"), default=None),
        tflops_per_device=metrics.median("tflops_per_device"),
        hardware_tflops_per_device=metrics.median("hardware_tflops_per_device"),
        mfu=metrics.median("mfu"),
        gpu_utilization=metrics.mean("gpu_utilization"),
        gpu_temperature_c=max(metrics.values("gpu_temperature_c"), default=None),
        gpu_power_w=metrics.mean("gpu_power_w"),
        time=account_for_time(record),
        price=_find_price(record, pricing.gpu_hour, prices),
        currency=currency,
        prices=prices,
        files_gib=count_bytes(record.path) / 2**30,
        export_gib=count_bytes(record.files.export) / 2**30,
        num_nodes=num_nodes,
        network_gib=num_nodes * pricing.network_gib,
    )


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested plain values to dotted keys, as overrides on the command line name them."""
    pairs = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    flat: dict[str, Any] = {}
    for key, value in pairs:
        is_nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
        flat |= flatten_config(value, f"{prefix}{key}.") if is_nested and value else {f"{prefix}{key}": value}
    return flat


def _find_price(record: RunRecord, given: float | None, prices: Prices) -> Price:
    """Return the given price of a GPU-hour, else the config's, else the list price of the run's GPUs."""
    chosen = record.config.get("price_per_gpu_hour") if given is None else given
    if chosen is not None:
        return Price(chosen)
    device = str(record.run.get("device", "")).partition(",")[0]
    without_memory = re.sub(r"\b\d+ ?GB\b", "", device)  # that of one size has the price of another, if it has none
    gpus = [gpu.name for name in (device, without_memory) if (gpu := match_gpu(name)) is not None]
    return next((prices.gpu_hour[gpu] for gpu in gpus if gpu in prices.gpu_hour), Price(None))


def _tokens_per_s_per_rank(record: RunRecord) -> float | None:
    """Return the median tokens/s per rank; without that metric, only if all segments had the same number of ranks."""
    recorded = record.metrics.median("tokens_per_s_per_device")
    if recorded is not None:
        return recorded
    speed = record.metrics.median("tokens_per_s")
    sizes = {segment.world_size for segment in record.segments} - {None}
    return speed / size if speed is not None and len(sizes) == 1 and (size := sizes.pop()) else None


def _accuracy_interval(metrics: MetricsFile) -> tuple[float, float, float] | None:
    accuracy, low, high = (metrics.latest(f"eval_accuracy{end}") for end in ("", "_low", "_high"))
    if accuracy is None:
        return None
    return accuracy[1], low[1] if low else accuracy[1], high[1] if high else accuracy[1]


def _ratio(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total
