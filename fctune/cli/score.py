"""``fctune score``: predictions in a file are judged against a benchmark or cases of your own."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from rich.table import Table

from fctune.terminal import Terminal, print_whole

_NUM_SHOWN = 5


def add_commands(commands: Any) -> None:
    """Add ``fctune score`` to the command."""
    score = commands.add_parser(
        "score", help="predictions: judge a file of them, with an interval for every category"
    ).add_subparsers(required=True, metavar="COMMAND")
    bfcl = score.add_parser("bfcl", help="by the Berkeley leaderboard's rules; its categories, never a sum of them")
    bfcl.add_argument("--data", required=True, metavar="DIR", help="the wheel's data: site-packages/bfcl_eval/data")
    bfcl.add_argument(
        "--categories", nargs="+", default=[], help="score these whole; default: those of the predictions"
    )
    bfcl.add_argument("--dots-as-underscores", action="store_true", help="for models that write a_b for a.b")
    bfcl.set_defaults(run=_score_bfcl)
    calls = score.add_parser("calls", help="by exact match with the expected calls of your own cases")
    calls.add_argument("--cases", required=True, help="JSONL: messages, tools, expected_calls[, id, kind]")
    calls.set_defaults(run=_score_calls)
    for command in (bfcl, calls):
        command.add_argument(
            "--predictions",
            required=True,
            metavar="FILE",
            help="JSONL: id with calls, with text and format, or with turns of steps of calls",
        )
        command.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSONL: a verdict for each row")
        command.add_argument("--format", help="wire format of texts whose row names none")


def _score_bfcl(arguments: argparse.Namespace) -> int:
    from fctune.calls.bfcl.suite import BfclSuite
    from fctune.calls.judge import score_file

    _collect_less()
    suite = BfclSuite(arguments.data, arguments.categories, arguments.dots_as_underscores)
    _show(score_file(suite, arguments.predictions, arguments.out, arguments.format), arguments.out, has_own_rules=True)
    return 0


def _score_calls(arguments: argparse.Namespace) -> int:
    from fctune.calls.cases import read_cases
    from fctune.calls.judge import CaseSuite, score_file

    _collect_less()
    suite = CaseSuite(read_cases(arguments.cases))
    _show(score_file(suite, arguments.predictions, arguments.out, arguments.format), arguments.out)
    return 0


def _collect_less() -> None:
    """Look for reference cycles less often: judging makes none, and looking takes a sixth of its time."""
    gc.set_threshold(100_000)


def _show(summary: dict[str, Any], out: Path, has_own_rules: bool = False) -> None:
    table = _table(summary["categories"], has_own_rules)
    console = Terminal(soft_wrap=True, highlight=False)
    print_whole(console, table)
    missing, unknown, repeated = summary["missing_ids"], summary["unknown_ids"], summary["num_repeated_ids"]
    if missing:
        console.print(f"{_count(len(missing), 'case')} without a prediction, counted as wrong: {_few(missing)}")
    if unknown:
        num_rows = _count(sum(unknown.values()), "prediction")
        console.print(f"{num_rows} of no case, wrong and in no category: {_few(list(unknown))}")
    if repeated:
        console.print(f"{_count(repeated, 'id')} more than once; each prediction counts")
    console.print(f"each verdict: {out}   all rates: {out.with_suffix('.summary.json')}")


def _table(categories: dict[str, dict[str, Any]], has_own_rules: bool) -> Table:
    """The rates of each category; ``has_own_rules`` where valid is something else than an exact match."""
    has_texts = any("valid_lenient" in scores for scores in categories.values())
    names = ["valid", *(["read leniently"] if has_texts else []), *(["exact match"] if has_own_rules else [])]
    table = Table(title="valid predictions, with 95 % intervals", title_justify="left", box=None, pad_edge=False)
    for name in ("category", "n", *names, "what went wrong"):
        table.add_column(name, justify="left" if name in ("category", "what went wrong") else "right")
    for category, scores in categories.items():
        if "not_run" in scores:
            table.add_row(category, f"{scores['n']:,}", "not run", *[""] * (len(names) - 1), scores["not_run"])
            continue
        rates = {
            "valid": scores["valid"],
            "read leniently": scores.get("valid_lenient", scores["valid"]),
            "exact match": scores.get("rates", {}).get("accuracy"),
        }
        wrong = {verdict: n for verdict, n in scores.get("verdicts", {}).items() if n and verdict != "correct"}
        table.add_row(
            category,
            f"{scores['n']:,}",
            *(_share(rates[name]) for name in names),
            ", ".join(f"{n} {verdict}" for verdict, n in wrong.items()),
        )
    return table


def _share(rate: dict[str, Any] | None) -> str:
    return "" if rate is None else f"{rate['rate']:.1%} ({rate['low']:.1%} - {rate['high']:.1%})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _few(ids: list[str]) -> str:
    return ", ".join(ids[:_NUM_SHOWN]) + (", ..." if len(ids) > _NUM_SHOWN else "")
