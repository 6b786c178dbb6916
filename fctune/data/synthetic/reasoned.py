"""Fine-tuning rows of which half reason before they answer, for models that do so on request."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from fctune.data.conversation import Conversation, Message
from fctune.data.synthetic.cases import iter_train


def iter_reasoned(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield the fine-tuning rows of this seed; in half of them, drawn at random, the assistant reasons in each turn."""
    rng = random.Random(f"reasoned:{seed}")
    for conversation in iter_train(num_rows, seed):
        yield _add_reasoning(conversation) if rng.random() < 0.5 else conversation


def _add_reasoning(conversation: Conversation) -> Conversation:
    messages: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            previous = messages[-1].role
            message = replace(message, reasoning=_describe(message, previous))
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def _describe(message: Message, previous: str) -> str:
    """Return a true statement about the assistant's next step that contains the names of the calls in order."""
    names = [call.name for call in message.calls]
    if len(names) > 1:
        return f"I call {len(names)} tools: {', '.join(names)}."
    if names:
        return f"I call one tool: {names[0]}." if previous == "user" else f"Next I call {names[0]}."
    return "The result answers it." if previous == "tool" else "I call no tool."
