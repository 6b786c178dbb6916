"""Run configs checked against the model that they name, and the directory of that model; torch is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.models.hub import resolve_model_dir
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


def resolve_base(config: RunConfig) -> Path:
    """Return the local directory of a run's base, downloaded and extended by ``model.add_tokens`` if needed.

    Raises:
        ConfigError: the download failed, or a token cannot be added.
        CheckpointError: the base's files are damaged.
    """
    model_dir = resolve_model_dir(config.model.path)
    if not config.model.add_tokens:
        return model_dir
    from fctune.data.prepared_set import prepared_root  # slow imports, torch among them, that few configs need
    from fctune.models.added_tokens import extend_base

    return extend_base(model_dir, config.model.add_tokens, prepared_root(config))


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
