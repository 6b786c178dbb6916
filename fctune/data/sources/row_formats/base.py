"""Description of a row format, as each module of this package defines it in ``ROW_FORMAT``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fctune.data.sources.defects import RowError
from fctune.data.sources.row_builder import ParsedRow, RowBuilder

SHARED_COLUMNS = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "reviewed")
"""Columns that are read in rows of every format."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A part of a log that belongs to no conversation; ``kind`` is a key of ``LEFT_OUT_KINDS``.

    ``cause`` is the field that says that an answer failed.
    """

    kind: str
    cause: str = ""


FileRow = tuple[int, dict[str, Any] | RowError]
"""The line of a row of a file, and the row itself or its defect."""

LogRow = tuple[int, dict[str, Any] | RowError | LeftOut]
"""The line of a row of a log, and the row itself, its defect, or a part of the log that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """A known shape of rows: how it is recognised and read."""

    name: str
    """Its name in a config (``format`` of a source)."""
    keys: str
    """The keys of its rows, as error messages list them."""
    matches: Callable[[dict[str, Any]], bool]
    """Returns True if a row may have this format; the first match in order of ``priority`` is used."""
    read: Callable[[dict[str, Any], RowBuilder], ParsedRow]
    """Reads a row; raises ``RowError`` at its first defect, or KeyError if a required key is missing."""
    columns: tuple[str, ...]
    """The columns that it reads, beside those of every format (``SHARED_COLUMNS``)."""
    harmless: tuple[str, ...] = ()
    """Columns of public rows in this format that repeat or describe what is read."""
    expand: Callable[[Iterator[FileRow]], Iterator[LogRow]] | None = None
    """Yields a row for each conversation of a file, for logs whose lines are not one conversation each."""
    is_log: bool = False
    """True if its records repeat one another, as logs of model calls do; see ``fctune.data.fold``."""
    priority: int = 0
    """Formats with distinctive keys come first: higher values are tried earlier."""
