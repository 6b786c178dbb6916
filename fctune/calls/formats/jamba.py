"""Jamba and Hunyuan-A13B: calls as a JSON list between tags."""

from __future__ import annotations

from typing import ClassVar

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.formats.json_calls import MarkedListFormat

_OPEN, _CLOSE = "<tool_calls>", "</tool_calls>"


class Jamba(MarkedListFormat):
    """``<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>``.

    The chat templates of Jamba 1.5 and later.
    """

    name = "jamba"
    aliases = ("jamba1.5",)
    template_signatures: ClassVar[tuple[TemplateSignature, ...]] = (TemplateSignature((_OPEN,), priority=-2),)
    vllm_parser: ClassVar[str | None] = "jamba"
    vllm_tokens: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    _mark, _closing = _OPEN, _CLOSE


class HunyuanA13B(Jamba):
    """The same in templates with Hunyuan's tokens, for which servers have another parser.

    The chat template of Hunyuan-A13B-Instruct.
    """

    name = "hunyuan_a13b"
    aliases = ("hunyuan",)
    template_signatures = (TemplateSignature((_OPEN, "<|extra_0|>"), priority=1),)
    vllm_parser = "hunyuan_a13b"
    vllm_tokens = ()
