"""Reasoning as messages of its own within a turn, between calls and answers: gpt-oss and Muse."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import Reasoning, ReasoningFormat

_MESSAGE = "<|message|>"


class ChannelReasoning(ReasoningFormat):
    """A turn of several messages, each with a header that says for whom it is."""

    is_in_every_answer = True
    _header: ClassVar[re.Pattern[str]]
    """A header with its ``<|message|>``."""
    _end: ClassVar[re.Pattern[str]]
    """The mark that ends a message, or the header of the next one, in group ``next``."""

    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find all messages of reasoning; see ``ReasoningFormat.split``."""
        end = len(text)
        bodies: list[str] = []
        spans: list[tuple[int, int]] = []
        is_closed = True
        start = body = 0
        is_reasoning = bool(is_open)
        while True:
            if is_reasoning:
                found = self._end.search(text, body, end)
                is_closed = found is not None
                stop = end if found is None else found.start() if found["next"] is not None else found.end()
                bodies.append(text[body : found.start() if found else end].strip())
                spans.append((start, stop))
                body = stop
            header = self._header.search(text, body, end)
            if header is None:
                break
            start, body = header.span()
            is_reasoning = self._is_reasoning(header)
        return Reasoning("\n".join(filter(None, bodies)), is_closed, tuple(spans)) if spans else None

    @abstractmethod
    def _is_reasoning(self, header: re.Match[str]) -> bool:
        """Return True if a header opens reasoning."""

    def is_opened_by(self, prompt: str) -> bool:
        """Return True if the prompt ends with the header of reasoning."""
        prompt = prompt.rstrip()
        if not prompt.endswith(_MESSAGE):
            return False
        headers = list(self._header.finditer(prompt[-200:]))
        return bool(headers) and self._is_reasoning(headers[-1])


class GptOss(ChannelReasoning):
    """Messages in the channel ``analysis`` that call no function.

    https://github.com/openai/harmony.
    """

    name = "gpt_oss"
    template_signatures = (TemplateSignature(("<|channel|>", "analysis")),)
    vllm_parser = "openai_gptoss"
    sglang_parser = "gpt-oss"
    marks = ("analysis",)
    _header = re.compile(
        r"(?:^[^<]*|<\|start\|>[^<]*)?<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>"
    )
    _end = re.compile(r"<\|(?:end|return|call)\|>|(?P<next><\|start\|>|<\|channel\|>)")

    def describe_response(self) -> dict[str, Any] | None:
        """Return the field of messages in the channel."""
        return {
            "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
            "close_pattern": r"<\|(?:end|return)\|>",
            "content": "text",
        }

    def _is_reasoning(self, header: re.Match[str]) -> bool:
        words = header["channel"].split()
        return words[:1] == ["analysis"] and "to=functions." not in header[0]


class Muse(ChannelReasoning):
    """Messages to ``self``; the chat template of Muse Glimmer."""

    name = "muse"
    template_signatures = (TemplateSignature(("to=self", _MESSAGE)),)
    vllm_parser = "muse_glimmer"
    sglang_parser = "muse"
    marks = ("to=self<|message|>",)
    _header = re.compile(r"(?:<\|start\|>\s*assistant\s*)?to=(?P<recipient>[^\s<]{1,256})<\|message\|>")
    _end = re.compile(r"<\|eo[mt]\|>|(?P<next>(?:<\|start\|>\s*assistant\s*)?to=[^\s<]{1,256}<\|message\|>)")

    def _is_reasoning(self, header: re.Match[str]) -> bool:
        return header["recipient"] == "self"
