"""Training rows of each kind of the real-model benchmark's mixture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.real_dialogues import make_dialogue
from benchmarks.real_options import add_options, make_list
from benchmarks.real_quantities import describe_quantities, describe_unfit_quantities
from benchmarks.real_requests import (
    answer_with,
    describe_parallel,
    describe_request,
    join_questions,
    multiply_question,
    offer,
    revalue_question,
    take_tools_away,
)
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.conversation import Conversation, Tool

_NUM_OTHERS = (0, 0, 0, 0, 1, 1, 2, 3)
_NUM_TOOLS_OF_TWINS = (1, 2, 3, 4, 6, 8)
_CALCULATION_SHARE = 0.25  # of the questions that no tool can answer


class RowMaker:
    """Makes rows of each kind of a mixture, all with one random generator.

    Args:
        seal: Seal-Tools rows, all of whose tools are in the pool.
        glaive: Glaive rows.
        public: Questions for other people's tools, whose tools are in the pool, too.
        num_copies: Number of times that each Seal-Tools row is used as it is.
        pool: Tools to offer.
        rng: Random generator.
    """

    def __init__(
        self,
        seal: Sequence[Conversation],
        glaive: Sequence[Conversation],
        public: Sequence[Conversation],
        num_copies: int,
        pool: ToolPool,
        rng: random.Random,
    ):
        self.seals = [row for _ in range(num_copies) for row in seal]
        self._seal, self._pool, self._rng = seal, pool, rng
        self._single = [row for row in seal if len(row.messages[-1].calls) == 1]
        self._single_public = [row for row in public if len(row.messages[-1].calls) == 1]
        self._asked = [row for row in glaive if any(message.role == "user" for message in row.messages)]

    def make_seal(self) -> Conversation:
        """Return the next Seal-Tools row, with tools of others on offer."""
        return self._offer(self.seals.pop())

    def make_no_call(self) -> Conversation:
        """Return a question for which no tool on offer is right."""
        if self._rng.random() < _CALCULATION_SHARE:
            return describe_unfit_quantities(self._rng)
        draw = self._rng.random()
        if draw < 0.45:
            source = self._draw_asked()
        elif draw < 0.55:
            source = self._rng.choice(self._seal)
        elif draw < 0.75 and self._asked:
            source = self._rng.choice(self._asked)
        else:
            source = describe_request(self._pool, self._rng)
        return take_tools_away(source, self._pool, self._rng)

    def make_twins(self) -> tuple[Conversation, Conversation]:
        """Return a question for which no tool on offer is right, and one for the same tools that needs one of them.

        Raises:
            IndexError: No tool that is known has a request.
        """
        rng, pool = self._rng, self._pool
        if not any(map(pool.requests, pool.tools)):
            raise IndexError
        fitting: list[Tool] = []
        while not fitting:
            source = self._draw_asked() if rng.random() < 0.6 else describe_request(pool, rng)
            without = take_tools_away(source, pool, rng, _NUM_TOOLS_OF_TWINS)
            fitting = [tool for tool in without.tools if pool.requests(tool)]
        tool = rng.choice(fitting)
        is_known = all(pool.values(tool, name) for name in tool.parameters.get("required", ()))
        if is_known and tool.function.get("description") and rng.random() < 0.4:
            asked = describe_request(pool, rng, [tool])
        else:
            request = rng.choice(pool.requests(tool))
            asked = revalue_question(answer_with(tool, [request.arguments], request.text, "twin"), pool, rng)
        return without, replace(asked, tools=without.tools)

    def make_natural(self) -> Conversation:
        """Return a Seal-Tools question with other values."""
        made = revalue_question(self._rng.choice(self._single), self._pool, self._rng)
        return self._offer(add_options(made, self._rng) if self._rng.random() < 0.6 else made)

    def make_described(self) -> Conversation:
        """Return a request that follows from a tool's description."""
        made = describe_request(self._pool, self._rng)
        return self._offer(add_options(made, self._rng) if self._rng.random() < 0.4 else made)

    def make_parallel(self) -> Conversation:
        """Return a question that takes several calls of one tool."""
        return self._offer(self._draw_parallel())

    def make_listed(self) -> Conversation:
        """Return a question with a list as an argument."""
        made = None
        while made is None:
            made = make_list(self._draw_parallel(), self._rng)
        return self._offer(made)

    def make_quantities(self) -> Conversation:
        """Return a question with numbers, for one call or several."""
        num_calls = self._rng.choice((1, 1, 1, 1, 2, 2, 3, 4)) if self._rng.random() < 0.8 else 1
        return self._offer(describe_quantities(self._rng, num_calls))

    def make_joined(self) -> Conversation:
        """Return two or three questions in one."""
        count = self._rng.choice((2, 2, 3))
        parts = [self._draw_one() for _ in range(count)]
        return self._offer(join_questions(parts, self._rng))

    def make_dialogue(self) -> Conversation:
        """Return several questions about the same tools."""
        return make_dialogue(self._pool, self._single, self._rng)

    def _offer(self, row: Conversation) -> Conversation:
        return offer(row, self._pool, self._rng.choice(_NUM_OTHERS), self._rng)

    def _draw_parallel(self) -> Conversation:
        rng, pool = self._rng, self._pool
        made = multiply_question(rng.choice(self._single), pool, rng) if rng.random() < 0.4 else None
        return made or describe_parallel(pool, rng)

    def _draw_asked(self) -> Conversation:
        """Return a question for one call, mostly of people if there are any, else of Seal-Tools."""
        if self._single_public and self._rng.random() < 0.7:
            return self._rng.choice(self._single_public)
        return self._rng.choice(self._single)

    def _draw_one(self) -> Conversation:
        rng, draw = self._rng, self._rng.random()
        if draw < 0.35:
            return describe_request(self._pool, rng)
        if draw < 0.6:
            return describe_quantities(rng)
        return add_options(revalue_question(rng.choice(self._single), self._pool, rng), rng)
