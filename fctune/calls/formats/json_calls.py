"""Calls as JSON objects: what formats that write them share, in both directions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fctune.base.errors import DataError
from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, ParseState
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, call_list
from fctune.data.conversation import Call, Tool

Convert = Callable[[Any, str, bool], Call | str]
"""Makes a call of a decoded value, the key of the arguments, and whether to be lenient; or gives the reason why not."""
Pattern = re.Pattern[str]

CALL_START = re.compile(r"""\{\s*["'](?:name|type|function|id|arguments|parameters)["']\s*:""")


def dump_json(value: Any, name: str) -> str:
    """Write JSON as chat templates do: a space after comma and colon, non-ASCII letters as they are.

    Args:
        value: What to write.
        name: The call that the value belongs to, for the error.

    Raises:
        DataError: JSON has no such value.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name}: its arguments cannot be written as JSON ({error}). "
            "Expected finite numbers, text, lists and objects."
        ) from None


def require_name(name: str, pattern: re.Pattern[str]) -> str:
    """Return the name if a format that writes it without quotes can read it back.

    Raises:
        DataError: It cannot.
    """
    if not pattern.fullmatch(name):
        raise DataError(f"{name[:80]!r}: not a name that this call format can write. Use letters, digits and _ - .")
    return name


def to_object(call: Call, key: str = "arguments", has_id: bool = False) -> dict[str, Any]:
    """Return a call as most formats write it: ``{"name": ..., "arguments": ...}``, with its id if requested."""
    written: dict[str, Any] = {"name": call.name, key: call.arguments}
    if has_id and call.id is not None:
        written["id"] = call.id
    return written


def read_objects(
    state: ParseState,
    key: str,
    mark: str = "",
    convert: Convert = to_call,
    call_start: Pattern = CALL_START,
) -> None:
    """Add all objects that look like calls, wherever they are in the text.

    Serving engines read like this: they take calls out of prose, lists and code fences.

    Args:
        state: The text, and where to add the calls.
        key: The format's key for the arguments.
        mark: The mark that the format writes before its calls; if it occurs without a call, the rest is malformed.
        convert: Makes a call of an object.
        call_start: Matches the beginning of an object that looks like a call.
    """
    position = 0
    opened = find_mark(state, mark, call_start, lambda at: read_json(state.text, at, lenient=True)[1])
    if opened >= 0:
        position = opened + len(mark)
        state.skip(opened, position)
    while (found := call_start.search(state.text, position, state.end)) is not None:
        call: Call | str
        try:
            value, position = read_json(state.text, found.start(), lenient=True)
            call = convert(value, key, True)
        except ParseError as error:
            try:
                reader = PythonReader(state.text, has_json_constants=True)
                value, position = reader.read_value(found.start())
                call = convert(value, key, True)
            except ParseError as python_error:
                # Both readers failed after reading this far; starting again before would take quadratic time.
                call, position = error.reason, max(error.position, python_error.position, found.end())
        if isinstance(call, str):
            state.add_malformed(found.start(), position, call)
        else:
            state.add_list_item(call, found.start(), position)
    state.require_call(mark)


def find_mark(state: ParseState, mark: str, call_start: re.Pattern[str], read: Callable[[int], int]) -> int:
    """Return the position of the mark before the calls, or -1; a mark within a string of a call does not count.

    Args:
        state: The text.
        mark: The mark; empty if the format has none.
        call_start: Matches the beginning of a call.
        read: Reads the call at a position and returns the position after it, or raises ``ParseError``.
    """
    opened = state.find(mark, 0) if mark else -1
    position = 0
    while position < opened and (found := call_start.search(state.text, position, opened)) is not None:
        try:
            position = read(found.start())
        except ParseError as error:
            position = max(error.position, found.end())
        else:
            if position > opened:
                return -1
    return opened


def read_list(
    state: ParseState, opened: int, start: int, key: str = "arguments", convert: Convert = to_call, closing: str = ""
) -> int:
    """Add the list of calls at ``start``, and return the position after it.

    One error makes the complete list malformed, because nobody can know which calls were meant.

    Args:
        state: The text, and where to add the calls.
        opened: Position of the mark before the list.
        start: Where the list should begin.
        key: The format's key for the arguments.
        convert: Makes a call of an item.
        closing: The mark that must follow the list.
    """
    start = skip_space(state.text, start)
    try:
        value, end = read_json(state.text, start)
    except ParseError as error:
        state.add_malformed(opened, state.end, error.reason)
        return state.end
    calls = [convert(item, key, False) for item in value] if isinstance(value, list) else ["expected a list of calls"]
    errors = [call for call in calls if isinstance(call, str)]
    if closing:
        closed = skip_space(state.text, end)
        if state.text.startswith(closing, closed):
            end = closed + len(closing)
        else:
            errors.append(f"not closed by {closing}")
            end = state.end
    if errors:
        state.add_malformed(opened, end, errors[0])
    else:
        state.add_calls([call for call in calls if isinstance(call, Call)], opened, end)
    return end


class MarkedListFormat(CallFormat):
    """Base of formats that write one JSON list of all calls after a mark, up to a closing mark or the end of the turn.

    Attributes:
        _mark: The mark before the list. If it ends with a bracket, that is the list's own.
        _closing: The mark after the list; empty if there is none.
        _arguments_key: The key of a call's arguments.
        _has_id: True if calls carry their ids.
        _response_keys: The keys of a call's name and arguments.
        _call_start: Matches the beginning of a call, as the lenient reading looks for it.
    """

    _mark: str
    _closing = ""
    _arguments_key = "arguments"
    _has_id = False
    _response_keys: ClassVar[tuple[str, str]] = ("name", "arguments")
    _call_start = CALL_START

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the marks and one list of all calls."""
        return f"{self._mark.removesuffix('[')}{self._render_list(calls)}{self._closing}" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the list."""
        begun = re.escape(self._mark.removesuffix("["))
        end = rf"(?<=\]\s*){re.escape(self._closing)}" if self._closing else rf"\s*{around.end}"
        marks = {"open_pattern": rf"\s*{begun}\s*(?=\[)", "close_pattern": end}
        return {"tool_calls": call_list(marks, *self._response_keys)}

    def _render_list(self, calls: Sequence[Call]) -> str:
        return dump_json([to_object(call, has_id=self._has_id) for call in calls], calls[0].name)

    def _to_call(self, value: Any, key: str, lenient: bool) -> Call | str:
        """Return the call that an item of the list describes, or the reason why it describes none."""
        return to_call(value, key, lenient)

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            self._read_objects(state)
        elif (opened := state.find(self._mark, 0)) >= 0:
            begun = opened + len(self._mark.removesuffix("["))
            end = read_list(state, opened, begun, self._arguments_key, self._to_call, self._closing)
            if (again := state.find(self._mark, end)) >= 0:
                state.add_malformed(again, state.end, "a second list of calls")

    def _read_objects(self, state: ParseState) -> None:
        read_objects(state, self._arguments_key, self._mark, self._to_call, self._call_start)
        if self._closing and (ended := state.find(self._closing, state.position)) >= 0:
            state.skip(ended, ended + len(self._closing))
