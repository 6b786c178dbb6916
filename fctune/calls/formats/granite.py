"""Granite 3: calls as a JSON list after a mark. Granite 4 writes the Hermes format."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat


class Granite3(MarkedListFormat):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``.

    The chat templates of Granite 3.
    """

    name = "granite3"
    template_signatures = (TemplateSignature(("<|tool_call|>",), priority=-2),)
    vllm_parser = "granite"
    _mark = "<|tool_call|>"
