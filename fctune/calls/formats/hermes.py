"""Calls as JSON objects between tags: Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat, Page, to_call
from fctune.calls.formats.json_formats import call_object, dump_json
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import ParseError, decode_json, read_json, skip_space
from fctune.parsing.python_reader import PythonReader

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallFormat):
    """``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``; one block a call.

    https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen 2.5 and 3.
    """

    name = "hermes"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """The blocks, one under another."""
        return "\n".join(f"{_OPEN}\n{dump_json(call_object(call), call.name)}\n{_CLOSE}" for call in calls)

    def _read(self, page: Page, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position = start
        while (opened := page.find(_OPEN, position)) >= 0:
            position = self._read_block(page, opened, lenient)

    def _read_block(self, page: Page, opened: int, lenient: bool) -> int:
        """Read the block that opens there; the position behind it."""
        text, body = page.text, opened + len(_OPEN)
        closed, reopened = page.find(_CLOSE, body), page.find(_OPEN, body)
        is_whole = closed >= 0 and (reopened < 0 or closed < reopened)
        end = closed + len(_CLOSE) if is_whole else (reopened if reopened >= 0 else page.end)
        call: Call | str
        try:
            if is_whole:
                call = to_call(decode_json(text[body:closed], lenient), "arguments", lenient)
            else:
                call = "not closed by </tool_call>"
        except ParseError as error:
            call = error.reason
        if isinstance(call, str):
            call, end = self._read_past(page, body, lenient, is_whole) or (call, end)
        if isinstance(call, str):
            page.put_malformed(opened, end, call)
        else:
            page.put_calls([call], opened, end)
        return end

    def _read_past(self, page: Page, body: int, lenient: bool, is_whole: bool) -> tuple[Call | str, int] | None:
        """The call from the text itself, since a tag may stand inside a string; and where it ends."""
        text, start = page.text, skip_space(page.text, body)
        try:
            value, stop = read_json(text, start, lenient)
        except ParseError:
            if not lenient:
                return None
            try:
                value, stop = PythonReader(text, has_json_constants=True).read_value(start)
            except ParseError:
                return None
        stop = skip_space(text, stop)
        if text.startswith(_CLOSE, stop):
            return to_call(value, "arguments", lenient), stop + len(_CLOSE)
        return (to_call(value, "arguments", lenient), stop) if lenient and not is_whole else None
