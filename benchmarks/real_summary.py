"""Answers of ``benchmarks.real_model`` before and after training, compared by category."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fctune.calls.metrics import wilson_interval
from fctune.tasks.evaluation.paired import compare_rows
from fctune.tasks.evaluation.results import read_rows as read_results
from fctune.tasks.judge import Row, is_valid


def read_answers(folder: Path, names: Collection[str] | None = None) -> list[Row]:
    """Read the answers that ``measure`` wrote, of the named suites or of all; the smoke suite is one category."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        if names is not None and path.stem not in names:
            continue
        found = read_results(path)
        rows += [{**row, "category": "smoke"} for row in found] if path.stem == "smoke" else found
    return rows


def summarise(before: Sequence[Row] | None, after: Sequence[Row] | None) -> dict[str, Any]:
    """Return for each category the rates of both readings with their intervals, and the paired comparison."""
    measured = after or before or ()
    categories = list(dict.fromkeys(row["category"] for row in measured))
    compared = {one.category: one for one in compare_rows(before, after, has_total=False)} if before and after else {}
    summary: dict[str, Any] = {}
    for category in categories:
        summary[category] = {"n": sum(row["category"] == category for row in measured)}
        for name, rows in (("before", before), ("after", after)):
            if rows:
                summary[category][name] = _rates([row for row in rows if row["category"] == category])
        if category in compared:
            summary[category] |= {"difference": compared[category].difference, "p": compared[category].p_value}
    return summary


def _rates(rows: Sequence[Row]) -> dict[str, Any]:
    num_right = sum(map(is_valid, rows))
    low, high = wilson_interval(num_right, len(rows))
    lenient = sum(is_valid(row["lenient"]) for row in rows)
    return {"strict": num_right / len(rows), "low": low, "high": high, "lenient": lenient / len(rows)}


def format_table(summary: dict[str, Any]) -> str:
    """Return the summary as a Markdown table."""
    lines = [
        "| | cases | before | after | after, lenient | difference | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for category, one in summary.items():
        before, after = (_format_rate(one.get(name)) for name in ("before", "after"))
        lenient = f"{one['after']['lenient']:.1%}" if "after" in one else "-"
        difference = "{:+.1%} ({:+.1%} to {:+.1%})".format(*one["difference"]) if "difference" in one else "-"
        p = f"{one['p']:.1g}" if "p" in one else "-"
        lines.append(f"| {category} | {one['n']} | {before} | {after} | {lenient} | {difference} | {p} |")
    return "\n".join(lines)


def _format_rate(rates: dict[str, float] | None) -> str:
    return "-" if rates is None else "{strict:.1%} ({low:.1%} - {high:.1%})".format(**rates)
