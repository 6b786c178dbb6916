"""Replacement of a module's forward in its class, so that compiled code serves all modules of a kind.

A forward that is set on a module, or holds one in a closure, is another function for each module, and a compiler would
compile every block of a model again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn


def override_forward_(module: nn.Module, wrap: Callable[..., Any]) -> None:
    """Make a module compute ``wrap(module, own, *arguments, **options)``, where ``own`` is its forward, in place.

    Its class becomes a subclass of the same name, one for each class and ``wrap``. What differs between modules belongs
    into their attributes.

    Args:
        module: Module to change.
        wrap: Function of a module or class that exists once, not a closure or partial made for each module.
    """
    kind: Any = type(module)
    module.__class__ = _derive(kind, wrap)


@functools.cache
def _derive(kind: Any, wrap: Callable[..., Any]) -> Any:
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return wrap(self, super(derived, self).forward, *arguments, **options)

    # The limit of recompilations is one of a code object, so each class has its own.
    own = FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    functools.update_wrapper(own, kind.forward)
    names = {"forward": own, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    derived: Any = type(kind.__name__, (kind,), names)
    return derived
