"""Settings of one run: the configured one, its alternatives, and the best one for each number of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.parallel.expert_parallel import check_expert_parallelism
from fctune.parallel.layout import Hardware, check_layout, choose_parallel_layout
from fctune.planner.data_size import DataSize
from fctune.planner.kernel_times import KernelTimes, estimate_kernel_times
from fctune.planner.memory import MemoryModel
from fctune.planner.memory_timeline import Peak, Setting
from fctune.planner.models import is_valid_layout
from fctune.planner.plan_request import PlanRequest
from fctune.planner.speed import EFFICIENCY, Flops, StepTime, count_flops, estimate_step_time
from fctune.planner.storage import Storage, plan_storage

# Doubling the GPUs pays off if it makes the run at least this much faster.
WORTHWHILE_SPEEDUP = 1.6

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
class ScalingPoint:
    """Fastest variant on a number of nodes; None if nothing fits."""

    nodes: int
    best: Variant | None
    hours: float | None
    gpu_hours: float | None
    cost: float | None
    pays: bool  # worth doubling the previous number of nodes


class VariantSearch:
    """Evaluates settings of one run on the requested machines."""

    def __init__(
        self, config: RunConfig, request: PlanRequest, model: CausalLM, memory: MemoryModel, rows: DataSize | None
    ):
        self.config, self.request, self.model, self.memory, self.rows = config, request, model, memory, rows
        self.efficiency = EFFICIENCY if request.efficiency is None else request.efficiency
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

    def time(self, setting: Setting, efficiency: float | None = None) -> StepTime:
        """Return the step time of a setting; a requested efficiency overrides ``efficiency``."""
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

    def kernel_times(self, setting: Setting) -> KernelTimes:
        """Return the time of each kind of kernel in a setting, compiled."""
        tokens = setting.micro_batch_size * self.config.data.seq_len
        return estimate_kernel_times(self.memory, self.request.gpu, setting.fraction, self.flops(setting), tokens)

    def storage(self, setting: Setting, num_steps: int | None) -> Storage:
        """Return the disk space, and the time that saves and failures take, of a setting."""
        rates = self.request.disk_gb_s, self.request.failures_per_gpu_day
        step_s = self.time(setting).total_s
        return plan_storage(
            self.memory,
            self.config,
            setting.world_size,
            self.rows,
            *rates,
            setting.shard,
            num_steps,
            step_s,
        )

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
            hours = None
            if best is not None:
                hours = self.storage(best.setting, num_steps).hours(num_steps, best.time.total_s)
            gpu_hours = None if hours is None else hours * world_size
            cost = None if gpu_hours is None or self.request.price is None else gpu_hours * self.request.price
            pays = best is not None
            if best is not None and previous is not None and previous.best is not None:
                pays = previous.pays and previous.best.time.total_s / best.time.total_s >= WORTHWHILE_SPEEDUP
            previous = ScalingPoint(nodes, best, hours, gpu_hours, cost, pays)
            points.append(previous)
        return points
