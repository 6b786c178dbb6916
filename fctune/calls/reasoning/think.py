"""Reasoning between ``<think>`` and ``</think>``, by most families; their servers' parsers differ in detail."""

from __future__ import annotations

from typing import ClassVar

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import TaggedReasoning

_OPEN, _CLOSE = "<think>", "</think>"


class Think(TaggedReasoning):
    """The tags in a template of no known family."""

    name = "think"
    template_signatures: ClassVar[tuple[TemplateSignature, ...]] = (TemplateSignature((_OPEN,), priority=-1),)
    vllm_parser: ClassVar[str | None] = "deepseek_r1"
    vllm_tokens: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    sglang_parser: ClassVar[str | None] = "deepseek-r1"
    opening = _OPEN
    _close = _CLOSE


class Qwen3(Think):
    """Qwen3, its successors, and others with its switch ``enable_thinking``, which its servers' parsers know."""

    name = "qwen3"
    template_signatures = (
        TemplateSignature((_OPEN, "<|im_start|>", "reasoning_content")),
        TemplateSignature((_OPEN, "enable_thinking")),
    )
    vllm_parser = "qwen3"
    vllm_tokens = ()
    sglang_parser = "qwen3"


class Nemotron3(Think):
    """The tags in templates of Nemotron 3, which leave earlier reasoning out on request."""

    name = "nemotron3"
    template_signatures = (TemplateSignature((_OPEN, "<|im_start|>", "truncate_history_thinking"), priority=1),)
    vllm_parser = "nemotron_v3"
    vllm_tokens = ()
    sglang_parser = "nemotron_3"


class Glm(Think):
    """The tags in templates of GLM 4.5 and later; further blocks may precede the first call."""

    name = "glm45"
    template_signatures = (TemplateSignature((_OPEN, "[gMASK]"), priority=1),)
    vllm_parser = "glm45"
    vllm_tokens = ()
    sglang_parser = "glm45"
    first_call = "<tool_call>"


class DeepSeekR1(Think):
    """DeepSeek R1 and its distillations, which always reason."""

    name = "deepseek_r1"
    template_signatures = (TemplateSignature((_OPEN, "<｜Assistant｜>")),)


class DeepSeekV31(Think):
    """DeepSeek V3.1, which reasons if its template is given ``thinking``."""

    name = "deepseek_v31"
    template_signatures = (
        TemplateSignature((_OPEN, "<｜Assistant｜>", "thinking is defined"), priority=1),
        TemplateSignature((_OPEN, "<｜Assistant｜>", "not thinking"), priority=1),
    )
    vllm_parser = "deepseek_v3"
    sglang_parser = "deepseek-v3"


class KimiK2(Think):
    """The tags in templates of Kimi K2 Thinking."""

    name = "kimi_k2"
    template_signatures = (TemplateSignature((_OPEN, "<|im_assistant|>"), priority=1),)
    vllm_parser = "kimi_k2"
    vllm_tokens = ()
    sglang_parser = "kimi_k2"


class MiniMaxM2(Think):
    """MiniMax M2, whose template opens the reasoning."""

    name = "minimax_m2"
    template_signatures = (TemplateSignature((_OPEN, "]~b]"), priority=1),)
    vllm_parser = "minimax_m2"
    vllm_tokens = ()
    sglang_parser = "minimax"


class Granite42(Think):
    """The tags in templates of Granite 4.2."""

    name = "granite42"
    template_signatures = (TemplateSignature((_OPEN, "<|start_of_role|>", "enable_thinking"), priority=1),)
    vllm_parser = "granite_thinking_parser"
    vllm_tokens = ()
    sglang_parser = "granite_thinking_parser"


class Olmo3(Think):
    """Olmo 3 Think, in whose vocabulary the tags are plain text."""

    name = "olmo3"
    template_signatures = (TemplateSignature((_OPEN, "<|im_start|>", "<functions>"), priority=1),)
    vllm_parser = "olmo3"
    vllm_tokens = ()


class SeedOss(TaggedReasoning):
    """Seed-OSS, with tags of its own."""

    name = "seed_oss"
    template_signatures = (TemplateSignature(("<seed:think>",), priority=1),)
    vllm_parser = "seed_oss"
    opening = "<seed:think>"
    _close = "</seed:think>"
