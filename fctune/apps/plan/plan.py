"""Plan of a run: its memory, time, cost and storage as configured, faster variants, and other numbers of nodes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.apps.plan.data_size import DataSize, count_steps, measure_data
from fctune.apps.plan.memory import MemoryModel
from fctune.apps.plan.memory_timeline import Peak, Setting
from fctune.apps.plan.models import (
    check_run,
    extend_architecture,
    find_architecture,
    find_planned_tokens,
    list_overrides,
    shape_model,
)
from fctune.apps.plan.plan_request import PlanRequest
from fctune.apps.plan.prices import CURRENCY, Cost
from fctune.apps.plan.rollouts import RolloutPlan
from fctune.apps.plan.speed import MEASURED_RANGE, UNMEASURED_RANGE, Flops, KernelTimes, StepTime
from fctune.apps.plan.startup import Startup
from fctune.apps.plan.storage import Storage
from fctune.apps.plan.variants import Estimate, ScalingPoint, Variant, VariantSearch, recommend
from fctune.base.errors import ConfigProblems
from fctune.config.intervals import parse_interval
from fctune.config.run_length import RunLength, find_length_warnings
from fctune.config.schema import RunConfig
from fctune.data.prepared_set import resolve_batch_size
from fctune.models.architecture import Architecture

VERSION = 2  # of the JSON


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory, time, cost and storage of a run, as estimated before its launch."""

    config: RunConfig
    request: PlanRequest
    shape_source: str  # where the model's sizes come from
    num_parameters: int
    num_trained: int
    has_experts: bool
    tokens_note: str  # on tokens that look untrained in the base; may be empty
    setting: Setting
    layout_reason: str
    peak: Peak
    largest_micro_batch: int
    flops: Flops
    compute_width: int  # bytes per element in matrix products
    kernel_times: KernelTimes
    estimate: Estimate
    rows: DataSize | None
    num_steps: int | None
    variants: list[Variant]
    scaling: list[ScalingPoint] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """GPUs of all nodes together."""
        return self.request.nodes * self.request.gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs that are paid for: those that train, and those of the server in reinforcement."""
        return self.estimate.num_gpus

    @property
    def time(self) -> StepTime:
        """Time of a step's parts, without generation."""
        return self.estimate.time

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step; in reinforcement with the generation of its answers, if none is dropped."""
        return self.estimate.step_s

    @property
    def rollouts(self) -> RolloutPlan | None:
        """Plan of the answers generated in reinforcement."""
        return self.estimate.rollouts

    @property
    def storage(self) -> Storage:
        """Files of the run and the cost of saving them."""
        return self.estimate.storage

    @property
    def startup(self) -> Startup:
        """Time before the first step."""
        return self.estimate.startup

    @property
    def efficiency(self) -> float:
        """Share of the GPU's peak rate that a step's arithmetic reaches, without waiting for the network."""
        if self.request.efficiency is not None:
            return self.request.efficiency
        return self.flops.total / (self.request.gpu.tflops(self.compute_width) * 1e6 * self.kernel_times.total)

    @property
    def num_packs(self) -> int:
        """Packs of a step, over all GPUs."""
        batch = self.config.global_batch_size
        return batch if self.rows is None else min(batch, self.rows.packs)

    @property
    def num_idle(self) -> int:
        """GPUs that have no data in any step: a run warns of them, and they wait for the others."""
        return max(0, self.world_size - self.num_packs)

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
        packs = None if self.rows is None else self.rows.packs
        return find_length_warnings(self.config, RunLength(self.num_steps, packs, self.step_s, self.storage.save_s))

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
        return every.in_steps(self.num_steps or 0, self.step_s)

    @property
    def hours(self) -> float | None:
        """Hours of start-up, and of training with the expected saves and failures; without evaluation."""
        return self.estimate.hours

    @property
    def error_range(self) -> tuple[float, float]:
        """Training time of a run like this, as shares of the planned one: the shortest and the longest to expect."""
        is_like_measured = self.config.compile and self.request.gpu.name == "h100" and self.world_size == 1
        return MEASURED_RANGE if is_like_measured and not self.has_experts else UNMEASURED_RANGE

    @property
    def hours_range(self) -> tuple[float, float] | None:
        """``hours`` at both ends of ``error_range``; None with a given efficiency, unknown steps, or rollouts."""
        training = self.estimate.training_hours
        if training is None or self.rollouts is not None or self.request.efficiency is not None:
            return None
        low, high = (self.startup.total_s / 3600 + share * training for share in self.error_range)
        return low, high

    @property
    def cost(self) -> Cost | None:
        """Cost of the run by part; None without a price of a GPU-hour or a known number of steps."""
        return self.estimate.cost

    @property
    def recommended(self) -> ScalingPoint | None:
        """Number of nodes that the search recommends; None if hours are unknown, or none meets the deadline."""
        return recommend(self.scaling, self.request.deadline_hours)

    @property
    def egress_gib(self) -> float:
        """Traffic to the internet in GiB: as requested, or the export published once. What is downloaded is free."""
        requested = self.request.egress_gib
        return self.storage.export_bytes / 2**30 if requested is None else requested

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values in the layout of ``VERSION``: bytes and seconds, None if unknown."""
        request, hours = self.request, self.hours
        gpu_hours = None if hours is None else hours * self.num_gpus
        return {
            "version": VERSION,
            "config": self.config.to_dict(),
            "model": {
                "shape": self.shape_source,
                "num_parameters": self.num_parameters,
                "num_trained": self.num_trained,
                "tokens": self.tokens_note,
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
            "data": None if self.rows is None else self.rows.to_json(),
            "num_steps": self.num_steps,
            "warmup_steps": self.warmup_steps,
            "save_steps": self.save_steps,
            "warnings": self.warnings,
            "step": self.time.to_json()
            | {"flops_per_token": asdict(self.flops) | {"total": self.flops.total}, "efficiency": self.efficiency},
            "kernels_us_per_token": self.kernel_times.to_json(),
            "startup": self.startup.to_json(),
            "training_hours": self.estimate.training_hours,
            "hours": hours,
            "hours_range": self.hours_range,
            "gpu_hours": gpu_hours,
            "cost": None if gpu_hours is None or request.price is None else gpu_hours * request.price,
            "costs": None if self.cost is None else asdict(self.cost) | {"total": self.cost.total},
            "currency": self.config.currency,
            "storage": self.storage.to_json(),
            "rollouts": None if self.rollouts is None else self.rollouts.to_json(),
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


def make_plan(config: RunConfig, request: PlanRequest) -> Plan:
    """Plan a config on the requested machines.

    Raises:
        ConfigError: The layout does not suit the ranks or the GPU, the model's sizes cannot be found, or numbers given
            by the user are out of range; all problems that can be found, the model's first.
        DataError: The prepared set is damaged.
    """
    request = replace(request, price=_choose_price(config, request))
    world_size = request.nodes * request.gpus_per_node
    architecture, model_dir, shape_source = _find_model(config, request)
    tokens = find_planned_tokens(config, architecture, model_dir)
    model = shape_model(config, architecture, token_ids=tokens.ids)
    rows = measure_data(config, model_dir, request.rows, request.mean_tokens, world_size)
    # Without a known data size, packs are taken to be full.
    config = resolve_batch_size(config, *((config.data.seq_len, 1) if rows is None else (rows.tokens, rows.packs)))
    supervised_share = 1.0 if rows is None else rows.supervised / rows.slots
    memory = MemoryModel(model, config, request.gpu.memory_bytes, supervised_share)
    search = VariantSearch(config, request, model, memory, rows)
    setting, reason = search.configured()
    peak = memory.peak(setting)
    num_steps = config.max_steps if config.grpo is not None else count_steps(config, rows)
    most = math.ceil(config.global_batch_size / world_size)
    return Plan(
        config=config,
        request=request,
        shape_source=shape_source,
        num_parameters=search.num_parameters,
        num_trained=sum(t.numel for t in memory.all.tensors if t.is_trained),
        has_experts=bool(architecture.expert_names),
        tokens_note=tokens.note,
        setting=setting,
        layout_reason=reason,
        peak=peak,
        largest_micro_batch=memory.largest_micro_batch(setting, most, config.global_batch_size),
        flops=search.flops(setting),
        compute_width=memory.precision.compute_dtype.itemsize,
        kernel_times=search.kernel_times(setting),
        estimate=search.estimate(setting, peak, search.time(setting), num_steps),
        rows=rows,
        num_steps=num_steps,
        variants=search.variants(request.nodes),
        scaling=search.scale(num_steps) if request.is_searching else [],
    )


def _choose_price(config: RunConfig, request: PlanRequest) -> float | None:
    """Return the price of a GPU-hour: the request's, else the config's, else the listed one; None if none is known."""
    if request.price is not None:
        return request.price
    if config.price_per_gpu_hour is not None or config.currency != CURRENCY:
        return config.price_per_gpu_hour
    listed = request.prices.gpu_hour.get(request.gpu.name)
    return None if listed is None else listed.price


def _find_model(config: RunConfig, request: PlanRequest) -> tuple[Architecture, Path | None, str]:
    """Check the run, and return the sizes of its model, the model's directory, and the source of the sizes."""
    problems = ConfigProblems()
    found = problems.collect(lambda: find_architecture(config.model.path, request.model, config.model.source))
    problems.collect(lambda: check_run(config, request.gpu))
    problems.raise_all()
    assert found is not None
    architecture, model_dir, source = found
    return *extend_architecture(config, architecture, model_dir), source


def list_remedies(plan: Plan) -> list[str]:
    """List changes that could help a run that fits in no layout."""
    config, remedies = plan.config, ["more or larger GPUs"]
    if config.adapter is None:
        remedies += ["an adapter instead of all weights", "an 8-bit optimizer"]
    elif config.adapter.base != "nf4" and not plan.has_experts:
        remedies.append("adapter.base=nf4")
    smallest = min(
        (variant.peak for variant in plan.variants), key=lambda peak: peak.footprint.total, default=plan.peak
    )
    if smallest.footprint.of_batch > smallest.footprint.total / 4:
        remedies.append(f"data.seq_len below {config.data.seq_len}")
    if config.parallel.cpu_offload or config.parallel.expert > 1:  # experts that are spread are not offloaded
        return remedies
    return [*remedies, f"parallel.cpu_offload=true{' parallel.mode=fsdp' if config.parallel.mode == 'ddp' else ''}"]
