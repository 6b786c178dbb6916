"""Run a suite on a model: ask the cases that have no answer yet, judge the answers and write them, on any number of
processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from fctune import __version__
from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import Interrupted
from fctune.calls.formats.base import CallFormat
from fctune.engines.engine import Engine
from fctune.tasks.episode import Episode, EpisodeLimits, EpisodeRunner
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.judge import JudgedEpisode, Row, judge_episode
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case, MultiTurnCase

AnyCase = TypeVar("AnyCase", Case, MultiTurnCase)


def describe_run(suite: Suite, engine: Engine, call_format: CallFormat | None, max_new_tokens: int) -> dict[str, Any]:
    """Return everything that the answers and judgements of a run depend on."""
    return {
        "suite": suite.name,
        "num_cases": len(suite.all_cases),
        "cases_digest": suite.digest(),
        "format": "served" if call_format is None else call_format.name,
        "max_new_tokens": max_new_tokens,
        "fctune": __version__,
        **({"release": suite.release} if suite.release is not None else {}),
        **engine.describe(),
    }


def ask_cases(
    cases: Sequence[Case],
    engine: Engine,
    call_format: CallFormat | None,
    max_new_tokens: int,
    is_first: bool = True,
) -> Iterator[JudgedEpisode]:
    """Ask single-turn cases, all at once, and yield the judged answers as they arrive.

    Args:
        cases: The cases to ask.
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        max_new_tokens: Maximum length of an answer.
        is_first: No case was answered before, so an engine that can answer none of them is an error.
    """
    runner = EpisodeRunner(engine, call_format, EpisodeLimits(max_new_tokens))
    return map(judge_episode, runner.run(map(Episode, cases), is_first=is_first))


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
    to_row: Callable[[JudgedEpisode], Row] = JudgedEpisode.to_row,
    is_enough: Callable[[Row], bool] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[Row] | None:
    """Run a suite and return the rows of all cases in its order, on the main process; None on the others.

    Every process calls this function and asks its share of the cases that have no answer yet.

    Args:
        suite: The cases to ask.
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        results: Where rows are written, and where those of an earlier run are.
        max_new_tokens: Maximum length of an answer.
        num_at_once: Number of multi-turn conversations that advance together on each process.
        is_fresh: Discard the results of an earlier run.
        world: This process among several; None: there is only one.
        on_row: Called with each new row, the number of rows and the number of cases of this process.
        to_row: Makes the row of a judged episode.
        is_enough: Called with each new row; True ends the run without the remaining answers. Each question is then
            asked once before any is asked again.
        settings: Further settings that existing rows must have been written with.

    Raises:
        Interrupted: Ctrl-C; the message says how many answers are kept.
    """
    described = {**describe_run(suite, engine, call_format, max_new_tokens), **(settings or {})}
    finished = start_results(results, described, is_fresh, world)
    share = _take_share([case for case in suite.cases if case.id not in finished], world)
    rounds = [share] if is_enough is None else _split_by_sample(share)
    dialogues = _take_share([case for case in suite.multi_turn if case.id not in finished], world)
    is_first = not finished and not share

    def ask() -> None:
        runner = EpisodeRunner(engine, call_format, EpisodeLimits(max_new_tokens))
        judged = chain(
            *(ask_cases(part, engine, call_format, max_new_tokens, not finished) for part in rounds),
            map(judge_episode, runner.run(map(Episode, dialogues), num_at_once, is_first)),
        )
        try:
            for number, row in enumerate(map(to_row, judged), start=1):
                results.append(row)
                on_row(row, number, len(share) + len(dialogues))
                if is_enough is not None and is_enough(row):
                    break
        finally:
            results.close()

    return finish_results(results, [case.id for case in suite.all_cases], ask, world)


def start_results(results: ResultsFile, described: Mapping[str, Any], is_fresh: bool, world: World | None) -> set[str]:
    """Open the results on the main process; returns the ids of the cases that are finished, on every process."""

    def start() -> list[str]:
        return list(results.start(described, is_fresh))

    return set(start() if world is None else distributed.run_on_rank_0(start))


def finish_results(
    results: ResultsFile, ids: Sequence[str], ask: Callable[[], None], world: World | None
) -> list[Row] | None:
    """Ask on every process; returns the rows of all ids in their order on the main process, None on the others.

    Raises:
        Interrupted: Ctrl-C; the message says how many answers are kept.
    """
    with _release_on_error(results, len(ids)):
        if world is None:
            ask()
        else:
            distributed.run_on_all_ranks(ask)
    return None if world is not None and not world.is_main else results.finish(ids)


@contextmanager
def _release_on_error(results: ResultsFile, num_cases: int) -> Iterator[None]:
    """Release the results if the block fails; Ctrl-C becomes an error that says how many answers are kept."""
    try:
        yield
    except KeyboardInterrupt:
        results.release()
        raise Interrupted(
            f"kept {results.count():,} of {num_cases:,} answers in {results.path}; run the same command to continue"
        ) from None
    except BaseException:
        results.release()
        raise


def _take_share(cases: list[AnyCase], world: World | None) -> list[AnyCase]:
    """Deal the cases out to the processes, longest first, so that each has about the same amount of work."""
    dealt = sorted(cases, key=lambda case: -sum(len(message.content or "") for message in case.questions))
    return dealt if world is None else dealt[world.rank :: world.world_size]


def _split_by_sample(cases: Sequence[Case]) -> list[list[Case]]:
    by_sample: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_sample[case.sample].append(case)
    return [by_sample[sample] for sample in sorted(by_sample)]
