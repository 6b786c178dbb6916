"""The choice between DDP, FSDP and HSDP for a model and the ranks of a run, and the check that it fits in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from fctune.base.errors import ConfigError
from fctune.base.gpus import GPUS, Gpu
from fctune.config.schema import RunConfig
from fctune.config.sections.parallel import ParallelConfig
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import check_nf4_shards
from fctune.models.loss import MAX_LOGITS
from fctune.parallel.context_parallel import can_share_rows, check_context_parallelism
from fctune.parallel.expert_parallel import check_expert_parallelism
from fctune.parallel.footprint import GIB, SAFE_SHARE, Footprint
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.speed import count_flops, estimate_step_time

_MAX_SUGGESTED_SHARDS = 8192

# Tiles of a row that a run chooses; an eighth of an MLP's activations is less than what the rest of its block needs.
MLP_TILES = 8

# Tokens of a tile below which products are slower than planned: they are a few waves of blocks on an H100, the last one
# half empty. An assumption.
_MIN_TILE = 2048

# How many times as fast a layout must be by the plan to be chosen instead of one with fewer ranks to a row.
_WORTHWHILE = 1.05

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ranks of a run; ``memory_bytes`` is that of one rank's device, and ``gpu`` its rates; None if unknown."""

    device_type: str
    world_size: int
    ranks_per_node: int
    memory_bytes: int | None = None
    gpu: Gpu | None = None

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
    once; see ``choose_fraction`` and ``choose_max_logits`` of ``MemoryModel``. ``context`` ranks share each row, and
    MLPs are computed in ``mlp_tiles``.
    """

    mode: Literal["none", "ddp", "fsdp", "hsdp"]
    replicate: int
    shard: int
    reason: str
    fraction: float = 0.0
    max_logits: int = MAX_LOGITS
    context: int = 1
    mlp_tiles: int = 1

    @property
    def rows(self) -> dict[str, int]:
        """How rows are split, as arguments of ``MemoryModel``'s methods."""
        return {"context": self.context, "mlp_tiles": self.mlp_tiles}

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
    """Return the layout of a run, with its checkpointed blocks, MLPs in tiles and the logits computed at once.

    The planner and the run itself choose by it. Unless configured, as few ranks of a node share a row as it needs to
    fit, and MLPs are computed in tiles if no number of ranks fits without. Where either may save time on a known GPU,
    what fits is compared by the planned time of full rows. If nothing fits, no ranks share.

    Args:
        config: Config of the run.
        model: Model, which may be on the meta device.
        hardware: Ranks of the run.
        memory: Memory of the model and the config.

    Raises:
        ConfigError: A layout that does not divide the ranks, or that the model or the optimizer does not support.
    """
    check_expert_parallelism(model, config.parallel.expert_ranks, hardware.world_size)
    contexts, tiles = list_contexts(config, model, hardware), list_mlp_tiles(config, memory.architecture)
    if config.parallel.context is not None:
        check_context_parallelism(model, config.parallel.context, hardware.world_size)
        contexts = [config.parallel.context]
    fitting: list[ParallelLayout] = []
    for mlp_tiles, context in itertools.product(tiles, contexts):
        if fitting and not may_save_time(config, hardware.world_size, mlp_tiles, context):
            continue
        layout = _choose_for_rows(config, model, hardware, memory, context, mlp_tiles)
        required = memory.required(hardware.world_size, layout.shard, fraction=layout.fraction, **layout.rows)
        if hardware.can_hold(required):
            fitting.append(layout)
            if hardware.gpu is None:
                break
    if not fitting:
        return _choose_for_rows(config, model, hardware, memory, contexts[0], tiles[-1])
    return choose_faster(fitting, lambda layout: 1 / estimate_layout_time(memory, hardware, layout))


def may_save_time(config: RunConfig, world_size: int, mlp_tiles: int, context: int) -> bool:
    """Return whether a number of tiles and of ranks that share a row may be faster than what fits with less of both.

    In long rows, both replace the recomputation of attention, and ranks without rows of their own can share others'.
    """
    if mlp_tiles > 1 and config.data.row_tokens // context < _MIN_TILE * mlp_tiles:
        return False
    return config.data.row_tokens >= _MIN_TILE * MLP_TILES or config.global_batch_size < world_size


def choose_faster(choices: Sequence[Choice], rate: Callable[[Choice], float]) -> Choice:
    """Return the first of some choices, or a later one that is faster by more than what plans are wrong by."""
    best = choices[0]
    for choice in choices[1:]:
        if rate(choice) > _WORTHWHILE * rate(best):
            best = choice
    return best


def make_setting(memory: MemoryModel, layout: ParallelLayout) -> Setting:
    """Return the setting of a layout with the micro-batches of the config."""
    shape = layout.mode, layout.replicate, layout.shard, layout.fraction, memory.config.micro_batch_packs, 1
    rows = layout.context, layout.mlp_tiles
    return memory.with_accumulation(Setting(*shape, layout.max_logits, *rows, memory.config.parallel.expert_ranks))


def estimate_layout_time(memory: MemoryModel, hardware: Hardware, layout: ParallelLayout) -> float:
    """Return the planned seconds of a step of full rows, each one conversation; an unknown GPU counts as an H100."""
    setting, config = make_setting(memory, layout), memory.config
    pairs, size = (config.data.row_tokens + 1) / 2, setting.micro_batch_size / setting.context
    shares = setting.fraction, memory.supervised_share, pairs
    flops = count_flops(memory, *shares, setting.max_logits, size, setting.mlp_tiles)
    packs, local = config.global_batch_size, hardware.ranks_per_node
    return estimate_step_time(memory, hardware.gpu or GPUS["h100"], setting, flops, packs, local).total_s


def list_mlp_tiles(config: RunConfig, architecture: Architecture) -> list[int]:
    """Return the numbers of tiles that a run chooses from, the preferred one first.

    Raises:
        ConfigError: Tiles for a model without such MLPs.
    """
    configured = config.activation_checkpointing.mlp_tiles
    if (configured or 1) > 1 and not architecture.has_mlps:
        raise ConfigError(
            f"activation_checkpointing.mlp_tiles={configured}: model_type={architecture.model_type!r} has no MLPs "
            "besides experts; leave it out."
        )
    if configured is not None:
        return [configured]
    is_exact = config.activation_checkpointing.policy == "block" and not config.has_float8_products
    return [1, MLP_TILES] if is_exact and architecture.has_mlps else [1]


def list_contexts(config: RunConfig, model: CausalLM, hardware: Hardware) -> list[int]:
    """Return the numbers of ranks of a node that can share a row in a run that leaves it open, ascending."""
    if config.compares_answers:
        return [1]
    local, world_size = hardware.ranks_per_node, hardware.world_size
    return [n for n in range(1, local + 1) if local % n == 0 and can_share_rows(model, n, world_size)]


def _choose_for_rows(
    config: RunConfig, model: CausalLM, hardware: Hardware, memory: MemoryModel, context: int, mlp_tiles: int
) -> ParallelLayout:
    world_size, rows = hardware.world_size, {"context": context, "mlp_tiles": mlp_tiles}
    estimate = partial(memory.required, world_size, **rows)
    layout = choose_parallel_layout(config.parallel, hardware, config.adapter is not None, estimate)
    check_layout(config, model, layout.mode, layout.shard)
    fraction = memory.choose_fraction(world_size, layout.shard, **rows)
    max_logits = memory.choose_max_logits(world_size, layout.shard, fraction, **rows)
    return replace(layout, fraction=fraction, max_logits=max_logits, context=context, mlp_tiles=mlp_tiles)


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
    if config.expert_ranks > 1:
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
    if config.adapter.base in ("nf4", "mxfp4"):
        return None
    return f"adapter.base={'mxfp4' if model.architecture.stores_mxfp4 else 'nf4'}"


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
