"""Apply a parallel layout with torch's DDP and FSDP2; each transformer block is one unit of sharding."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fctune.config.sections.parallel import ParallelConfig
from fctune.models.causal_lm import CausalLM
from fctune.parallel.context_parallel import share_rows_
from fctune.parallel.expert_parallel import is_spread, reduce_expert_gradients_, spread_experts_
from fctune.parallel.footprint import can_hold_gradients
from fctune.parallel.layout import Hardware, ParallelLayout


class GradientSync:
    """When the gradients of a model are reduced over ranks while they accumulate over micro-batches.

    If full gradients fit in memory, they are kept on each rank and reduced once, in the last backward. Otherwise each
    backward scatters them into shards; with several copies of the model, the sum over the copies waits for the last.

    Args:
        model: Model to train; sharded or replicated unless the run has one rank.
        num_copies: Copies of the model over the ranks.
        holds_gradients: Full gradients of the trained parameters fit in memory.
    """

    def __init__(self, model: CausalLM, num_copies: int = 1, holds_gradients: bool = True):
        self.model = model
        self.num_copies = num_copies
        self.holds_gradients = holds_gradients

    def defer(self, is_deferred: bool) -> None:
        """Turn deferral of the gradient reduction on or off for the backward passes that follow."""
        set_sync: Any = getattr(self.model, "set_requires_gradient_sync", None)  # the same name in DDP and FSDP
        if self.holds_gradients and set_sync is not None:
            set_sync(not is_deferred)
        elif isinstance(self.model, FSDPModule) and self.num_copies > 1:
            self.model.set_requires_all_reduce(not is_deferred)

    def finish(self) -> None:
        """Reduce what backward does not, after the last one of a step."""
        reduce_expert_gradients_(self.model)


def shard_(model: CausalLM, layout: ParallelLayout, config: ParallelConfig, hardware: Hardware) -> GradientSync:
    """Shard or replicate a model that is still on the meta device, in place.

    In mixed precision and under CPU offload, DDP is FSDP with one shard per copy: FSDP casts one block at a time and
    keeps float32 weights for the optimizer, which DDP does not.

    Args:
        model: Model on the meta device, with its adapters.
        layout: Copies and shards; their product is the number of ranks.
        config: The ``parallel`` section of the run's config.
        hardware: Ranks of the run.

    Returns:
        The control of gradient reduction for the training step.
    """
    if layout.context > 1:
        share_rows_(model, layout.context, hardware.world_size, hardware.device_type)
    if model.precision.is_mixed or config.cpu_offload or layout.mode in ("fsdp", "hsdp"):
        num_ranks = config.expert_ranks
        spread = spread_experts_(model, num_ranks, hardware.device_type) if num_ranks > 1 else set()
        _fully_shard_(model, layout, config, hardware.device_type, spread)
    elif layout.mode == "ddp":
        # Every rank loads the same weights, so no initial broadcast is needed.
        replicate(model, init_sync=False, gradient_as_bucket_view=True)
    holds_gradients = not isinstance(model, FSDPModule) or _can_hold_gradients(model, hardware)
    return GradientSync(model, layout.replicate, holds_gradients)


def _fully_shard_(
    model: CausalLM, layout: ParallelLayout, config: ParallelConfig, device_type: str, ignored: set[nn.Parameter]
) -> None:
    """Shard all parameters but the ignored ones, in place."""
    if layout.mode in ("hsdp", "ddp"):
        mesh = init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type, (layout.shard,), mesh_dim_names=("shard",))
    is_mixed = model.precision.is_mixed
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=model.precision.compute_dtype if is_mixed else None,
            reduce_dtype=torch.float32 if is_mixed else None,
            cast_forward_inputs=False,  # the loss weights are a floating-point input and must stay float32
        ),
        "ignored_params": ignored,
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    blocks = list(model.blocks)
    for block in blocks:
        for module in _find_other_dtypes(block):
            fully_shard(module, reshard_after_forward=config.reshard_after_forward, **options)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **options)
    # Backward starts with the head, where forward ended: resharding it in between would save no memory.
    fully_shard(model, reshard_after_forward=False, **options)
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    # The first block is gathered while the tokens are embedded, as each other block is while the one before it runs.
    model.set_modules_to_forward_prefetch(units[:1])  # type: ignore[operator]
    for block, following in itertools.pairwise(units):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _find_other_dtypes(block: nn.Module) -> list[nn.Module]:
    """Return the modules whose trained weights differ in dtype from most of the block's, such as a float32 router.

    FSDP reduces the gradients of one dtype per unit, so these are units of their own.
    """
    sizes: Counter[torch.dtype] = Counter()
    owners: dict[nn.Module, set[torch.dtype]] = {}
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                sizes[parameter.dtype] += parameter.numel()
                owners.setdefault(module, set()).add(parameter.dtype)
    return [module for module, dtypes in owners.items() if dtypes != {max(sizes, key=lambda dtype: sizes[dtype])}]


def _can_hold_gradients(model: CausalLM, hardware: Hardware) -> bool:
    trained = [_held_part(p) for p in model.parameters() if p.requires_grad]
    num_bytes = sum(p.numel() * (4 if model.precision.is_mixed else p.element_size()) for p in trained)
    return can_hold_gradients(num_bytes, hardware.memory_bytes)


def _held_part(parameter: Tensor) -> Tensor:
    """Return the tensor that a rank has a full gradient of: its part of spread experts, else the parameter."""
    return parameter.to_local() if is_spread(parameter) and isinstance(parameter, DTensor) else parameter


def reshard_(model: CausalLM) -> None:
    """Free the full weights that a forward without a backward leaves gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
