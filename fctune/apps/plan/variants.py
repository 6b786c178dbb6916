"""Settings of one run: the configured one, its alternatives, and the number of nodes that is worth its cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from fctune.apps.plan.data_size import DataSize
from fctune.apps.plan.memory import MemoryModel
from fctune.apps.plan.memory_timeline import Peak, Setting
from fctune.apps.plan.models import is_valid_layout
from fctune.apps.plan.plan_request import PlanRequest
from fctune.apps.plan.prices import CURRENCY, Cost, Prices, compute_cost
from fctune.apps.plan.rollouts import RolloutPlan, plan_rollouts
from fctune.apps.plan.speed import (
    Flops,
    KernelTimes,
    StepTime,
    count_flops,
    estimate_kernel_times,
    estimate_step_time,
)
from fctune.apps.plan.startup import Startup, estimate_startup
from fctune.apps.plan.storage import Storage, plan_storage
from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.parallel.expert_parallel import check_expert_parallelism
from fctune.parallel.layout import Hardware, check_layout, choose_parallel_layout

# Doubling the GPUs of a run of unknown length pays off if it makes a step at least this much faster.
WORTHWHILE_SPEEDUP = 1.6

# How much dearer than the cheapest number of nodes a recommended one may be.
MAX_EXTRA_COST = 0.1

_FRACTIONS = (0.0, 0.5, 1.0)
_NODES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Variant:
    """A run's setting with the largest micro-batch that fits, or 1 if none does."""

    setting: Setting
    peak: Peak
    fits: bool
    time: StepTime
    tokens_per_s_per_gpu: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time, files and cost of a run in one setting; hours and cost are None if the number of steps is unknown."""

    time: StepTime
    rollouts: RolloutPlan | None  # generation, in reinforcement
    step_s: float  # with generation, if no answer is dropped
    storage: Storage
    startup: Startup
    num_gpus: int  # paid for: those that train, and those of the server in reinforcement
    training_hours: float | None  # with the expected saves and failures
    cost: Cost | None  # None without a price of a GPU-hour, too

    @property
    def hours(self) -> float | None:
        """Hours from the first paid minute to the last step."""
        return None if self.training_hours is None else self.startup.total_s / 3600 + self.training_hours


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


class VariantSearch:
    """Evaluates settings of one run on the requested machines."""

    def __init__(
        self, config: RunConfig, request: PlanRequest, model: CausalLM, memory: MemoryModel, rows: DataSize | None
    ):
        self.config, self.request, self.model, self.memory, self.rows = config, request, model, memory, rows
        self.num_parameters = sum(t.numel for t in memory.all.tensors)
        self.supervised_share = memory.supervised_share
        seq_len = config.data.seq_len
        # Without a known data size, each pack is taken to be one conversation of full length, which costs most.
        self.pairs_per_token = (seq_len + 1) / 2 if rows is None else rows.pairs / rows.slots
        self.slots_per_pack = seq_len if rows is None else rows.slots / rows.packs
        self.steps_per_epoch = 1 if rows is None else math.ceil(rows.packs / config.global_batch_size)
        self.packs = config.global_batch_size if rows is None else min(config.global_batch_size, rows.packs)

    def configured(self) -> tuple[Setting, str]:
        """Return the setting that a run of this config chooses, and the reason for its layout."""
        config, request = self.config, self.request
        world_size = request.nodes * request.gpus_per_node
        hardware = Hardware("cuda", world_size, request.gpus_per_node, request.gpu.memory_bytes)
        # A run chooses its layout before it knows which share of its data is supervised.
        memory = self.memory.with_supervised_share(1.0)
        need = partial(memory.required, world_size)
        layout = choose_parallel_layout(config.parallel, hardware, config.adapter is not None, need)
        check_layout(config, self.model, layout.mode, layout.shard)
        check_expert_parallelism(self.model, config.parallel.expert, world_size)
        fraction = memory.choose_fraction(world_size, layout.shard)
        logits = memory.choose_max_logits(world_size, layout.shard, fraction)
        size = config.micro_batch_size
        setting = Setting(layout.mode, layout.replicate, layout.shard, fraction, size, max_logits=logits)
        return self.memory.with_accumulation(setting), layout.reason

    def flops(self, setting: Setting) -> Flops:
        """Return the FLOPs per token of a setting."""
        return count_flops(
            self.memory,
            setting.fraction,
            self.supervised_share,
            self.pairs_per_token,
            setting.max_logits,
            setting.micro_batch_size,
        )

    def time(self, setting: Setting) -> StepTime:
        """Return the step time of a setting."""
        return estimate_step_time(
            self.memory,
            self.request.gpu,
            setting,
            self.flops(setting),
            self.packs,
            self.request.gpus_per_node,
            self.request.efficiency,
            self.slots_per_pack,
        )

    def kernel_times(self, setting: Setting) -> KernelTimes:
        """Return the time of each kind of kernel in a setting."""
        tokens = setting.micro_batch_size * self.slots_per_pack
        return estimate_kernel_times(self.memory, self.request.gpu, setting.fraction, self.flops(setting), tokens)

    def estimate(self, setting: Setting, peak: Peak, time: StepTime, num_steps: int | None) -> Estimate:
        """Return the time, files and cost of the run in a setting, whose peak memory and step time are known."""
        config, request, gpus = self.config, self.request, setting.world_size
        nodes = max(1, gpus // request.gpus_per_node)
        grpo, footprint, step_s = config.grpo, peak.footprint, time.total_s
        is_served = grpo is not None and grpo.engine == "server"
        server_gpus = (request.server_gpus or request.gpus_per_node) if is_served else 0
        rollouts = plan_rollouts(
            config,
            self.memory.architecture,
            self.num_parameters,
            request.gpu,
            server_gpus or gpus,
            time.total_s / config.global_batch_size,
            footprint.state + footprint.buffers + footprint.context,
        )
        if rollouts is not None and grpo is not None:
            step_s = rollouts.batch_s / grpo.updates_per_batch
        rates = request.disk_gb_s, request.failures_per_gpu_day
        storage = plan_storage(self.memory, config, gpus, self.rows, *rates, setting.shard, num_steps, step_s)
        startup = estimate_startup(
            config,
            setting,
            nodes,
            self.rows,
            storage.base_bytes,
            len(set(self.memory.architecture.blocks)),
            request.disk_gb_s,
            request.download_gb_s,
            None if request.startup_min is None else 60 * request.startup_min,
        )
        made = Estimate(
            *(time, rollouts, step_s, storage, startup, gpus + server_gpus),
            training_hours=storage.hours(num_steps, step_s),
            cost=None,
        )
        if made.hours is None or request.price is None:
            return made
        egress_gib = storage.export_bytes / 2**30 if request.egress_gib is None else request.egress_gib
        prices = request.prices if config.currency == CURRENCY else Prices()
        disks = request.shared_gib, request.network_gib * nodes
        return replace(made, cost=compute_cost(prices, request.price, made.hours, made.num_gpus, *disks, egress_gib))

    def variants(self, nodes: int) -> list[Variant]:
        """Return every layout with every checkpointed fraction, each at the largest micro-batch that fits."""
        local = self.request.gpus_per_node
        world_size = nodes * local
        if world_size == 1:
            layouts = [("none", 1, 1)]
        else:
            layouts = [("ddp", world_size, 1), ("fsdp", 1, world_size)]
            if nodes > 1 and local > 1:
                layouts.append(("hsdp", nodes, local))
            replicas = self.config.parallel.replicate
            if replicas is not None and world_size % replicas == 0 and 1 < replicas < world_size and replicas != nodes:
                layouts.append(("hsdp", replicas, world_size // replicas))
        settings = [
            Setting(mode, replicate, shard, fraction, self.config.micro_batch_size)
            for mode, replicate, shard in layouts
            for fraction in _FRACTIONS
        ]
        return [self.evaluate(setting) for setting in settings if is_valid_layout(self.config, self.model, setting)]

    def evaluate(self, setting: Setting) -> Variant:
        """Return the memory and speed of a setting at its largest micro-batch."""
        most = math.ceil(self.config.global_batch_size / setting.world_size)
        largest = self.memory.largest_micro_batch(setting, most, self.config.global_batch_size)
        setting = self.memory.with_accumulation(replace(setting, micro_batch_size=largest or 1))
        time = self.time(setting)
        padding_share = 0.0 if self.rows is None else self.rows.padding_share
        tokens = self.packs * self.slots_per_pack * (1 - padding_share)
        rate = tokens / time.total_s / setting.world_size
        return Variant(setting, self.memory.peak(setting), largest > 0, time, rate)

    def scale(self, num_steps: int | None) -> list[ScalingPoint]:
        """Return the fastest variant for each number of nodes that the global batch can be split over."""
        points: list[ScalingPoint] = []
        previous: ScalingPoint | None = None
        for nodes in _NODES:
            world_size = nodes * self.request.gpus_per_node
            if world_size > self.config.global_batch_size:
                break
            fitting = [variant for variant in self.variants(nodes) if variant.fits]
            best = min(fitting, key=lambda variant: variant.time.total_s, default=None)
            estimate = None if best is None else self.estimate(best.setting, best.peak, best.time, num_steps)
            pays = best is not None
            if best is not None and previous is not None and previous.best is not None:
                pays = previous.pays and previous.best.time.total_s / best.time.total_s >= WORTHWHILE_SPEEDUP
            previous = ScalingPoint(nodes, best, estimate, pays)
            points.append(previous)
        return points
