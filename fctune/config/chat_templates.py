"""Chat templates that replace a model's own: those that come with fctune, by name, and files."""

from __future__ import annotations

import os
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.config.parsing import suggest

_FOLDER = Path(__file__).resolve().parents[1] / "data" / "templates"


def list_shipped_templates() -> dict[str, Path]:
    """Return the files of the templates that come with fctune, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.jinja"))}


def read_chat_template(name: str) -> str:
    """Return the text of a template that comes with fctune, or of a file.

    Raises:
        ConfigError: There is no such template or file, or the file is not a template; starts with the name.
    """
    shipped = list_shipped_templates()
    path = shipped.get(name, Path(name))
    if os.path.isdir(path):
        raise ConfigError(f"{name}: a directory; expected a Jinja file, or one of {', '.join(shipped)}")
    if not os.path.isfile(path):
        raise ConfigError(
            f"{name}: no such file, and no template of that name{suggest(name, shipped)} "
            f"(known: {', '.join(shipped)}; relative paths start at {Path.cwd()})"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read as text ({error})") from None
    if not text.strip():
        raise ConfigError(f"{name}: an empty file; expected a chat template in Jinja")
    return text
