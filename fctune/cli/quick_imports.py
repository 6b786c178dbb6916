"""Imports of a process that makes one plan and ends: without what transformers imports and no plan needs.

transformers imports torch's compiler for the decorators of functions that a plan never calls, and so does torch at the
first operation of a meta tensor. It imports torchao for checkpoints in its format, and reads the files of its models to
list their classes. Each of these has a stand-in, which gives way to the real module as soon as anything else is asked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_MODELS = "transformers.models"
_NAMES = (_COMPILER, _MODELS, "transformers.quantizers.quantizer_torchao")

# Decorators of the compiler, which change nothing where nothing is compiled.
_DECORATORS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
# What others import from these modules by name, to call it later.
_CALLED = frozenset({"TransformGetItemToIndex", "TorchAoHfQuantizer"})


def stand_in_for_slow_imports() -> None:
    """Let later imports find stand-ins; for a process that compiles nothing. Without effect on what is imported."""
    sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """Stands for a module until something is asked of it that only the real one has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _DECORATORS and self.__name__ == _COMPILER:
            return _leave_as_it_is
        if name in _CALLED:
            return partial(_call, self.__name__, name)
        return getattr(_load(self.__name__), name)


def _leave_as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """Return the decorated function, or a decorator if only options are given."""
    return _leave_as_it_is if function is None else function


def _call(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(_load(module), name)(*arguments, **options)


def _load(name: str) -> ModuleType:
    """Import the real module, and the real ones around it."""
    root = _find_root(name)
    for other, module in list(sys.modules.items()):
        if isinstance(module, _StandIn) and _find_root(other) == root:
            del sys.modules[other]
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            finder.names.discard(root)
    return importlib.import_module(name)


def _find_root(name: str) -> str:
    return next((root for root in _NAMES if name == root or name.startswith(f"{root}.")), "")


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins before the usual finders find the modules."""

    def __init__(self) -> None:
        self.names = set(_NAMES)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a stand-in, or None for other modules."""
        root = _find_root(fullname)
        if root not in self.names or (root == _MODELS and fullname != _MODELS):
            return None  # the modules of the models themselves are real
        spec = ModuleSpec(fullname, self, is_package=True)
        if root == _MODELS:
            spec.submodule_search_locations = [str(Path(folder) / "models") for folder in path or ()]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in has no content."""
