"""Training conversations of several questions about the same few tools, with their results.

Most of a row's tokens are the schemas of its tools. A question in a dialogue takes half of the tokens of a row of its
own, so a short training sees more questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.real_quantities import describe_quantities, draw_calculation
from benchmarks.real_requests import (
    describe_parallel,
    describe_request,
    join_questions,
    list_called,
    revalue_question,
)
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.augment.wordings import word_refusal
from fctune.data.conversation import Call, Conversation, Message, Tool

_NUM_QUESTIONS = (3, 4, 4, 5)
_NUM_TOPICS = (1, 2, 2)
_NUM_OTHERS = (0, 0, 0, 1, 1, 2)
_NUM_CALLS = (1, 1, 1, 2, 3, 4)
_UNFIT_SHARE = 0.15
_JOINED_SHARE = 0.4  # of the other questions, where they are about two tools
_CALCULATION_SHARE = 0.45


class _Topic(NamedTuple):
    """A tool, and a source of questions that call it."""

    tool: Tool
    ask: Callable[[], Conversation]


def make_dialogue(pool: ToolPool, singles: Sequence[Conversation], rng: random.Random) -> Conversation:
    """Return three to five questions about one or two tools, or both, which are on offer among up to two others.

    Args:
        pool: Tools to ask about and to offer.
        singles: Seal-Tools rows of one call, to ask with other values.
        rng: Random generator.
    """
    topics = _draw_topics(pool, singles, rng)
    tools = [topic.tool for topic in topics]
    about = " ".join(str(tool.function["description"]) for tool in tools)
    tools += pool.draw_others(tools, about, rng.choice(_NUM_OTHERS), rng)
    rng.shuffle(tools)
    messages: list[Message] = []
    for _ in range(rng.choice(_NUM_QUESTIONS)):
        if messages and messages[-1].calls:
            messages += _reply(messages[-1].calls, rng)
        if rng.random() < _UNFIT_SHARE:
            messages += _draw_unfit(tools, pool, rng)
        elif len(topics) > 1 and rng.random() < _JOINED_SHARE:
            rng.shuffle(topics)
            messages += join_questions([topic.ask() for topic in topics], rng).messages
        else:
            messages += rng.choice(topics).ask().messages
    return Conversation(tuple(messages), tuple(tools), "dialogue")


def _draw_topics(pool: ToolPool, singles: Sequence[Conversation], rng: random.Random) -> list[_Topic]:
    num_topics = rng.choice(_NUM_TOPICS)
    topics: list[_Topic] = []
    while len(topics) < num_topics:
        topic = _calculation(rng) if rng.random() < _CALCULATION_SHARE else _tool_of_pool(pool, singles, rng)
        if not any(pool.are_alike(one.tool, topic.tool) for one in topics):
            topics.append(topic)
    return topics


def _calculation(rng: random.Random) -> _Topic:
    calculation = draw_calculation(rng)
    return _Topic(calculation.tool, lambda: describe_quantities(rng, rng.choice(_NUM_CALLS), calculation))


def _tool_of_pool(pool: ToolPool, singles: Sequence[Conversation], rng: random.Random) -> _Topic:
    draw = rng.random()
    if draw < 0.4:
        (tool,) = list_called(rng.choice(singles))
        rows = [row for row in singles if tool in row.tools and row.messages[-1].calls[0].name == tool.name]
        return _Topic(tool, lambda: revalue_question(rng.choice(rows), pool, rng))
    if draw < 0.7:
        (tool,) = describe_request(pool, rng).tools
        return _Topic(tool, lambda: describe_request(pool, rng, [tool]))
    (tool,) = describe_parallel(pool, rng).tools
    kinds = (describe_request, describe_parallel)
    return _Topic(tool, lambda: rng.choice(kinds)(pool, rng, [tool]))


def _draw_unfit(tools: Sequence[Tool], pool: ToolPool, rng: random.Random) -> tuple[Message, Message]:
    """Draw a question that is about none of the tools, and the answer that says so."""
    while True:
        other = describe_quantities(rng) if rng.random() < 0.3 else describe_request(pool, rng)
        if not any(pool.are_alike(other.tools[0], tool) for tool in tools):
            request = Conversation(other.messages[:1], tuple(tools))
            return request.messages[0], Message("assistant", word_refusal(request.tools, other.tools, rng))


def _reply(calls: Sequence[Call], rng: random.Random) -> list[Message]:
    """Return the results of calls, and the sentence that closes the turn."""
    if rng.random() < 0.5:
        values = [round(rng.uniform(0, 10 ** rng.randint(1, 4)), rng.choice((1, 2))) for _ in calls]
        results: list[dict[str, Any]] = [{"result": value} for value in values]
        said = " and ".join(map(str, values))
        closing = f"The result is {said}." if len(calls) == 1 else f"The results are {said}."
    else:
        results = [{"status": "success"} for _ in calls]
        closing = "Done."
    return [*(Message("tool", json.dumps(result)) for result in results), Message("assistant", closing)]
