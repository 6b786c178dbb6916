"""The strict readers of JSON and of Python literals, with their errors as defects of a row."""

from __future__ import annotations

import math
from typing import Any

from fctune.base.declared_calls import DeclaredCallReader
from fctune.base.json_reader import MAX_DEPTH, JsonReader, ParseError, is_deeper_than, skip_space
from fctune.data.sources.defects import RowError, describe_value

# A call puts an object and a list around its arguments when it is written as JSON.
MAX_VALUE_DEPTH = MAX_DEPTH - 2
_AS_STRINGS = "store tools and arguments as JSON strings"


class RowJsonReader(JsonReader):
    """Strict JSON reader that raises ``RowError``."""

    def decode(self, text: str, pointer: str = "", kind: str = "not_json") -> Any:
        """Return the one value that ``text`` holds.

        Raises:
            RowError: Of the given kind for what is not JSON; ``duplicate_key``, ``not_finite`` or ``too_deep`` for
                JSON that is refused.
        """
        value, end = self.decode_prefix(text, 0, pointer, kind)
        end = skip_space(text, end)
        if end != len(text):
            reason = f"not JSON (extra text at {describe_position(text, end)}: {text[end : end + 40]!r})"
            raise RowError(pointer, kind, reason)
        return value

    def decode_prefix(self, text: str, start: int, pointer: str = "", kind: str = "not_json") -> tuple[Any, int]:
        """Return the value that begins at ``start``, after whitespace, and the index after it."""
        try:
            return self.read(text, start)
        except ParseError as error:
            if error.kind == "syntax":
                reason = f"not JSON ({error.reason} at {describe_position(text, error.position)})"
                raise RowError(pointer, kind, reason) from None
            raise RowError(pointer, error.kind, error.reason) from None


def read_python_literal(text: str, start: int, pointer: str, kind: str) -> tuple[Any, int]:
    """Return the Python literal that begins at ``start``, and the index after it; it is scanned, never evaluated.

    Only values that Python and JSON read alike are literals here: no arithmetic, no tuples, no adjacent strings.

    Raises:
        RowError: Of the given kind for what is no literal; ``duplicate_key``, ``not_finite`` or ``too_deep`` for one
            that is refused.
    """
    try:
        return DeclaredCallReader(text, ()).read_value(skip_space(text, start))
    except ParseError as error:
        reason = f"not a Python literal ({error.reason} at {describe_position(text, error.position)})"
        raise RowError(pointer, kind if error.kind == "syntax" else error.kind, reason) from None


def check_depth(value: Any, pointer: str) -> None:
    """Raise ``RowError`` if a value is nested too deep for chat templates, validators and the readers of calls."""
    if is_deeper_than(value, MAX_VALUE_DEPTH):
        raise RowError(pointer, "too_deep", f"nested deeper than {MAX_VALUE_DEPTH} levels")


def check_values(value: Any, pointer: str, kind: str) -> None:
    """Raise ``RowError`` if a part of an object is no value of JSON, as columns of a table may have them.

    Raises:
        RowError: ``not_finite``, or of the given kind for a value of another type, such as a date or bytes.
    """
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RowError(pointer, kind, f"expected a string as key, got {describe_value(key)}; {_AS_STRINGS}")
            check_values(item, f"{pointer}.{key}", kind)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_values(item, f"{pointer}[{i}]", kind)
    elif not isinstance(value, float):
        raise RowError(pointer, kind, f"expected a value of JSON, got {describe_value(value)}; {_AS_STRINGS}")
    elif not math.isfinite(value):
        raise RowError(pointer, "not_finite", f"{value} is not JSON; leave the key out, or the row")


def describe_position(text: str, position: int) -> str:
    """Return ``column 31``, or ``line 2 column 5`` after a line break."""
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line} column {column}" if line > 1 else f"column {column}"
