"""Detection and reading of the known row formats, which are found in the modules of this package."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import islice
from typing import Any

from fctune.data.sources import row_formats
from fctune.data.sources.columns import is_harmless, map_columns, require_read
from fctune.data.sources.defects import TEXT_ONLY, RowError, describe_value
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import SHARED_COLUMNS, RowFormat
from fctune.data.sources.row_json import MAX_VALUE_DEPTH
from fctune.data.sources.row_reasoning import read_template_args


def _find_row_formats() -> dict[str, RowFormat]:
    names = [module.name for module in pkgutil.iter_modules(row_formats.__path__)]
    modules = [import_module(f"{row_formats.__name__}.{name}") for name in names if name != "registry"]
    found: list[RowFormat] = [module.ROW_FORMAT for module in modules if hasattr(module, "ROW_FORMAT")]
    return {row_format.name: row_format for row_format in sorted(found, key=lambda f: -f.priority)}


ROW_FORMATS = _find_row_formats()
"""The row formats by name, in the order of their detection."""


_READ_COLUMNS = {
    name: frozenset({*row_format.columns, *row_format.harmless, *SHARED_COLUMNS})
    for name, row_format in ROW_FORMATS.items()
}


def list_columns(row_format: str = "auto") -> list[str]:
    """Return the columns that a row format reads, or that any does; columns of other names can be mapped to them."""
    formats = list(ROW_FORMATS.values()) if row_format == "auto" else [ROW_FORMATS[row_format]]
    return sorted({column for found in formats for column in (*found.columns, *SHARED_COLUMNS)})


def detect_row_format(row: dict[str, Any]) -> str | None:
    """Return the name of the row's format, or None if its keys match none."""
    return next((name for name, row_format in ROW_FORMATS.items() if row_format.matches(row)), None)


_NUM_LISTED = 12
# Columns of what a row's placeholders, such as <image>, stand for; the placeholder alone would be trained as text.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def read_row(row: Any, row_format: str, context: ReadContext, source: str = "") -> ParsedRow:
    """Read a row as a conversation.

    Args:
        row: JSON value of the row.
        row_format: A key of ``ROW_FORMATS``, or auto.
        context: State shared by the rows of a source.
        source: Location of the row, ``file:line``.

    Raises:
        RowError: The row has a defect; the first one is reported.
    """
    if not isinstance(row, dict):
        raise RowError("", "unknown_row_format", f"expected an object, got {describe_value(row)}")
    if context.columns:
        row = map_columns(row, context.columns)
    if row.get("reviewed") is False:
        raise RowError("reviewed", "unreviewed", "a draft; set it to true after a person has corrected the row")
    if media := next((key for key in _MEDIA if row.get(key)), None):
        raise RowError(media, "not_text_only", f"{describe_value(row[media])}; {TEXT_ONLY}")
    name = detect_row_format(row) if row_format == "auto" else row_format
    if name is None:
        raise RowError("", "unknown_row_format", describe_row_formats(row))
    try:
        builder = RowBuilder(context, source)
        builder.template_args = read_template_args(row)
        parsed = ROW_FORMATS[name].read(row, builder)
    except KeyError as error:
        if ROW_FORMATS[name].expand is not None:
            reason = f"a part of a log ({name}) after rows of another format; give each its own file"
            raise RowError("", "unknown_row_format", reason) from None
        raise RowError(
            "",
            "unknown_row_format",
            f"has no {error}, which the row format {name} requires. {describe_row_formats(row)}",
        ) from None
    except RecursionError:
        raise RowError("", "too_deep", f"nested deeper than {MAX_VALUE_DEPTH} levels") from None
    read = _READ_COLUMNS[name]
    if not read.issuperset(row) or builder.unread:
        columns = {column: value for column, value in row.items() if column not in read and not is_harmless(column)}
        columns |= {name: value for name, value in builder.unread.items() if name in row}
        keys = {name: value for name, value in builder.unread.items() if name not in row}
        require_read(columns, keys, parsed.conversation)
    parsed.row_format, parsed.raw, parsed.is_record = name, row, ROW_FORMATS[name].is_log
    return parsed


def list_unread(row: ParsedRow) -> list[str]:
    """Return the columns of a row of which nothing gets into its conversation, such as a log's ``metadata``."""
    row_format = ROW_FORMATS.get(row.row_format)
    if row_format is None:
        return []
    others = [name for name in row.raw if name not in row_format.columns and name not in SHARED_COLUMNS]
    if not others:
        return []
    read = {re.split(r"[.\[]", pointer, maxsplit=1)[0] for pointer in (*row.message_pointers, row.tools_pointer)}
    metadata = row.raw.get("metadata")
    if isinstance(metadata, dict) and metadata.keys() <= row.provenance.keys():  # written, and searched
        read.add("metadata")
    return [name for name in others if name not in read and row.raw[name] not in (None, "", [], {})]


def describe_unread(columns: Mapping[str, int]) -> str:
    """Say which columns of rows are read by nothing; "" if there is none."""
    more = f" and {len(columns) - _NUM_LISTED:,} more" if len(columns) > _NUM_LISTED else ""
    return (
        f"columns that are in no row, and not searched: {', '.join(islice(columns, _NUM_LISTED))}{more}"
        if columns
        else ""
    )


# Names of the two answers in rows of pairs, which fctune.data.pairs reads.
_PAIR_COLUMNS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
)


def is_pair(row: dict[str, Any]) -> bool:
    """Return True for a row with two answers, as preference pairs have."""
    return any(chosen in row and rejected in row for chosen, rejected in _PAIR_COLUMNS)


def describe_row_formats(row: dict[str, Any]) -> str:
    """List the keys of a row and those of the known row formats."""
    known = "; ".join(f"{name} ({row_format.keys})" for name, row_format in ROW_FORMATS.items())
    return f"{describe_keys('keys', row, row)}. Known row formats: {known}"


def describe_keys(noun: str, keys: Iterable[str], row: dict[str, Any]) -> str:
    """List keys or columns that were found, and say what a row may be that has those of this one."""
    hint = ""
    if is_pair(row):
        hint = ". Rows of preference pairs need data.pairs=true and a preference section"
    elif isinstance(row.get("prompt"), str) and "completion" in row:
        hint = ". Text has no roles: write prompt and completion as lists of messages"
    return f"{noun} found: {', '.join(map(str, islice(keys, _NUM_LISTED))) or 'none'}{hint}"
