"""JSON as models write it: read from the middle of a text, in time linear in what is read, with the place and reason
of the first fault.

The standard library's decoder is used where it can be; it recurses as deep as the text says, takes the last of two
equal keys, turns 1e999 into infinity, and its errors cost the whole text before them, so nothing else is left to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

# Deeper than any tool's arguments, shallow enough for code that walks a value recursively.
MAX_DEPTH = 64
# Python refuses longer integers itself (sys.int_info); a decimal of that length is noise as well.
MAX_DIGITS = 4000
# Each fault that the standard library finds costs it the text before; in a text of this length that is little.
_MAX_QUICK = 20_000

_SPACE = re.compile(r"[ \t\n\r]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?P<fraction>\.[0-9]++)?(?P<exponent>[eE][+-]?[0-9]++)?")
_STRING = re.compile(r'"([^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+)"')
_WORDS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


class UnreadableError(ValueError):
    """Text that is not the value it should be: ``reason`` says why, ``position`` where in the text."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


def skip_space(text: str, position: int) -> int:
    """Position of the first character that is not JSON white space."""
    match = _SPACE.match(text, position)
    assert match is not None
    return match.end()


def decode_json(text: str, is_lenient: bool = False) -> Any:
    """The one value that the whole text holds.

    Args:
        text: A JSON document; white space around it is allowed.
        is_lenient: Take the last of equal keys in an object, as most decoders do, instead of refusing them.

    Raises:
        UnreadableError: Not JSON, more than one value, two equal keys, a number that is not finite, nested deeper than
            ``MAX_DEPTH``.
    """
    try:
        document = text.strip(" \t\n\r")
        value, end = (_LENIENT if is_lenient else _STRICT).raw_decode(document)
        if end == len(document) and (text.count("[") + text.count("{") <= MAX_DEPTH or is_shallow(value)):
            return value
    except (ValueError, RecursionError):
        pass
    # Once more by our own reader, which knows the place and the reason.
    value, end = read_json(text, skip_space(text, 0), is_lenient)
    end = skip_space(text, end)
    if end != len(text):
        raise UnreadableError("something follows the JSON value", end)
    return value


def read_json(text: str, position: int, is_lenient: bool = False, depth: int = 0) -> tuple[Any, int]:
    """The value that starts exactly at ``position``, and the position after it.

    Raises:
        UnreadableError: As for ``decode_json``.
    """
    if depth == 0 and len(text) <= _MAX_QUICK:
        try:
            value, end = (_LENIENT if is_lenient else _STRICT).raw_decode(text, position)
            if text.count("[") + text.count("{") <= MAX_DEPTH or is_shallow(value):
                return value, end
        except (ValueError, RecursionError):
            pass
    if position >= len(text):
        raise UnreadableError("the JSON value ends before it is whole", position)
    if depth > MAX_DEPTH:
        raise UnreadableError(f"nested more than {MAX_DEPTH} deep", position)
    first = text[position]
    if first == '"':
        return _read_string(text, position)
    if first == "{":
        return _read_object(text, position, is_lenient, depth)
    if first == "[":
        return _read_array(text, position, is_lenient, depth)
    if first in _WORDS:
        word, value = _WORDS[first]
        if text.startswith(word, position):
            return value, position + len(word)
    number = _NUMBER.match(text, position)
    if number is None:
        raise UnreadableError("no JSON value here", position)
    if number.end() - position > MAX_DIGITS:
        raise UnreadableError(f"a number of more than {MAX_DIGITS} digits", position)
    if number["fraction"] or number["exponent"]:
        decimal = float(number.group())
        if math.isinf(decimal):
            raise UnreadableError("a number that no float holds", position)
        return decimal, number.end()
    return int(number.group()), number.end()


def is_shallow(value: Any) -> bool:
    """Whether nothing in a value stands deeper than ``MAX_DEPTH`` lists and objects."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return True
    return False


def _read_string(text: str, position: int) -> tuple[str, int]:
    match = _STRING.match(text, position)
    if match is None:
        raise UnreadableError("a string that is not closed, or holds a raw control character", position)
    if "\\" not in match[1]:
        return match[1], match.end()
    try:
        return json.loads(match.group()), match.end()
    except ValueError:
        raise UnreadableError("a string with an escape that JSON does not have", position) from None


def _read_object(text: str, position: int, is_lenient: bool, depth: int) -> tuple[dict[str, Any], int]:
    pairs: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    if text.startswith("}", position):
        return pairs, position + 1
    while True:
        if not text.startswith('"', position):
            raise UnreadableError("no key in double quotes where an object needs one", position)
        place = position
        key, position = _read_string(text, position)
        if key in pairs and not is_lenient:
            raise UnreadableError(f"the key {key[:40]!r} twice in one object", place)
        position = skip_space(text, position)
        if not text.startswith(":", position):
            raise UnreadableError("no colon after a key", position)
        pairs[key], position = read_json(text, skip_space(text, position + 1), is_lenient, depth + 1)
        position = skip_space(text, position)
        if text.startswith("}", position):
            return pairs, position + 1
        if not text.startswith(",", position):
            raise UnreadableError("neither a comma nor a brace after a value", position)
        position = skip_space(text, position + 1)


def _read_array(text: str, position: int, is_lenient: bool, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = skip_space(text, position + 1)
    if text.startswith("]", position):
        return items, position + 1
    while True:
        item, position = read_json(text, position, is_lenient, depth + 1)
        items.append(item)
        position = skip_space(text, position)
        if text.startswith("]", position):
            return items, position + 1
        if not text.startswith(",", position):
            raise UnreadableError("neither a comma nor a bracket after an item", position)
        position = skip_space(text, position + 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError
    return result


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError
    return value


def _refuse(_: str) -> float:
    raise ValueError


def _decoder(pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=pairs_hook, parse_float=_finite, parse_constant=_refuse)


_STRICT = _decoder(_unique)
_LENIENT = _decoder(None)
