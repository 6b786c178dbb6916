"""JSON readers that refuse what has more than one reading, and report the reason and position of the first error.

Strictly read, a repeated key, NaN, an infinite number and very deep nesting are errors; ``json.loads`` accepts them.
The standard library's C scanner does the reading. Where it fails, the text is read again by the reader below, in time
linear in the text: it knows the reason and the position, and its recursion is bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

# The one limit on nested lists and objects, in data rows as in model output. Rows have always been accepted to depth
# 100, and a call wraps its arguments in an object and a list; the limit leaves room for both, so that every call that
# can be trained on can be read back. Readers need up to four stack frames a level, half of Python's 1,000.
MAX_DEPTH = 128
# Python itself refuses to convert longer integers (sys.int_info.default_max_str_digits).
MAX_DIGITS = 4300
# An error of the C scanner costs a scan of the text before it, which is negligible in texts of this length only.
_MAX_QUICK_LENGTH = 20_000

_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?P<fraction>\.[0-9]++)?(?P<exponent>[eE][+-]?[0-9]++)?")
_STRING = re.compile(r'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"')
_CONSTANTS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_READS_LIKE_PYTHON: ContextVar[bool] = ContextVar("reads_like_python", default=False)

ParseErrorKind = Literal["syntax", "duplicate_key", "not_finite", "too_deep"]


class ParseError(ValueError):
    """Text that is not the expected value: the reason, its position in the text, and the kind of error."""

    def __init__(self, reason: str, position: int, kind: ParseErrorKind = "syntax") -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.kind = kind


@contextmanager
def reading_like_python() -> Iterator[None]:
    """Let ``decode_json`` and ``read_json`` accept whatever ``json.loads`` does, in this thread."""
    token = _READS_LIKE_PYTHON.set(True)
    try:
        yield
    finally:
        _READS_LIKE_PYTHON.reset(token)


def reads_like_python() -> bool:
    """Return True inside ``reading_like_python``."""
    return _READS_LIKE_PYTHON.get()


class JsonReader:
    """Strict reader of the JSON in data rows.

    The depth of a value is not checked: rows check the parts they keep with ``is_deeper_than``.

    Attributes:
        num_respelled: Numbers read so far that Python writes differently (``1e5``, ``1.50``): the value is kept, the
            spelling is not.
    """

    def __init__(self) -> None:
        self.num_respelled = 0
        self._decoder = _make_decoder(_collect_unique, self._read_float)

    def read(self, text: str, position: int) -> tuple[Any, int]:
        """Return the value that starts at or after ``position``, whitespace aside, and the position after it.

        Raises:
            ParseError: There is no JSON value, or it is refused.
        """
        start = skip_space(text, position)
        try:
            return self._decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            return _read_value(text, start, False, 0)

    def _read_float(self, text: str) -> float:
        value = _read_finite(text)
        if repr(value) != text:
            self.num_respelled += 1
        return value


def decode_json(text: str, lenient: bool = False) -> Any:
    """Return the one value that a text holds.

    Args:
        text: A JSON document; whitespace around it is allowed.
        lenient: Keep the last of equal keys in an object, as most decoders do, instead of refusing them.

    Raises:
        ParseError: Not JSON, more than one value, a repeated key, a number that is not finite, or nesting deeper than
            ``MAX_DEPTH``.
    """
    document = text.strip(" \t\n\r")
    try:
        value, end = (_SCAN_LENIENT if lenient else _SCAN)(document, 0)
        is_shallow = text.count("[") + text.count("{") <= MAX_DEPTH or not is_deeper_than(value, MAX_DEPTH)
        if end == len(document) and is_shallow:
            return value
    except (ValueError, StopIteration, RecursionError):
        pass
    if reads_like_python():
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParseError(str(error), 0) from None
    value, end = _read_value(text, skip_space(text, 0), lenient, 0)
    end = skip_space(text, end)
    if end != len(text):
        raise ParseError("extra text after the JSON value", end)
    return value


def read_json(text: str, position: int, lenient: bool = False) -> tuple[Any, int]:
    """Return the value that starts exactly at ``position``, and the position after it.

    Raises:
        ParseError: As for ``decode_json``; text after the value is not an error.
    """
    if len(text) <= _MAX_QUICK_LENGTH:
        try:
            value, end = (_SCAN_LENIENT if lenient else _SCAN)(text, position)
            if text.count("[") + text.count("{") <= MAX_DEPTH or not is_deeper_than(value, MAX_DEPTH):
                return value, end
        except (ValueError, StopIteration, RecursionError):
            pass
    try:
        return _read_value(text, position, lenient, 0)
    except ParseError as error:
        if error.kind == "syntax" or not reads_like_python():
            raise
        try:
            value, length = json.JSONDecoder().raw_decode(text[position : position + _MAX_QUICK_LENGTH])
        except (ValueError, RecursionError):
            raise error from None
        return value, position + length


def skip_space(text: str, position: int) -> int:
    """Return the position of the first character at or after ``position`` that is not JSON whitespace."""
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def is_deeper_than(value: Any, max_depth: int) -> bool:
    """Return True if a decoded value has more than ``max_depth`` nested lists and objects."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(max_depth):
        if not level:
            return False
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
    return bool(level)


def _read_value(text: str, position: int, lenient: bool, depth: int) -> tuple[Any, int]:
    if position >= len(text):
        raise ParseError("unexpected end of JSON", position)
    first = text[position]
    if first == '"':
        return _read_string(text, position)
    if first in "{[":
        if depth >= MAX_DEPTH:
            raise ParseError(f"nested deeper than {MAX_DEPTH} levels", position, "too_deep")
        return (_read_object if first == "{" else _read_array)(text, position, lenient, depth)
    if first in _CONSTANTS:
        word, value = _CONSTANTS[first]
        if text.startswith(word, position):
            return value, position + len(word)
    number = _NUMBER.match(text, position)
    if number is not None:
        return _read_number(number), number.end()
    for word in _NOT_FINITE:
        if text.startswith(word, position):
            raise ParseError(f"{word} is not JSON", position, "not_finite")
    raise ParseError("expected a JSON value", position)


def _read_number(number: re.Match[str]) -> int | float:
    if not number["fraction"] and not number["exponent"]:
        if number.end() - number.start() > MAX_DIGITS:
            raise ParseError(f"integer of more than {MAX_DIGITS} digits", number.start())
        return int(number.group())
    value = float(number.group())
    if math.isinf(value):
        reason = f"the number {number.group()[:40]} is too large for a float"
        raise ParseError(reason, number.start(), "not_finite")
    return value


def _read_string(text: str, position: int) -> tuple[str, int]:
    match = _STRING.match(text, position)
    if match is None:
        raise ParseError("unterminated string, or a raw control character in it", position)
    if "\\" not in match[1]:
        return match[1], match.end()
    try:
        return json.loads(match.group()), match.end()
    except ValueError:
        raise ParseError("invalid escape in a string", position) from None


def _read_object(text: str, position: int, lenient: bool, depth: int) -> tuple[dict[str, Any], int]:
    pairs: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    if text.startswith("}", position):
        return pairs, position + 1
    while True:
        if not text.startswith('"', position):
            raise ParseError("expected a key in double quotes", position)
        key_start = position
        key, position = _read_string(text, position)
        if key in pairs and not lenient:
            raise ParseError(f"duplicate key {key[:40]!r} in one object", key_start, "duplicate_key")
        position = skip_space(text, position)
        if not text.startswith(":", position):
            raise ParseError("expected ':' after a key", position)
        pairs[key], position = _read_value(text, skip_space(text, position + 1), lenient, depth + 1)
        position = skip_space(text, position)
        if text.startswith("}", position):
            return pairs, position + 1
        if not text.startswith(",", position):
            raise ParseError("expected ',' or '}' after a value", position)
        position = skip_space(text, position + 1)


def _read_array(text: str, position: int, lenient: bool, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = skip_space(text, position + 1)
    if text.startswith("]", position):
        return items, position + 1
    while True:
        item, position = _read_value(text, position, lenient, depth + 1)
        items.append(item)
        position = skip_space(text, position)
        if text.startswith("]", position):
            return items, position + 1
        if not text.startswith(",", position):
            raise ParseError("expected ',' or ']' after an item", position)
        position = skip_space(text, position + 1)


# What the hooks of the C scanner raise is only ever caught: the second reading reports the reason.


def _collect_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError
    return result


def _read_finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError
    return value


def _refuse_constant(_: str) -> float:
    raise ValueError


def _make_decoder(
    collect: Callable[[list[tuple[str, Any]]], Any] | None, read_float: Callable[[str], float]
) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=collect, parse_float=read_float, parse_constant=_refuse_constant)


# The C scanners themselves, which raise StopIteration where no value starts: the decoders' methods around them take a
# tenth of the time of a short document.
_SCAN = vars(_make_decoder(_collect_unique, _read_finite))["scan_once"]
_SCAN_LENIENT = vars(_make_decoder(None, _read_finite))["scan_once"]
