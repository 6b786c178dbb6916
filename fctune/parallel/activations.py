"""Activation checkpointing and offloading, compilation and float8 matrix products of a model's blocks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fctune.config.schema import ActivationCheckpointingConfig
from fctune.errors import ConfigError
from fctune.models.attention import attention_operators
from fctune.models.causal_lm import CausalLM
from fctune.models.grouped_products import product_operators

# Compilations of a block: unpacked rows of changing lengths take two for each of the six kinds of graph.
_MAX_GRAPHS = 16
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
}


def apply_activation_checkpointing_(model: CausalLM, config: ActivationCheckpointingConfig, device_type: str) -> None:
    """Make an evenly spread fraction of the blocks recompute their activations in backward, in place.

    A block saves only its input (policy ``block``), or also the outputs of attention and of every second matrix product
    (policy ``op``), which are cheaper to store than to recompute. Offloading keeps what is saved in the host's memory.

    Raises:
        ConfigError: offloading on CPU.
    """
    if config.offload:
        if device_type == "cpu":
            raise ConfigError(
                "activation_checkpointing.offload: moves activations between a CUDA device and the host, and this run "
                "is on CPU; set activation_checkpointing.offload=false."
            )
        model.offload_activations_()
    contexts: dict[str, Any] = {"context_fn": _save_costly_context} if config.policy == "op" else {}
    for index, block in enumerate(model.blocks):
        if is_checkpointed(index, config.fraction):
            # Dropout is a function of step, row and position, so recomputation needs no random state.
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
            )


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
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = _MAX_GRAPHS
    dynamo.fail_on_recompile_limit_hit = True
    # DDP's buckets would split blocks into several graphs; their gradients are reduced as they are computed anyway.
    dynamo.optimize_ddp = False
    for block in model.blocks:
        compiled: Callable[..., Any] = torch.compile(block.forward)
        block.forward = compiled


def use_float8_matmuls_(model: CausalLM) -> None:
    """Make the linears of the blocks multiply in float8 with dynamic scales, one per tensor, in place.

    The head keeps its precision, because the loss is most sensitive to it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)

    for block in model.blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(), module_filter_fn=fits)
