"""Summary figures of a run, one number each, for pages, the terminal and success criteria."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from fctune.apps.plan.prices import CURRENCY, NETWORK_GIB, Cost, Price, Prices, compute_cost, read_prices
from fctune.base.gpus import GPUS
from fctune.runs.leftovers import count_bytes
from fctune.runs.record import MetricsFile, RunRecord
from fctune.runs.time_use import TimeUse, account_for_time

FINAL_STEPS = 20  # steps that the final loss is averaged over


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices that a run's cost is computed with."""

    gpu_hour: float | None = None  # None: that of the run's config, else the list price of its GPUs
    prices: Prices | None = None  # None: the list prices
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
    prices = (pricing.prices or read_prices()) if currency == CURRENCY else Prices()
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
    words = set(re.findall(r"[a-z0-9]+", str(record.run.get("device", "")).lower()))
    names = [name for name in GPUS if set(name.split("-")) <= words]
    return prices.gpu_hour.get(max(names, key=len, default=""), Price(None))


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
