"""Rows made from a row with calls: without the tool, without a required value, or with several calls."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fctune.data.augment.spoken import (
    count_value,
    join_words,
    list_properties,
    list_required,
    replace_value,
    say_value,
    take_out_item,
    take_out_value,
)
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.augment.wordings import word_question, word_refusal, word_reply
from fctune.data.conversation import Call, Conversation, Message, Tool

NO_CALLS = "no request that a call of a tool on offer answers"
_ANSWERED = "an answer before the call, which may promise it or ask for its values"
_UNSUPERVISED = "calls that are not supervised"
_SEVERAL = "several calls in the turn"
_NUM_CALLS = (2, 2, 2, 3, 3, 4)
_JOINERS = (" Also, ", " Then, ", " After that, ", " Additionally, ", " ", "\n", " And one more thing: ")
_AGAIN = (" Do the same for {}.", " Also for {}.", " And then for {}.", " I also need {}.")
_RESTORED_SHARE = 0.5  # of the rows that ask, in which the user gives the value and the call follows


@dataclass(frozen=True, slots=True)
class Turn:
    """The first turn of a conversation that calls.

    Attributes:
        index: Index of its message.
        needed: The tools that it calls, in the order in which they are offered.
    """

    index: int
    needed: tuple[Tool, ...]

    def call_of(self, conversation: Conversation) -> Call | None:
        """Return the only call of the turn, or None if there are several."""
        calls = conversation.messages[self.index].calls
        return calls[0] if len(calls) == 1 else None


def find_turn(conversation: Conversation) -> Turn | None:
    """Return the first turn that calls, if the user spoke just before it and all its tools are on offer; or None."""
    index = next((i for i, message in enumerate(conversation.messages) if message.calls), None)
    if index is None or index == 0 or conversation.messages[index - 1].role != "user":
        return None
    called = {call.name for call in conversation.messages[index].calls}
    needed = tuple(tool for tool in conversation.tools if tool.name in called)
    return Turn(index, needed) if len({tool.name for tool in needed}) == len(called) else None


def has_no_call_turn(conversation: Conversation) -> bool:
    """Return True if a supervised turn answers the user without a call; the row may say there what it cannot do."""
    return any(
        before.role == "user" and answer.role == "assistant" and answer.weight > 0 and not answer.calls
        for before, answer in pairwise(conversation.messages)
    )


def find_missing_tools(conversation: Conversation, turn: Turn, pool: ToolPool) -> tuple[Tool, ...] | str:
    """Return the tools to take away: those that the turn needs, and others that may do the same; or why not."""
    messages = conversation.messages
    if not messages[turn.index].weight:
        return _UNSUPERVISED
    if any(message.role == "assistant" for message in messages[: turn.index]):
        return _ANSWERED
    earlier = "\n".join(message.content or "" for message in messages[: turn.index])
    if any(tool.name in earlier for tool in turn.needed):
        return "the tool is named in the request or the system prompt"
    return tuple(tool for tool in conversation.tools if any(tool is n or pool.are_alike(tool, n) for n in turn.needed))


def take_away(conversation: Conversation, turn: Turn, missing: Sequence[Tool], rng: random.Random) -> Conversation:
    """Return the request with the answer that something is missing.

    Args:
        conversation: The row, whose tools are those that remain on offer.
        turn: Its turn with calls.
        missing: The tools that the turn needs.
        rng: Random generator.
    """
    before = replace(conversation, messages=conversation.messages[: turn.index])
    refusal = word_refusal(before.tools, missing, rng)
    answer = Message("assistant", refusal, weight=conversation.messages[turn.index].weight)
    return replace(before, messages=(*before.messages, answer))


def find_askable(conversation: Conversation, turn: Turn) -> list[tuple[str, str]] | str:
    """Return the required arguments that can be taken out of the request, each with what remains; or why not."""
    call = turn.call_of(conversation)
    if call is None:
        return _SEVERAL
    messages = conversation.messages
    if not messages[turn.index].weight:
        return _UNSUPERVISED
    if any(message.role == "assistant" for message in messages[: turn.index]):
        return _ANSWERED
    request, earlier = messages[turn.index - 1].content or "", messages[: turn.index - 1]
    properties = list_properties(turn.needed[0])
    found = []
    for name in list_required(turn.needed[0]):
        value, schema = call.arguments.get(name), properties.get(name, {})
        choices = schema.get("enum")
        if not _is_scalar(value) or "default" in schema or "const" in schema:
            continue
        if isinstance(choices, list) and len(choices) < 2:
            continue
        if any(other != name and _says_same(value, one) for other, one in call.arguments.items()):
            continue
        if any(str(value).lower() in (message.content or "").lower() for message in earlier):
            continue
        said = say_value(value)
        remaining = take_out_item(request, name, said) or take_out_value(request, said)
        if remaining is not None:
            found.append((name, remaining))
    return found or "no required value that can be left out of the request"


def ask(conversation: Conversation, turn: Turn, parameter: str, remaining: str, rng: random.Random) -> Conversation:
    """Return the request without a value, with the question for it; in half of the cases the user then gives it."""
    messages = conversation.messages
    answer = messages[turn.index]
    request = replace(messages[turn.index - 1], content=remaining)
    before = replace(conversation, messages=(*messages[: turn.index - 1], request))
    question = word_question(turn.needed[0], parameter, rng)
    asked = (*before.messages, Message("assistant", question, weight=answer.weight))
    if rng.random() < _RESTORED_SHARE:
        value = answer.calls[0].arguments[parameter]
        asked = (*asked, Message("user", word_reply(parameter, value, rng)), answer)
    return replace(conversation, messages=asked)


@dataclass(frozen=True, slots=True)
class Repetition:
    """How a request for one call can be made one for several.

    Attributes:
        others: Other requests for the tool, of rows with the same system prompts.
        values: Other values of the only argument that the request says and that can vary on its own, by its name.
    """

    others: tuple[tuple[str, dict[str, Any]], ...]
    values: dict[str, list[Any]]


def find_repetition(conversation: Conversation, turn: Turn, pool: ToolPool) -> Repetition | str:
    """Return how a row's request can be repeated, or why not."""
    call = turn.call_of(conversation)
    if call is None:
        return _SEVERAL
    message = conversation.messages[turn.index]
    if not message.weight:
        return _UNSUPERVISED
    if message.reasoning or message.content:
        return "a call with an explanation, which several calls would contradict"
    request = conversation.messages[turn.index - 1].content or ""
    requests = pool.requests(turn.needed[0], conversation)
    others = tuple(one for one in requests if one.text and one.arguments != call.arguments)
    values = {}
    # Arguments belong together, as a city and its country do; one on its own is free to vary.
    if len(call.arguments) == 1:
        ((name, value),) = call.arguments.items()
        if _is_scalar(value) and count_value(request, value) == 1:
            known = pool.values(turn.needed[0], name)
            values = {name: [one for one in known if type(one) is type(value) and not _says_same(one, value)]}
    values = {name: others for name, others in values.items() if others}
    return Repetition(others, values) if others or values else "no other values or requests known for the tool"


def repeat(conversation: Conversation, turn: Turn, repetition: Repetition, rng: random.Random) -> Conversation:
    """Return a request for several calls of one tool, with the calls."""
    messages = conversation.messages
    call = messages[turn.index].calls[0]
    text = messages[turn.index - 1].content or ""
    if repetition.values and (not repetition.others or rng.random() < 0.6):
        ((name, known),) = repetition.values.items()
        values = draw_column(known, call.arguments[name], rng.choice(_NUM_CALLS), rng)
        text, arguments = multiply_value(text, values, rng), [{**call.arguments, name: value} for value in values]
    else:
        drawn = rng.sample(repetition.others, min(len(repetition.others), rng.choice(_NUM_CALLS) - 1))
        text += "".join(rng.choice(_JOINERS) + other for other, _ in drawn)
        arguments = [call.arguments, *(values for _, values in drawn)]
    is_counted = call.id is not None
    calls = tuple(Call(call.name, one, f"call_{n}" if is_counted else None) for n, one in enumerate(arguments, 1))
    request = replace(messages[turn.index - 1], content=text)
    answer = replace(messages[turn.index], calls=calls)
    return replace(conversation, messages=(*messages[: turn.index - 1], request, answer))


def multiply_value(text: str, values: Sequence[Any], rng: random.Random) -> str:
    """Return a request for the first value asked for all of them, in one sentence or in a second one."""
    if rng.random() < 0.6:
        return replace_value(text, values[0], values)
    return text + rng.choice(_AGAIN).format(join_words([say_value(value) for value in values[1:]]))


def draw_column(values: Sequence[Any], first: Any, count: int, rng: random.Random) -> list[Any]:
    """Draw ``count`` different values, or fewer if there are fewer, the given one first."""
    others = [value for value in values if str(value) not in str(first) and str(first) not in str(value)]
    return [first, *rng.sample(others, min(count - 1, len(others)))]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip() != ""


def _says_same(one: Any, other: Any) -> bool:
    """Return True if one of two values contains the other, so that a text with one says both."""
    if not isinstance(other, str | int | float):
        return str(one).lower() in str(other).lower()
    small, large = sorted((str(one).lower(), str(other).lower()), key=len)
    return small in large
