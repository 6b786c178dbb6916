"""Formats found in the modules of a package, and recognised by a chat template."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from fctune.calls.formats.base import TemplateFormat, TemplateSignature

F = TypeVar("F", bound=TemplateFormat)


def find_formats(package: ModuleType, base: type[F]) -> dict[str, F]:
    """Import the modules of a package, and return an instance of each subclass of ``base`` that has a name, by name."""
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "registry":  # which is being imported
            import_module(f"{package.__name__}.{module.name}")
    classes: list[type[F]] = base.__subclasses__()
    for parent in classes:
        classes.extend(parent.__subclasses__())
    return {cls.name: cls() for cls in sorted((c for c in classes if hasattr(c, "name")), key=lambda c: c.name)}


def sort_signatures(formats: Mapping[str, F]) -> list[tuple[TemplateSignature, F]]:
    """Return each signature of the formats with its format, highest priority first."""
    signatures = [(signature, found) for found in formats.values() for signature in found.template_signatures]
    return sorted(signatures, key=lambda entry: -entry[0].priority)


def match_signature(signatures: Iterable[tuple[TemplateSignature, F]], chat_template: str) -> F | None:
    """Return the format of the first signature whose marks all occur in a chat template; None if there is none."""
    return next((found for signature, found in signatures if all(m in chat_template for m in signature.marks)), None)
