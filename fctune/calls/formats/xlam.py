"""XLAM 2 and its descendants: calls as one bare JSON list."""

from __future__ import annotations

from collections.abc import Sequence

from fctune.base.json_reader import skip_space
from fctune.calls.formats.base import CallFormat, ParseState, TemplateSignature
from fctune.calls.formats.json_calls import CALL_START, dump_json, read_list, read_objects, to_object
from fctune.calls.formats.response_fields import ResponseFields, Surroundings, call_list
from fctune.data.conversation import Call, Tool


class Xlam(CallFormat):
    """``[{"name": ..., "arguments": {...}}, ...]`` and nothing else.

    https://github.com/SalesforceAIResearch/xLAM
    """

    name = "xlam"
    # Only the wording of the prompt shows it, on templates of other formats.
    template_signatures = (TemplateSignature(("in a single JSON array",), priority=-3),)
    vllm_parser = "xlam"

    def render(self, calls: Sequence[Call], tools: Sequence[Tool] = ()) -> str:
        """Return one list of all calls."""
        return dump_json([to_object(call) for call in calls], calls[0].name) if calls else ""

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the field of a list that is all of the answer."""
        marks = {
            "open_pattern": rf'{around.start}\s*(?=\[\s*\{{\s*"name"\s*:)',
            "close_pattern": rf"\s*{around.end}",
        }
        return {"tool_calls": call_list(marks)}

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        if lenient:
            read_objects(state, "arguments")
            return
        start = skip_space(state.text, 0)
        if not state.text.startswith("[", start):
            return
        first = skip_space(state.text, start + 1)
        if state.text.startswith("]", first) and skip_space(state.text, first + 1) >= state.end:
            state.skip(start, state.end)  # An empty list means that no call is made.
        if not CALL_START.match(state.text, first, state.end):
            return
        end = read_list(state, start, start)
        if skip_space(state.text, end) < state.end and state.calls:
            state.calls.clear()
            state.spans.clear()
            state.add_malformed(start, state.end, "text after the list of calls")
