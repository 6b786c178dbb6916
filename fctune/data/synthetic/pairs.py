"""Preference pairs of the synthetic training split: the right answer against a near miss."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fctune.data.conversation import Call, Conversation, Message

_REFUSAL = Message("assistant", "I cannot help with that.")


def make_pairs(conversations: Iterable[Conversation], seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row with ``prompt``, ``chosen``, ``rejected`` and ``tools`` for each conversation.

    The last answer is the chosen one. The rejected one calls another tool, leaves out or changes an argument, answers
    in words where a call is due, or calls where none is.
    """
    rng = random.Random(seed)
    for conversation in conversations:
        *prompt, chosen = conversation.messages
        rejected = _corrupt(chosen, conversation, rng)
        yield {
            "prompt": [message.to_openai() for message in prompt],
            "chosen": [chosen.to_openai()],
            "rejected": [rejected.to_openai()],
            "tools": [tool.to_openai() for tool in conversation.tools],
        }


def _corrupt(answer: Message, conversation: Conversation, rng: random.Random) -> Message:
    names = [tool.name for tool in conversation.tools]
    if not answer.calls:
        return replace(_REFUSAL, content=None, calls=(Call(rng.choice(names), {}),)) if names else _REFUSAL
    index = rng.randrange(len(answer.calls))
    call = answer.calls[index]
    others = [name for name in names if name != call.name]
    choices = [_REFUSAL]
    if others:
        choices.append(_replace_call(answer, index, replace(call, name=rng.choice(others))))
    if call.arguments:
        name = rng.choice(list(call.arguments))
        without = {key: value for key, value in call.arguments.items() if key != name}
        value = call.arguments[name]
        changed = value + 1 if type(value) in (int, float) else f"{value} 2"
        choices.append(_replace_call(answer, index, replace(call, arguments=without)))
        choices.append(_replace_call(answer, index, replace(call, arguments=call.arguments | {name: changed})))
    return rng.choice(choices)


def _replace_call(answer: Message, index: int, call: Call) -> Message:
    return replace(answer, calls=(*answer.calls[:index], call, *answer.calls[index + 1 :]))
