"""The choice between DDP, FSDP and HSDP for a model and the ranks of a run, and the check that it fits in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from fctune.base.errors import ConfigError
from fctune.config.schema import RunConfig
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import check_nf4_shards
from fctune.models.loss import MAX_LOGITS
from fctune.parallel.context_parallel import can_share_rows, check_context_parallelism
from fctune.parallel.expert_parallel import check_expert_parallelism
from fctune.parallel.footprint import GIB, SAFE_SHARE, Footprint
from fctune.parallel.memory import MemoryModel

_MAX_SUGGESTED_SHARDS = 8192


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ranks of a run; ``memory_bytes`` is that of one rank's device, or None if unknown."""

    device_type: str
    world_size: int
    ranks_per_node: int
    memory_bytes: int | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which all have the same number of ranks."""
        return max(1, self.world_size // self.ranks_per_node)

    def can_hold(self, footprint: Footprint) -> bool:
        """Return whether an estimate fits in the memory of one rank."""
        return self.memory_bytes is None or footprint.total <= SAFE_SHARE * self.memory_bytes


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """``replicate`` copies of the model, each sharded over ``shard`` ranks; ``reason`` is for the log.

    ``fraction`` is the share of the blocks that are checkpointed and ``max_logits`` the number of logits computed at
    once; see ``choose_fraction`` and ``choose_max_logits`` of ``MemoryModel``. ``context`` ranks share each row.
    """

    mode: Literal["none", "ddp", "fsdp", "hsdp"]
    replicate: int
    shard: int
    reason: str
    fraction: float = 0.0
    max_logits: int = MAX_LOGITS
    context: int = 1

    def __str__(self) -> str:
        shape = {
            "none": "unsharded",
            "ddp": f"DDP, {self.replicate} copies",
            "fsdp": f"FSDP over {self.shard}",
            "hsdp": f"HSDP, {self.replicate} copies over {self.shard} ranks each",
        }
        shared = f", rows shared by {self.context} ranks" if self.context > 1 else ""
        return f"{shape[self.mode]}{shared} ({self.reason})"


def choose_layout(config: RunConfig, model: CausalLM, hardware: Hardware, memory: MemoryModel) -> ParallelLayout:
    """Return the layout of a run, with its checkpointed blocks and the logits computed at once.

    The planner and the run itself choose by it. Unless configured, as few ranks of a node share a row as it needs to
    fit; if it fits with none of these numbers, none share.

    Args:
        config: Config of the run.
        model: Model, which may be on the meta device.
        hardware: Ranks of the run.
        memory: Memory of the model and the config.

    Raises:
        ConfigError: A layout that does not divide the ranks, or that the model or the optimizer does not support.
    """
    check_expert_parallelism(model, config.parallel.expert, hardware.world_size)
    if config.parallel.context is not None:
        check_context_parallelism(model, config.parallel.context, hardware.world_size)
        return _choose_for_context(config, model, hardware, memory, config.parallel.context)
    whole = _choose_for_context(config, model, hardware, memory, 1)
    for context in list_contexts(config, model, hardware):
        layout = whole if context == 1 else _choose_for_context(config, model, hardware, memory, context)
        required = memory.required(hardware.world_size, layout.shard, fraction=layout.fraction, context=context)
        if hardware.can_hold(required):
            return layout
    return whole


def list_contexts(config: RunConfig, model: CausalLM, hardware: Hardware) -> list[int]:
    """Return the numbers of ranks of a node that can share a row in a run that leaves it open, ascending."""
    if config.preference is not None or config.grpo is not None:  # they compare whole answers
        return [1]
    local, world_size = hardware.ranks_per_node, hardware.world_size
    return [n for n in range(1, local + 1) if local % n == 0 and can_share_rows(model, n, world_size)]


def _choose_for_context(
    config: RunConfig, model: CausalLM, hardware: Hardware, memory: MemoryModel, context: int
) -> ParallelLayout:
    world_size = hardware.world_size
    estimate = partial(memory.required, world_size, context=context)
    layout = choose_parallel_layout(config.parallel, hardware, config.adapter is not None, estimate)
    check_layout(config, model, layout.mode, layout.shard)
    fraction = memory.choose_fraction(world_size, layout.shard, context)
    max_logits = memory.choose_max_logits(world_size, layout.shard, fraction, context)
    return replace(layout, fraction=fraction, max_logits=max_logits, context=context)


def choose_parallel_layout(
    config: ParallelConfig, hardware: Hardware, has_adapter: bool, estimate: Callable[[int], Footprint]
) -> ParallelLayout:
    """Return the configured layout; for ``auto``, the one with the least network traffic among those that fit.

    Args:
        config: The ``parallel`` section of the run's config.
        hardware: Ranks of the run.
        has_adapter: The base is frozen and only adapters train.
        estimate: Memory of one rank, given the number of ranks that a copy of the model is sharded over.

    Raises:
        ConfigError: A number of copies that does not divide the ranks, or offloading on CPU.
    """
    world = hardware.world_size
    if config.cpu_offload and hardware.device_type == "cpu":
        raise ConfigError(
            "parallel.cpu_offload: moves weights between a CUDA device and the host, but this run is on CPU; "
            "set parallel.cpu_offload=false."
        )
    if config.mode == "hsdp":
        copies = _count_copies(config, hardware)
        return ParallelLayout("hsdp", copies, world // copies, "parallel.mode=hsdp")
    if config.mode == "fsdp":
        return ParallelLayout("fsdp", 1, world, "parallel.mode=fsdp")
    if config.expert > 1:
        return ParallelLayout("fsdp", 1, world, "auto: parallel.expert needs sharded weights")
    if world == 1:
        return ParallelLayout("none", 1, 1, "one rank")
    if config.mode == "ddp":
        return ParallelLayout("ddp", world, 1, "parallel.mode=ddp")
    return _choose_automatically(config, hardware, has_adapter, estimate)


def _choose_automatically(
    config: ParallelConfig, hardware: Hardware, has_adapter: bool, estimate: Callable[[int], Footprint]
) -> ParallelLayout:
    world, nodes, local = hardware.world_size, hardware.num_nodes, hardware.ranks_per_node
    if has_adapter and not config.cpu_offload and hardware.can_hold(estimate(1)):
        return ParallelLayout("ddp", world, 1, "auto: the base fits in one device, so only adapter gradients are sent")
    if nodes > 1 and local > 1 and hardware.can_hold(estimate(local)):
        sent = "adapter gradients" if has_adapter else "reduced gradients"
        reason = f"auto: the model fits in one node, so only {sent} are sent between nodes"
        return ParallelLayout("hsdp", nodes, local, reason)
    why = "the base does not fit in one device" if has_adapter else "all weights train, so all are sharded"
    return ParallelLayout("fsdp", 1, world, f"auto: {why}")


def _count_copies(config: ParallelConfig, hardware: Hardware) -> int:
    world = hardware.world_size
    copies = config.replicate or hardware.num_nodes
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    choices = f"{', '.join(map(str, divisors[:-1]))} or {divisors[-1]}" if len(divisors) > 1 else "1"
    if copies not in divisors:
        raise ConfigError(f"parallel.replicate={copies}: does not divide the {world} ranks of this run; use {choices}.")
    if config.replicate is None and copies == 1 and world > 1:
        raise ConfigError(
            f"parallel.replicate: not set, and the {world} ranks of this run are on one node, so hsdp would be fsdp; "
            f"set it to {choices}, or parallel.mode=fsdp."
        )
    return copies


def check_memory(
    hardware: Hardware, layout: ParallelLayout, smaller: str | None, estimate: Callable[[int], Footprint], path: str
) -> str | None:
    """Compare the estimated memory with the device's; returns a warning if the run probably does not fit, else None.

    ``smaller`` is the setting that makes the weights themselves smaller, if there is one.

    Raises:
        ConfigError: The run cannot fit with any batch size; gives the missing memory and settings that would fit.
    """
    need, memory = estimate(layout.shard), hardware.memory_bytes
    if memory is None or hardware.can_hold(need):
        return None
    usable = SAFE_SHARE * memory
    report = (
        f"model.path={path}: a rank needs about {need}, {(need.total - usable) / GIB:.1f} GiB more than the "
        f"{usable / GIB:.1f} GiB it can use. Settings that would fit: "
        f"{'; '.join(_suggest_remedies(hardware, layout, smaller, estimate, usable))}."
    )
    if need.total - need.of_batch > memory:
        raise ConfigError(report)
    return report


def _suggest_remedies(
    hardware: Hardware,
    layout: ParallelLayout,
    smaller: str | None,
    estimate: Callable[[int], Footprint],
    usable_bytes: float,
) -> list[str]:
    remedies: list[str] = []
    shards = layout.shard
    while shards < hardware.world_size and not hardware.can_hold(estimate(shards)):
        shards *= 2
    if shards > layout.shard and hardware.can_hold(estimate(shards)):
        remedies.append("parallel.mode=fsdp" if shards == hardware.world_size else f"shards over {shards} ranks (hsdp)")
    else:
        while shards < _MAX_SUGGESTED_SHARDS and not hardware.can_hold(estimate(shards)):
            shards *= 2
        if hardware.can_hold(estimate(shards)):
            remedies.append(f"parallel.mode=fsdp on {shards} such devices")
    if estimate(layout.shard).of_batch > usable_bytes / 4:
        remedies.append("a lower micro_batch_size or data.seq_len, or activation_checkpointing.fraction=1.0")
    if smaller:
        remedies.append(smaller)
    return remedies or ["a smaller model, or devices with more memory"]


def suggest_smaller_weights(config: RunConfig, model: CausalLM) -> str | None:
    """Return the setting that makes the weights of a run smaller, or None if there is none that it accepts."""
    if config.adapter is None:
        return "an adapter instead of all weights, or an 8-bit optimizer"
    is_quantized = config.adapter.base == "nf4" or bool(model.architecture.expert_names)
    return None if is_quantized else "adapter.base=nf4"


def check_layout(config: RunConfig, model: CausalLM, mode: str, num_shards: int) -> None:
    """Check that the frozen base and the optimizer of a run work under a layout.

    Raises:
        ConfigError: 4-bit weights that cannot be split over ``num_shards`` ranks, or stochastic rounding in shards.
    """
    check_nf4_shards(model, num_shards)
    if config.optimizer.get("bf16_stochastic_round") and mode in ("fsdp", "hsdp"):
        raise ConfigError(
            f"optimizer.bf16_stochastic_round: torchao does not support it for sharded weights, and the layout is "
            f"{mode}; set parallel.mode=ddp, or leave it out."
        )
