"""Granite 3.2: reasoning announced in prose."""

from __future__ import annotations

import re

from fctune.calls.formats.base import TemplateSignature
from fctune.calls.reasoning.base import Reasoning, ReasoningFormat

_OPEN_END = "my thought process:"
_OPEN = re.compile(rf"Here(?:'s| is) {_OPEN_END}")
_CLOSE = re.compile(r"Here(?:'s| is) my response:")


class Granite32(ReasoningFormat):
    """``Here is my thought process:``, the reasoning, ``Here is my response:``; the chat template of Granite 3.2."""

    name = "granite32"
    template_signatures = (TemplateSignature(("Here is my thought process:",), priority=1),)
    vllm_parser = "granite"

    @property
    def marks(self) -> tuple[str, ...]:
        """The end of the announcement."""
        return (_OPEN_END,)

    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find the reasoning; prose that is never followed by a response is an answer."""
        opened = _OPEN.search(text)
        closed = _CLOSE.search(text, opened.end()) if opened else None
        if opened is None or closed is None:
            return None
        return Reasoning(text[opened.end() : closed.start()].strip(), spans=((0, closed.end()),))

    def is_opened_by(self, prompt: str) -> bool:
        """Return False: its prompts do not open the reasoning."""
        return False
