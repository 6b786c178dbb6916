"""The base model that a PEFT adapter names in its ``adapter_config.json``."""

from __future__ import annotations

import json
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.models.hub import parse_name

FILE_NAME = "adapter_config.json"


def name_base(path: str) -> tuple[str, str | None]:
    """Return PEFT's ``base_model_name_or_path`` and ``revision`` for a base given as ``model.path``.

    A relative directory gets ``./`` in front: without it, DIR/NAME could be a name on the hub.
    """
    named = parse_name(path)
    if named is not None:
        return named
    return (path if path.startswith(("/", ".")) else f"./{path}"), None


def read_base(adapter_dir: Path) -> str:
    """Return the base that an adapter names, as ``model.path`` takes it: a directory or ``hf:NAME[@REVISION]``.

    Raises:
        ConfigError: The adapter names none.
    """
    path = adapter_dir / FILE_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        base, revision = config["base_model_name_or_path"], config.get("revision")
        if not base or not isinstance(base, str):
            raise ValueError(f"base_model_name_or_path is {json.dumps(base)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: names no base model ({error}). Set base_model_name_or_path in it.") from None
    # Adapters of earlier versions name hf:NAME@REVISION.
    if base.startswith("hf:") or (Path(base) / "config.json").is_file() or not _is_hub_name(base):
        return base
    return f"hf:{base}" + (f"@{revision}" if revision else "")


def _is_hub_name(text: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
