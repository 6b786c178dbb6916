"""Muse Glimmer: calls in ATEM markup, each in a message of its own to the tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.base.json_reader import ParseError, decode_json
from fctune.calls.formats.base import ParseState, TemplateSignature
from fctune.calls.formats.invoke_calls import Block, InvokeFormat
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings
from fctune.calls.formats.tagged_calls import read_value, write_value
from fctune.data.conversation import Call, Tool

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_RECIPIENT = re.compile(r"to=([^\s<]++)\s*+")
_HEADER = re.compile(r"(?:<\|start\|>\s*+assistant)?+\s*+(?:to=([^\s<]++))?+\s*+")
# Messages to these hold words.
_PEOPLE = frozenset(("self", "user", "commentary"))


class Muse(InvokeFormat):
    """Messages ``to=f`` with ``<atem:invoke name="f">`` and ``<atem:parameter name="k">`` in them.

    The chat template of Muse Glimmer. A model's own text begins after ``<|start|>assistant``. Values are JSON, or text
    if they are not; a string that reads as other JSON is written as JSON where the schema does not say.
    """

    name = "muse"
    aliases = ("atem",)
    response_note = "all calls: the schema has no field for the recipient of a message"
    template_signatures = (TemplateSignature(("<atem:function_calls>",)),)
    vllm_parser = "muse_glimmer"
    sglang_parser = "muse"
    _tags = Block(
        "<atem:function_calls>",
        "</atem:function_calls>",
        "<atem:invoke",
        "</atem:invoke>",
        "<atem:parameter",
        "</atem:parameter>",
    )

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one message a call, the last without the mark that ends the turn."""
        messages = (
            f"{_START}assistant to={call.name}{_MESSAGE}{super(Muse, self).render([call], tools)}" for call in calls
        )
        return "<|eom|>".join(messages)

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return None: a message's recipient decides whether it is a call, thinking or content."""
        return None

    def _write_value(self, value: Any, schema: Any, is_typed: bool) -> tuple[str, str]:
        text = dump_json(value, "an argument")
        if isinstance(value, str):
            is_plain = not self._has_mark(value) and self._read_value(value, "", schema) == value
            return "", value if is_plain else text.replace("<", "\\u003c")
        return "", write_value(value, text, schema, is_typed, self._tags)

    def _read_value(self, text: str, attributes: str, schema: Any) -> Any:
        try:
            value = decode_json(text)
        except ParseError:
            return read_value(text, schema)
        return value if isinstance(value, str) else read_value(text, schema)

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        if lenient and state.find(_MESSAGE, 0) < 0:
            self._read_invokes(state, 0, tools, lenient)
            return
        while (marked := state.find(_MESSAGE, position)) >= 0:
            header, recipient = _find_header(state.text, position, marked)
            body = marked + len(_MESSAGE)
            state.skip(header, body)
            end, mark = _find_message_end(state, body)
            if recipient is not None and recipient not in _PEOPLE:
                self._read_message(state, body, end, tools, lenient)
            state.skip(end, end + len(mark))
            position = end + len(mark)

    def _read_message(self, state: ParseState, body: int, end: int, tools: Sequence[Tool], lenient: bool) -> None:
        """Add the calls of one message."""
        message = ParseState(state.text, end)
        message.position = body
        self._read_invokes(message, body, tools, lenient)
        message.skip(end, end)
        state.calls += message.calls
        state.spans += message.spans
        state.malformed += message.malformed
        state.prose += message.prose
        state.skip(body, body)
        state.position = end


def _find_header(text: str, position: int, marked: int) -> tuple[int, str | None]:
    """Return where the header before a message mark begins, and to whom the message is."""
    begun = text.rfind(_START, position, marked)
    if begun < 0:
        begun = text.rfind("to=", position, marked)
    header = _HEADER.fullmatch(text, begun, marked) if begun >= 0 else None
    return (begun, header[1]) if header else (marked, None)


def _find_message_end(state: ParseState, body: int) -> tuple[int, str]:
    """Return the position of the mark that ends a message, and the mark; empty if the next message's header does."""
    ends = [(position, mark) for mark in _ENDS if (position := state.find(mark, body)) >= 0]
    reopened = state.find(_START, body)
    end, mark = min(ends, default=(state.end, ""))
    return (reopened, "") if 0 <= reopened < end else (end, mark)
