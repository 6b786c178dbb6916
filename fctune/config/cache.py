"""Directory for prepared sets and other files that can be recreated."""

from __future__ import annotations

from pathlib import Path

from fctune.config.loading import read_environment
from fctune.config.schema import RunConfig


def cache_root() -> Path:
    """Return ``FCTUNE_CACHE``, or ``fctune`` in the user's cache directory (``XDG_CACHE_HOME``, ``~/.cache``)."""
    environment = read_environment()
    if root := environment.get("FCTUNE_CACHE"):
        return Path(root)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fctune"


def prepared_root(config: RunConfig) -> Path:
    """Return the directory that holds the prepared sets of a run."""
    return Path(config.data.prepared_dir) if config.data.prepared_dir else cache_root() / "prepared"
