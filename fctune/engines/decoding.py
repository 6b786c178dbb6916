"""From generated token ids to an answer: its text, without the stop token, and the reasoning in it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from fctune.calls.reasoning.base import Reasoning
from fctune.calls.reasoning.registry import detect_reasoning, find_reasoning
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Answer, AnswerTokens

# Tokens at the end of a prompt that may open the reasoning.
_NUM_ENDING = 32


class AnswerDecoder:
    """Decodes the answers of one chat template.

    Args:
        template: The template, with its tokenizer.
        stop_ids: Tokens that end an answer.
    """

    def __init__(self, template: ChatTemplate, stop_ids: Set[int]):
        self.template, self.stop_ids = template, stop_ids
        self.reasoning_format = detect_reasoning(template.source)

    def decode(self, index: int, tokens: AnswerTokens, has_tokens: bool = True) -> Answer:
        """Return the answer that these tokens are; it keeps them if ``has_tokens``."""
        ids = tokens.ids
        is_stopped = bool(ids) and ids[-1] in self.stop_ids
        text = self.template.decode(ids[:-1] if is_stopped else ids)
        answer = Answer(index, text, not is_stopped, num_tokens=len(ids), tokens=tokens if has_tokens else None)
        return replace(answer, reasoning=self.find_reasoning(tokens.prompt_ids, text))

    def find_reasoning(self, prompt: Sequence[int], text: str) -> Reasoning | None:
        """Return the reasoning in a text, with its number of tokens; the prompt may have opened it."""
        if self.reasoning_format is None:
            reasoning = find_reasoning(text)
        else:
            is_open = self.reasoning_format.is_opened_by(self.template.decode(prompt[-_NUM_ENDING:]))
            reasoning = self.reasoning_format.split(text, is_open)
        if reasoning is None:
            return None
        num_tokens = len(self.template.tokenizer.encode(reasoning.text, add_special_tokens=False))
        return reasoning._replace(num_tokens=num_tokens)


def find_stop_ids(eos: int | list[int] | None, template: ChatTemplate) -> frozenset[int]:
    """Return the model's own end tokens, and those with which the template closes an assistant's turn."""
    return frozenset([eos] if isinstance(eos, int) else eos or ()) | template.stop_ids
