"""The error of conditions that no row of a source meets, with the values that its rows have in their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fctune.base.errors import DataError
from fctune.config.conditions import COUNTS, Condition
from fctune.config.intervals import format_count
from fctune.config.parsing import suggest_in_brackets
from fctune.config.sections.data import Fold
from fctune.data.conversation import Tool
from fctune.data.secrets import SecretScanner
from fctune.data.sources.columns import Columns
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.reader import RowReader, decode_row, scan_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.sources.row_formats.base import LeftOut
from fctune.data.sources.selection import MISSING, Selection, find_value

_NUM_LISTED = 12
_MAX_LENGTH = 40  # of a value; longer ones are texts


def require_selected(
    paths: Sequence[str],
    left_out: Counter[str],
    row_format: str,
    columns: Columns | None,
    fold: Fold,
    selection: Selection,
) -> None:
    """Raise the error of sources of which no row was read; nothing is done unless conditions left rows out.

    Args:
        paths: The sources.
        left_out: Counts of what was left out, by kind.
        row_format: Format of the rows, or auto.
        columns: The format's name for each column of another name, or ``ignore``.
        fold: Leave out records that others continue: always, never, or in logs (auto).
        selection: What the rows were selected by.

    Raises:
        DataError: The sources have rows, and none meets the conditions.
    """
    if not selection.where or not left_out["not_selected"] + left_out["where_missing"]:
        return
    found = [_Found(condition) for condition in selection.where]
    num_rows = num_failed = 0
    for path in paths:
        # Calls are read from rows without tools as well.
        reader = RowReader(row_format, columns, (Tool({"name": ""}),), selection=replace(selection, where=()))
        for row in scan_source(path, row_format, columns, fold, replace(selection, where=())):
            parsed = reader.read(row)
            num_failed += isinstance(parsed, LeftOut) and parsed.kind == "answer_failed"
            if isinstance(parsed, ParsedRow):
                num_rows += 1
                decoded = decode_row(row.value, ReadContext()) if parsed.row_format != "synthetic" else {}
                for one in found:
                    one.add(find_value(one.condition.name, decoded, parsed.conversation), decoded)
    where = " and ".join(map(str, selection.where))
    found_values = " ".join(one.describe() for one in found)
    names = ", ".join(paths)
    if num_failed:
        failed = format_count(num_failed, "record that failed is", "records that failed are")
        found_values += f" {failed} not among them (--failed keep, or failed: keep, reads them)."
    raise DataError(f"{names}: where {where}: met by none of {format_count(num_rows, 'row')}. {found_values}")


class _Found:
    """The values that rows have where a condition looks, and how many rows meet it."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self._num_met = 0
        self._values: Counter[str] = Counter()
        self._keys: dict[str, None] = {}

    def add(self, found: Any, row: Any) -> None:
        """Add the value of a row."""
        if found is MISSING:
            self._keys.update(dict.fromkeys(row if isinstance(row, dict) else ()))
            return
        self._num_met += self.condition.holds(found)
        for value in {str(item) for item in (found if isinstance(found, list) else [found])}:
            self._values[value] += 1

    def _hide(self, values: list[str]) -> list[str]:
        """Return values without those that are secrets, which no message shows."""
        scanner, name = SecretScanner(), self.condition.name.rpartition(".")[2]
        return [value for value in values if not scanner.is_named_secret(name, value)]

    def describe(self) -> str:
        """Say how many rows meet the condition, and if none does, which values or keys there are."""
        condition = self.condition
        if self._num_met:
            return f"{condition}: met by {format_count(self._num_met, 'row')}."
        if not self._values and condition.name != "tool":
            keys = list(map(str, self._keys))
            near = suggest_in_brackets(condition.name, keys)
            return f"{condition.name}: no such column or key{near}; there are {_list(keys)}."
        values = [value for value, _ in self._values.most_common() if len(value) <= _MAX_LENGTH]
        if condition.name in COUNTS or condition.is_number:
            numbers = sorted(float(value) for value in values if value.replace(".", "", 1).lstrip("-").isdecimal())
            return f"{condition}: met by no row; values are {numbers[0]:g} to {numbers[-1]:g}." if numbers else ""
        what = "tools that are called" if condition.name == "tool" else "values"
        shown = self._hide(values)
        near = suggest_in_brackets(str(condition.value), shown)
        listed = _list(shown) if shown or not values else f"{len(values):,}, which are secrets and not shown"
        return f"{condition}: met by no row{near}; {what}: {listed}."


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_LISTED:,} more" if len(names) > _NUM_LISTED else ""
    return (", ".join(names[:_NUM_LISTED]) or "none") + more
