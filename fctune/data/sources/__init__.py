"""Readers of public row formats: every row becomes a conversation or a reported defect."""

from fctune.data.sources.defects import DEFECT_KINDS, OVERLONG, Defect
from fctune.data.sources.reader import (
    RowReader,
    UnreadRow,
    describe_defects,
    has_reasoning_rows,
    parse_source,
    read_source,
    scan_source,
)
from fctune.data.sources.row_builder import LEFT_OUT_KINDS, NOTE_KINDS, ParsedRow, RowWarning
from fctune.data.sources.row_formats.base import LeftOut
from fctune.data.sources.row_formats.registry import ROW_FORMATS
from fctune.data.sources.selection import DEFAULT_SELECTION, Selection

__all__ = [
    "DEFAULT_SELECTION",
    "DEFECT_KINDS",
    "LEFT_OUT_KINDS",
    "NOTE_KINDS",
    "OVERLONG",
    "ROW_FORMATS",
    "Defect",
    "LeftOut",
    "ParsedRow",
    "RowReader",
    "RowWarning",
    "Selection",
    "UnreadRow",
    "describe_defects",
    "has_reasoning_rows",
    "parse_source",
    "read_source",
    "scan_source",
]
