"""Switches of a chat template, recorded next to it in a model directory so that every later use renders alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError
from fctune.config.sections.model import find_template_args_problems

TEMPLATE_ARGS_FILE = "chat_template_kwargs.json"
# Where transformers keeps the templates of a model besides its default one, such as that for requests with tools.
ADDITIONAL_TEMPLATES = "additional_chat_templates"


def read_template_args(model_dir: Path) -> dict[str, Any]:
    """Return the switches recorded in a model directory; empty if there are none.

    Raises:
        ConfigError: The file is damaged.
    """
    path = model_dir / TEMPLATE_ARGS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from None
    try:
        recorded = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}). Correct it, or delete it.") from None
    if not isinstance(recorded, dict):
        raise ConfigError(f"{path}: expected an object of switches. Correct it, or delete it.")
    if problems := find_template_args_problems(recorded, str(path)):
        raise ConfigError(f"{problems[0]}. Correct the file, or delete it.")
    return recorded


def merge_template_args(recorded: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return recorded switches with those given over them; one given as None is unset."""
    merged = {**recorded, **(given or {})}
    return {name: value for name, value in merged.items() if value is not None}


def write_template_args(folder: Path, template_args: Mapping[str, Any]) -> None:
    """Record switches in a model directory; none at all leave no file."""
    path = folder / TEMPLATE_ARGS_FILE
    if template_args:
        path.write_text(json.dumps(dict(template_args), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
