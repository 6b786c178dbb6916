"""``fctune score``: judge a file of predictions against a benchmark or cases of your own."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.config.intervals import format_count
from fctune.tasks.benchmarks import find_benchmarks

if TYPE_CHECKING:
    from fctune.tasks.suite import Suite

_NUM_SHOWN = 5


def add_commands(commands: Any) -> None:
    """Add ``fctune score`` to the command."""
    score = commands.add_parser(
        "score", help="judge a file of predictions, with an interval for every category"
    ).add_subparsers(required=True, metavar="COMMAND")
    scored = []
    for name, benchmark in ((name, one) for name, one in find_benchmarks().items() if one.has_predictions):
        command = score.add_parser(name, help=f"judge by the rules of {benchmark.title}, for each of its categories")
        benchmark.add_score_options(command)
        command.set_defaults(run=_score_benchmark, benchmark=benchmark)
        scored.append(command)
    calls = score.add_parser("calls", help="judge by exact match with the expected calls of your own cases")
    calls.add_argument(
        "--cases", required=True, metavar="FILE", help="JSONL: messages, tools, expected_calls[, id, category]"
    )
    calls.set_defaults(run=_score_calls)
    for command in (*scored, calls):
        command.add_argument(
            "--predictions",
            required=True,
            metavar="FILE",
            help="JSONL: id with calls, with text and format, or with turns of steps of calls",
        )
        command.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSONL: a verdict for each row")
        command.add_argument("--format", help="call format of rows that do not name one")


def _score_benchmark(arguments: argparse.Namespace) -> int:
    return _score(arguments, arguments.benchmark.open_predictions_suite(arguments))


def _score_calls(arguments: argparse.Namespace) -> int:
    from fctune.tasks.suite import Suite
    from fctune.tasks.suite_files import read_cases

    return _score(arguments, Suite(Path(arguments.cases).stem, tuple(read_cases(arguments.cases))))


def _score(arguments: argparse.Namespace, suite: Suite) -> int:
    from fctune.tasks.evaluation.score_file import score_file

    # Judging makes no reference cycles, and looking for them takes a sixth of its time.
    gc.set_threshold(100_000)
    summary = score_file(suite, arguments.predictions, arguments.out, arguments.format)
    _show(summary, arguments.out)
    return 0


def _show(summary: dict[str, Any], out: Path) -> None:
    from fctune.cli.tables import (
        make_console,
        make_score_table,
        print_figures,
        print_leaderboard,
        print_not_run,
    )
    from fctune.tasks.evaluation.results import name_beside

    console = make_console()
    title = f"predictions for {summary['suite']}"
    console.print(make_score_table(title, summary))
    print_figures(console, summary.get("figures"))
    print_leaderboard(console, summary)
    print_not_run(console, summary["not_run"])
    missing, unknown, repeated = summary["missing_ids"], summary["unknown_ids"], summary["num_repeated_ids"]
    lines = []
    if missing:
        cases = format_count(len(missing), "case")
        lines.append(f"{cases} without a prediction, counted as wrong: {_shorten(missing)}")
    if unknown:
        num_rows = format_count(sum(unknown.values()), "prediction")
        lines.append(f"{num_rows} with an unknown id, wrong and in no category: {_shorten(list(unknown))}")
    if not_judged := summary["not_judged"]:
        named = "; ".join(f"{i}: {reason}" for i, reason in list(not_judged.items())[:_NUM_SHOWN])
        lines.append(f"{format_count(len(not_judged), 'prediction')} could not be judged, counted as wrong: {named}")
    if repeated:
        lines.append(f"{format_count(repeated, 'id')} more than once; each prediction counts")
    lines.append(f"verdicts: {out}   all rates: {name_beside(out, '.summary.json')}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _shorten(ids: list[str]) -> str:
    return ", ".join(ids[:_NUM_SHOWN]) + (", ..." if len(ids) > _NUM_SHOWN else "")
