"""JSON read strictly: a repeated key, NaN and a number too large are refused; ``json.loads`` lets them through."""

from __future__ import annotations

import json
import math
from typing import Any

from fctune.data.sources.defects import RowError

MAX_DEPTH = 100


class JsonReader:
    """A JSON decoder that refuses what has more than one reading.

    ``num_respelled`` counts the numbers that Python writes differently from how they stood (``1e5``, ``1.50``): the
    value is kept, the spelling is not. It grows over the life of the reader.
    """

    def __init__(self) -> None:
        self.num_respelled = 0
        self._decoder = json.JSONDecoder(
            object_pairs_hook=_object_once, parse_constant=_refuse_constant, parse_float=self._read_float
        )

    def decode(self, text: str, pointer: str = "", kind: str = "not_json") -> Any:
        """The value that ``text`` holds.

        Raises:
            RowError: Of ``kind`` for what is not JSON, else ``duplicate_key``, ``not_finite`` or ``too_deep``.
        """
        value, end = self.decode_prefix(text, 0, pointer, kind)
        rest = text[end:].strip(" \t\r\n")
        if rest:
            raise RowError(pointer, kind, f"not JSON (extra text at character {end}: {rest[:40]!r})")
        return value

    def decode_prefix(self, text: str, start: int, pointer: str = "", kind: str = "not_json") -> tuple[Any, int]:
        """The value that begins at ``start`` (after white space) and the index after it."""
        while start < len(text) and text[start] in " \t\r\n":
            start += 1
        try:
            value, end = self._decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            line = f"line {error.lineno} " if error.lineno > 1 else ""
            raise RowError(pointer, kind, f"not JSON ({error.msg} at {line}column {error.colno})") from None
        except _RefusedError as error:
            raise RowError(pointer, error.kind, error.reason) from None
        except RecursionError:
            raise RowError(pointer, "too_deep", f"nested deeper than {MAX_DEPTH} levels") from None
        except ValueError as error:  # an integer of more digits than int() takes
            raise RowError(pointer, kind, f"not JSON ({error})") from None
        return value, end

    def _read_float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise _RefusedError("not_finite", f"the number {text[:40]} is too large for a float")
        if repr(value) != text:
            self.num_respelled += 1
        return value


class _RefusedError(Exception):
    """Raised by the decoder's hooks."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError("duplicate_key", f"the key {twice!r} stands twice in one object")
    return value


def _refuse_constant(text: str) -> float:
    raise _RefusedError("not_finite", f"{text} is not JSON")


def check_depth(value: Any, pointer: str, limit: int = MAX_DEPTH) -> None:
    """Refuses a value nested deeper than ``limit``, since it breaks templates and validators later."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise RowError(pointer, "too_deep", f"nested deeper than {MAX_DEPTH} levels")
