"""Response templates of each call format, and what they read in seeded outputs."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_parsing import parse_response

from fctune.calls.formats.base import CallFormat
from fctune.calls.formats.registry import FORMATS
from fctune.calls.formats.response_fields import Surroundings

END = "<|im_end|>"
AROUND = Surroundings(r"(?:\A)", r"(?:<\|im_end\|>)")
EXPRESSED = [found for found in FORMATS.values() if found.describe_response(AROUND) is not None]
# Calls of tools on offer with arguments of their schemas, to which readers convert others.
KINDS = (
    *("one call", "parallel calls", "prose before", "no call", "nested values", "unicode", "markup in values"),
    "no arguments",
)


def make_spec(call_format: CallFormat) -> dict[str, Any]:
    content = {"close_pattern": rf"\s*{AROUND.end}", "content": "text"}
    return {
        "start_anchor": "assistant\n",
        "fields": {"content": content, **(call_format.describe_response(AROUND) or {})},
    }


def read_calls(text: str, spec: dict[str, Any], tools: Any) -> list[Any] | str:
    """Return names and arguments of the calls, or the error."""
    try:
        found = parse_response(text, spec, prefix="", tools=[tool.to_openai() for tool in tools])
    except (ValueError, KeyError) as error:
        return str(error)
    return [[item["function"]["name"], item["function"]["arguments"]] for item in found.get("tool_calls", ())]
