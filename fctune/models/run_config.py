"""Run configs checked against the model that they name, without importing torch or reading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fctune.config.loading import load_config
from fctune.config.schema import RunConfig
from fctune.errors import ConfigError
from fctune.models.torchtune.architecture import read_architecture
from fctune.models.torchtune.names import find_module_problems


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
    problems = [] if config.adapter is None else find_module_problems(config.adapter.modules)
    if (Path(config.model.path) / "config.json").is_file():
        try:
            read_architecture(config.model.path)
        except ConfigError as error:
            problems.append(f"model.path: {error}")
    return problems
