"""Rows of CSV files: the columns are a row's keys, with conversations and tools as JSON."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from fctune.base.errors import DataError
from fctune.data.sources.defects import RowError
from fctune.data.sources.files import MAX_ROW_BYTES
from fctune.data.sources.row_json import RowJsonReader

# Columns that hold lists; the readers of other formats decode their own.
_JSON_COLUMNS = ("messages", "conversations", "tools")


def read_header(path: str) -> list[str]:
    """Return the columns of a CSV file; none if it cannot be read."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return next(filter(None, csv.reader(file, strict=True)), [])
    except (csv.Error, UnicodeDecodeError, OSError):
        return []


def iter_csv(path: str, json: RowJsonReader) -> Iterator[tuple[int, Any]]:
    """Yield the line on which each row starts and its value; the value is a ``RowError`` if it cannot be decoded.

    Empty fields are left out, as nulls of other tables are; blank lines count as lines but yield no row.

    Raises:
        DataError: The file is not CSV in UTF-8 with a header.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    line = 1
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, strict=True)
            header = next(filter(None, rows), [])  # a blank line has no fields
            if len(header) == 1 and (found := next((mark for mark in ";\t|" if mark in header[0]), None)):
                separator = {";": "semicolons", "\t": "tabs", "|": "bars"}[found]
                raise DataError(f"{path}:1: values separated by {separator}. Save the table as CSV, with commas.")
            if len(set(header)) != len(header) or not all(header):
                raise DataError(f"{path}:1: expected a header with distinct column names, got {header}.")
            line = rows.line_num + 1
            for fields in rows:
                if fields:
                    yield line, _read_row(header, fields, json)
                line = rows.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}:{line}: not a readable CSV file in UTF-8 ({error}). Save it as CSV in UTF-8."
        ) from None


def _read_row(header: list[str], fields: list[str], json: RowJsonReader) -> dict[str, Any] | RowError:
    if len(fields) != len(header):
        return RowError("", "csv_fields", f"{len(fields)} fields, but the header has {len(header)}")
    row: dict[str, Any] = {}
    for column, text in zip(header, fields, strict=True):
        try:
            if text:
                row[column] = json.decode(text, column) if column in _JSON_COLUMNS else text
        except RowError as error:
            return error
    return row
