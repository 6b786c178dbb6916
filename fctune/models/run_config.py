"""Run configs checked against the model that they name, and the directory of that model; torch is not imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from fctune.config.cache import prepared_root
from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.config.sections.model import ModelSource
from fctune.models.architecture import ALL_LINEAR
from fctune.models.hub import resolve_model_dir
from fctune.models.sources import find_model_problems


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's config, and check it against its model's architecture where the model directory is local.

    Args:
        path: YAML file in the schema of RunConfig, or the name of a config that comes with fctune.
        overrides: ``key=value`` overrides, see ``load_config``.

    Raises:
        ConfigError: Listing every problem with its key and remedy.
    """
    return load_config(path, overrides, _find_model_problems)


def resolve_base(config: RunConfig) -> Path:
    """Return the local directory of a run's base, downloaded and extended by ``model.add_tokens`` if needed.

    Raises:
        ConfigError: The download failed, or a token cannot be added.
        CheckpointError: The base's files are damaged.
    """
    model_dir = resolve_model_dir(config.model.path)
    if not config.model.add_tokens:
        return model_dir
    from fctune.models.added_tokens import extend_base

    return extend_base(model_dir, config.model.add_tokens, prepared_root(config))


def _find_model_problems(config: RunConfig) -> list[str]:
    """Check the adapter's modules and the model; either section may hold wrong values, which have been reported."""
    modules = ALL_LINEAR if config.adapter is None else config.adapter.modules
    if not isinstance(modules, list):
        modules = ALL_LINEAR
    elif modules:
        modules = [name for name in modules if isinstance(name, str)] or ALL_LINEAR
    path: Any = getattr(config.model, "path", None)
    source: Any = getattr(config.model, "source", None)
    is_local = isinstance(path, str) and os.path.isfile(Path(path) / "config.json")
    return find_model_problems(
        path if is_local else None, modules, source if source in get_args(ModelSource) else "auto"
    )
