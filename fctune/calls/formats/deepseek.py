"""DeepSeek V3, R1 and V3.1: names and JSON arguments between the model's own marks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import ParseState, TemplateSignature
from fctune.calls.formats.json_calls import dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.calls.formats.section_calls import SectionFormat
from fctune.data.conversation import Call, Tool

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[^\s<>{`]([^\n<>{`]*[^\s<>{`])?")
_NAME_GROUP = r"([^\s<>{`][^\n<>{`]*+)"
# Models and prompts mix the two versions. Serving engines read the one of their template, most deployments either.
_ANY_HEAD = re.compile(
    rf"\s*+(?:function<｜tool▁sep｜>)?+{_NAME_GROUP}\s*+(?:<｜tool▁sep｜>)?+\s*+(?:```json)?+\s*+(?=\{{)"
)
_ANY_TAIL = re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?")


class DeepSeekV31(SectionFormat):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, all calls between one pair of marks.

    The chat template of DeepSeek-V3.1.
    """

    name = "deepseek_v31"
    template_signatures = (TemplateSignature((_OPEN,)),)
    vllm_parser = "deepseek_v31"
    vllm_tokens = (_OPEN, _CLOSE, _CALL, _CALL_END)
    sglang_parser = "deepseekv31"
    _opening, _closing, _call_opening = _OPEN, _CLOSE, _CALL
    _separator = ""
    _head = re.compile(rf"\s*+{_NAME_GROUP}<｜tool▁sep｜>")
    _tail = re.compile(r"\s*<｜tool▁call▁end｜>")
    _response_type, _response_fences = "", ("", "")

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return all calls between one pair of marks."""
        return _OPEN + self._separator.join(map(self._render_call, calls)) + _CLOSE if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls of a section."""
        before, after = self._response_fences
        separator = "" if self._response_type else _SEPARATOR
        marks = {
            "open_pattern": rf"\s*(?:{_OPEN})?\s*{_CALL}{self._response_type}(?P<name>[^\n<>{{`]+){separator}{before}",
            "close_pattern": rf"(?<=\}}\s*){after}\s*{_CALL_END}(?:\s*{_CLOSE})?",
        }
        return {"tool_calls": named_call(marks)}

    def _render_call(self, call: Call) -> str:
        name, arguments = require_name(call.name, _NAME), dump_json(call.arguments, call.name)
        return f"{_CALL}{name}{_SEPARATOR}{arguments}{_CALL_END}"

    def _read_call(self, state: ParseState, opened: int, is_inside: bool, lenient: bool) -> tuple[Call, int]:
        text, start = state.text, opened + len(_CALL)
        head = (_ANY_HEAD if lenient else self._head).match(text, start)
        if head is None:
            raise ParseError("expected a function name", start)
        arguments, end = read_json(text, skip_space(text, head.end()), lenient)
        tail = (_ANY_TAIL if lenient else self._tail).match(text, end)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are not an object", head.end())
        if tail is None:
            raise ParseError(f"not closed by {_CALL_END}", end)
        if not is_inside and not lenient:
            raise ParseError(f"not opened by {_OPEN}", opened)
        return Call(head[1].strip(), arguments), tail.end()

    def _find_malformed_end(self, state: ParseState, opened: int, error_position: int) -> int:
        following = state.find(_CALL, opened + len(_CALL))
        closed = state.find(_CALL_END, max(error_position, opened))
        end = following if following >= 0 else state.end
        return closed + len(_CALL_END) if 0 <= closed < end else end


class DeepSeekV3(DeepSeekV31):
    """Calls of V3 and R1: V3.1's with a type before the name and a code fence around the arguments.

    The chat template of DeepSeek-V3.
    """

    name = "deepseek_v3"
    aliases = ("deepseek_r1",)
    template_signatures = (TemplateSignature((_OPEN, "```json"), priority=1),)
    vllm_parser = "deepseek_v3"
    sglang_parser = "deepseekv3"
    _separator = "\n"
    _head = re.compile(rf"function<｜tool▁sep｜>{_NAME_GROUP}\n```json\n")
    _tail = re.compile(r"\s*```\s*<｜tool▁call▁end｜>")
    _response_type, _response_fences = f"function{_SEPARATOR}", (r"\n```json\n", r"\s*```")

    def _render_call(self, call: Call) -> str:
        name, arguments = require_name(call.name, _NAME), dump_json(call.arguments, call.name)
        return f"{_CALL}function{_SEPARATOR}{name}\n```json\n{arguments}\n```{_CALL_END}"
