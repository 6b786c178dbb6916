"""Files that commands write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fctune.errors import ConfigError


def write_file(path: Path, option: str, make: Callable[[], str | None]) -> None:
    """Write what ``make`` returns, or let it write itself; folders are made as needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = make()
        if text is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}).") from None
