"""Compare two evaluations of the same cases, such as a base model and its fine-tune: ``fctune compare``.

    python -m eval.compare BEFORE.jsonl AFTER.jsonl [--show 5] [--lenient] [--json FILE]

The files are those of ``eval.tool_calls --out``. Cases are paired by id: the difference has an interval for paired
proportions (Tango), and p is McNemar's exact test on the cases that changed, not corrected for multiple categories.

They may also be results that other packages wrote, which are shown as they are: the ``.json`` file or directory of a
run of tau2-bench, or the directory of ACEBench's scores of a model.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.cli.files import write_file
from fctune.cli.tables import format_gaps, format_rate, make_console, make_reasoning_table, make_table
from fctune.config.intervals import format_count
from fctune.tasks.benchmarks import Benchmark, find_benchmark_of_rows
from fctune.tasks.evaluation.paired import Comparison, compare_rows
from fctune.tasks.evaluation.published import is_published, read_published
from fctune.tasks.evaluation.results import read_rows, read_settings
from fctune.tasks.evaluation.summary import summarise_reasoning
from fctune.tasks.judge import Row, is_measured
from fctune.tasks.suite import Measured


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison of two result files; returns 0."""
    if is_published(arguments.before) or is_published(arguments.after):
        return _compare_published(arguments)
    if arguments.html is not None and arguments.lenient:
        raise ConfigError(
            "--html: shows the strict reading. Leave out --lenient, or write the lenient one with --json."
        )
    before, after = _read(arguments.before), _read(arguments.after)
    benchmark = find_benchmark_of_rows((*before, *after))
    has_total = benchmark is None
    _check_settings(arguments.before, arguments.after)
    compared = compare_rows(before, after, has_total, arguments.lenient)
    reasoning = {
        name: used
        for name, rows in (("before", before), ("after", after))
        if (used := summarise_reasoning(rows, has_total))
    }
    if arguments.json is not None:
        _write_json(arguments.json, compared, reasoning)
    if arguments.html is not None:
        _write_html(arguments)
    console = make_console()
    title = "tool-call accuracy, before and after"
    columns = ("category", "n", "before", "after", "difference", "p", "turned right", "turned wrong")
    table = make_table(f"{title}, lenient reading" if arguments.lenient else title, *columns)
    for row in compared:
        table.add_row(*_to_cells(row), style="bold" if row.category == "all" else "")
    console.print(table)
    if unmeasured := {row["id"] for row in (*before, *after) if not is_measured(row)}:
        tasks = format_count(len(unmeasured), "task is", "tasks are")
        console.print(f"{tasks} not compared, which failed in one of the two results", style="yellow", soft_wrap=True)
    if benchmark is not None:
        for line in _format_overall(benchmark, compared, _read_releases(arguments.before, arguments.after)):
            console.print(line, soft_wrap=True, highlight=False)
    for name, used in reasoning.items():
        console.print(make_reasoning_table(f"reasoning {name}", used))
    for row in compared if arguments.show > 0 else ():
        for word, ids in (("right", row.turned_right), ("wrong", row.turned_wrong)):
            if ids and (row.category != "all" or len(compared) == 1):
                rest = f" and {len(ids) - arguments.show:,} more" if len(ids) > arguments.show else ""
                shown = f"{row.category}, turned {word}: {', '.join(ids[: arguments.show])}{rest}"
                console.print(shown, soft_wrap=True, highlight=False)
    return 0


def _write_html(arguments: argparse.Namespace) -> None:
    """Write the page of the comparison: accuracy by category before and after, and the failures after."""
    from fctune.apps.report.run_sections import add_accuracy
    from fctune.pages.page import Page
    from fctune.tasks.evaluation.accuracy import pair_results

    accuracy = pair_results(arguments.after, arguments.before)
    before, after = Path(arguments.before), Path(arguments.after)
    names = [before.name, after.name]
    if before.name == after.name:  # results of one suite are told apart by the model that their directory names
        names = [path.resolve().parent.name for path in (before, after)]
    page = Page(f"Comparison: {' and '.join(names)}")
    add_accuracy(page, accuracy)
    footer = f"fctune compare {arguments.before} {arguments.after}"
    write_file(arguments.html, "--html", lambda: page.write(arguments.html, footer))


def _read_releases(before: str, after: str) -> str:
    """Return the version of the benchmark that two results are of."""
    settings = (read_settings(path) or {} for path in (before, after))
    return " and ".join(dict.fromkeys(str(one.get("release") or "version unknown") for one in settings))


def _format_overall(benchmark: Benchmark, compared: list[Comparison], release: str) -> list[str]:
    """Return lines with the overall numbers of two results of a benchmark's cases, and what they lack."""
    before = benchmark.weigh({row.category: Measured(row.num_right_before / row.n, row.n) for row in compared})
    after = benchmark.weigh({row.category: Measured(row.num_right_after / row.n, row.n) for row in compared})
    if before is None or after is None:
        return []
    overall = (
        f"overall as the leaderboard weighs it ({release}): "
        f"before {before['overall']:.2%}, after {after['overall']:.2%}"
    )
    return [overall, *format_gaps(after)]


def _compare_published(arguments: argparse.Namespace) -> int:
    """Print the numbers of another package's benchmark for two models."""
    if arguments.lenient or arguments.show or arguments.html is not None:
        raise ConfigError("--lenient, --show, --html: other packages' results contain no answers. Leave them out.")
    before, after = read_published(arguments.before), read_published(arguments.after)
    if before.benchmark != after.benchmark:
        raise DataError(
            f"{arguments.before} is of {before.benchmark} and {arguments.after} of {after.benchmark}. "
            "Pass results of one benchmark."
        )
    if arguments.json is not None:
        both = {name: asdict(one) for name, one in (("before", before), ("after", after))}
        write_file(arguments.json, "--json", lambda: json.dumps(both, indent=2) + "\n")
    console = make_console()
    columns = ("category", "n before", "n after", "before", "after", "difference")
    table = make_table(f"{after.benchmark}, before and after, as its own package scored it", *columns)
    for category in dict.fromkeys((*before.scores, *after.scores)):
        first, second = before.scores.get(category), after.scores.get(category)
        difference = f"{second.value - first.value:+.1%}" if first and second else "-"
        counts = (f"{score.num_cases:,}" if score else "-" for score in (first, second))
        values = (f"{score.value:.1%}" if score else "not run" for score in (first, second))
        table.add_row(category, *counts, *values, difference)
    console.print(table)
    for name, one in (("before", before), ("after", after)):
        model = f"{one.model}: " if one.model else ""
        console.print(f"{name}: {model}{'; '.join(one.notes)}", soft_wrap=True, highlight=False)
    return 0


def _read(path: str) -> list[Row]:
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: contains no results. Pass a file written by fctune eval --out.")
    return rows


def _check_settings(before: str, after: str) -> None:
    """Require the same cases and answer length; suites of one name may differ in both."""
    first, second = read_settings(before) or {}, read_settings(after) or {}
    for key in ("release", "cases_digest", "max_new_tokens"):
        if key in first and key in second and first[key] != second[key]:
            raise DataError(
                f"{before} and {after}: {key} is {first[key]} in one and {second[key]} in the other. "
                "Evaluate both models on the same cases with the same options."
            )


def _to_cells(row: Comparison) -> list[str]:
    difference, low, high = row.difference
    return [
        row.category,
        f"{row.n:,}",
        format_rate(row.num_right_before, row.n),
        format_rate(row.num_right_after, row.n),
        f"{difference:+.1%} ({low:+.1%} to {high:+.1%})",
        "< 0.0001" if row.p_value < 0.0001 else f"{row.p_value:.4f}",
        f"{len(row.turned_right):,}",
        f"{len(row.turned_wrong):,}",
    ]


def _write_json(path: Path, compared: list[Comparison], reasoning: dict[str, dict[str, Any]]) -> None:
    found: dict[str, Any] = {}
    for row in compared:
        difference, low, high = row.difference
        found[row.category] = {
            "n": row.n,
            "num_right_before": row.num_right_before,
            "num_right_after": row.num_right_after,
            "difference": difference,
            "low": low,
            "high": high,
            "p_value": row.p_value,
            "turned_right": row.turned_right,
            "turned_wrong": row.turned_wrong,
        }
        used = {name: found_in[row.category] for name, found_in in reasoning.items() if row.category in found_in}
        found[row.category] |= {"reasoning": used} if used else {}
    write_file(path, "--json", lambda: json.dumps(found, indent=2) + "\n")
