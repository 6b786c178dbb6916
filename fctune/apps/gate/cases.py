"""The cases of the gate that come from held-out rows: with a call due, without one, and the partner of each of these.

A model that calls whenever tools are on offer loses on the cases without a call; one that never calls loses on their
partners, which are like them but need a call. Both come from the rows: a held-out case without a call is paired with
one that calls and offers a tool of it, and a held-out call gets a partner from which the tools that it needs are taken
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fctune.config.intervals import format_count
from fctune.config.sections.data import AugmentConfig
from fctune.data.augment.augmenter import Augmenter
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.conversation import Conversation, Message
from fctune.data.conversion import to_openai_row
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.tasks.evaluation.row_cases import rank_by_hash
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

AnyItem = TypeVar("AnyItem")

SUITE = "held_out"
_MADE = "take_away"


@dataclass(frozen=True)
class HeldOutCases:
    """The held-out cases to ask.

    Attributes:
        suite: All of them, those that were made included.
        given: The cases that the user gave, asked or not.
        calls: Ids of those that need a call.
        no_calls: Ids of those of the user that need none.
        made: Ids of those that need none because ``take_away`` made them of a call.
        partners: Ids of the cases that need a call and are partners of those without one.
        note: Where the pairs come from.
    """

    suite: Suite
    given: Sequence[Case]
    calls: tuple[str, ...]
    no_calls: tuple[str, ...]
    made: tuple[str, ...]
    partners: tuple[str, ...]
    note: str

    @property
    def num_left_out(self) -> int:
        """Number of the user's cases that are not asked."""
        return sum(self.suite.find(case.id) is None for case in self.given)


def choose_cases(cases: Sequence[AnyItem], ids: Sequence[str], count: int, seed: int = 0) -> list[AnyItem]:
    """Choose cases by a hash of their ids, so that the choice stays when others are added; kept in their order."""
    ranked = sorted(range(len(cases)), key=lambda i: rank_by_hash(ids[i], seed))
    return [cases[i] for i in sorted(ranked[:count])]


def pair_held_out(held_out: Suite, max_cases: int, seed: int = 0) -> HeldOutCases:
    """Choose held-out cases and pair those with and without a call.

    Args:
        held_out: All held-out cases.
        max_cases: Largest number of cases with a call, and of those without one.
        seed: Seed of the choice.
    """
    due = [case for case in held_out.cases if case.expected]
    none_due = [case for case in held_out.cases if not case.expected]
    calls = choose_cases(due, [case.id for case in due], max_cases, seed)
    own = choose_cases(none_due, [case.id for case in none_due], max_cases, seed)
    pairs = _pair_by_tool(own, calls)
    made = _take_tools_away(calls, held_out.cases, max_cases - len(own), seed)
    partners = dict.fromkeys([*pairs.values(), *(origin for origin, _ in made)])
    sources = Counter({"rows": len(pairs), _MADE: len(made)})
    note = f"{format_count(sources['rows'], 'pair')} from the rows, {sources[_MADE]:,} made by take_away"
    if alone := len(own) - len(pairs):
        note += f"; {format_count(alone, 'case')} without a call and a partner, since no call has a tool in common"
    suite = held_out.with_cases([*calls, *own, *(case for _, case in made)])
    suite.name = SUITE
    return HeldOutCases(
        suite,
        held_out.cases,
        tuple(case.id for case in calls),
        tuple(case.id for case in own),
        tuple(case.id for _, case in made),
        tuple(partners),
        note,
    )


def _pair_by_tool(none_due: Iterable[Case], due: Sequence[Case]) -> dict[str, str]:
    """Return the id of a partner for each case without a call: one that offers most of its tools, each used once."""
    pairs: dict[str, str] = {}
    free = {case.id: {tool.name for tool in case.prompt.tools} for case in due}
    for case in none_due:
        offered = {tool.name for tool in case.prompt.tools}
        best = max(free, key=lambda name: len(free[name] & offered), default=None)
        if best is not None and free[best] & offered:
            pairs[case.id] = best
            del free[best]
    return pairs


def _take_tools_away(due: Sequence[Case], all_cases: Sequence[Case], count: int, seed: int) -> list[tuple[str, Case]]:
    """Return up to ``count`` cases without a call that were made of one with a call, each with the id of that one."""
    if count <= 0:
        return []
    pool = ToolPool()
    for case in all_cases:
        pool.add(case.prompt)
    augmenter = Augmenter(AugmentConfig(take_away=1.0, seed=seed), pool)
    made: list[tuple[str, Case]] = []
    for case in sorted(due, key=lambda case: rank_by_hash(case.id, seed)):
        if len(made) == count:
            break
        complete = replace(case.prompt, messages=(*case.prompt.messages, Message("assistant", None, case.expected)))
        for form in augmenter.expand(read_row(to_openai_row(complete), "openai", ReadContext(), case.id)):
            if form.is_added:
                made.append((case.id, _make_case(case, form.conversation)))
    return made


def _make_case(case: Case, changed: Conversation) -> Case:
    prompt = replace(case.prompt, tools=changed.tools, messages=changed.messages[:-1])
    return Case(id=f"{case.id}:{_MADE}", category="no_call", prompt=prompt, expected=())
