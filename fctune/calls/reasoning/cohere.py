"""Command A Reasoning and later: reasoning between two control tokens."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import TaggedReasoning


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
