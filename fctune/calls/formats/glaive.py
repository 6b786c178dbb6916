"""Glaive's function-calling data set: a call's arguments as JSON between single quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.data.conversation import Call, Tool

_MARK = "<functioncall>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*(?=")')
_MIDDLE = re.compile(r"""\s*,\s*"arguments"\s*:\s*+('?)\s*+(?=\{)""")
_TAIL = re.compile(r"\s*+('?)\s*+\}")


class Glaive(CallFormat):
    """``<functioncall> {"name": "...", "arguments": '{...}'}``; the quotes around the arguments make it invalid JSON.

    https://huggingface.co/datasets/glaiveai/glaive-function-calling-v2
    """

    name = "glaive"
    template_signatures = (TemplateSignature((_MARK,), priority=-2),)

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one line per call."""
        return "\n".join(
            f'{_MARK} {{"name": {dump_json(call.name, call.name)}, '
            f"\"arguments\": '{dump_json(call.arguments, call.name)}'}}"
            for call in calls
        )

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls."""
        head = r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*\''
        marks = {"open_pattern": rf"\s*{_MARK}{head}", "close_pattern": r"(?<=\}\s*)'\s*\}"}
        return {"tool_calls": named_call(marks)}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := state.find(_MARK, position)) >= 0:
            body = opened + len(_MARK)
            following = state.find(_MARK, body)
            try:
                call, position = self._read_call(state.text, body, lenient)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position = following if following >= 0 else state.end
                state.add_malformed(opened, position, error.reason)

    def _read_call(self, text: str, start: int, lenient: bool) -> tuple[Call, int]:
        if lenient:
            try:
                value, end = read_json(text, skip_space(text, start), lenient)
                call = to_call(value, "arguments", lenient)
                if isinstance(call, Call):
                    return call, end
            except ParseError:
                pass
        head = _HEAD.match(text, start)
        if head is None:
            raise ParseError('no {"name": after the mark', start)
        name, end = read_json(text, head.end())
        middle = _MIDDLE.match(text, end)
        if middle is None or not (middle[1] or lenient):
            raise ParseError("no arguments in single quotes after the name", end)
        arguments, end = read_json(text, middle.end(), lenient)
        tail = _TAIL.match(text, end)
        if tail is None or tail[1] != middle[1]:
            raise ParseError("not closed after the arguments", end)
        if not name:
            raise ParseError("missing name", start)
        return Call(name, arguments), tail.end()
