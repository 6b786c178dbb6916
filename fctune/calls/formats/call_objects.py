"""Calls as decoded JSON objects, and the search for them in text that has no marks of a call format."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fctune.base.json_reader import ParseError, decode_json, read_json, reads_like_python
from fctune.base.python_reader import PythonReader
from fctune.data.conversation import Call

# The beginning and the end of a value that has its lines to itself, with or without a code fence.
_VALUE_START = re.compile(r"^[ \t]*+(?:```[ \t]*+\w*+\s*+)?+(?=[\[{])", re.MULTILINE)
_VALUE_END = re.compile(r"[ \t]*+(?:\s*+```[ \t]*+)?+(?=\n|\Z)")
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "type", "id", "function"))


class BareCalls(NamedTuple):
    """Calls written without marks, and their position ``(start, end)`` in the text, code fence included."""

    calls: list[Call]
    start: int
    end: int


def find_bare_calls(text: str, start: int, tool_names: Collection[str]) -> Iterator[BareCalls]:
    """Yield each call object, or list of them, that has its lines to itself and names only tools on offer.

    Values with other keys, such as a tool's repeated schema, are skipped.

    Args:
        text: The text to search.
        start: Where to begin.
        tool_names: The names of the tools on offer.
    """
    position = start
    while (found := _VALUE_START.search(text, position)) is not None:
        value, position = _read_value(text, found.end())
        closed = _VALUE_END.match(text, position)
        values = value if isinstance(value, list) else [value]
        calls = [to_call(one, "arguments", lenient=True) for one in values if _has_call_keys(one)]
        named = [call for call in calls if isinstance(call, Call) and call.name in tool_names]
        if named and len(named) == len(values) and closed is not None:
            position = closed.end()
            yield BareCalls(named, found.start(), position)


def _read_value(text: str, start: int) -> tuple[Any, int]:
    """Return the value at a position, None if there is none, and the position after what was read."""
    try:
        return read_json(text, start, lenient=True)
    except ParseError as error:
        try:
            return PythonReader(text, has_json_constants=True).read_value(start)
        except ParseError as python_error:
            return None, max(error.position, python_error.position, start + 1)


def _has_call_keys(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if isinstance(function := value.get("function"), dict):
        return value.keys() <= _CALL_KEYS and _has_call_keys(function)
    return value.keys() <= _CALL_KEYS and ("arguments" in value or "parameters" in value)


def to_call(value: Any, key: str, lenient: bool = False) -> Call | str:
    """Return the call that a decoded object describes, or the reason why it describes none.

    Args:
        value: The decoded object.
        key: The format's key for the arguments: ``arguments`` or ``parameters``.
        lenient: Accept either key, arguments as a string of JSON, missing arguments, and unknown keys.
    """
    if not isinstance(value, dict):
        return f"expected an object, got {type(value).__name__}"
    if lenient:
        function = value.get("function")
        value = {**value, **function} if isinstance(function, dict) else value
        arguments = value.get(key, value.get("parameters" if key == "arguments" else "arguments"))
        if isinstance(arguments, str):
            try:
                arguments = decode_json(arguments, lenient=True)
            except ParseError as error:
                return f"{key} are a string that is not JSON: {error.reason}"
        arguments = {} if arguments is None else arguments
    else:
        unknown = value.keys() - {"name", key, "type", "id"}
        if unknown:
            return f"unknown key {min(unknown)[:40]!r}"
        if key not in value:
            return f"missing {key!r}"
        arguments = value[key]
    name, call_id = value.get("name"), value.get("id")
    if not isinstance(name, str) or not name:
        if not reads_like_python() or "name" not in value or isinstance(name, (dict, list)):
            return "missing name"
        name = ""
    if not isinstance(arguments, dict):
        return f"{key}: expected an object, got {type(arguments).__name__}"
    return Call(name, arguments, call_id if isinstance(call_id, str) else None)
