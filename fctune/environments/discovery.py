"""Environments by name: our own, and those of installed packages."""

from __future__ import annotations

import importlib.metadata

from fctune.config.parsing import suggest
from fctune.errors import ConfigError

BUILT_IN = {
    "files": "fctune.environments.files:Files",
    "calendar": "fctune.environments.calendar:Calendar",
    "shop": "fctune.environments.shop:Shop",
}
"""Our own environments by name."""

GROUP = "fctune.environments"
"""Entry points of this group are environments by name."""


def list_environments() -> dict[str, str]:
    """Return the references ``module:Class`` of all environments by name, entry points included."""
    found = {point.name: point.value for point in importlib.metadata.entry_points(group=GROUP)}
    return {**found, **BUILT_IN}


def find_reference(name: str) -> str:
    """Return the reference of an environment that is given by its name or by its reference.

    Raises:
        ConfigError: There is no such environment.
    """
    if ":" in name:
        return name
    known = list_environments()
    if name not in known:
        close = suggest(name, list(known))
        raise ConfigError(
            f"environment {name}: no such environment{close} (known: {', '.join(sorted(known))}). Pass one of them, or "
            "module:Class."
        )
    return known[name]
