"""Plan of a run: its memory, time, cost and storage as configured, faster variants, and other numbers of nodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fctune.apps.plan.estimate import Estimate, estimate_run
from fctune.apps.plan.request import PlanRequest
from fctune.base.errors import ConfigError, ConfigProblems
from fctune.base.gpus import GPUS
from fctune.config.intervals import parse_interval
from fctune.config.run_length import RunLength, find_length_warnings
from fctune.config.schema import RunConfig
from fctune.data.data_size import DataSize, count_steps
from fctune.data.row_lengths import find_lengths
from fctune.models.architecture import Architecture
from fctune.models.planned_model import extend_architecture, find_architecture
from fctune.models.precision import choose_precision
from fctune.parallel.layout import Hardware
from fctune.parallel.memory import Peak, Setting
from fctune.parallel.search import LayoutSearch, Variant, fit_seq_len, list_overrides
from fctune.parallel.speed import MEASURED_RANGE, UNMEASURED_RANGE, Flops, KernelTimes

VERSION = 2  # of the JSON

# Doubling the GPUs of a run of unknown length pays off if it makes a step at least this much faster.
WORTHWHILE_SPEEDUP = 1.6

# How much dearer than the cheapest number of nodes a recommended one may be.
MAX_EXTRA_COST = 0.1

_NODES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """Fastest variant on a number of nodes; None if nothing fits."""

    nodes: int
    best: Variant | None
    estimate: Estimate | None
    pays: bool  # worth doubling the previous number of nodes, if the run is long

    @property
    def hours(self) -> float | None:
        """Hours of the run, start-up included; None if unknown."""
        return None if self.estimate is None else self.estimate.hours

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs that are paid for; None if unknown."""
        return None if self.estimate is None or self.hours is None else self.hours * self.estimate.num_gpus

    @property
    def cost(self) -> float | None:
        """Cost of all parts; None without a price or a known number of steps."""
        return None if self.estimate is None or self.estimate.cost is None else self.estimate.cost.total


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory, time, cost and storage of a run, as estimated before its launch."""

    request: PlanRequest
    search: LayoutSearch
    shape_source: str  # where the model's sizes come from
    length_reason: str  # why rows have their length, if the config leaves it open; else ""
    num_parameters: int
    num_trained: int
    setting: Setting
    layout_reason: str
    peak: Peak
    largest_micro_batch: int
    flops: Flops
    kernel_times: KernelTimes
    estimate: Estimate
    num_steps: int | None
    variants: list[Variant]
    scaling: list[ScalingPoint]  # empty if no other numbers of nodes were requested

    @property
    def config(self) -> RunConfig:
        """Config of the run, with the batch size that its data resolves to."""
        return self.search.config

    @property
    def rows(self) -> DataSize | None:
        """Size of the data; None if it is unknown."""
        return self.search.rows

    @property
    def gpu_rate(self) -> float:
        """Peak TFLOP/s of the GPU in the dtype of the run's matrix products."""
        return self.request.gpu.tflops(self.search.memory.precision.compute_dtype.itemsize)

    @property
    def efficiency(self) -> float:
        """Share of the GPU's peak rate that a step's arithmetic reaches, without waiting for the network."""
        if self.request.efficiency is not None:
            return self.request.efficiency
        return self.flops.total / (self.gpu_rate * 1e6 * self.kernel_times.total)

    @property
    def num_idle(self) -> int:
        """GPUs that have no data in any step: a run warns of them, and they wait for the others."""
        return max(0, self.setting.num_shares - self.search.packs) * self.setting.context

    @property
    def margin_bytes(self) -> int:
        """Memory of a GPU that is free at the peak; negative if the run does not fit."""
        return self.request.gpu.memory_bytes - self.peak.footprint.total

    @property
    def fits(self) -> bool:
        """True if the run as configured fits into GPU memory."""
        return self.margin_bytes >= 0

    @property
    def fastest(self) -> Variant | None:
        """Fastest variant that fits; None if nothing does."""
        return max((v for v in self.variants if v.fits), key=lambda v: v.tokens_per_s_per_gpu, default=None)

    @property
    def warnings(self) -> list[str]:
        """Settings that do not suit the length of the run; empty if that is unknown."""
        if self.num_steps is None:
            return []
        packs, made = None if self.rows is None else self.rows.packs, self.estimate
        return find_length_warnings(self.config, RunLength(self.num_steps, packs, made.step_s, made.storage.save_s))

    @property
    def warmup_steps(self) -> int | None:
        """Steps of warm-up; None if the number of steps is unknown."""
        warmup = parse_interval(self.config.lr_scheduler.warmup)
        return warmup.in_steps(self.num_steps or 0) if self.num_steps or warmup.share is None else None

    @property
    def save_steps(self) -> int | None:
        """Steps between checkpoints, 0 for never; None if the number of steps is unknown and decides it."""
        every = parse_interval(self.config.checkpoint.every)
        if self.num_steps is None and every.share is not None:
            return None
        return every.in_steps(self.num_steps or 0, self.estimate.step_s)

    @property
    def error_range(self) -> tuple[float, float]:
        """Training time of a run like this, as shares of the planned one: the shortest and the longest to expect."""
        is_like_measured = self.config.compile and self.request.gpu.name == "h100" and self.search.world_size == 1
        has_experts = bool(self.search.architecture.expert_names)
        return MEASURED_RANGE if is_like_measured and not has_experts else UNMEASURED_RANGE

    @property
    def hours_range(self) -> tuple[float, float] | None:
        """Hours at both ends of ``error_range``; None with a given efficiency, unknown steps, or rollouts."""
        made = self.estimate
        if made.training_hours is None or made.rollouts is not None or self.request.efficiency is not None:
            return None
        low, high = (made.startup.total_s / 3600 + share * made.training_hours for share in self.error_range)
        return low, high

    @property
    def recommended(self) -> ScalingPoint | None:
        """Number of nodes that the search recommends; None if hours are unknown, or none meets the deadline."""
        return recommend(self.scaling, self.request.deadline_hours)

    @property
    def egress_gib(self) -> float:
        """Traffic to the internet in GiB: as requested, or the export published once. What is downloaded is free."""
        requested = self.request.egress_gib
        return self.estimate.storage.export_bytes / 2**30 if requested is None else requested

    def list_remedies(self) -> list[str]:
        """List changes that could help a run that fits in no layout."""
        return self.search.list_remedies([variant.peak for variant in self.variants] or [self.peak])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values in the layout of ``VERSION``: bytes and seconds, None if unknown."""
        request, made = self.request, self.estimate
        hours, cost = made.hours, made.cost
        gpu_hours = None if hours is None else hours * made.num_gpus
        return {
            "version": VERSION,
            "config": self.config.to_dict(),
            "model": {
                "shape": self.shape_source,
                "num_parameters": self.num_parameters,
                "num_trained": self.num_trained,
                "tokens": self.search.tokens_note,
            },
            "gpu": asdict(request.gpu),
            "nodes": request.nodes,
            "gpus_per_node": request.gpus_per_node,
            "idle_gpus": self.num_idle,
            "price": request.price,
            "egress_gib": self.egress_gib,
            "disk_gb_s": request.disk_gb_s,
            "failures_per_gpu_day": request.failures_per_gpu_day,
            "layout": asdict(self.setting) | {"reason": self.layout_reason},
            "memory": self.peak.footprint.to_json()
            | {"phase": self.peak.phase, "fits": self.fits, "margin": self.margin_bytes},
            "largest_micro_batch": self.largest_micro_batch,
            "data": _to_json(self.rows, "padding_share"),
            "seq_len_reason": self.length_reason or None,
            "micro_batch_reason": self.search.micro_batch_reason or None,
            "expert_reason": self.search.expert_reason or None,
            "num_steps": self.num_steps,
            "warmup_steps": self.warmup_steps,
            "save_steps": self.save_steps,
            "warnings": self.warnings,
            "step": {
                **asdict(made.time),
                "total_s": made.time.total_s,
                "flops_per_token": _to_json(self.flops, "total"),
                "efficiency": self.efficiency,
            },
            "kernels_us_per_token": _to_json(self.kernel_times, "total"),
            "startup": _to_json(made.startup, "total_s"),
            "training_hours": made.training_hours,
            "hours": hours,
            "hours_range": self.hours_range,
            "gpu_hours": gpu_hours,
            "cost": None if gpu_hours is None or request.price is None else gpu_hours * request.price,
            "costs": _to_json(cost, "total"),
            "currency": self.config.currency,
            "storage": _to_json(made.storage, "total_bytes", "fallback_bytes"),
            "rollouts": _to_json(made.rollouts, "fits", "batch_s"),
            "variants": [self._describe(v) for v in self.variants],
            "fastest": None if self.fastest is None else self._describe(self.fastest),
            "search": [
                {
                    "nodes": point.nodes,
                    "best": None if point.best is None else self._describe(point.best),
                    "hours": point.hours,
                    "gpu_hours": point.gpu_hours,
                    "cost": point.cost,
                    "pays": point.pays,
                    "recommended": point is self.recommended,
                }
                for point in self.scaling
            ],
        }

    def _describe(self, variant: Variant) -> dict[str, Any]:
        return asdict(variant.setting) | {
            "memory": variant.peak.footprint.total,
            "fits": variant.fits,
            "step_s": variant.time.total_s,
            "tokens_per_s_per_gpu": variant.tokens_per_s_per_gpu,
            "overrides": list_overrides(self.config, variant.setting),
        }


def _to_json(value: Any, *derived: str) -> dict[str, Any] | None:
    """Return the fields of a dataclass with some of its properties; None for None."""
    return None if value is None else asdict(value) | {name: getattr(value, name) for name in derived}


def make_plan(config: RunConfig, request: PlanRequest) -> Plan:
    """Plan a config on the requested machines.

    Raises:
        ConfigError: The layout does not suit the ranks or the GPU, the model's sizes cannot be found, or numbers given
            by the user are out of range; all problems that can be found, the model's first.
        DataError: The prepared set is damaged.
    """
    request = replace(request, price=_choose_price(config, request))
    problems = ConfigProblems()
    found = problems.collect(lambda: find_architecture(config.model.path, request.model, config.model.source))
    problems.collect(lambda: _check_precision(config, request))
    problems.raise_all()
    assert found is not None
    architecture, model_dir, shape_source = found
    architecture, model_dir = extend_architecture(config, architecture, model_dir)
    config, length_reason = _resolve_seq_len(config, architecture, model_dir, request)
    search = LayoutSearch(
        config,
        architecture,
        model_dir,
        gpu=request.gpu,
        nodes=request.nodes,
        gpus_per_node=request.gpus_per_node,
        rows=request.rows,
        mean_tokens=request.mean_tokens,
        efficiency=request.efficiency,
    )
    setting, reason = search.configured()
    peak = search.memory.peak(setting)
    num_steps = config.max_steps
    if config.rollouts is None and search.rows is not None:
        num_steps = count_steps(search.config, search.rows.packs, search.rows.rows)
    parameters = search.memory.all.tensors
    return Plan(
        request=request,
        search=search,
        shape_source=shape_source,
        length_reason=length_reason,
        num_parameters=search.memory.num_base_weights + sum(t.numel for t in parameters if t.is_adapter),
        num_trained=sum(t.numel for t in parameters if t.is_trained),
        setting=setting,
        layout_reason=reason,
        peak=peak,
        largest_micro_batch=search.largest_micro_batch(setting),
        flops=search.flops(setting),
        kernel_times=search.kernel_times(setting),
        estimate=estimate_run(search, request, setting, peak, search.time(setting), num_steps),
        num_steps=num_steps,
        variants=search.variants(request.nodes),
        scaling=_scale(search, request, num_steps) if request.is_searching else [],
    )


def _resolve_seq_len(
    config: RunConfig, architecture: Architecture, model_dir: Path | None, request: PlanRequest
) -> tuple[RunConfig, str]:
    """Return the config with the row length that ``data.seq_len: auto`` stands for, and the reason; "" with a number.

    Raises:
        ConfigError: The lengths of the rows are unknown, or none can be trained on.
    """
    if isinstance(config.data.seq_len, int):
        return config, ""
    if (lengths := find_lengths(config, model_dir)) is None:
        raise ConfigError(
            "data.seq_len=auto: the lengths of the rows are not measured yet, nor the number of their tokens. Run "
            "`fctune data prepare` with the same config first, which needs no GPU, or plan with a length, such as "
            "data.seq_len=4096."
        )
    world_size = request.nodes * request.gpus_per_node
    hardware = Hardware("cuda", world_size, request.gpus_per_node, request.gpu.memory_bytes, request.gpu)
    return fit_seq_len(config, lengths, architecture, hardware)


def _choose_price(config: RunConfig, request: PlanRequest) -> float | None:
    """Return the price of a GPU-hour: the request's, else the config's, else the listed one; None if none is known."""
    if request.price is not None:
        return request.price
    if config.price_per_gpu_hour is not None:
        return config.price_per_gpu_hour
    listed = request.prices.gpu_hour.get(request.gpu.name)
    return None if listed is None else listed.price


def _check_precision(config: RunConfig, request: PlanRequest) -> None:
    """Check that a GPU supports the precision of a run; a GPU described by options is assumed to."""
    precision = choose_precision(config.precision, config.adapter is not None, "cuda")
    is_base = config.adapter is not None and config.adapter.base == "float8"
    if precision.compute_dtype is torch.bfloat16 and not request.gpu.has_bf16:
        raise ConfigError(
            f"--gpu {request.gpu.name}: has no bfloat16, so the run would not start. Plan it with precision=fp32, "
            "which is slower and needs twice the memory, or for another GPU."
        )
    known = GPUS.get(request.gpu.name)
    if known is not None and known.fp8_tflops is None and (precision.has_float8_matmuls or is_base):
        key = "adapter.base=float8" if is_base else f"precision={config.precision}"
        raise ConfigError(
            f"{key}: --gpu {known.name} has no float8 matrix products, so the run would not start. Use bf16, or "
            f"one of these GPUs: {', '.join(name for name, gpu in GPUS.items() if gpu.fp8_tflops is not None)}."
        )


def _scale(search: LayoutSearch, request: PlanRequest, num_steps: int | None) -> list[ScalingPoint]:
    """Return the fastest variant for each number of nodes that the global batch can be split over."""
    points: list[ScalingPoint] = []
    for nodes in _NODES:
        variants = search.variants(nodes)
        fitting = [variant for variant in variants if variant.fits]
        best = min(fitting, key=lambda variant: variant.time.total_s, default=None)
        shown = best or next(iter(variants), None)
        if shown is None or shown.setting.num_shares > search.config.global_batch_size:
            break
        estimate, pays = None, best is not None
        if best is not None:
            estimate = estimate_run(search, request, best.setting, best.peak, best.time, num_steps)
            if points and (before := points[-1].best) is not None:
                pays = points[-1].pays and before.time.total_s / best.time.total_s >= WORTHWHILE_SPEEDUP
        points.append(ScalingPoint(nodes, best, estimate, pays))
    return points


def recommend(points: list[ScalingPoint], deadline_hours: float | None = None) -> ScalingPoint | None:
    """Choose a number of nodes: the cheapest that meets the deadline; None if none does, or hours are unknown.

    Without a deadline, it is the fastest of those that are at most ``MAX_EXTRA_COST`` dearer than the cheapest. Without
    a price, GPU-hours are compared.
    """
    costs = {point.nodes: point.gpu_hours if point.cost is None else point.cost for point in points}
    timed = [(point, point.hours, cost) for point in points if point.hours and (cost := costs[point.nodes]) is not None]
    if deadline_hours is not None:
        in_time = [(cost, hours, point) for point, hours, cost in timed if hours <= deadline_hours]
        return min(in_time, key=lambda found: found[:2])[2] if in_time else None
    least = min((cost for _, _, cost in timed), default=0.0)
    cheap = [(hours, cost, point) for point, hours, cost in timed if cost <= (1 + MAX_EXTRA_COST) * least]
    return min(cheap, key=lambda found: found[:2])[2] if cheap else None
