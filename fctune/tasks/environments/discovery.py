"""Environments by name: our own, and those of installed packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.config.parsing import suggest

BUILT_IN = {
    "files": "fctune.tasks.environments.files:Files",
    "calendar": "fctune.tasks.environments.calendar:Calendar",
    "shop": "fctune.tasks.environments.shop:Shop",
}
"""Our own environments by name."""

GROUP = "fctune.tasks.environments"
"""Entry points of this group are environments by name."""


def list_environments() -> dict[str, str]:
    """Return the references of all environments by name, entry points included."""
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {**found, **BUILT_IN}


def find_reference(name: str) -> str:
    """Return the reference of an environment, ``FILE.py:Class`` or ``module:Class`` of an installed package.

    Args:
        name: Its name, or its reference.

    Raises:
        ConfigError: There is no such environment.
    """
    where, colon, _ = name.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise ConfigError(f"environment {name}: {where} does not exist; relative paths start at {Path.cwd()}.")
        return name
    if colon:
        return name
    known = list_environments()
    if name not in known:
        close = suggest(name, list(known))
        raise ConfigError(
            f"environment {name}: no such environment{close} (known: {', '.join(sorted(known))}). Pass one of them, or "
            "FILE.py:Class."
        )
    return known[name]
