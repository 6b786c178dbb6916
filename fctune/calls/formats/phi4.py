"""Phi-4-mini: calls as a JSON list, between marks of its own or after a word that its prompt asks for."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat


class Phi4Mini(MarkedListFormat):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>``.

    The model card of Phi-4-mini-instruct, whose own template writes tools but no calls. No server reads it.
    """

    name = "phi4_mini"
    aliases = ("phi4", "phi-4-mini")
    template_signatures = (
        TemplateSignature(("<|/tool_call|>",)),
        TemplateSignature(("<|tool|>", "<|/tool|>"), priority=-1),
    )
    _mark, _closing = "<|tool_call|>", "<|/tool_call|>"


class Functools(MarkedListFormat):
    """``functools[{"name": ..., "arguments": {...}}, ...]``.

    The prompt of vLLM's template for Phi-4-mini, and FireFunction v2.
    """

    name = "functools"
    aliases = ("firefunction",)
    template_signatures = (TemplateSignature(("functools[",), priority=1),)
    vllm_parser = "phi4_mini_json"
    _mark = "functools["
