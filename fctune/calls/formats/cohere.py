"""Cohere's Command R7B and Command A: calls as a JSON list between marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.call_objects import to_call
from fctune.calls.formats.json_calls import MarkedListFormat, dump_json
from fctune.calls.formats.response_fields import ResponseFields, Surroundings
from fctune.data.conversation import Call

_NAMES = {"tool_name": "name", "tool_call_id": "id"}


class Cohere(MarkedListFormat):
    """``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>``.

    The chat templates of c4ai-command-r7b-12-2024 and c4ai-command-a-03-2025. They number the calls themselves, so a
    call's own id is neither written nor read.
    """

    name = "cohere"
    aliases = ("command-r7b", "command-a")
    template_signatures = (TemplateSignature(("<|START_ACTION|>", '"tool_name"')),)
    vllm_parser = "cohere_command3"
    sglang_parser = "cohere_command4"
    _mark, _closing = "<|START_ACTION|>", "<|END_ACTION|>"
    _arguments_key = "parameters"
    _response_keys = ("tool_name", "parameters")
    _call_start = re.compile(r"""\{\s*["'](?:tool_call_id|tool_name|name|arguments|parameters)["']\s*:""")

    def describe_response(self, around: Surroundings) -> ResponseFields | None:
        """Return the fields of the list and of the marked answer."""
        answer = {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"}
        return {**(super().describe_response(around) or {}), "content": answer}

    def _render_list(self, calls: Sequence[Call]) -> str:
        objects = (
            dump_json({"tool_call_id": str(number), "tool_name": call.name, "parameters": call.arguments}, call.name)
            for number, call in enumerate(calls)
        )
        return "[\n    " + ",\n    ".join(objects) + "\n]"

    def _to_call(self, value: Any, key: str, lenient: bool) -> Call | str:
        if isinstance(value, dict):
            if not lenient and (unknown := value.keys() & _NAMES.values()):
                return f"unknown key {min(unknown)!r}"
            value = {_NAMES.get(given, given): item for given, item in value.items()}
        call = to_call(value, key, lenient)
        return Call(call.name, call.arguments) if isinstance(call, Call) else call
