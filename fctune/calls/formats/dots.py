"""dots.llm: calls as ``<invoke>`` with untyped values, in a block of its own."""

from __future__ import annotations

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.invoke_calls import Block
from fctune.calls.formats.minimax import MiniMaxM2


class Dots(MiniMaxM2):
    """MiniMax M2's calls in ``<dots_function_call>``.

    vLLM's parser for the models of dots.llm.
    """

    name = "dots"
    aliases = ("dots.llm1",)
    template_signatures = (TemplateSignature(("<dots_function_call>",), priority=2),)
    vllm_parser = "dots"
    sglang_parser = None
    _tags = Block("<dots_function_call>", "</dots_function_call>", "<invoke", "</invoke>", "<parameter", "</parameter>")
