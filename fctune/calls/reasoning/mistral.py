"""Magistral, Ministral 3 and Mistral Small 4: reasoning between two control tokens."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import TaggedReasoning


class Mistral(TaggedReasoning):
    """``[THINK]...[/THINK]``; the tokenizers of https://github.com/mistralai/mistral-common from version 13."""

    name = "mistral"
    template_signatures = (TemplateSignature(("[THINK]",)),)
    vllm_parser = "mistral"
    sglang_parser = "mistral"
    opening = "[THINK]"
    _close = "[/THINK]"
    first_call = "[TOOL_CALLS]"
