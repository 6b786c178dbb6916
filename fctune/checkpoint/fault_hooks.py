"""The moments of a run that can be cut, told to whoever listens: tests cut it at one of them."""

from __future__ import annotations

from collections.abc import Callable

PHASES = ("step", "update", "stage", "write", "publish", "mark", "prune", "sweep", "read")

_listeners: list[Callable[[str, str], None]] = []


def listen(listener: Callable[[str, str], None]) -> None:
    """Call ``listener(phase, name)`` when a phase of a step or checkpoint begins, in the thread that begins it."""
    _listeners.append(listener)


def reached(phase: str, name: str) -> None:
    """Tell the listeners that a phase begins."""
    for listener in _listeners:
        listener(phase, name)
