"""Files of tools, for rows that have none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fctune.base.errors import ConfigError
from fctune.data.conversation import Tool
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext

_PLACE = re.compile(r"\[(\d+)\]\.?(.*)", re.DOTALL)


def read_tool_files(paths: Sequence[Path]) -> tuple[Tool, ...]:
    """Return the tools of files in any form that a row's tools may have; the files may be pages of one list.

    Raises:
        ConfigError: A file cannot be read, or holds no tools; or the page after the last is missing.
    """
    if not paths:
        return ()
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{path}: cannot be read as tools ({reason}). Pass a JSON file.") from None
        if not texts[-1].strip():
            raise ConfigError(f"{path}: empty; expected tools as JSON.")
    return read_tool_texts(texts, list(map(str, paths)))


def read_tool_texts(texts: Sequence[str], names: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools of texts, which may be pages of one list; ``names`` say in errors where each came from.

    Raises:
        ConfigError: A text is not JSON of tools, there are no tools, or the page after the last is missing.
    """
    try:
        tools, _ = ReadContext().read_tools(list(texts), "", Counter())
    except RowError as error:
        place = _PLACE.fullmatch(error.pointer)
        assert place is not None
        where = f"{names[int(place[1])]}: {place[2]}: " if place[2] else f"{names[int(place[1])]}: "
        raise ConfigError(f"{where}{error.reason}.") from None
    if not tools:
        raise ConfigError(f"{', '.join(names)}: no tools in it; expected a list of tools as JSON.")
    return tools
