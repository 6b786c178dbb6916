"""Multiple choice by log-likelihood: which tokens of each choice count, and the answer that their scores make.

A choice is scored as the model's chat template writes it, a call in the model's own format. Its tokens are those
between the beginning and the end that all choices of a prompt share: the prompt, with the marks that open an answer,
and the marks that end one. The best choice has the highest log-likelihood per character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fctune.base.errors import DataError
from fctune.data.conversation import Conversation, Message
from fctune.engines.engine import Answer, ChoiceScore


def with_choice(conversation: Conversation, choice: Message) -> Conversation:
    """Return the conversation with one choice as the model's answer."""
    return replace(conversation, messages=(*conversation.messages, choice))


def find_span(sequences: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the number of token ids that all sequences share at the start, and at the end.

    Raises:
        DataError: The sequences share no start, or one of them has no ids of its own.
    """
    start = _count_shared(sequences)
    shortest = min(map(len, sequences)) - start
    num_after = min(_count_shared([ids[::-1] for ids in sequences]), shortest)
    if start == 0:
        raise DataError("the chat template renders choices without a common prompt")
    if num_after == shortest:
        raise DataError("a choice has no tokens of its own: the chat template does not print it, or it repeats another")
    return start, num_after


def to_answer(index: int, choices: Sequence[Message], scores: Sequence[ChoiceScore]) -> Answer:
    """Return the answer that consists of the best choice, the first of equal ones."""
    best = choices[max(range(len(scores)), key=lambda position: scores[position].per_character)]
    calls = tuple(call.to_openai() for call in best.calls)
    return Answer(index, best.content or "", tool_calls=calls, choices=tuple(scores))


def _count_shared(sequences: Sequence[Sequence[int]]) -> int:
    count = 0
    for ids in zip(*sequences, strict=False):
        if len(set(ids)) > 1:
            break
        count += 1
    return count
