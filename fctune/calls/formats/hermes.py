"""Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4, SmolLM3: calls as JSON objects between tags."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.base.json_reader import ParseError, decode_json, read_json, skip_space
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import dump_json, to_object
from fctune.data.conversation import Call, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallFormat):
    """``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``; one block a call.

    https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen 2.5 and 3.
    """

    name = "hermes"
    aliases = ("qwen2.5", "qwen3", "granite4", "smollm3")
    # Templates of several other formats contain these strings too.
    template_signatures = (TemplateSignature((_OPEN, "arguments"), priority=-1),)
    vllm_parser = "hermes"
    sglang_parser = "hermes"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the blocks, one under another."""
        return "\n".join(f"{_OPEN}\n{dump_json(to_object(call), call.name)}\n{_CLOSE}" for call in calls)

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := state.find(_OPEN, position)) >= 0:
            position = self._read_block(state, opened, lenient)

    def _read_block(self, state: ParseState, opened: int, lenient: bool) -> int:
        """Add the call or malformed span of the block that opens at a position, and return the position after it."""
        text, body = state.text, opened + len(_OPEN)
        closed, reopened = state.find(_CLOSE, body), state.find(_OPEN, body)
        is_closed = closed >= 0 and (reopened < 0 or closed < reopened)
        end = closed + len(_CLOSE) if is_closed else (reopened if reopened >= 0 else state.end)
        call: Call | str
        try:
            if is_closed:
                call = to_call(decode_json(text[body:closed], lenient), "arguments", lenient)
            else:
                call = f"not closed by {_CLOSE}"
        except ParseError as error:
            call = error.reason
        if isinstance(call, str):
            found, stop = self._read_past_tags(state, body, lenient, is_closed)
            call, end = (call, state.choose_restart(end, stop)) if found is None else (found, stop)
        if isinstance(call, str):
            state.add_malformed(opened, end, call)
        else:
            state.add_calls([call], opened, end)
        return end

    def _read_past_tags(
        self, state: ParseState, body: int, lenient: bool, is_closed: bool
    ) -> tuple[Call | str | None, int]:
        """Return the call read without regard to the tags, which may be inside a string, and the position after it.

        Without a call, the position is the one up to which the text was read.
        """
        text, start = state.text, skip_space(state.text, body)
        try:
            value, stop = read_json(text, start, lenient)
        except ParseError as error:
            if not lenient:
                return None, error.position
            try:
                value, stop = PythonReader(text, has_json_constants=True).read_value(start)
            except ParseError as python_error:
                return None, max(error.position, python_error.position)
        stop = skip_space(text, stop)
        if text.startswith(_CLOSE, stop):
            return to_call(value, "arguments", lenient), stop + len(_CLOSE)
        return (to_call(value, "arguments", lenient) if lenient and not is_closed else None), stop
