"""Evaluate dialogues: ask the tasks of an environment, an agent or recorded rows once, as training rewards them.

A task that fails, such as one whose MCP server dies, is not measured: it is in no figure, and the next run asks it
again. A dialogue without an answer of the model counts as unsolved, as in other suites.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fctune import __version__
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.calls.formats.base import CallFormat
from fctune.calls.judge import Judgement, Outcome
from fctune.config.intervals import format_count
from fctune.config.sections.rollouts import ENVIRONMENT, DialogueConfig
from fctune.engines.engine import Engine
from fctune.tasks.episode import Episode, EpisodeLimits
from fctune.tasks.evaluation.results import ResultsFile
from fctune.tasks.evaluation.run import finish_results, start_results
from fctune.tasks.evaluation.summary import summarise_defects, summarise_reasoning, tally_judgements
from fctune.tasks.judge import (
    NOT_MEASURED,
    Row,
    is_measured,
    is_valid,
    to_plain,
    to_plain_calls,
    to_step_fields,
    to_step_row,
)
from fctune.tasks.rollouts import TaskSet
from fctune.tasks.suite import Suite
from fctune.tasks.task import TaskError


def name_dialogues(cases: str) -> str:
    """Return the name of a source of dialogues, such as ``mcp-rooms`` for ``mcp:data/rooms.yaml``."""
    kind, _, source = cases.partition(":")
    name = source if cases.startswith(ENVIRONMENT) else Path(source).stem
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}"


def describe_dialogues(
    name: str,
    tasks: TaskSet,
    num_tasks: int,
    engine: Engine,
    call_format: CallFormat | None,
    max_new_tokens: int,
    config: DialogueConfig,
) -> dict[str, Any]:
    """Return everything that the answers and verdicts depend on."""
    return {
        "suite": name,
        "num_cases": num_tasks,
        "cases_digest": tasks.digest(),
        "format": "served" if call_format is None else call_format.name,
        "max_new_tokens": max_new_tokens,
        "max_turns": config.max_turns,
        "max_result_bytes": config.max_result_bytes,
        "fctune": __version__,
        **engine.describe(),
    }


def run_dialogues(
    tasks: TaskSet,
    ids: Sequence[str],
    engine: Engine,
    call_format: CallFormat | None,
    limits: EpisodeLimits,
    results: ResultsFile,
    settings: Mapping[str, Any],
    *,
    num_at_once: int = 64,
    is_fresh: bool = False,
    world: World | None = None,
    on_row: Callable[[Row, int, int], None] = lambda row, num_done, num_tasks: None,
) -> list[Row] | None:
    """Ask tasks once and return their rows in order, on the main process; None on the others.

    Args:
        tasks: The tasks.
        ids: Those to ask.
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        limits: Where dialogues end.
        results: Where rows are written, and where those of an earlier run are.
        settings: Settings that existing rows must have been written with.
        num_at_once: Most dialogues that advance together on each process.
        is_fresh: Discard the results of an earlier run.
        world: This process among several; None: there is only one.
        on_row: Called with each new row, the number of rows and the number of tasks of this process.

    Raises:
        ConfigError: Many tasks in a row failed, or all of them.
        Interrupted: Ctrl-C; the message says how many answers are kept.
    """
    finished = start_results(results, settings, is_fresh, world)
    left = [task_id for task_id in ids if task_id not in finished]
    share = left if world is None else left[world.rank :: world.world_size]
    at_once = num_at_once if tasks.num_at_once is None else min(num_at_once, tasks.num_at_once)

    def ask() -> None:
        rows = tasks.ask_each(
            *(engine, call_format, limits, share, lambda episode: make_row(tasks, episode, limits)),
            num_at_once=at_once,
            is_first=not finished,
        )
        try:
            for number, row in enumerate(rows, start=1):
                results.append(row)
                on_row(row, number, len(share))
                tasks.note_end(row["id"], row["error"] if row["verdict"] == NOT_MEASURED else None)
        finally:
            results.close()

    rows = finish_results(results, ids, ask, world)
    if rows and not any(map(is_measured, rows)):
        raise ConfigError(
            f"none of {format_count(len(rows), 'task')} could be measured, for example {rows[0]['id']}: "
            f"{rows[0]['error'].rstrip('.')}. Fix the cause and run the same command again."
        )
    return rows


def make_row(tasks: TaskSet, episode: Episode, limits: EpisodeLimits) -> Row:
    """Return the results row of a dialogue that is over, and whose state is still open.

    It has the fields of a multi-turn case, and ``parts``, those of the reward but the control, and ``ended``, how the
    dialogue ended: ``answered`` without a call, ``malformed_call``, ``cut_off``, ``max_turns``, ``context_full``,
    ``completed`` or ``deviated`` from a recorded row, ``after_calls`` where the agent asked no more, or ``no_answer``.
    Only well-formed calls are made, so the lenient reading has the same verdict.
    """
    parts: Mapping[str, float] = {}
    if episode.error is None:
        try:
            parts = tasks.score(episode)
        except TaskError as error:
            episode.fail(str(error), is_task_fault=True)
    task, steps = episode.task, episode.steps
    tools = episode.state.tools if steps else ()
    is_solved = parts.get("solved") == 1.0
    ended = _find_end(episode, limits, is_solved)
    verdict = "correct" if is_solved else "malformed" if ended == "malformed_call" else "wrong_answer"
    if episode.error is not None:
        verdict = NOT_MEASURED if episode.is_task_fault else "no_answer"
    differences = [f"ended: {ended.replace('_', ' ')}", *(f"{name}: {value:g}" for name, value in parts.items())]
    row: Row = {
        "id": task.id,
        "category": task.category or "all",  # a task of an environment has none before it is made
        "verdict": verdict,
        "differences": [] if is_solved else differences,
        "parts": dict(parts),
        "ended": ended,
        "answer": steps[-1].answer.text if steps else "",
        **to_step_fields(steps, tools),
        "lenient": {"verdict": verdict, **to_plain(*(step.reading.lenient for step in steps))},
        "expected_calls": to_plain_calls(task.solution),
        "messages": [message.to_openai() for message in episode.messages],
        "tools": [tool.to_openai() for tool in tools],
        "turns": [[to_step_row(step) for step in steps]],
    }
    if episode.stopped is not None:
        row |= {"stopped": episode.stopped, "is_unanswered": episode.is_unanswered}
    if episode.error is not None:
        row["error"] = " ".join(episode.error.split())[:400]
    return row


def _find_end(episode: Episode, limits: EpisodeLimits, is_solved: bool) -> str:
    if episode.error is not None:
        return "task_failed" if episode.is_task_fault else "no_answer"
    if episode.stopped is not None:
        return "context_full"
    step = episode.steps[-1]
    if episode.is_cut or step.answer.is_cut:
        return "cut_off"
    if step.parsed.malformed:
        return "malformed_call"
    if not step.calls:
        return "answered"
    if limits.max_turns is None:  # an agent, which ends as it likes
        return "after_calls"
    if len(episode.steps) == limits.max_turns:
        return "max_turns"
    return "completed" if is_solved else "deviated"


def summarise_dialogues(name: str, rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise the rows of dialogues as ``summarise_run`` does those of a suite.

    ``accuracy`` is the share of solved tasks. ``figures`` holds the mean of each other part of the reward, and how many
    dialogues ended in each way, solved or not. Tasks that were not measured are in ``num_not_measured`` alone.
    """
    measured = [row for row in rows if is_measured(row)]
    # No calls are due and no further rates are known: only the task's own verdict counts.
    suite = Suite(name, (), any_call=frozenset({"all", *(row["category"] for row in measured)}))

    def judge(row: Row) -> Judgement:
        return Judgement(Outcome(row["verdict"], 0, len(row["calls"]), len(row["malformed"])))

    tally = tally_judgements(suite, ((row["category"], (judged := judge(row)), judged) for row in measured))
    return {
        "suite": name,
        "benchmark": None,
        "release": None,
        "num_cases": len(measured),
        "num_not_measured": len(rows) - len(measured),
        "num_no_answer": sum(row.get("error") is not None for row in measured),
        "num_cut": sum(bool(row["is_cut"]) for row in measured),
        "reasoning": summarise_reasoning(measured, has_total=True),
        "defects": summarise_defects(measured, has_total=True),
        "not_run": {},
        "settings": dict(settings),
        **tally.summarise(),
        "figures": _make_figures(rows, measured),
    }


def _make_figures(rows: Sequence[Row], measured: Sequence[Row]) -> dict[str, Any]:
    scored = [row["parts"] for row in measured if row["parts"]]
    names = [name for name in (scored[0] if scored else ()) if name != "solved"]
    ends = Counter((row["ended"], is_valid(row)) for row in measured)
    failed = next((row for row in rows if not is_measured(row)), None)
    notes = ["The values are mean parts of the reward; the table counts how dialogues ended."]
    if failed is not None:
        tasks = format_count(len(rows) - len(measured), "task is", "tasks are")
        notes.append(f"{tasks} not measured and in no figure, for example {failed['id']}: {failed['error']}")
    return {
        "values": {name: sum(parts[name] for parts in scored) / len(scored) for name in names},
        "table": {
            ended.replace("_", " "): {"solved": ends[ended, True], "unsolved": ends[ended, False]}
            for ended in sorted({ended for ended, _ in ends})
        },
        "notes": notes,
    }
