"""Parameters over ranks: copies (DDP), shards (FSDP2), or copies of shards (HSDP), one unit a block."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fctune.config.schema import ParallelConfig, RunConfig
from fctune.errors import ConfigError
from fctune.models.frozen_linear import check_nf4_shards
from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.build import CausalLM
from fctune.parallel.footprint import GIB, SAFE_SHARE, Footprint, can_hold_gradients

_MOST_SHARDS = 8192


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ranks of a run; ``memory_bytes`` of one rank's device, None where it is not known."""

    device_type: str
    world_size: int
    ranks_per_node: int
    memory_bytes: int | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes, all with as many ranks."""
        return max(1, self.world_size // self.ranks_per_node)

    def holds(self, footprint: Footprint) -> bool:
        """Whether an estimate fits in a rank's device."""
        return self.memory_bytes is None or footprint.total <= SAFE_SHARE * self.memory_bytes


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """``replicate`` whole copies of the model, each cut over ``shard`` ranks; ``reason`` says why, for the log."""

    mode: Literal["none", "ddp", "fsdp", "hsdp"]
    replicate: int
    shard: int
    reason: str

    def __str__(self) -> str:
        shape = {
            "none": "unsharded",
            "ddp": f"DDP, {self.replicate} copies",
            "fsdp": f"FSDP over {self.shard}",
            "hsdp": f"HSDP, {self.replicate} copies over {self.shard} ranks each",
        }
        return f"{shape[self.mode]} ({self.reason})"


def choose_parallel_layout(
    config: ParallelConfig, hardware: Hardware, has_adapter: bool, estimate: Callable[[int], Footprint]
) -> ParallelLayout:
    """The layout that a config names, or for ``auto`` the one that sends least over the network and fits.

    Args:
        config: what is asked for.
        hardware: what there is.
        has_adapter: whether the base is frozen.
        estimate: memory of a rank, by the number of ranks that a copy of the model is cut over.

    Raises:
        ConfigError: copies that do not divide the ranks, or offloading without a device to offload from.
    """
    world = hardware.world_size
    if config.cpu_offload and hardware.device_type == "cpu":
        raise ConfigError(
            "parallel.cpu_offload: moves weights between a CUDA device and the host, and this run is on CPU; "
            "set parallel.cpu_offload=false."
        )
    if config.mode == "hsdp":
        copies = _count_copies(config, hardware)
        return ParallelLayout("hsdp", copies, world // copies, "parallel.mode=hsdp")
    if config.mode == "fsdp":
        return ParallelLayout("fsdp", 1, world, "parallel.mode=fsdp")
    if world == 1:
        return ParallelLayout("none", 1, 1, "one rank")
    if config.mode == "ddp":
        return ParallelLayout("ddp", world, 1, "parallel.mode=ddp")
    return _choose_automatically(config, hardware, has_adapter, estimate)


def _choose_automatically(
    config: ParallelConfig, hardware: Hardware, has_adapter: bool, estimate: Callable[[int], Footprint]
) -> ParallelLayout:
    world, nodes, local = hardware.world_size, hardware.num_nodes, hardware.ranks_per_node
    if has_adapter and not config.cpu_offload and hardware.holds(estimate(1)):
        return ParallelLayout("ddp", world, 1, "auto: the base fits in one device, so adapter gradients alone are sent")
    if nodes > 1 and local > 1 and hardware.holds(estimate(local)):
        what = "adapter gradients" if has_adapter else "sums of gradients"
        return ParallelLayout(
            "hsdp", nodes, local, f"auto: the model fits in one node, so {what} alone are sent between nodes"
        )
    why = "the base does not fit in one device" if has_adapter else "all weights train, so all are sharded"
    return ParallelLayout("fsdp", 1, world, f"auto: {why}")


def _count_copies(config: ParallelConfig, hardware: Hardware) -> int:
    world = hardware.world_size
    copies = config.replicate or hardware.num_nodes
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    named = f"{', '.join(map(str, divisors[:-1]))} or {divisors[-1]}" if len(divisors) > 1 else "1"
    if copies not in divisors:
        raise ConfigError(f"parallel.replicate={copies}: does not divide the {world} ranks of this run; use {named}.")
    if config.replicate is None and copies == 1 and world > 1:
        raise ConfigError(
            f"parallel.replicate: not set, and the {world} ranks of this run are on one node, so hsdp would be fsdp; "
            f"set it to {named}, or parallel.mode=fsdp."
        )
    return copies


def check_memory(
    hardware: Hardware, layout: ParallelLayout, has_adapter: bool, estimate: Callable[[int], Footprint], path: str
) -> str | None:
    """A warning where a run will probably not fit; None where it will.

    Raises:
        ConfigError: when it cannot fit, whatever the batch: with how much is missing and what would fit.
    """
    need, memory = estimate(layout.shard), hardware.memory_bytes
    if memory is None or hardware.holds(need):
        return None
    usable = SAFE_SHARE * memory
    remedies: list[str] = []
    shards = layout.shard
    while shards < hardware.world_size and not hardware.holds(estimate(shards)):
        shards *= 2
    if shards > layout.shard and hardware.holds(estimate(shards)):
        remedies.append("parallel.mode=fsdp" if shards == hardware.world_size else f"shards over {shards} ranks (hsdp)")
    else:
        while shards < _MOST_SHARDS and not hardware.holds(estimate(shards)):
            shards *= 2
        if hardware.holds(estimate(shards)):
            remedies.append(f"parallel.mode=fsdp on {shards} such devices")
    if need.of_batch > usable / 4:
        remedies.append("a lower micro_batch_size or data.seq_len, or activation_checkpointing.fraction=1.0")
    remedies.append("adapter.base=nf4" if has_adapter else "an adapter in place of all weights, or an 8-bit optimizer")
    report = (
        f"model.path={path}: a rank needs about {need}, {(need.total - usable) / GIB:.1f} GiB more than the "
        f"{usable / GIB:.1f} GiB it can use. What would fit: {'; '.join(remedies)}."
    )
    if need.total - need.of_batch > memory:
        raise ConfigError(report)
    return report


def check_layout(config: RunConfig, model: CausalLM, mode: str, num_shards: int) -> None:
    """Stop where a run cannot start so.

    Raises:
        ConfigError: weights in 4 bits that cannot be cut over so many ranks; an optimizer that cannot round in shards.
    """
    check_nf4_shards(model, num_shards)
    if config.optimizer.get("bf16_stochastic_round") and mode in ("fsdp", "hsdp"):
        raise ConfigError(
            f"optimizer.bf16_stochastic_round: torchao cannot round so in shards, and the layout is {mode}; set "
            "parallel.mode=ddp, or leave it out."
        )


def shard_(
    model: CausalLM, layout: ParallelLayout, config: ParallelConfig, precision: PrecisionPolicy, hardware: Hardware
) -> None:
    """Lay a model that is still on the meta device over the ranks, in place.

    Copies of a model whose weights are cast as they are multiplied go through FSDP too, as shards over one rank each:
    it casts a block at a time and keeps the float32 weights for the optimizer, which DDP does not.
    """
    model.layout = layout
    if precision.is_mixed or config.cpu_offload or layout.mode in ("fsdp", "hsdp"):
        _fully_shard_(model, layout, config, precision, hardware.device_type)
    elif layout.mode == "ddp":
        # Every rank loads the same weights, so none need be sent at the start.
        replicate(model, init_sync=False, gradient_as_bucket_view=True)
    model.holds_gradients = not isinstance(model, FSDPModule) or _holds_gradients(model, precision, hardware)


def _fully_shard_(
    model: CausalLM, layout: ParallelLayout, config: ParallelConfig, precision: PrecisionPolicy, device_type: str
) -> None:
    if layout.mode in ("hsdp", "ddp"):
        mesh = init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type, (layout.shard,), mesh_dim_names=("shard",))
    mixed = (
        MixedPrecisionPolicy(precision.compute_dtype, torch.float32) if precision.is_mixed else MixedPrecisionPolicy()
    )
    # Inputs that are floating, the weights of the loss, must stay as they are.
    mixed = MixedPrecisionPolicy(mixed.param_dtype, mixed.reduce_dtype, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed,
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    # Backward begins where forward ended, with the head: gathering it twice would buy no memory.
    fully_shard(model, reshard_after_forward=False, **options)
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for block, following in itertools.pairwise(units):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _holds_gradients(model: CausalLM, precision: PrecisionPolicy, hardware: Hardware) -> bool:
    """Whether whole gradients of what trains fit beside the rest while they accumulate."""
    trained = [p for p in model.parameters() if p.requires_grad]
    held = sum(p.numel() * (4 if precision.is_mixed else p.element_size()) for p in trained)
    return can_hold_gradients(held, hardware.memory_bytes)


def defer_reduce(model: CausalLM, is_deferred: bool) -> None:
    """Leave gradients unreduced over ranks in the backwards that follow, or reduce them again: for accumulation.

    Gradients that fit are held whole and nothing is sent. Others are still scattered into shards, and where there are
    several copies the sum over them alone is left to the last backward.
    """
    synchronise: Any = getattr(model, "set_requires_gradient_sync", None)  # of DDP and of FSDP, by one name
    if model.holds_gradients and synchronise is not None:
        synchronise(not is_deferred)
    elif isinstance(model, FSDPModule) and model.layout.replicate > 1:
        model.set_requires_all_reduce(not is_deferred)


def reshard_(model: CausalLM) -> None:
    """Let go of weights that a forward without a backward left whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
