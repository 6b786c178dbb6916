"""Llama 3.1, 3.2 and 4: calls as JSON objects."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fctune.base.json_reader import ParseError, read_json, skip_space
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import CALL_START, dump_json, read_objects, to_object
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, call_object, named_call
from fctune.data.conversation import Call, Tool


class LlamaJson(CallFormat):
    """``{"name": ..., "parameters": {...}}`` and nothing else; several are joined by ``; ``.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    """

    name = "llama3_json"
    aliases = ("llama3.1", "llama3.2")
    # Templates of other formats for Llama mention these strings too.
    template_signatures = (TemplateSignature(("<|start_header_id|>", '"parameters": '), priority=-5),)
    vllm_parser = "llama3_json"
    vllm_tokens = ("<|python_tag|>",)
    sglang_parser = "llama3"
    _mark = "<|python_tag|>"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the objects, joined by a semicolon; the official template writes only one."""
        return "; ".join(dump_json(to_object(call, "parameters"), call.name) for call in calls)

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of the objects, from which an answer begins and which semicolons join."""
        start = r'\s*(?=\{\s*"name"\s*:)'
        begun = rf"{around.start}\s*(?:<\|python_tag\|>)?"
        marks = {
            # After other text, even objects that semicolons join are none.
            "open_pattern": rf'(?:{begun}|(?<={begun}\s*\{{\s*"name".*\}}\s*;)){start}',
            "close_pattern": rf"(?<=\}})\s*;(?={start})|\s*{around.end}",
        }
        return {"tool_calls": call_object(marks, "parameters")}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        text = state.text
        if lenient:
            read_objects(state, "parameters", self._mark)
            return
        opened = position = skip_space(text, 0)
        if text.startswith(self._mark, opened):
            position = skip_space(text, opened + len(self._mark))
        elif not CALL_START.match(text, opened, state.end):
            return
        while True:
            try:
                value, end = read_json(text, position)
                call = to_call(value, "parameters")
            except ParseError as error:
                call, end = error.reason, state.end
            following = skip_space(text, end)
            if following < state.end and text[following] != ";":
                call, end = call if isinstance(call, str) else "text after the call", state.end
            if isinstance(call, str):
                state.add_malformed(opened, end, call)
            else:
                state.add_calls([call], opened, end)
            if following >= state.end or end == state.end:
                return
            state.skip(end, following + 1)
            opened = position = skip_space(text, following + 1)


class Llama4Json(CallFormat):
    """``<|python_start|>content<|python_end|>{"name": ..., "parameters": {...}}``, with nothing between the objects.

    The chat template in ``Llama4Processor`` of transformers, which writes the marks also without content. vLLM's parser
    reads a single call only.
    """

    name = "llama4_json"
    template_signatures = (TemplateSignature(("<|header_start|>", '"parameters": '), priority=-5),)
    vllm_parser = "llama4_json"
    vllm_tokens = ("<|python_tag|>",)
    _opening, _closing = "<|python_start|>", "<|python_end|>"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the marks and the objects."""
        objects = "".join(dump_json(to_object(call, "parameters"), call.name) for call in calls)
        return f"{self._opening}{self._closing}{objects}" if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the fields of the objects after the marks, and of the content between or without them."""
        opening, closing = re.escape(self._opening), re.escape(self._closing)
        start = r'\s*\{\s*"name"\s*:\s*"'
        marks = {
            "open_pattern": rf'(?:{closing}|(?<=\}})){start}(?P<name>[^"\\]+)"\s*,\s*"parameters"\s*:',
            # Nothing but the next name shows that an object has ended.
            "close_pattern": rf"(?<=\}}\s*)\}}(?:(?={start})|\s*{around.end}|\s*\Z)",
        }
        content = {"close_pattern": rf"{opening}|\s*{around.end}", "content": "text"}
        return {"tool_calls": named_call(marks), "content": content}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_objects(state, "parameters")
            state.skip(state.end, state.end)
            state.prose = [part.replace(self._opening, "").replace(self._closing, "") for part in state.prose]
            return
        opened = skip_space(state.text, 0)
        if not state.text.startswith(self._opening, opened):
            return
        closed = state.find(self._closing, opened)
        if closed < 0:
            state.add_malformed(opened, state.end, f"not closed by {self._closing}")
            return
        state.skip(opened, opened + len(self._opening))
        position = closed + len(self._closing)
        state.skip(closed, position)
        if skip_space(state.text, position) >= state.end:
            state.add_malformed(closed, state.end, f"no call after {self._closing}")
        while (position := skip_space(state.text, position)) < state.end:
            try:
                value, end = read_json(state.text, position)
                call = to_call(value, "parameters")
            except ParseError as error:
                call, end = error.reason, state.end
            if isinstance(call, str):
                state.add_malformed(position, state.end, call)
                return
            state.add_calls([call], position, end)
            position = end
