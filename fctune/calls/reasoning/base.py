"""The interface of reasoning formats, and the reasoning found in one answer."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

from fctune.calls.formats.base import TemplateFormat, find_content_end


class Reasoning(NamedTuple):
    """The reasoning in one answer.

    Attributes:
        text: The reasoning without its marks, stripped; empty for an empty block.
        is_closed: False if generation ended inside the reasoning, so that there is no answer.
        spans: Positions ``(start, end)`` of the reasoning in the model's text, marks included; empty if a server sent
            the reasoning apart from the text.
        num_tokens: Number of tokens of the text, in the model's tokenizer; None if unknown.
    """

    text: str
    is_closed: bool = True
    spans: tuple[tuple[int, int], ...] = ()
    num_tokens: int | None = None

    def blank(self, text: str) -> str:
        """Replace the reasoning in the model's text by spaces, so that the positions of the answer stay the same."""
        parts = []
        position = 0
        for start, end in self.spans:
            parts += [text[position:start], " " * (end - start)]
            position = end
        return "".join([*parts, text[position:]])


class ReasoningFormat(TemplateFormat):
    """The marks around the reasoning of a family of models; servers' parsers are those of ``--reasoning-parser``.

    Attributes:
        opening: The mark that opens the reasoning; empty if there are several.
        first_call: A mark of calls up to which further blocks are reasoning too; empty: there is only one block.
        is_in_every_answer: Its servers' parsers also read answers without reasoning, and remove marks from them.
    """

    is_in_every_answer: ClassVar[bool] = False
    opening: ClassVar[str] = ""
    first_call: ClassVar[str] = ""

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Marks of which any text contains one in which ``split`` finds reasoning that the prompt has not opened."""

    @abstractmethod
    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find the reasoning in a model's text; None if there is none. Takes linear time and never raises.

        Args:
            text: One assistant turn, with or without the mark that ends it.
            is_open: The prompt ended inside the reasoning, so that the text starts there; None if that is unknown.
        """

    @abstractmethod
    def is_opened_by(self, prompt: str) -> bool:
        """Return True if the end of a prompt opens the reasoning that the model is to continue."""

    def describe_response(self) -> dict[str, Any] | None:
        """Return the field of transformers' ``response_template`` that reads the reasoning; None: it cannot."""
        return None

    @property
    def end_pattern(self) -> str:
        """Pattern of the mark after which the answer begins; empty if there are several."""
        return ""


class TaggedReasoning(ReasoningFormat):
    """Reasoning between two tags.

    A block at the start of the turn, or the one that the prompt has opened, is reasoning. Tags later in the turn belong
    to the answer, as a call may quote them, unless the family's servers read further blocks.
    """

    _close: ClassVar[str]
    _label: ClassVar[str] = ""
    """Text after the opening tag that is not part of the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Both tags, and the label, which shows where the opening tag was lost."""
        return tuple(filter(None, (self.opening, self._close, self._label)))

    def split(self, text: str, is_open: bool | None = None) -> Reasoning | None:
        """Find the reasoning in the text; see ``ReasoningFormat.split``.

        Without knowledge of the prompt, a closing tag without an opening one counts if it starts a line.
        """
        end = find_content_end(text)
        start = _skip_space(text, 0, end)
        if is_open is None and not text.startswith(self.opening, start):
            is_open = text.find(f"\n{self._close}", 0, end) >= 0
        opened = 0 if is_open or text.startswith((self.opening, self._close), start) else -1
        bodies: list[str] = []
        spans: list[tuple[int, int]] = []
        position, limit, is_closed = start, -1, True
        while True:
            if opened < 0 and self.first_call:
                if limit < position:
                    limit = text.find(self.first_call, position, end)
                    limit = end if limit < 0 else limit
                opened = text.find(self.opening, position, limit)
            if opened < 0:
                break
            body, closed = self._find_body(text, opened, end)
            is_closed = closed >= 0
            bodies.append(text[body : closed if is_closed else end].replace(self.opening, "").strip())
            position = self._skip_closings(text, closed, end) if is_closed else end
            spans.append((opened, position))
            opened = -1
        return Reasoning("\n\n".join(filter(None, bodies)), is_closed, tuple(spans)) if spans else None

    def describe_response(self) -> dict[str, Any] | None:
        """Return the field between the tags, which servers can stream as they are no patterns."""
        return {"open": f"{self.opening}{self._label}", "close": self._close, "content": "text"}

    @property
    def end_pattern(self) -> str:
        """Pattern of the closing tag."""
        return re.escape(self._close)

    def _find_body(self, text: str, opened: int, end: int) -> tuple[int, int]:
        """Return where the block's reasoning starts, and the position of its closing tag or -1."""
        body = _skip_space(text, opened, end)
        body = body + len(self.opening) if text.startswith(self.opening, body) else opened
        if self._label and text.startswith(self._label, body):
            body += len(self._label)
        return body, text.find(self._close, body, end)

    def _skip_closings(self, text: str, closed: int, end: int) -> int:
        """Return the position after a closing tag, and after more of them that a model may add."""
        while text.startswith(self._close, closed):
            closed = _skip_space(text, closed + len(self._close), end)
        return closed

    def is_opened_by(self, prompt: str) -> bool:
        """Return True if the prompt ends with the opening tag."""
        prompt = prompt.rstrip()
        label = self._label.rstrip()
        return prompt.endswith(self.opening) or bool(label and prompt.removesuffix(label).endswith(self.opening))


def _skip_space(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start
