"""Hermes 2 Pro and 3, Qwen 2.5 and 3, Granite 4, SmolLM3: calls as JSON objects between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fctune.base.json_reader import ParseError, decode_json, read_json, skip_space
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, Parsed, ParseState, TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import dump_json, to_object
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, call_object
from fctune.data.conversation import Call, Tool

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallFormat):
    """``<tool_call>``, a line with ``{"name": ..., "arguments": {...}}``, ``</tool_call>``; one block a call.

    https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen 2.5 and 3.
    """

    name = "hermes"
    aliases: ClassVar[tuple[str, ...]] = ("qwen2.5", "qwen3", "granite4", "smollm3")
    # Templates of several other formats contain these strings too.
    template_signatures: ClassVar[tuple[TemplateSignature, ...]] = (
        TemplateSignature((_OPEN, "arguments"), priority=-1),
    )
    vllm_parser: ClassVar[str | None] = "hermes"
    sglang_parser: ClassVar[str | None] = "hermes"
    _open, _close = _OPEN, _CLOSE

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the blocks, one under another."""
        return "\n".join(f"{self._open}\n{dump_json(to_object(call), call.name)}\n{self._close}" for call in calls)

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the blocks; a closing tag in a string is no brace's neighbour."""
        marks = {"open_pattern": rf"\s*{self._open}", "close_pattern": rf"(?<=\}}\s*){self._close}"}
        return {"tool_calls": call_object(marks)}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := state.find(self._open, position)) >= 0:
            position = self._read_block(state, opened, lenient)

    def _read_block(self, state: ParseState, opened: int, lenient: bool) -> int:
        """Add the call or malformed span of the block that opens at a position, and return the position after it."""
        text, body = state.text, opened + len(self._open)
        closed, reopened = state.find(self._close, body), state.find(self._open, body)
        is_closed = closed >= 0 and (reopened < 0 or closed < reopened)
        end = closed + len(self._close) if is_closed else (reopened if reopened >= 0 else state.end)
        call: Call | str
        try:
            if is_closed:
                call = to_call(decode_json(text[body:closed], lenient), "arguments", lenient)
            else:
                call = f"not closed by {self._close}"
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
        if text.startswith(self._close, stop):
            return to_call(value, "arguments", lenient), stop + len(self._close)
        return (to_call(value, "arguments", lenient) if lenient and not is_closed else None), stop


class Ernie45(Hermes):
    """The same, next to answers in ``<response>``, whose tags are no part of them.

    The chat template of ERNIE-4.5-21B-A3B-Thinking.
    """

    name = "ernie45"
    aliases = ("ernie4.5",)
    template_signatures = (TemplateSignature((_OPEN, "<response>"), priority=1),)
    vllm_parser = "ernie45"
    sglang_parser = None

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the fields of the blocks and of the answer, whose tags end a part of the content."""
        content = {"close_pattern": rf"\s*(?:</?response>|{around.end})\s*", "content": "text"}
        return {**(super().describe_response(around) or {}), "content": content}

    def parse(self, text: str, tools: Sequence[Tool] = (), lenient: bool = False) -> Parsed:
        """Split a model's text; see ``CallFormat.parse``."""
        parsed = super().parse(text, tools, lenient)
        return parsed._replace(prose=parsed.prose.replace("<response>", "").replace("</response>", "").strip())


class LongCat(Hermes):
    """The same in ``<longcat_tool_call>``.

    The chat template of LongCat-Flash-Chat.
    """

    name = "longcat"
    aliases = ("longcat-flash",)
    template_signatures = (TemplateSignature(("<longcat_tool_call>",), priority=1),)
    vllm_parser = "longcat"
    sglang_parser = None
    _open, _close = "<longcat_tool_call>", "</longcat_tool_call>"
