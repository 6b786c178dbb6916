"""Float64 models of transformers, whose layers cast to float32 in norms, rotations and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fctune.models.forward_override import override_forward_


class KeepFloat64(TorchFunctionMode):
    """Turns every request for float32 into one for float64, so that a float64 model computes in float64 throughout."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with float64 in place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*(_widen(value) for value in args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def keep_float64_(base: nn.Module) -> None:
    """Make the modules with weights of a model without its head compute in float64, in place.

    They do so again when backward recomputes them. The angles of RoPE stay in float32, as everywhere.
    """
    for child in base.children():
        for module in child if isinstance(child, nn.ModuleList) else [child]:
            if next(module.parameters(), None) is not None:
                override_forward_(module, _run_in_float64)


def _run_in_float64(module: nn.Module, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with KeepFloat64():
        return own(*arguments, **options)
