"""Bytes that the blocks of any model keep for backward, counted in a forward pass on the meta device.

The formulas of ``fctune.planner.blocks`` describe two norms, attention and one MLP, as torchtune builds them. Models
from transformers have other layers, and norms that compute in float32 and keep their steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy

# Lengths of the traced rows, in tokens; two, to tell what grows with them from what does not.
_LENGTHS = (128, 256)

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """Bytes that the blocks of a model keep for backward, on average."""

    per_token: float
    constant: float


def trace_blocks(a: Architecture, config: RunConfig, width: int) -> TracedBlocks | None:
    """Count the bytes that the blocks keep in eager mode; None if they need values of tensors to run.

    Args:
        a: Sizes of the model.
        config: Config of the run.
        width: Bytes per element in the compute dtype.
    """
    model = a.build_model(config.data.seq_len, PrecisionPolicy.uniform(_DTYPES[width]))
    if config.adapter is not None:
        apply_lora_(model, replace(config.adapter, base="bf16"))  # quantised weights keep the same activations
    model.train()
    try:
        short, long = (_trace(model, length) for length in _LENGTHS)
    except RuntimeError:  # a layer reads values, which meta tensors do not have
        return None
    slope = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    count = len(list(model.blocks))
    return TracedBlocks(slope / count, max(0.0, short - slope * _LENGTHS[0]) / count)


def _trace(model: CausalLM, length: int) -> int:
    """Return the bytes that all blocks keep in a row of so many tokens, without their weights and buffers."""
    buffers = {name: buffer.to("meta") for name, buffer in model.named_buffers()}
    known = {_storage(tensor) for tensor in (*model.parameters(), *buffers.values())}
    kept: dict[int, int] = {}
    # Storages stay alive, so that none is taken for an earlier one at the same address.
    alive: list[Tensor] = []
    is_inside = False

    def keep(tensor: Tensor) -> Tensor:
        if is_inside and _storage(tensor) not in known:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    def enter(*_: Any) -> None:
        nonlocal is_inside
        is_inside = True

    def leave(*_: Any) -> None:
        nonlocal is_inside
        is_inside = False

    hooks = [block.register_forward_pre_hook(enter) for block in model.blocks]
    hooks += [block.register_forward_hook(leave) for block in model.blocks]
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(_Hidden(model), {f"model.{name}": b for name, b in buffers.items()}, (length,))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(kept.values())


class _Hidden(nn.Module):
    """Computes the hidden states of one conversation."""

    def __init__(self, model: CausalLM):
        super().__init__()
        self.model = model

    def forward(self, length: int) -> Tensor:
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        self.model.token_keys.set_rows(torch.zeros(1, dtype=torch.int64, device="meta"), length)
        bounds = self.model.make_bounds([[length]])
        positions = torch.zeros(1, length, dtype=torch.int64, device="meta")
        return self.model.hidden_states(tokens, positions, bounds)


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
