"""Write the output files of commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fctune.base.errors import ConfigError


def check_replaced(path: Path, option: str, text: str, is_forced: bool) -> None:
    """Check that writing a text replaces no other one, unless ``--force`` is given; repeating a command is no change.

    Raises:
        ConfigError: The file holds something else, or cannot be read.
    """
    try:
        if not is_forced and path.is_file() and path.read_bytes() != text.encode():
            raise ConfigError(f"{option} {path}: exists and holds something else; pass --force to replace it.")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be read ({error.strerror}).") from None


def write_file(path: Path, option: str, make: Callable[[], str | None]) -> None:
    """Write the text that ``make`` returns, or let it write the file itself; missing directories are created.

    Args:
        path: File to write.
        option: Command-line option that named it, for the error.
        make: Returns the text, or None if it has written the file.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = make()
        if text is not None:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}).") from None
