"""Importing torchtune without Hugging Face's ``datasets``, which takes longer to import than torchtune itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "datasets"


@contextmanager
def lazy_datasets() -> Iterator[None]:
    """Let imports bind functions of ``datasets`` that import it when they are called.

    torchtune imports it at its top for data that is not used here. Without effect if ``datasets`` is imported already.
    """
    if _NAME in sys.modules:
        yield
        return
    finder = _LazyFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _LazyModule)]:
            del sys.modules[name]  # the next import is of the real one


class _LazyModule(ModuleType):
    """Stands for a module of ``datasets``; its attributes are functions that call the real ones."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__

        def call(*arguments: Any, **options: Any) -> Any:
            return getattr(importlib.import_module(module), name)(*arguments, **options)

        return call


class _LazyFinder(MetaPathFinder, Loader):
    """Finds ``datasets`` and its modules before the usual finders do."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the spec of a stand-in, or None for other packages."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module in place of ``datasets``."""
        return _LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the stand-in has no content."""
