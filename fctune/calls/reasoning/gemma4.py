"""Gemma 4: reasoning in a channel named thought."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import Reasoning, TaggedReasoning


class Gemma4(TaggedReasoning):
    """``<|channel>thought``, a line break, the reasoning and ``<channel|>``; the chat template of Gemma 4."""

    name = "gemma4"
    template_signatures = (
        TemplateSignature(("<|channel>",)),
        TemplateSignature(("<|think|>", "<|turn>")),
    )
    vllm_parser = "gemma4"
    sglang_parser = "gemma4"
    opening = "<|channel>"
    _close = "<channel|>"
    _label = "thought\n"
    first_call = "<|tool_call>"

    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find the reasoning; without an opening mark, its label or the closing mark identifies it."""
        before_calls = text.partition(self.first_call)[0]
        has_mark = self._close in before_calls or text.startswith(self._label)
        return super().split(text, is_open or (has_mark and self.opening not in before_calls))
