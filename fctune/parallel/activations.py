"""What a block keeps for its backward, and how it is run: recomputation, offloading, compilation, float8 products."""

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

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
}


def apply_activation_checkpointing_(model: CausalLM, config: ActivationCheckpointingConfig, device_type: str) -> None:
    """Let a fraction of the blocks, evenly spread, compute activations again in backward, in place.

    A block keeps its input alone (``block``), or also what attention and every second product gave (``op``), which
    costs less to keep than to compute. Offloading moves what is kept to the host until it is needed.

    Raises:
        ConfigError: offloading on a device that has no host beside it.
    """
    if config.offload:
        if device_type == "cpu":
            raise ConfigError(
                "activation_checkpointing.offload: moves activations between a CUDA device and the host, and this run "
                "is on CPU; set activation_checkpointing.offload=false."
            )
        model.offload_activations_()
    contexts: dict[str, Any] = {"context_fn": _keep_costly} if config.policy == "op" else {}
    for index, block in enumerate(model.blocks):
        if is_checkpointed(index, config.fraction):
            # Dropout is a function of the place and needs no generator's state to be the same again.
            block.forward = functools.partial(
                checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
            )


def is_checkpointed(index: int, fraction: float) -> bool:
    """Whether the item at ``index`` is among a fraction of all, evenly spread."""
    return int((index + 1) * fraction + 1e-9) > int(index * fraction + 1e-9)


def _keep_costly() -> Any:
    counts: Counter[bool] = Counter()
    attention = attention_operators()

    def decide(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in attention:
            return CheckpointPolicy.MUST_SAVE
        if operator in _PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
    return contexts


def compile_blocks_(model: CausalLM) -> None:
    """Compile each block, in place: they are alike, so one compilation serves all of them."""
    for block in model.blocks:
        compiled: Callable[..., Any] = torch.compile(block.forward)
        block.forward = compiled


def use_float8_matmuls_(model: CausalLM) -> None:
    """Multiply in float8 what the blocks' linears multiply, in place; a scale a tensor, taken anew each time.

    The head is left as it is: the loss is most sensitive to it.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and all(size % 16 == 0 for size in module.weight.shape)

    for block in model.blocks:
        convert_to_float8_training(block, config=Float8LinearConfig(), module_filter_fn=fits)
