"""The plan of a run: what it needs as configured, what would be faster, and from where on more GPUs do not pay."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.models.causal_lm import CausalLM
from fctune.parallel.layout import Hardware, check_layout, choose_parallel_layout
from fctune.planner.data_size import DataSize, count_steps, measure_data
from fctune.planner.memory import MemoryModel
from fctune.planner.memory_timeline import Peak, Setting
from fctune.planner.models import check_run, find_architecture, is_valid_layout, shape_model
from fctune.planner.plan_request import PlanRequest
from fctune.planner.rule_of_thumb import RuleOfThumb, estimate_flops_by_rule, estimate_memory_by_rule
from fctune.planner.speed import EFFICIENCY, EFFICIENCY_RANGE, Flops, StepTime, count_flops, estimate_step_time
from fctune.planner.storage import Storage, plan_storage

VERSION = 1  # of the JSON's layout

_FRACTIONS = (0.0, 0.5, 1.0)
_NODES = (1, 2, 4, 8, 16, 32, 64, 128)

# Doubling the GPUs pays while it makes the run this much faster.
WORTH = 1.6


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to lay the run out, at the largest micro-batch that fits (1, where none does)."""

    setting: Setting
    peak: Peak
    fits: bool
    time: StepTime
    tokens_per_s_per_gpu: float


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The best that a number of nodes gives; None where nothing fits."""

    nodes: int
    best: Variant | None
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    pays: bool  # against half the nodes


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known of a run before it is launched."""

    config: RunConfig
    request: PlanRequest
    shape_source: str
    num_parameters: int
    num_trained: int
    setting: Setting
    layout_reason: str
    peak: Peak
    largest_micro_batch: int
    flops: Flops
    compute_width: int  # bytes of a number that is multiplied
    efficiency: float
    time: StepTime
    slowest_s: float  # a step, at the ends of the range that the efficiency is of
    quickest_s: float
    rows: DataSize | None
    num_steps: int | None
    hand: RuleOfThumb
    hand_flops: float | None
    storage: Storage
    variants: list[Variant]
    scaling: list[ScalingPoint] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.request.nodes * self.request.gpus_per_node

    @property
    def margin_bytes(self) -> int:
        """Left of a GPU's memory at the peak; under 0 it does not fit."""
        return self.request.gpu.memory_bytes - self.peak.footprint.total

    @property
    def fits(self) -> bool:
        """Whether the run as configured fits."""
        return self.margin_bytes >= 0

    @property
    def fastest(self) -> Variant | None:
        """The fastest variant that fits."""
        return max((v for v in self.variants if v.fits), key=lambda v: v.tokens_per_s_per_gpu, default=None)

    @property
    def hours(self) -> float | None:
        """Of training, saves and failures as expected; start, compilation and evaluation aside."""
        return self.storage.hours(self.num_steps, self.time.total_s)

    @property
    def hours_range(self) -> tuple[float, float] | None:
        """The same at both ends of the range of efficiencies; None where one was given, or steps are not known."""
        low, high = (self.storage.hours(self.num_steps, step_s) for step_s in (self.quickest_s, self.slowest_s))
        return None if low is None or high is None or low == high else (low, high)

    def to_json(self) -> dict[str, Any]:
        """The plan in the layout that ``version`` names; bytes and seconds, None where not known."""
        hours = self.hours
        gpu_hours = None if hours is None else hours * self.world_size
        return {
            "version": VERSION,
            "config": self.config.to_dict(),
            "model": {
                "shape": self.shape_source,
                "num_parameters": self.num_parameters,
                "num_trained": self.num_trained,
            },
            "gpu": asdict(self.request.gpu),
            "nodes": self.request.nodes,
            "gpus_per_node": self.request.gpus_per_node,
            "price": self.request.price,
            "disk_gb_s": self.request.disk_gb_s,
            "failures_per_gpu_day": self.request.failures_per_gpu_day,
            "layout": asdict(self.setting) | {"reason": self.layout_reason},
            "memory": self.peak.footprint.to_json()
            | {"phase": self.peak.phase, "fits": self.fits, "margin": self.margin_bytes},
            "largest_micro_batch": self.largest_micro_batch,
            "hand": asdict(self.hand) | {"total_gib": self.hand.total_gib, "flops": self.hand_flops},
            "data": None if self.rows is None else self.rows.to_json(),
            "num_steps": self.num_steps,
            "step": self.time.to_json()
            | {"flops_per_token": asdict(self.flops) | {"total": self.flops.total}, "efficiency": self.efficiency},
            "hours": hours,
            "hours_range": self.hours_range,
            "gpu_hours": gpu_hours,
            "cost": None if gpu_hours is None or self.request.price is None else gpu_hours * self.request.price,
            "storage": self.storage.to_json(),
            "variants": [_describe_variant(v) for v in self.variants],
            "fastest": None if self.fastest is None else _describe_variant(self.fastest),
            "search": [
                {
                    "nodes": s.nodes,
                    "best": None if s.best is None else _describe_variant(s.best),
                    "hours": s.hours,
                    "gpu_hours": s.gpu_hours,
                    "cost": s.cost,
                    "pays": s.pays,
                }
                for s in self.scaling
            ],
        }


def make_plan(config: RunConfig, ask: PlanRequest) -> Plan:
    """The plan of a config on the GPUs that are asked for.

    Raises:
        ConfigError: a layout that does not fit the ranks, a model whose shape is not to be had, numbers that cannot be.
    """
    if ask.price is None:
        ask = replace(ask, price=config.price_per_gpu_hour)
    world = ask.nodes * ask.gpus_per_node
    if config.global_batch_size < world:
        raise ConfigError(
            f"global_batch_size={config.global_batch_size}: under the {world} GPUs of --nodes {ask.nodes} "
            f"--gpus-per-node {ask.gpus_per_node}, so some would idle; use fewer GPUs or a larger batch."
        )
    check_run(config, ask.gpu)
    architecture, model_dir, shape_source = find_architecture(config.model.path, ask.model)
    model = shape_model(config, architecture)
    rows = measure_data(config, model_dir, ask.rows, ask.mean_tokens, world)
    share = 1.0 if rows is None else rows.supervised / rows.slots
    memory = MemoryModel(model, config, ask.gpu.memory_bytes, share)
    bench = _Bench(config, ask, model, memory, rows)
    setting, reason = bench.configured()
    num_trained = sum(t.numel for t in memory.all.tensors if t.is_trained)
    num_parameters = sum(t.numel for t in memory.all.tensors)
    num_steps = count_steps(config, rows)
    largest = memory.largest_micro_batch(setting, math.ceil(config.global_batch_size / world), config.global_batch_size)
    hand = estimate_memory_by_rule(
        num_parameters,
        num_trained,
        world,
        setting.micro_batch_size,
        config.data.seq_len,
        architecture.embed_dim,
        architecture.num_layers,
    )
    total_tokens = None if rows is None or num_steps is None else rows.tokens * num_steps / bench.steps_per_epoch
    return Plan(
        config=config,
        request=ask,
        shape_source=shape_source,
        num_parameters=num_parameters,
        num_trained=num_trained,
        setting=setting,
        layout_reason=reason,
        peak=memory.peak(setting),
        largest_micro_batch=largest,
        flops=bench.flops(setting),
        compute_width=memory.precision.compute_dtype.itemsize,
        efficiency=bench.efficiency,
        time=bench.time(setting),
        slowest_s=bench.time(setting, EFFICIENCY_RANGE[0]).total_s,
        quickest_s=bench.time(setting, EFFICIENCY_RANGE[1]).total_s,
        rows=rows,
        num_steps=num_steps,
        hand=hand,
        hand_flops=None
        if total_tokens is None
        else estimate_flops_by_rule(num_parameters, total_tokens, setting.fraction > 0),
        storage=bench.storage(setting, num_steps),
        variants=bench.variants(ask.nodes),
        scaling=bench.search(num_steps) if ask.is_searching else [],
    )


def list_remedies(plan: Plan) -> list[str]:
    """What of a run that fits in no layout can still be changed."""
    config, remedies = plan.config, ["more or larger GPUs"]
    if config.adapter is None:
        remedies += ["an adapter in place of all weights", "an 8-bit optimizer"]
    elif config.adapter.base != "nf4":
        remedies.append("adapter.base=nf4")
    least = min((variant.peak for variant in plan.variants), key=lambda peak: peak.footprint.total, default=plan.peak)
    if least.footprint.of_batch > least.footprint.total / 4:
        remedies.append(f"data.seq_len under {config.data.seq_len}")
    return remedies if config.parallel.cpu_offload else [*remedies, "parallel.cpu_offload=true"]


class _Bench:
    """Tries settings of one run."""

    def __init__(
        self, config: RunConfig, ask: PlanRequest, model: CausalLM, memory: MemoryModel, rows: DataSize | None
    ):
        self.config, self.request, self.model, self.memory, self.rows = config, ask, model, memory, rows
        self.efficiency = EFFICIENCY if ask.efficiency is None else ask.efficiency
        self.supervised_share = memory.supervised_share
        seq_len = config.data.seq_len
        # Unknown rows are taken to fill a pack each, which costs most.
        self.pairs_per_token = (seq_len + 1) / 2 if rows is None else rows.pairs / rows.slots
        self.slots_per_pack = seq_len if rows is None else rows.slots / rows.packs
        self.steps_per_epoch = 1 if rows is None else math.ceil(rows.packs / config.global_batch_size)
        self.packs = config.global_batch_size if rows is None else min(config.global_batch_size, rows.packs)

    def configured(self) -> tuple[Setting, str]:
        """The setting that a run of this config would choose, and why."""
        config, ask = self.config, self.request
        hardware = Hardware("cuda", ask.nodes * ask.gpus_per_node, ask.gpus_per_node, ask.gpu.memory_bytes)
        # A run chooses before it knows how much of its data is learnt.
        memory = MemoryModel(self.model, config, ask.gpu.memory_bytes)
        need = partial(memory.required, hardware.world_size)
        layout = choose_parallel_layout(config.parallel, hardware, config.adapter is not None, need)
        check_layout(config, self.model, layout.mode, layout.shard)
        fraction = config.activation_checkpointing.fraction
        setting = Setting(layout.mode, layout.replicate, layout.shard, fraction, config.micro_batch_size)
        return self.memory.accumulated(setting), layout.reason

    def flops(self, setting: Setting) -> Flops:
        """Of a token."""
        return count_flops(
            self.memory,
            setting.fraction,
            self.supervised_share,
            self.pairs_per_token,
            micro_batch_size=setting.micro_batch_size,
        )

    def time(self, setting: Setting, efficiency: float | None = None) -> StepTime:
        """Of a step, at another efficiency than the plan's where none was asked for."""
        if efficiency is None or self.request.efficiency is not None:
            efficiency = self.efficiency
        return estimate_step_time(
            self.memory,
            self.request.gpu,
            setting,
            self.flops(setting),
            self.packs,
            self.request.gpus_per_node,
            efficiency,
            self.slots_per_pack,
        )

    def storage(self, setting: Setting, num_steps: int | None) -> Storage:
        """On the shared disk, and what saves and failures take."""
        rates = self.request.disk_gb_s, self.request.failures_per_gpu_day
        return plan_storage(self.memory, self.config, setting.world_size, self.rows, *rates, setting.shard, num_steps)

    def variants(self, nodes: int) -> list[Variant]:
        """Every layout by every fraction, each at the largest micro-batch that fits."""
        local = self.request.gpus_per_node
        world = nodes * local
        if world == 1:
            layouts = [("none", 1, 1)]
        else:
            layouts = [("ddp", world, 1), ("fsdp", 1, world)]
            if nodes > 1 and local > 1:
                layouts.append(("hsdp", nodes, local))
            copies = self.config.parallel.replicate
            if copies is not None and world % copies == 0 and 1 < copies < world and copies != nodes:
                layouts.append(("hsdp", copies, world // copies))
        if self.config.parallel.cpu_offload:
            layouts = [layout for layout in layouts if layout[0] != "ddp"]
        return [
            self.try_setting(Setting(mode, replicate, shard, fraction, self.config.micro_batch_size))
            for mode, replicate, shard in layouts
            if is_valid_layout(self.config, self.model, mode, shard)
            for fraction in _FRACTIONS
        ]

    def try_setting(self, setting: Setting) -> Variant:
        """What a setting needs and gives."""
        most = math.ceil(self.config.global_batch_size / setting.world_size)
        largest = self.memory.largest_micro_batch(setting, most, self.config.global_batch_size)
        setting = self.memory.accumulated(replace(setting, micro_batch_size=largest or 1))
        time = self.time(setting)
        tokens = self.packs * self.slots_per_pack * (1 - self.padding_share)
        rate = tokens / time.total_s / setting.world_size
        return Variant(setting, self.memory.peak(setting), largest > 0, time, rate)

    @property
    def padding_share(self) -> float:
        """Of the places computed."""
        return 0.0 if self.rows is None else self.rows.padding_share

    def search(self, num_steps: int | None) -> list[ScalingPoint]:
        """The best of each number of nodes that the batch can be dealt to."""
        scaling: list[ScalingPoint] = []
        before: ScalingPoint | None = None
        for nodes in _NODES:
            world = nodes * self.request.gpus_per_node
            if world > self.config.global_batch_size:
                break
            fitting = [variant for variant in self.variants(nodes) if variant.fits]
            best = min(fitting, key=lambda variant: variant.time.total_s, default=None)
            hours = None
            if best is not None:
                hours = self.storage(best.setting, num_steps).hours(num_steps, best.time.total_s)
            gpu_hours = None if hours is None else hours * world
            cost = None if gpu_hours is None or self.request.price is None else gpu_hours * self.request.price
            pays = best is not None
            if best is not None and before is not None and before.best is not None:
                pays = before.pays and before.best.time.total_s / best.time.total_s >= WORTH
            before = ScalingPoint(nodes, best, hours, gpu_hours, cost, pays)
            scaling.append(before)
        return scaling


def _describe_variant(variant: Variant) -> dict[str, Any]:
    return asdict(variant.setting) | {
        "memory": variant.peak.footprint.total,
        "fits": variant.fits,
        "step_s": variant.time.total_s,
        "tokens_per_s_per_gpu": variant.tokens_per_s_per_gpu,
    }
