"""Bytes that the blocks of any model keep for backward, counted in a forward pass on the meta device.

The formulas of ``fctune.apps.plan.blocks`` describe two norms, attention and one MLP, as torchtune builds them. Models
from transformers have other layers, and norms that compute in float32 and keep their steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture
from fctune.models.block_kinds import repeats_skipped
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
    model = a.build_shapes(config.data.seq_len, PrecisionPolicy.uniform(_DTYPES[width]))
    kinds = model.block_kinds()
    if config.adapter is not None:
        apply_lora_(model, replace(config.adapter, base="bf16"))  # quantised weights keep the same activations
    model.train()
    try:
        short, long = (_trace(model, kinds, length) for length in _LENGTHS)
    except RuntimeError:  # a layer reads values, which meta tensors do not have
        return None
    slope = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    return TracedBlocks(slope / len(kinds), max(0.0, short - slope * _LENGTHS[0]) / len(kinds))


def _trace(model: CausalLM, kinds: Sequence[Hashable], length: int) -> int:
    """Return the bytes that all blocks keep in a row of so many tokens, without their weights and buffers.

    The first block of a kind may keep what the others share, such as positions, and the first of all lacks what only a
    gradient of its input needs. The second one stands for the blocks of its kind that follow.
    """
    blocks = list(model.blocks)
    buffers = {name: buffer.to("meta") for name, buffer in model.named_buffers()}
    known = {_storage(tensor) for tensor in (*model.parameters(), *buffers.values())}
    kept = [0] * len(blocks)
    # Storages stay alive, so that none is taken for an earlier one at the same address.
    alive: list[Tensor] = []
    running: int | None = None

    def keep(tensor: Tensor) -> Tensor:
        if running is not None and _storage(tensor) not in known:
            known.add(_storage(tensor))
            kept[running] += tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    def enter(index: int, *_: Any) -> None:
        nonlocal running
        running = index

    def leave(*_: Any) -> None:
        nonlocal running
        running = None

    hooks = [block.register_forward_pre_hook(partial(enter, index)) for index, block in enumerate(blocks)]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    try:
        with repeats_skipped(blocks, kinds, 2) as skipped, saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(_Hidden(model), {f"model.{name}": b for name, b in buffers.items()}, (length,))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(kept) + sum(kept[ran] for ran in skipped.values())


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
