"""The known row formats: detection and their readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.glaive import read_glaive
from fctune.data.sources.hermes import is_hermes, read_hermes
from fctune.data.sources.openai import read_openai
from fctune.data.sources.row_builder import ParsedRow, ReadContext, RowBuilder
from fctune.data.sources.row_json import MAX_VALUE_DEPTH
from fctune.data.sources.sharegpt import read_sharegpt
from fctune.data.sources.toolace import is_toolace, read_toolace
from fctune.data.sources.xlam import read_xlam

READERS: dict[str, Callable[[dict[str, Any], RowBuilder], ParsedRow]] = {
    "openai": read_openai,
    "sharegpt": read_sharegpt,
    "hermes": read_hermes,
    "glaive": read_glaive,
    "xlam": read_xlam,
    "toolace": read_toolace,
}
"""The reader of each row format, by its name in the config (``format`` of a source)."""

_KEYS = (
    "openai (messages[, tools])",
    "sharegpt or hermes (conversations of from/value[, tools])",
    "glaive (system, chat)",
    "xlam (query, answers, tools)",
    "toolace (system that lists tools, conversations)",
)


def detect_row_format(row: dict[str, Any]) -> str | None:
    """Return the name of the row's format, or None if its keys match none."""
    if "messages" in row:
        return "openai"
    turns = row.get("conversations")
    if turns is not None:
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            if "role" in turns[0]:
                return "openai"
            if is_hermes(turns):
                return "hermes"
        return "toolace" if is_toolace(row) else "sharegpt"
    if "chat" in row and "system" in row:
        return "glaive"
    return "xlam" if "query" in row and "answers" in row and "tools" in row else None


def read_row(row: Any, row_format: str, context: ReadContext, source: str = "") -> ParsedRow:
    """Read a row as a conversation.

    Args:
        row: JSON value of the row.
        row_format: A key of ``READERS``, or auto.
        context: State shared by the rows of a source.
        source: Location of the row, ``file:line``.

    Raises:
        RowError: The row has a defect; the first one is reported.
    """
    if not isinstance(row, dict):
        raise RowError("", "unknown_row_format", f"expected an object, got {describe_value(row)}")
    if row.get("reviewed") is False:
        raise RowError("reviewed", "unreviewed", "a draft; set it to true after a person has corrected the row")
    name = detect_row_format(row) if row_format == "auto" else row_format
    if name is None:
        raise RowError("", "unknown_row_format", describe_row_formats(row))
    try:
        parsed = READERS[name](row, RowBuilder(context, source))
    except KeyError as error:
        raise RowError(
            "",
            "unknown_row_format",
            f"has no {error}, which the row format {name} requires. {describe_row_formats(row)}",
        ) from None
    except RecursionError:
        raise RowError("", "too_deep", f"nested deeper than {MAX_VALUE_DEPTH} levels") from None
    parsed.row_format = name
    return parsed


def describe_row_formats(row: dict[str, Any]) -> str:
    """List the keys of a row and those of the known row formats."""
    keys = ", ".join(map(str, list(row)[:12])) or "none"
    return f"keys found: {keys}. Known row formats: {'; '.join(_KEYS)}"
