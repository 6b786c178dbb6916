"""Reasoning between marks that only one family writes: Cohere, Gemma 4, Granite 3.2 and Mistral."""

from __future__ import annotations

import re

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import Reasoning, ReasoningFormat, TaggedReasoning

_GRANITE_OPEN_END = "my thought process:"
_GRANITE_OPEN = re.compile(rf"Here(?:'s| is) {_GRANITE_OPEN_END}")
_GRANITE_CLOSE = re.compile(r"Here(?:'s| is) my response:")


class Cohere(TaggedReasoning):
    """The reasoning of Command A and R7B: ``<|START_THINKING|>...<|END_THINKING|>``."""

    name = "cohere"
    template_signatures = (TemplateSignature(("<|START_THINKING|>",)),)
    vllm_parser = "cohere_command3"
    opening = "<|START_THINKING|>"
    _close = "<|END_THINKING|>"


class CohereWithText(Cohere):
    """The same in templates that mark text by ``<|START_TEXT|>``, as from Command A+ on."""

    name = "cohere_text"
    template_signatures = (TemplateSignature(("<|START_THINKING|>", "<|START_TEXT|>"), priority=1),)
    vllm_parser = "cohere_command4"
    sglang_parser = "cohere_command4"


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


class Granite32(ReasoningFormat):
    """``Here is my thought process:``, the reasoning, ``Here is my response:``; the chat template of Granite 3.2."""

    name = "granite32"
    template_signatures = (TemplateSignature(("Here is my thought process:",), priority=1),)
    vllm_parser = "granite"

    @property
    def marks(self) -> tuple[str, ...]:
        """The end of the announcement."""
        return (_GRANITE_OPEN_END,)

    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find the reasoning; prose that is never followed by a response is an answer."""
        opened = _GRANITE_OPEN.search(text)
        closed = _GRANITE_CLOSE.search(text, opened.end()) if opened else None
        if opened is None or closed is None:
            return None
        return Reasoning(text[opened.end() : closed.start()].strip(), spans=((0, closed.end()),))

    def is_opened_by(self, prompt: str) -> bool:
        """Return False: its prompts do not open the reasoning."""
        return False


class Mistral(TaggedReasoning):
    """``[THINK]...[/THINK]``; the tokenizers of https://github.com/mistralai/mistral-common from version 13."""

    name = "mistral"
    template_signatures = (TemplateSignature(("[THINK]",)),)
    vllm_parser = "mistral"
    sglang_parser = "mistral"
    opening = "[THINK]"
    _close = "[/THINK]"
    first_call = "[TOOL_CALLS]"
