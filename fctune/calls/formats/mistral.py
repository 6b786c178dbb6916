"""Mistral: a JSON list after a mark up to tokenizer v7, names and arguments between marks from v11 on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat, dump_json, require_name
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, named_call
from fctune.data.conversation import Call, Tool

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[]([^\[]*[^\s\[])?")


class _MistralList(MarkedListFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]``.

    The tokenizers of https://github.com/mistralai/mistral-common, as for the later versions.
    """

    vllm_parser = "mistral"
    vllm_tokens = (_MARK,)
    sglang_parser = "mistral"
    _mark = _MARK
    _has_id = True


class MistralV3(_MistralList):
    """The list of the oldest tokenizers."""

    name = "mistral_v3"
    template_signatures = (TemplateSignature((_MARK,)),)


class MistralV7(_MistralList):
    """The same list, in templates with marks for the system prompt and the content of results."""

    name = "mistral_v7"
    template_signatures = (
        TemplateSignature((_MARK, "[TOOL_CONTENT]"), priority=1),
        TemplateSignature((_MARK, "[SYSTEM_PROMPT]"), priority=1),
    )


class MistralV11(CallFormat):
    """``[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`` for each call."""

    name = "mistral_v11"
    template_signatures = (TemplateSignature((_MARK, _ARGUMENTS, _ID), priority=3),)
    vllm_parser = "mistral"
    vllm_tokens: ClassVar[tuple[str, ...]] = (_MARK, _ID, _ARGUMENTS)
    sglang_parser = "mistral"
    _has_id = True

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the calls, one directly after another, each with its mark."""
        return "".join(map(self._render_call, calls))

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the calls, each up to the next or the end of the turn."""
        mark, call_id, arguments = map(re.escape, (_MARK, _ID, _ARGUMENTS))
        marks = {
            "open_pattern": rf"\s*{mark}(?P<name>[^\[]+)(?:{call_id}[^\[]*)?{arguments}",
            "close_pattern": rf"(?<=\}}\s*)(?={mark})|\s*{around.end}",
        }
        return {"tool_calls": named_call(marks)}

    def _render_call(self, call: Call) -> str:
        call_id = f"{_ID}{call.id}" if self._has_id and call.id is not None else ""
        return f"{_MARK}{require_name(call.name, _NAME)}{call_id}{_ARGUMENTS}{dump_json(call.arguments, call.name)}"

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        position = 0
        while (opened := state.find(_MARK, position)) >= 0:
            following = state.find(_MARK, opened + len(_MARK))
            try:
                call, position = self._read_call(state, opened + len(_MARK), lenient)
                state.add_calls([call], opened, position)
            except ParseError as error:
                position = following if following >= 0 else state.end
                state.add_malformed(opened, position, error.reason)

    def _read_call(self, state: ParseState, start: int, lenient: bool) -> tuple[Call, int]:
        text = state.text
        marked = state.find(_ARGUMENTS, start)
        following = state.find(_MARK, start)
        if marked < 0 or 0 <= following < marked:
            raise ParseError(f"no {_ARGUMENTS} after the name", start)
        name, has_id, call_id = text[start:marked].partition(_ID)
        if not name.strip() or not (lenient or _NAME.fullmatch(name)):
            raise ParseError(f"no name after {_MARK}", start)
        arguments, end = read_json(text, skip_space(text, marked + len(_ARGUMENTS)), lenient)
        if not isinstance(arguments, dict):
            raise ParseError("the arguments are not an object", marked)
        return Call(name.strip(), arguments, call_id.strip() if has_id else None), end


class MistralV13(MistralV11):
    """``[TOOL_CALLS]name[ARGS]{...}`` for each call; Ministral 3, Devstral 2 and later."""

    name = "mistral_v13"
    aliases = ("ministral3", "devstral2")
    template_signatures = (TemplateSignature((_MARK, _ARGUMENTS), priority=2),)
    vllm_tokens = (_MARK, _ARGUMENTS)
    _has_id = False
