"""Lookup of reasoning formats by chat template, or by the text where nothing else is known.

The formats are found in the modules of this package; nothing about any one of them is known here.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from fctune.calls import reasoning
from fctune.calls.reasoning.base import Reasoning, ReasoningFormat


def _find_formats() -> dict[str, ReasoningFormat]:
    for module in pkgutil.iter_modules(reasoning.__path__):
        if module.name != "registry":
            import_module(f"{reasoning.__name__}.{module.name}")
    classes: list[type[ReasoningFormat]] = ReasoningFormat.__subclasses__()
    for base in classes:
        classes.extend(base.__subclasses__())
    return {cls.name: cls() for cls in sorted((c for c in classes if hasattr(c, "name")), key=lambda c: c.name)}


REASONING_FORMATS = _find_formats()
_SIGNATURES = sorted(
    ((signature, found) for found in REASONING_FORMATS.values() for signature in found.template_signatures),
    key=lambda entry: -entry[0].priority,
)


def detect_reasoning(chat_template: str) -> ReasoningFormat | None:
    """Return the format in which a chat template writes reasoning; None if it writes none."""
    for signature, found in _SIGNATURES:
        if all(mark in chat_template for mark in signature.marks):
            return found
    return None


def find_reasoning(text: str) -> Reasoning | None:
    """Find the reasoning at the start of a text whose model, and so its format, is unknown; None if there is none."""
    for found in _DISTINCT:
        reasoning = found.split(text)
        if reasoning is not None and not text[: reasoning.spans[0][0]].strip():
            return reasoning
    return None


# One format for each opening mark; of several, one that reads a single block.
_DISTINCT = tuple(
    {
        found.opening or found.name: found
        for found in sorted(REASONING_FORMATS.values(), key=lambda found: not found.first_call)
    }.values()
)
