"""Run configs checked against the model that they name, without importing torch or reading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.models.sources import find_module_problems, read_architecture


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's config, and check it against its model's architecture where the model directory is local.

    Args:
        path: YAML file in the schema of RunConfig, or the name of a config that comes with fctune.
        overrides: ``key=value`` overrides, see ``load_config``.

    Raises:
        ConfigError: listing every problem with its key and remedy.
    """
    return load_config(path, overrides, _find_model_problems)


def _find_model_problems(config: RunConfig) -> list[str]:
    """Check the adapter's modules and the model; either section may hold wrong values, which have been reported."""
    modules = None if config.adapter is None else config.adapter.modules
    if modules:
        modules = [name for name in modules if isinstance(name, str)] or None
    path = getattr(config.model, "path", None)
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        return find_module_problems(modules)
    try:
        return read_architecture(path).find_adapter_problems(modules)
    except ConfigError as error:
        return [f"model.path: {error}", *find_module_problems(modules)]
