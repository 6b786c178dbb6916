"""Apertus: calls as a JSON list of objects with the name as their only key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.calls.formats.base import ParseState, TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat, dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings
from fctune.data.conversation import Call, Tool


class Apertus(MarkedListFormat):
    """``<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>``.

    The chat templates of Apertus.
    """

    name = "apertus"
    template_signatures = (TemplateSignature(("<|tools_prefix|>",), priority=1),)
    response_note = "all calls: the schema takes no name from a key"
    vllm_parser = "apertus"
    _mark, _closing = "<|tools_prefix|>", "<|tools_suffix|>"
    _call_start = re.compile(r"""\{\s*+["'][^"']++["']\s*+:\s*+\{""")

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return None: the schema takes no name from a key."""
        return None

    def _read(self, state: ParseState, tools: Sequence[Tool], lenient: bool) -> None:
        probe = ParseState(state.text, state.end)
        super()._read(probe, tools, lenient=False)
        # An object that only looks like a call may be an argument of one.
        super()._read(state, tools, lenient and (not probe.calls or bool(probe.malformed)))

    def _render_list(self, calls: Sequence[Call]) -> str:
        return dump_json([{call.name: call.arguments} for call in calls], calls[0].name)

    def _to_call(self, value: Any, key: str, lenient: bool) -> Call | str:
        if not isinstance(value, dict) or len(value) != 1:
            return "expected an object with the name as its only key"
        ((name, arguments),) = value.items()
        if not name:
            return "missing name"
        if not isinstance(arguments, dict):
            return f"{name[:40]}: expected an object, got {type(arguments).__name__}"
        return Call(name, arguments)
