"""Kimi K2: calls as ids that contain the function's name, and JSON arguments, between the model's own marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.calls.formats.section_calls import SectionFormat
from fctune.data.conversation import Call, Tool

_OPEN, _CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_NAME = re.compile(r"[^\s<>:|]+")
_HEAD = re.compile(r"functions\.([^\s<>:|]++):[0-9]++<\|tool_call_argument_begin\|>")
_ANY_HEAD = re.compile(r"\s*+(?:functions\.)?([^\s<>:|]++):[0-9]++\s*+<\|tool_call_argument_begin\|>")


class KimiK2(SectionFormat):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``, all in one section.

    The chat template of Kimi-K2-Thinking, and docs/tool_call_guidance.md of Kimi-K2-Instruct. The number counts
    the calls; the template assigns it itself, so it is not the call's id.
    """

    name = "kimi_k2"
    aliases = ("kimi-k2.5", "kimi-k2-thinking")
    template_signatures = (TemplateSignature((_OPEN,)), TemplateSignature((_CALL, _ARGUMENTS)))
    vllm_parser = "kimi_k2"
    sglang_parser = "kimi_k2"
    _opening, _closing, _call_opening = _OPEN, _CLOSE, _CALL

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return all calls between one pair of marks, numbered from 0."""
        return _OPEN + "".join(map(self._render_call, calls, range(len(calls)))) + _CLOSE if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a section."""
        opening, closing, call, arguments, end = map(re.escape, (_OPEN, _CLOSE, _CALL, _ARGUMENTS, _CALL_END))
        marks = {
            "open_pattern": rf"\s*(?:{opening})?\s*{call}\s*functions\.(?P<name>[^\s<>:|]+):\d+\s*{arguments}",
            "close_pattern": rf"(?<=\}}\s*){end}(?:\s*{closing})?",
        }
        return {"tool_calls": named_call(marks)}

    def _render_call(self, call: Call, number: int) -> str:
        name, arguments = require_name(call.name, _NAME), dump_json(call.arguments, call.name)
        return f"{_CALL}functions.{name}:{number}{_ARGUMENTS}{arguments}{_CALL_END}"

    def _read_call(self, state: ParseState, opened: int, is_inside: bool, lenient: bool) -> tuple[Call, int]:
        if not is_inside:
            raise ParseError(f"not opened by {_OPEN}", opened)
        text, start = state.text, opened + len(_CALL)
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
        marks = ((_CALL, opened + len(_CALL)), (_CLOSE, max(error_position, opened)))
        end = min((at for mark, start in marks if (at := state.find(mark, start)) >= 0), default=state.end)
        closed = state.find(_CALL_END, max(error_position, opened))
        return closed + len(_CALL_END) if 0 <= closed < end else end
