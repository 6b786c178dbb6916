"""Root mean square norms by one function, wherever a probe shows that a family's norm is one.

transformers' norms take six operations, each of which keeps or moves a tensor of the activations' size. Families differ
in what a norm does with its weight, so each class is tried on numbers instead of being known by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm as torch_rms_norm

from fctune.models.forward_override import override_forward_
from fctune.models.norms import is_rowwise, rms_norm, rowwise_rms_norm

_NUM_ROWS = 3


def fuse_norms_(decoder: nn.Module) -> None:
    """Compute plain root mean square norms by our function, in place; others stay as they are.

    Norms that add one to their weight, as Gemma's do, are ours on CPUs only: elsewhere, torch's kernel would round the
    sum to half precision.
    """
    offsets: dict[Hashable, float | None] = {}
    for module in decoder.modules():
        eps = _find_eps(module)
        if eps is None:
            continue
        # A decoder has hundreds of norms of a few kinds.
        kind = _describe(module)
        if kind not in offsets:
            offsets[kind] = _find_offset(module, eps)
        offset = offsets[kind]
        if offset is not None:
            norm: Any = module
            norm._eps, norm._offset = eps, offset
            override_forward_(module, _normalise)


def _normalise(norm: Any, own: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    if norm._offset == 0.0:
        return rms_norm(hidden_states, norm.weight, norm._eps)
    if is_rowwise(hidden_states):
        return rowwise_rms_norm(hidden_states, norm.weight, norm._eps, norm._offset)
    return own(hidden_states)


def _find_eps(module: nn.Module) -> float | None:
    """Return the epsilon of a module that could be such a norm: one vector as its weight, and nothing else."""
    names = [name for name, _ in module.named_parameters()]
    if len(inspect.signature(type(module).forward).parameters) != 2:  # itself and its input; some have a gate, too
        return None
    eps = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, float)]
    if names != ["weight"] or len(eps) != 1 or next(module.buffers(), None) is not None:
        return None
    weight: Any = module.weight
    return eps[0] if weight.dim() == 1 else None


def _describe(module: nn.Module) -> Hashable:
    """Return what a norm's output depends on besides its input and weight: its class, size and attributes."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    if not all(isinstance(value, bool | int | float | str | tuple | None) for value in own.values()):
        return id(module)
    weight: Any = module.weight
    return type(module), len(weight), repr(sorted(own.items()))


def _find_offset(module: nn.Module, eps: float) -> float | None:
    """Return what a module adds to its weight if it equals a norm on random numbers of several sizes, in float32."""
    weight: Any = module.weight
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(len(weight), generator=generator)
    # Small inputs show where epsilon is added.
    scales = torch.tensor([1e-3, 1.0, 30.0]).repeat(_NUM_ROWS)[:_NUM_ROWS, None]
    x = torch.randn(1, _NUM_ROWS, len(weight), generator=generator) * scales
    try:
        with torch.no_grad():
            own = torch.func.functional_call(module, {"weight": probe}, (x,))
    except (TypeError, RuntimeError):  # of a module with another signature
        return None
    for offset in (0.0, 1.0):
        expected = torch_rms_norm(x, probe.shape, probe + offset, eps)
        is_alike = isinstance(own, Tensor) and own.shape == expected.shape
        if is_alike and torch.allclose(own, expected, rtol=1e-5, atol=1e-6):
            return offset
    return None
