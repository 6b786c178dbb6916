"""Sources of models: the packages of this folder, each of which builds some families. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.errors import ConfigError
from fctune.models import architecture
from fctune.models.architecture import Architecture
from fctune.models.torchtune import architecture as torchtune


def read_architecture(model_dir: str | Path) -> Architecture:
    """Read the architecture from ``config.json`` of a Hugging Face model directory.

    Raises:
        ConfigError: the file is missing or broken, or describes a model that no source builds.
    """
    path = Path(model_dir) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face model directory holds one.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error}). Download the model again.") from None
    return parse_architecture(str(path), raw)


def parse_architecture(source: str, raw: Any) -> Architecture:
    """Read the architecture from the parsed content of a ``config.json``; ``source`` names the file in messages.

    Raises:
        ConfigError: the content is broken, or describes a model that no source builds.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {type(raw).__name__}. Download the model again.")
    family = raw.get("model_type")
    if family not in torchtune.FAMILIES:
        supported = " and ".join(f"{name} ({facts.models})" for name, facts in torchtune.FAMILIES.items())
        raise ConfigError(f"{source}: model_type={family!r} is not supported; supported: {supported}.")
    return torchtune.parse_architecture(source, raw)


def find_module_problems(modules: Sequence[str] | None) -> list[str]:
    """Check ``adapter.modules`` for a model of unknown architecture, and return one line per problem."""
    known = (*torchtune.TorchtuneArchitecture.block_linears.all, torchtune.TorchtuneArchitecture.head)
    return architecture.find_module_problems(modules, known)


def find_public_config(name: str) -> dict[str, Any] | None:
    """Return ``config.json`` of a public model by its hub name, instruct variants included; None if it is not known."""
    return torchtune.PUBLIC_CONFIGS.get(name.removesuffix("-Instruct"))
