"""Hooks at the phases of a step and of a checkpoint, through which fault tests interrupt a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Phase = Literal[
    "step",
    "update",
    "stage",
    "write",
    "publish",
    "mark",
    "prune",
    "sweep",
    "read",
    # Of reinforcement:
    "policy",  # the engine gets the policy
    "load",  # a server loads its adapter
    "sample",
    "judge",
    "judged",
    "log",
]

_listeners: list[Callable[[Phase, str], None]] = []


def listen(listener: Callable[[Phase, str], None]) -> Callable[[], None]:
    """Call ``listener(phase, name)`` whenever a phase begins, in the thread that begins it.

    Returns:
        Function that removes the listener.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def fire(phase: Phase, name: str) -> None:
    """Notify the listeners that a phase begins; ``name`` is the step or checkpoint it belongs to."""
    for listener in _listeners:
        listener(phase, name)
