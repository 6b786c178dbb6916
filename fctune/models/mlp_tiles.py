"""MLPs computed in tiles along the rows, so that their activations exist for a part of the tokens at a time.

An MLP computes each token by itself, so tiles change no result: dropout is a function of row and position. Each tile is
recomputed in backward, just before its gradients (https://arxiv.org/abs/2506.13996).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fctune.models.causal_lm import CausalLM
from fctune.models.dropout import TokenKeys
from fctune.models.forward_override import override_forward_
from fctune.models.frozen_linear import FrozenLinear, is_linear
from fctune.models.lora import separate_inputs_


def is_mlp(module: nn.Module) -> bool:
    """Return whether a part of a block computes each token by linears alone: no experts, convolutions or attention."""
    linears = [inner for inner in module.modules() if is_linear(inner) or isinstance(inner, FrozenLinear)]
    known = {parameter for linear in linears for parameter in linear.parameters()}
    has_others = any(parameter.dim() > 1 and parameter not in known for parameter in module.parameters())
    has_lists = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    # Attention needs positions, and layers with state take a cache.
    takes_one_tensor = len(inspect.signature(type(module).forward).parameters) == 2
    return len(linears) > 1 and takes_one_tensor and not has_others and not has_lists


def find_mlps(model: CausalLM) -> Iterator[nn.Module]:
    """Iterate over the MLPs of a model's blocks, next to whatever else computes tokens, such as experts."""
    return (child for block in model.blocks for child in block.children() if is_mlp(child))


def tile_mlps_(model: CausalLM, num_tiles: int) -> None:
    """Make each MLP compute its rows in so many parts if gradients are needed, in place; adapters come first."""
    for mlp in find_mlps(model):
        tiled: Any = mlp
        tiled._num_tiles, tiled._token_keys = num_tiles, model.token_keys
        separate_inputs_(mlp)
        override_forward_(mlp, _compute_tiles)


def _compute_tiles(mlp: Any, own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute ``[b, s, d]`` by the MLP's own forward, some positions of all rows at a time."""
    if x.dim() != 3 or x.shape[1] < mlp._num_tiles or not torch.is_grad_enabled():
        return own(x)
    keys: TokenKeys = mlp._token_keys
    tiles = x.tensor_split(mlp._num_tiles, 1)
    key_tiles = [None] * len(tiles) if keys.value is None else keys.value.tensor_split(mlp._num_tiles, 1)
    computed = [
        checkpoint(_compute_tile, own, keys, *pair, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(tiles, key_tiles, strict=True)
    ]
    return torch.cat(computed, 1)


def _compute_tile(own: Callable[[Tensor], Tensor], keys: TokenKeys, x: Tensor, own_keys: Tensor | None) -> Tensor:
    """Compute a tile with the dropout keys of its tokens."""
    all_keys, keys.value = keys.value, own_keys
    try:
        return own(x)
    finally:  # recomputation ends by an exception
        keys.value = all_keys
