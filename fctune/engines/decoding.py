"""From generated token ids to an answer: its text, without the stop token, and the reasoning in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fctune.calls.reasoning.base import Reasoning
from fctune.calls.reasoning.registry import detect_reasoning, find_reasoning
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Answer

# Tokens at the end of a prompt that may open the reasoning.
_NUM_ENDING = 32


class AnswerDecoder:
    """Decodes the answers of one chat template."""

    def __init__(self, template: ChatTemplate):
        self.template = template
        self.reasoning_format = detect_reasoning(template.source)

    def decode(self, answer: Answer, has_tokens: bool = True) -> Answer:
        """Return an answer with the text, the reasoning and the number of its tokens, which it keeps if ``has_tokens``.

        Unless the answer was cut, its last token is its stop token.
        """
        assert answer.tokens is not None
        ids = answer.tokens.ids
        text = self.template.decode(ids if answer.is_cut else ids[:-1])
        return replace(
            answer,
            text=text,
            reasoning=self.find_reasoning(answer.tokens.prompt_ids, text),
            num_tokens=len(ids),
            tokens=answer.tokens if has_tokens else None,
        )

    def find_reasoning(self, prompt: Sequence[int], text: str) -> Reasoning | None:
        """Return the reasoning in a text, with its number of tokens; the prompt may have opened it."""
        if self.reasoning_format is None:
            reasoning = find_reasoning(text)
        else:
            is_open = self.reasoning_format.is_opened_by(self.template.decode(prompt[-_NUM_ENDING:]))
            reasoning = self.reasoning_format.split(text, is_open)
        if reasoning is None:
            return None
        return reasoning._replace(num_tokens=self.template.count_tokens(reasoning.text))


def find_stop_ids(eos: int | list[int] | None, template: ChatTemplate) -> frozenset[int]:
    """Return the model's own end tokens, and those with which the template closes an assistant's turn."""
    return frozenset([eos] if isinstance(eos, int) else eos or ()) | template.stop_ids
