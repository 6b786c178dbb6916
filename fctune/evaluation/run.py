"""A run of a suite over a model: what has no answer yet is asked, judged and put down, on one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from fctune import __version__, distributed
from fctune.calls.cases import Case
from fctune.calls.formats.base import CallFormat
from fctune.data.conversation import Message
from fctune.distributed import World
from fctune.evaluation.dialogue import ask_multi_turn
from fctune.evaluation.judging import Row, judge_answer
from fctune.evaluation.multi_turn import MultiTurnCase
from fctune.evaluation.results import ResultsFile
from fctune.evaluation.suites import Suite
from fctune.generation.engine import Engine

AnyCase = TypeVar("AnyCase", Case, MultiTurnCase)


def describe_run(suite: Suite, engine: Engine, call_format: CallFormat | None, max_new_tokens: int) -> dict[str, Any]:
    """What the answers and verdicts of a run depend on."""
    return {
        "suite": suite.name,
        "num_cases": len(suite.all_cases),
        "cases_digest": suite.digest(),
        "format": "served" if call_format is None else call_format.name,
        "max_new_tokens": max_new_tokens,
        "fctune": __version__,
        **engine.describe(),
    }


def run_suite(
    suite: Suite,
    engine: Engine,
    call_format: CallFormat | None,
    results: ResultsFile,
    *,
    max_new_tokens: int = 256,
    num_at_once: int = 64,
    is_fresh: bool = False,
    world: World | None = None,
    on_row: Callable[[Row, int, int], None] = lambda row, num_done, num_cases: None,
) -> list[Row] | None:
    """The rows of all cases in the suite's order, on the first process; None on the others.

    Every process calls this; each asks its share of what is not answered yet.

    Args:
        suite: What is asked.
        engine: Who answers.
        call_format: How the answers are read; None: the server has read the calls.
        results: Where rows go, and where those of an earlier run are.
        max_new_tokens: The most that an answer may be.
        num_at_once: How many conversations of several turns advance together on each process.
        is_fresh: Forget an earlier run.
        world: This process among several; None: it is alone.
        on_row: Called with each row that is new here, the count of cases of this process that have one, and of all.
    """
    settings = describe_run(suite, engine, call_format, max_new_tokens)

    def start() -> list[str]:
        return list(results.start(settings, is_fresh))

    finished = set(start() if world is None else distributed.run_on_rank_0(start))
    share = _deal([case for case in suite.cases if case.id not in finished], world)
    talks = _deal([case for case in suite.multi_turn if case.id not in finished], world)
    is_first = not finished and not share

    def ask() -> None:
        try:
            rows = chain(
                _ask_once(suite, share, engine, call_format, max_new_tokens),
                ask_multi_turn(talks, engine, call_format, max_new_tokens, num_at_once, is_first),
            )
            for number, row in enumerate(rows, start=1):
                results.append(row)
                on_row(row, number, len(share) + len(talks))
        finally:
            results.close()

    try:
        if world is None:
            ask()
        else:
            distributed.run_on_all_ranks(ask)
    except BaseException:
        results.release()
        raise
    if world is not None and not world.is_main:
        return None
    return results.finish([case.id for case in suite.all_cases])


def _deal(cases: list[AnyCase], world: World | None) -> list[AnyCase]:
    """This process's share: longest first and dealt out, so that ranks have about the same to do."""
    dealt = sorted(cases, key=lambda case: -sum(len(message.content or "") for message in _messages_of(case)))
    return dealt if world is None else dealt[world.rank :: world.world_size]


def _messages_of(case: Case | MultiTurnCase) -> Sequence[Message]:
    if isinstance(case, Case):
        return case.prompt.messages
    return [message for turn in case.turns for message in turn.messages]


def _ask_once(
    suite: Suite, cases: Sequence[Case], engine: Engine, call_format: CallFormat | None, max_new_tokens: int
) -> Iterator[Row]:
    if cases:
        for answer in engine.answer([case.prompt for case in cases], max_new_tokens):
            yield judge_answer(suite, cases[answer.index], answer, call_format)
