"""Activation checkpointing and offloading, compilation and float8 matrix products of a model's blocks."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fctune.base.errors import ConfigError
from fctune.config.sections.parallel import ActivationCheckpointingConfig
from fctune.models.attention import attention_operators
from fctune.models.causal_lm import CausalLM
from fctune.models.forward_override import override_forward_
from fctune.models.frozen_linear import is_linear
from fctune.models.grouped_products import product_operators
from fctune.models.mlp_tiles import tile_mlps_

# Compilations of blocks of one kind: unpacked rows of changing lengths take two for each of the six kinds of graph.
_MAX_GRAPHS = 16
# Kinds of blocks that share the limit; a list of layers in a config can make every block look like a kind of its own.
_MAX_KINDS = 4
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
}


def apply_activation_checkpointing_(
    model: CausalLM,
    config: ActivationCheckpointingConfig,
    device_type: str,
    fraction: float | None = None,
    mlp_tiles: int | None = None,
) -> None:
    """Make an evenly spread fraction of the blocks recompute their activations in backward, in place.

    ``fraction`` and ``mlp_tiles`` are those of a ``ParallelLayout``; None takes the config's. With ``mlp_tiles``, all
    blocks compute their MLPs in tiles, which are recomputed one by one.

    A block saves only its input (policy ``block``), or also the outputs of attention and of every second matrix product
    (policy ``op``), which are cheaper to store than to recompute. Offloading keeps the inputs in the host's memory.

    Raises:
        ConfigError: Offloading on CPU.
    """
    if config.offload and device_type == "cpu":
        raise ConfigError(
            "activation_checkpointing.offload: moves activations between a CUDA device and the host, and this run is "
            "on CPU; set activation_checkpointing.offload=false."
        )
    fraction = (config.fraction or 0.0) if fraction is None else fraction
    if (mlp_tiles or config.mlp_tiles or 1) > 1:
        tile_mlps_(model, mlp_tiles or config.mlp_tiles or 1)
    offloading = _Offloading() if config.offload else None
    recompute = _recompute_cheap if config.policy == "op" else _recompute_all
    for index, block in enumerate(model.blocks):
        if is_checkpointed(index, fraction):
            override_forward_(block, recompute)
            if offloading is not None:
                block.register_forward_pre_hook(offloading.enter)
                block.register_forward_hook(offloading.exit, always_call=True)


def _recompute_all(block: nn.Module, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # Dropout is a function of step, row and position, so recomputation needs no random state.
    return checkpoint(own, *arguments, use_reentrant=False, preserve_rng_state=False, **options)


def _recompute_cheap(block: nn.Module, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return checkpoint(
        own, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_save_costly_context, **options
    )


class _Offloading:
    """Moves what blocks save for backward to the host, but not their weights, of which products save views."""

    def __init__(self) -> None:
        from fctune.models.torchtune.offloading import OffloadActivations  # needs a CUDA device on import

        self._inner = OffloadActivations()
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._resident: set[int] = set()  # storages of the block's weights and buffers

    def enter(self, block: nn.Module, arguments: Any) -> None:
        """Offload from here on; sharding has gathered the block's weights."""
        tensors = itertools.chain(block.parameters(), block.buffers())
        self._resident = {t.untyped_storage().data_ptr() for t in tensors if not is_traceable_wrapper_subclass(t)}
        self._hooks.__enter__()

    def exit(self, block: nn.Module, arguments: Any, output: Any) -> None:
        """Stop offloading, after the block's forward pass."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        is_resident = not is_traceable_wrapper_subclass(tensor) and (
            tensor.untyped_storage().data_ptr() in self._resident
        )
        return tensor if is_resident else self._inner.pack_hook(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = packed if isinstance(packed, Tensor) else self._inner.unpack_hook(packed)
        return tensor


def is_checkpointed(index: int, fraction: float) -> bool:
    """Return whether the block at ``index`` is in an evenly spread fraction of all blocks."""
    return int((index + 1) * fraction + 1e-9) > int(index * fraction + 1e-9)


def _save_costly_context() -> Any:
    counts: Counter[bool] = Counter()
    attention, products = attention_operators(), _PRODUCTS | product_operators()

    def decide(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in attention:
            return CheckpointPolicy.MUST_SAVE
        if operator in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
    return contexts


def compile_blocks_(model: CausalLM) -> None:
    """Compile each block, in place; equal blocks share one compilation.

    Batches of a run have one shape, so the graphs of a block are few: without gradients, with an input that needs none,
    and others, each recomputed or not. A block that is compiled again and again fails the run, because torch would run
    it uncompiled without a word.

    TORCH_COMPILE_BACKEND names another backend than Inductor, as in torchtune: ``aot_eager`` makes the same graphs and
    no kernels.
    """
    backend = os.environ.get("TORCH_COMPILE_BACKEND")
    options: dict[str, Any] = {"backend": backend} if backend else {}
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = _MAX_GRAPHS * min(_MAX_KINDS, len(set(model.block_kinds())))
    dynamo.fail_on_recompile_limit_hit = True
    # Adapters that share an input keep its product until the last of them has run, in forward and in recomputation.
    dynamo.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # DDP's buckets would split blocks into several graphs; their gradients are reduced as they are computed anyway.
    dynamo.optimize_ddp = False
    for block in model.blocks:
        compiled: Callable[..., Any] = torch.compile(block.forward, **options)
        block.forward = compiled


def count_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def use_float8_matmuls_(model: CausalLM, is_emulated: bool = False) -> None:
    """Make the linears of the blocks multiply in float8 with dynamic scales, one per tensor, in place.

    The head keeps its precision, because the loss is most sensitive to it.

    Args:
        model: Model whose blocks are changed.
        is_emulated: Round to float8, but multiply in a wider type: for CPUs. Some take seconds for one float8 product.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        return is_linear(module) and all(size % 16 == 0 for size in module.get_parameter("weight").shape)

    for block in model.blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(emulate=is_emulated), module_filter_fn=fits)
