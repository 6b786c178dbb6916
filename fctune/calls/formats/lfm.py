"""LFM2 and LFM2.5: calls in Python's syntax between marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.pythonic import read_python_calls, render_python_call
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, python_call
from fctune.data.conversation import Call, Tool

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm(CallFormat):
    """``<|tool_call_start|>[f(a='x', b=1), g()]<|tool_call_end|>``; values may use JSON's constants.

    The chat templates of LFM2 and LFM2.5.
    """

    name = "lfm"
    template_signatures = (TemplateSignature((_OPEN,)),)
    vllm_parser = "lfm2"
    vllm_tokens = (_OPEN, _CLOSE)
    sglang_parser = "lfm2"
    response_note = (
        "strings with a backslash, both kinds of quotes or two apostrophes; True, False and None within lists and "
        "objects; keys that are not identifiers"
    )

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one list of all calls between the marks."""
        return f"{_OPEN}[{', '.join(map(render_python_call, calls))}]{_CLOSE}" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a list, from parenthesis to parenthesis."""
        opening, closing = re.escape(_OPEN), re.escape(_CLOSE)
        marks = {
            "open_pattern": rf"(?:\s*{opening}\s*\[|(?<=\)),)\s*(?P<name>[^\W\d][\w.\-/]*)\(",
            "close_pattern": rf"\)(?=\s*,\s*[^\W\d][\w.\-/]*\()|\)\s*\]\s*{closing}",
        }
        return {"tool_calls": python_call(marks)}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        reader = PythonReader(state.text[: state.end], has_json_constants=True, lenient=lenient)
        position = 0
        while (opened := state.find(_OPEN, position)) >= 0:
            body = opened + len(_OPEN)
            following, closed = state.find(_OPEN, body), state.find(_CLOSE, body)
            position = following if following >= 0 else state.end
            if 0 <= closed < position:
                position = closed + len(_CLOSE)
            try:
                calls, end = reader.read_calls(reader.skip_space(body))
                end = reader.skip_space(end)
                if state.text.startswith(_CLOSE, end):
                    position = end + len(_CLOSE)
                elif lenient:
                    position = end
                else:
                    raise ParseError(f"not closed by {_CLOSE}", end)
                state.add_calls([Call(*call) for call in calls], opened, position)
            except ParseError as error:
                position = state.choose_restart(position, error.position)
                state.add_malformed(opened, position, error.reason)
        if lenient and not state.calls and not state.malformed:
            read_python_calls(state)
