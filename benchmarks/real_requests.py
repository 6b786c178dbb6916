"""Training conversations made from real tools: requests from a tool's own description, parallel calls, and no calls.

Seal-Tools has no question that needs one tool twice and none that needs no tool. Both are made from its rows: an
argument that a question names is replaced by several ("Paris" by "Paris and Rome"), and the tools that a question needs
are taken away, both as ``data.augment`` does. Descriptions there give examples of values ("(e.g., daily, weekly)"),
which requests for any tool can be written with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.real_options import UNITS
from fctune.data.augment.added_rows import draw_column, multiply_value
from fctune.data.augment.spoken import count_value, join_words, replace_value, say_name, say_value, split_words
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.augment.wordings import upper_first, word_refusal
from fctune.data.conversation import Call, Conversation, Message, Tool

_LEADS = ("", "", "", "Please ", "Can you ", "Could you ", "I need to ", "I want to ", "I would like to ", "Help me ")
_NUM_CALLS = (2, 2, 2, 3, 3, 4)
_JOINERS = (" Also, ", " Then, ", " After that, ", " Additionally, ", " ")


def rename_tools(conversation: Conversation, share: float, rng: random.Random) -> Conversation:
    """Return a conversation in which a share of the tools is named in snake case or with a dot, calls included."""
    names = {tool.name: tool.name for tool in conversation.tools}
    for name in names:
        if rng.random() < share:
            words = split_words(name)
            new = "_".join(words)
            if len(words) > 2 and rng.random() < 0.4:
                new = f"{'_'.join(words[1:])}.{words[0]}" if rng.random() < 0.5 else f"{words[1]}.{'_'.join(words)}"
            if new and new not in names.values():
                names[name] = new
    tools = tuple(Tool({**tool.function, "name": names[tool.name]}) for tool in conversation.tools)
    messages = tuple(
        replace(message, calls=tuple(replace(call, name=names.get(call.name, call.name)) for call in message.calls))
        for message in conversation.messages
    )
    return replace(conversation, tools=tools, messages=messages)


def list_called(conversation: Conversation) -> list[Tool]:
    """Return the tools on offer that a conversation calls."""
    called = {call.name for message in conversation.messages for call in message.calls}
    return [tool for tool in conversation.tools if tool.name in called]


def offer(conversation: Conversation, pool: ToolPool, num_others: int, rng: random.Random) -> Conversation:
    """Return the conversation with the tools that it calls among ``num_others`` others, in random order."""
    called = list_called(conversation)
    tools = [*called, *pool.draw_others(called, conversation.messages[0].content or "", num_others, rng)]
    rng.shuffle(tools)
    return replace(conversation, tools=tuple(tools))


def take_tools_away(
    conversation: Conversation,
    pool: ToolPool,
    rng: random.Random,
    nums_others: Sequence[int] = (1, 1, 1, 1, 2, 2, 3, 4),
) -> Conversation:
    """Return the question with tools that cannot answer it, and the answer that says what is missing.

    Args:
        conversation: A question and calls.
        pool: Tools to offer.
        rng: Random generator.
        nums_others: Numbers of tools to draw from.
    """
    question = next(message for message in conversation.messages if message.role == "user")
    called = list_called(conversation)
    tools = pool.draw_others(called, question.content or "", rng.choice(nums_others), rng, taken=conversation.tools)
    return _refuse(question, tools, called, f"no_call:{conversation.source}", rng)


def leave_other_tools(conversation: Conversation, pool: ToolPool, rng: random.Random) -> Conversation | None:
    """Return the question with the tools that its row offers and does not call; None if there is none of another kind.

    Args:
        conversation: A question and calls.
        pool: Tools that tell which are alike.
        rng: Random generator of the wording.
    """
    called = list_called(conversation)
    others = [tool for tool in conversation.tools if tool not in called]
    tools = [tool for tool in others if not any(pool.are_alike(tool, needed) for needed in called)]
    if not called or not tools:
        return None
    return _refuse(conversation.messages[0], tools, called, f"near_miss:{conversation.source}", rng)


def _refuse(
    question: Message, tools: Sequence[Tool], missing: Sequence[Tool], source: str, rng: random.Random
) -> Conversation:
    answer = Message("assistant", word_refusal(tools, missing, rng))
    return Conversation((question, answer), tuple(tools), source)


def describe_request(pool: ToolPool, rng: random.Random, tools: Sequence[Tool] = ()) -> Conversation:
    """Make a request for one call from the description of a random tool, and examples of its arguments.

    ``tools`` are those to choose from, at least one of which has the examples; empty: all of the pool's.
    """
    while True:
        tool = rng.choice(tools or pool.tools)
        if (arguments := _draw_arguments(tool, pool, rng)) is not None and tool.function.get("description"):
            return answer_with(tool, [arguments], _word_request(tool, arguments, rng), "described")


def describe_parallel(pool: ToolPool, rng: random.Random, tools: Sequence[Tool] = ()) -> Conversation:
    """Make a request for several calls of one random tool, which differ in one or two arguments.

    ``tools`` are those to choose from, at least one of which has examples enough; empty: all of the pool's.
    """
    while True:
        tool = rng.choice(tools or pool.tools)
        first = _draw_arguments(tool, pool, rng)
        if not first or not tool.function.get("description"):
            continue
        num_calls = rng.choice(_NUM_CALLS)
        varied = [name for name in first if len(pool.values(tool, name)) >= 2]
        rng.shuffle(varied)
        varied = varied[: 1 if rng.random() < 0.6 else 2]
        columns = {name: draw_column(pool.values(tool, name), first[name], num_calls, rng) for name in varied}
        num_calls = min(map(len, columns.values()), default=0)
        if num_calls < 2:
            continue
        calls = [{**first, **{name: column[i] for name, column in columns.items()}} for i in range(num_calls)]
        return answer_with(tool, calls, _word_parallel(tool, calls, varied, rng), "parallel")


def multiply_question(conversation: Conversation, pool: ToolPool, rng: random.Random) -> Conversation | None:
    """Return a one-call question asked for several values of an argument, or None if it names none word for word."""
    call, question = conversation.messages[-1].calls[0], conversation.messages[0].content or ""
    (tool,) = list_called(conversation)
    spoken = [
        name
        for name, value in call.arguments.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool) and count_value(question, value) == 1
    ]
    rng.shuffle(spoken)
    for name in spoken:
        values = draw_column(pool.values(tool, name), call.arguments[name], rng.choice(_NUM_CALLS), rng)
        if len(values) > 1:
            calls = [{**call.arguments, name: value} for value in values]
            return answer_with(tool, calls, multiply_value(question, values, rng), "multiplied")
    return None


def revalue_question(conversation: Conversation, pool: ToolPool, rng: random.Random) -> Conversation:
    """Return a one-call question with some of the values that it names word for word replaced by others."""
    call, question = conversation.messages[-1].calls[0], conversation.messages[0].content or ""
    (tool,) = list_called(conversation)
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():
        if isinstance(value, bool | list | dict) or count_value(question, value) != 1 or rng.random() < 0.3:
            continue
        others = [one for one in pool.values(tool, name) if type(one) is type(value) and one != value]
        if others:
            arguments[name] = rng.choice(others)
            question = replace_value(question, value, [arguments[name]])
    answer = Message("assistant", calls=(Call(call.name, arguments),))
    return replace(conversation, messages=(Message("user", question), answer), source="revalued")


def join_questions(conversations: Sequence[Conversation], rng: random.Random) -> Conversation:
    """Return the questions of several conversations as one, with the calls and tools of all."""
    question = ""
    for conversation in conversations:
        text = (conversation.messages[0].content or "").strip()
        question += text if not question else rng.choice(_JOINERS) + text
    calls = tuple(call for conversation in conversations for call in conversation.messages[-1].calls)
    tools = {tool.name: tool for conversation in conversations for tool in conversation.tools}
    return Conversation(
        (Message("user", question), Message("assistant", calls=_without_ids(calls))), tuple(tools.values()), "joined"
    )


def _without_ids(calls: Sequence[Call]) -> tuple[Call, ...]:
    return tuple(replace(call, id=None) for call in calls)


def answer_with(tool: Tool, calls: list[dict[str, Any]], question: str, kind: str) -> Conversation:
    """Return a question that is answered by calls of one tool, the only one on offer."""
    answer = Message("assistant", calls=tuple(Call(tool.name, arguments) for arguments in calls))
    return Conversation((Message("user", question), answer), (tool,), f"{kind}:{tool.name}")


def _draw_arguments(tool: Tool, pool: ToolPool, rng: random.Random) -> dict[str, Any] | None:
    """Draw arguments of which examples are known; None if a required one has none."""
    arguments: dict[str, Any] = {}
    required = tool.parameters.get("required", ())
    for name in tool.parameters.get("properties", {}):
        values = pool.values(tool, name)
        if name in required or rng.random() < 0.35:
            if values:
                arguments[name] = _vary_number(rng.choice(values), rng)
            elif name in required:
                return None
    return arguments


def _vary_number(value: Any, rng: random.Random) -> Any:
    """Return a number, usually of the same size, so that the model must copy values rather than memorise them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or rng.random() < 0.25:
        return value
    if isinstance(value, float):
        return round(value * rng.uniform(0.3, 3), rng.choice((1, 2)))
    return value if 1900 < value < 2100 else rng.randint(1, max(9, 4 * abs(value)))


def _word_request(tool: Tool, arguments: dict[str, Any], rng: random.Random) -> str:
    lead, ending = _draw_frame(rng)
    return upper_first(f"{lead}{_describe(tool)}{_word_arguments(arguments, rng)}{ending}")


def _word_parallel(tool: Tool, calls: list[dict[str, Any]], varied: list[str], rng: random.Random) -> str:
    lead, ending = _draw_frame(rng)
    style = rng.random()
    if style < 0.5:  # all values in one sentence
        merged = {**calls[0], **{name: join_words([say_value(call[name]) for call in calls]) for name in varied}}
        respectively = rng.choice((", respectively", " respectively", "")) if len(varied) > 1 else ""
        return upper_first(f"{lead}{_describe(tool)}{_word_arguments(merged, rng, varied)}{respectively}{ending}")
    first = _word_request(tool, calls[0], rng)
    rest = [{name: call[name] for name in varied} for call in calls[1:]]
    if style < 0.8:  # the first in full, the others by what differs
        again = rng.choice(("Do the same for", "Also for", "I need the same for", "And for"))
        return f"{first} {again} {join_words([_pairs(one, '{} {}') for one in rest])}."
    return " ".join([first, *(_word_request(tool, call, rng) for call in calls[1:])])


def _word_arguments(arguments: dict[str, Any], rng: random.Random, plural: Sequence[str] = ()) -> str:
    if not arguments:
        return ""
    names = list(arguments)
    rng.shuffle(names)
    said = {(say_name(name) + ("s" if name in plural else "")): arguments[name] for name in names}
    values = [say_value(value) for value in said.values()]
    if len(values) == 1 and rng.random() < 0.5:
        return rng.choice((" for {}", " of {}", ": {}", " with {}", ' for "{}"')).format(values[0])
    if rng.random() < 0.35:
        said = {name: _measure(value, rng) for name, value in said.items()}
    return rng.choice(
        (
            f" for {_pairs(said, '{} {}')}",
            f" with {_pairs(said, '{} {}')}",
            f" with {_pairs(said, '{} of {}')}",
            f". {upper_first(_pairs(said, 'the {} is {}'))}",
            f" ({', '.join(f'{name}: {say_value(value)}' for name, value in said.items())})",
            f" using {_pairs(said, '{1} as {0}')}",
        )
    )


def _pairs(arguments: dict[str, Any], wording: str) -> str:
    return join_words([wording.format(say_name(name), say_value(value)) for name, value in arguments.items()])


def _draw_frame(rng: random.Random) -> tuple[str, str]:
    lead = rng.choice(_LEADS)
    return lead, "?" if lead.startswith("C") else rng.choice((".", ".", "", "!"))


def _describe(tool: Tool) -> str:
    text = str(tool.function["description"]).strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _measure(value: Any, rng: random.Random) -> Any:
    """Return a number with a unit, as people write it; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"${say_value(value)}" if rng.random() < 0.15 else f"{say_value(value)} {rng.choice(UNITS)}"
