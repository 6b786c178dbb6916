"""Which of the known row shapes a row has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fctune.data.sources.build import ParsedRow, ReadContext, RowBuilder
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.glaive import read_glaive
from fctune.data.sources.hermes import is_hermes, read_hermes
from fctune.data.sources.openai import read_openai
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
"""The reader of each shape, by the name that a config gives as ``format``."""

SHAPES = (
    "openai (messages[, tools])",
    "sharegpt or hermes (conversations of from/value[, tools])",
    "glaive (system, chat)",
    "xlam (query, answers, tools)",
    "toolace (system that lists tools, conversations)",
)
"""The known shapes with their keys, as an error message lists them."""


def detect_format(row: dict[str, Any]) -> str | None:
    """Name of the row's shape, or None where its keys fit none."""
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


def read_row(row: Any, format: str, context: ReadContext, source: str = "") -> ParsedRow:
    """The row as a conversation.

    Raises:
        RowError: At the row's first defect.
    """
    if not isinstance(row, dict):
        raise RowError("", "unknown_shape", f"expected an object, got {describe_value(row)}")
    if row.get("reviewed") is False:
        raise RowError("reviewed", "unreviewed", "a draft; set it to true once a person has put the row right")
    name = detect_format(row) if format == "auto" else format
    if name is None:
        raise RowError("", "unknown_shape", describe_shapes(row))
    try:
        parsed = READERS[name](row, RowBuilder(context, source))
    except KeyError as error:
        raise RowError(
            "", "unknown_shape", f"has no {error}, which the shape {name} needs. {describe_shapes(row)}"
        ) from None
    except RecursionError:
        raise RowError("", "too_deep", f"nested deeper than {MAX_VALUE_DEPTH} levels") from None
    parsed.row_format = name
    return parsed


def describe_shapes(row: dict[str, Any]) -> str:
    """The keys of a row against the shapes that are known."""
    keys = ", ".join(map(str, list(row)[:12])) or "none"
    return f"keys found: {keys}. Known shapes: {'; '.join(SHAPES)}"
