"""Llama 3.1 and 3.2: calls as bare JSON objects."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import CALL_START, dump_json, read_objects, to_object
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_reader import ParseError, read_json, skip_space


class LlamaJson(CallFormat):
    """``{"name": ..., "parameters": {...}}`` and nothing else; several are joined by ``; ``.

    https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
    """

    name = "llama3_json"
    aliases = ("llama3.1", "llama3.2")
    # Templates of other formats for Llama mention these strings too.
    template_signatures = (
        TemplateSignature(("<|start_header_id|>", '"parameters": '), priority=-5),
        TemplateSignature(("<|header_start|>", '"parameters": '), priority=-5),
    )
    vllm_parser = "llama3_json"
    sglang_parser = "llama3"
    _mark = "<|python_tag|>"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return the objects, joined by a semicolon; the official template writes only one."""
        return "; ".join(dump_json(to_object(call, "parameters"), call.name) for call in calls)

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
