"""Root mean square norms by torch's fused kernel, wherever a probe shows that a family's norm is that one.

transformers' norms take six operations, each of which keeps or moves a tensor of the activations' size. Families differ
in what a norm does with its weight, so each class is tried on numbers instead of being known by its name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

_NUM_ROWS = 3


def fuse_norms_(decoder: nn.Module) -> None:
    """Compute norms that are plain root mean square norms by torch's kernel, in place; others stay as they are."""
    for module in decoder.modules():
        eps = _find_eps(module)
        if eps is not None and _is_rms_norm(module, eps):
            module.forward = functools.partial(_normalise, module, eps)


def _normalise(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    weight: Tensor = module.weight
    return rms_norm(hidden_states, weight.shape, weight, eps)


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


def _is_rms_norm(module: nn.Module, eps: float) -> bool:
    """Return whether a module equals torch's norm on random numbers of several sizes, in float32."""
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
        return False
    expected = rms_norm(x, probe.shape, probe, eps)
    is_alike = isinstance(own, Tensor) and own.shape == expected.shape
    return is_alike and torch.allclose(own, expected, rtol=1e-5, atol=1e-6)
