"""Load a run's config from YAML and ``key=value`` overrides; every problem is reported in one ConfigError."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fctune.config.checks import find_problems
from fctune.config.parsing import apply_override, parse_dataclass
from fctune.config.schema import RunConfig
from fctune.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file and ``key=value`` overrides describe, checked as a whole.

    Args:
        path: YAML file in the schema of RunConfig.
        overrides: ``a.b=value`` (value read as YAML; list items by index, ``data.sources.0.path=x``), or ``~a.b`` to
            drop a key.

    Raises:
        ConfigError: with every problem found, each with its key and remedy.
    """
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=3, cutoff=0.4)
        hint = f" Near it: {', '.join(near)}." if near else ""
        raise ConfigError(f"{path}: no such config file.{hint} Pass --config PATH.")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(raw).__name__}.")
    problems: list[str] = []
    for override in overrides:
        apply_override(raw, override, problems)
    config = parse_config(raw, problems)
    if problems or config is None:
        raise ConfigError(format_problems(str(path), problems))
    return config


def parse_config(raw: dict[str, Any], problems: list[str]) -> RunConfig | None:
    """The RunConfig of nested plain dicts; appends to ``problems`` what is wrong and then may return None."""
    config: RunConfig | None = parse_dataclass(RunConfig, raw, "", problems)
    if config is not None and not problems:
        find_problems(config, problems)
    return config


def read_environment() -> dict[str, str]:
    """The variables of this process's environment, for what takes them as an argument."""
    return dict(os.environ)


def format_problems(where: str, problems: Sequence[str]) -> str:
    """One report: the file, the count, and a line for each problem."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"{where}: {count}\n" + "\n".join(f"  {problem}" for problem in problems)
