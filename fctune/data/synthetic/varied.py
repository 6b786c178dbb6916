"""Rows that teach calls with tools that change from row to row, so that tools of held-out cases are unseen."""

from __future__ import annotations

import random
from collections.abc import Iterator

from fctune.data.conversation import Call, Conversation, Message
from fctune.data.synthetic.curriculum import (
    JOINERS,
    draw_clause,
    draw_tools,
    draw_unfit_request,
    frame_clause,
)

_NUM_CALLS = (1, 2, 0)
_WEIGHTS = (0.6, 0.2, 0.2)
_SINGLE = 0.75  # such a small model is slow to learn to choose between tools that it has never seen
_UNFIT = "I have no tool for that."


def iter_varied(num_rows: int, seed: int) -> Iterator[Conversation]:
    """Yield conversations of one request, each with a tool of its own, some with two or three; a fifth need no call."""
    rng = random.Random(f"varied:{seed}")
    for row in range(num_rows):
        tools = draw_tools(rng)
        if rng.random() < _SINGLE:
            tools = tools[:1]
        num_calls = rng.choices(_NUM_CALLS, _WEIGHTS)[0]
        if not num_calls:
            messages = (Message("user", draw_unfit_request(tools, rng)), Message("assistant", _UNFIT))
        else:
            due = [rng.choice(tools) for _ in range(num_calls)]
            clauses, arguments = zip(*[draw_clause(tool, rng) for tool in due], strict=True)
            calls = tuple(Call(tool.tool.name, values) for tool, values in zip(due, arguments, strict=True))
            user = frame_clause(rng.choice(JOINERS).join(clauses), due[-1], rng)
            messages = (Message("user", user), Message("assistant", calls=calls))
        yield Conversation(messages, tuple(tool.tool for tool in tools), f"synthetic:varied:{row}")
