"""Calls between tags whose values carry no type: what the formats that write them share. The tool's schema types them.

Text without quotes cannot express everything, such as the string ``"3"`` where the schema has an integer, or a value
that contains the closing tag. ``write_value`` escapes such a value, and no other, as ``<json>"3"</json>``. This is a
convention of this project: no model is known to write it, and no serving engine reads it.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.base.errors import DataError
from fctune.base.json_reader import ParseError, decode_json
from fctune.calls.argument_types import read_typed_text
from fctune.calls.formats.base import CallFormat, ParseState
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.matching import is_equal
from fctune.data.conversation import Call, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
NAME = re.compile(r"[^<>\s]+")
KEY = re.compile(r"[^<>\n\S]*+[^<>\s][^<>\n]*+")

_ESCAPED = re.compile(r"<json>(.*)</json>", re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*+")


class TaggedFormat(CallFormat):
    """Base of formats that write each call between ``<tool_call>`` and ``</tool_call>``, read from tag to tag.

    Attributes:
        _open: The tag before a call.
        _close: The tag after it.
    """

    _open, _close = OPEN, CLOSE

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the blocks, one under another."""
        return "\n".join(self._render_call(call, tools) for call in calls)

    @abstractmethod
    def _render_call(self, call: Call, tools: Sequence[Tool]) -> str:
        """Return the block of one call."""

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := self._find_call(state, position, lenient)) >= 0:
            try:
                call, position = self._read_call(state, opened, tools, lenient)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position = self._find_malformed_end(state, opened, error.position)
                state.add_malformed(opened, position, error.reason)

    def _find_call(self, state: ParseState, position: int, lenient: bool) -> int:
        return state.find(self._open, position)

    @abstractmethod
    def _read_call(self, state: ParseState, opened: int, tools: Sequence[Tool], lenient: bool) -> tuple[Call, int]:
        """Return the call that opens at a position, and the position after it, or raise ``ParseError``."""

    def _find_malformed_end(self, state: ParseState, opened: int, error_position: int) -> int:
        """Return the position after the next closing tag, or of the next opening one, whichever comes first."""
        closed = state.find(self._close, error_position)
        reopened = state.find(self._open, max(error_position, opened + 1))
        if closed >= 0 and (reopened < 0 or closed < reopened):
            return closed + len(self._close)
        return reopened if reopened >= 0 else state.end


def write_value(value: Any, text: str, schema: Any, is_typed: bool, marks: tuple[str, ...]) -> str:
    """Return the text of an argument, escaped if it would be read back as another value.

    Args:
        value: The value.
        text: The value as the format writes it.
        schema: The argument's schema; None if the tool does not describe it.
        is_typed: Tools are known; without them a text is escaped only if it contains a mark.
        marks: Strings that end a value wherever they occur.
    """
    # An end of thinking on its own line would turn everything before it into thinking.
    has_mark = any(mark in text for mark in (*marks, "<json>", "</think>"))
    if not has_mark and (not is_typed or is_equal(read_typed_text(text, schema), value, is_same_number_type=True)):
        return text
    escaped = dump_json(value, "an argument").replace("<", "\\u003c")
    return f"<json>{escaped}</json>"


def read_value(text: str, schema: Any) -> Any:
    """Return the value of an argument's text, typed by its schema."""
    if "<json>" in text and (escaped := _ESCAPED.fullmatch(text.strip())):
        try:
            return decode_json(escaped[1])
        except ParseError:
            pass
    return read_typed_text(text, schema)


def require_writable(call: Call) -> None:
    """Raise ``DataError`` unless tags can hold a call's names, and JSON its values."""
    dump_json(call.arguments, call.name)
    names: Mapping[str, re.Pattern[str]] = {call.name: NAME} | dict.fromkeys(call.arguments, KEY)
    for name, pattern in names.items():
        if not pattern.fullmatch(name) or name != name.strip():
            raise DataError(
                f"{call.name[:80]!r}: the name {name[:80]!r} cannot be written in a tag. Use letters and digits."
            )


def find_closing(state: ParseState, mark: str, start: int) -> int:
    """Return the position of the next ``mark``, or raise ``ParseError``."""
    found = state.find(mark, start)
    if found < 0:
        raise ParseError(f"not closed by {mark}", start)
    return found


def find_name(state: ParseState, start: int, closing: str) -> tuple[str, int]:
    """Return the name between ``start`` and the next closing mark, and the position of the mark.

    The name is empty if there is none that a tag can hold. Text with another tag in it is not copied, as many opening
    tags may precede one closing mark.
    """
    end = find_closing(state, closing, start)
    tag = state.find("<", start)
    name = "" if 0 <= tag < end else state.text[start:end].strip()
    return (name if KEY.fullmatch(name) else ""), end


def skip_space(state: ParseState, position: int) -> int:
    """Return the position of the next character that is not whitespace."""
    space = _SPACE.match(state.text, position, state.end)
    return space.end() if space else position
