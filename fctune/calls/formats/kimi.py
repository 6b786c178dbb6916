"""Kimi K2: calls as ids that contain the function's name, and JSON arguments, between the model's own marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat, Malformed, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import ParseError, read_json, skip_space

_OPEN, _CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAME = re.compile(r"[^\s<>:|]+")
_HEAD = re.compile(r"functions\.([^\s<>:|]++):[0-9]++<\|tool_call_argument_begin\|>")
_ANY_HEAD = re.compile(r"\s*+(?:functions\.)?([^\s<>:|]++):[0-9]++\s*+<\|tool_call_argument_begin\|>")


class KimiK2(CallFormat):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``, all in one section.

    The chat template of Kimi-K2-Thinking, and docs/tool_call_guidance.md beside Kimi-K2-Instruct. The number counts
    the calls; the template assigns it itself, so it is no id of the call.
    """

    name = "kimi_k2"
    aliases = ("kimi-k2.5", "kimi-k2-thinking")
    template_signatures = (TemplateSignature((_OPEN,)), TemplateSignature((_CALL, _ARGUMENTS)))
    vllm_parser = "kimi_k2"
    sglang_parser = "kimi_k2"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return all calls between one pair of marks, numbered from 0."""
        return _OPEN + "".join(map(self._render_call, calls, range(len(calls)))) + _CLOSE if calls else ""

    def _render_call(self, call: Call, number: int) -> str:
        name, arguments = require_name(call.name, _NAME), dump_json(call.arguments, call.name)
        return f"{_CALL}functions.{name}:{number}{_ARGUMENTS}{arguments}{_CALL_END}"

    def _read(self, state: ParseState, start: int, tools: Sequence[Tool], lenient: bool) -> None:
        position, outer = start, -1
        is_open = was_open = False
        while (opened := state.find(_CALL, position)) >= 0:
            begun = state.find(_OPEN, position)
            if 0 <= begun < opened:
                state.skip(begun, begun + len(_OPEN))
                outer, is_open, was_open = begun, True, True
            try:
                if not (was_open if lenient else is_open):
                    raise ParseError(f"not opened by {_OPEN}", opened)
                call, position = self._read_call(state, opened + len(_CALL), lenient)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position = self._find_malformed_end(state, opened, error.position)
                state.add_malformed(opened, position, error.reason)
            closing = skip_space(state.text, position)
            if state.text.startswith(_CLOSE, closing):
                position, is_open = closing + len(_CLOSE), False
                state.skip(closing, position)
        if (begun := state.find(_OPEN, position)) >= 0:
            state.add_malformed(begun, state.end, "no call after the mark")
        if is_open and not lenient:
            # The span is that of the mark, because the calls after it are recorded already.
            state.malformed.append(Malformed(outer, outer + len(_OPEN), f"not closed by {_CLOSE}"))

    def _read_call(self, state: ParseState, start: int, lenient: bool) -> tuple[Call, int]:
        text = state.text
        head = (_ANY_HEAD if lenient else _HEAD).match(text, start, state.end)
        if head is None:
            raise ParseError(f"expected functions.NAME:NUMBER and {_ARGUMENTS}", start)
        begun = skip_space(text, head.end())
        if lenient and text.startswith(_CALL_END, begun):
            return Call(head[1], {}), begun + len(_CALL_END)
        arguments, end = read_json(text, begun, lenient)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are not an object", head.end())
        end = skip_space(text, end)
        if text.startswith(_CALL_END, end):
            return Call(head[1], arguments), end + len(_CALL_END)
        if lenient and (end >= state.end or text.startswith(_CLOSE, end)):
            return Call(head[1], arguments), min(end, state.end)
        raise ParseError(f"not closed by {_CALL_END}", end)

    def _find_malformed_end(self, state: ParseState, opened: int, error_position: int) -> int:
        """Return the position after the call's closing mark, or of the mark that follows without it."""
        marks = ((_CALL, opened + len(_CALL)), (_CLOSE, max(error_position, opened)))
        end = min((at for mark, start in marks if (at := state.find(mark, start)) >= 0), default=state.end)
        closed = state.find(_CALL_END, max(error_position, opened))
        return closed + len(_CALL_END) if 0 <= closed < end else end
