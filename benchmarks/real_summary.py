"""Answers of ``benchmarks.real_model`` before and after training, compared by category."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_public_sets import NO_CALL
from fctune.base.errors import DataError
from fctune.calls.metrics import rate, wilson_interval
from fctune.tasks.evaluation.paired import Comparison, PairedOutcome, compare_outcomes, compare_rows
from fctune.tasks.evaluation.results import read_rows as read_results
from fctune.tasks.judge import Row, is_valid

PROMPTED = "before_prompt"
_WITHOUT_CALL = ("irrelevance", "live_irrelevance", "no_call")  # categories in which no call is right
HEADS = {"before": "before", PROMPTED: "before, BFCL's prompt", "after": "after"}


def read_answers(folder: Path, names: Collection[str] | None = None) -> list[Row]:
    """Read the answers that ``measure`` wrote, of the named suites or of all; the smoke suite is one category."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        if names is not None and path.stem not in names:
            continue
        found = read_results(path)
        rows += [{**row, "category": "smoke"} for row in found] if path.stem == "smoke" else found
    return rows


def summarise(
    before: Sequence[Row] | None, after: Sequence[Row] | None, prompted: Sequence[Row] | None = None
) -> dict[str, Any]:
    """Return for each category the rates of both readings with their intervals, and the paired comparison.

    Args:
        before: Answers of the base with the chat template of the trained model.
        after: Answers of the trained model.
        prompted: Answers of the base to BFCL's own prompt; the comparison is with the better of both.
    """
    measured = after or before or ()
    categories = list(dict.fromkeys(row["category"] for row in measured))
    compared = {one.category: one for one in compare_rows(before, after, has_total=False)} if before and after else {}
    summary: dict[str, Any] = {}
    for category in categories:
        one: dict[str, Any] = {"n": sum(row["category"] == category for row in measured)}
        for name, rows in (("before", before), (PROMPTED, prompted), ("after", after)):
            if chosen := [row for row in rows or () if row["category"] == category]:
                one[name] = _rates(chosen)
        comparison = compared.get(category)
        if comparison is not None and PROMPTED in one:
            one["compared_with"] = max(("before", PROMPTED), key=lambda name: one[name]["strict"])
            if one["compared_with"] == PROMPTED:
                comparison = _compare_by_id(category, prompted or (), after or ())
        if comparison is not None:
            one |= {"difference": comparison.difference, "p": comparison.p_value}
        summary[category] = one
    return summary


def _compare_by_id(category: str, before: Sequence[Row], after: Sequence[Row]) -> Comparison:
    """Compare answers to the same questions in two forms, whose calls may be spelled differently."""
    first, second = ({row["id"]: is_valid(row) for row in rows if row["category"] == category}
                     for rows in (before, after))  # fmt: skip
    if first.keys() != second.keys():
        raise DataError(f"{category}: the answers before and after are to different cases. Measure both again.")
    return compare_outcomes(category, [PairedOutcome(name, first[name], second[name]) for name in second])


def summarise_pairs(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return for each set of pairs how often a fitting tool is refused, and how often an unfit one is called.

    Both are counted leniently: a call in another notation is no refusal. A pair is right if both of its answers are,
    read strictly.
    """
    by_category: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_category.setdefault(row["category"], {})[row["id"].rpartition("-")[2]] = row
    found = {}
    for category, fitting in by_category.items():
        unfit = by_category.get(category + NO_CALL, {})
        numbers = fitting.keys() & unfit.keys()
        if not numbers:
            continue
        verdicts = [(fitting[number]["lenient"]["verdict"], unfit[number]["lenient"]["verdict"]) for number in numbers]
        found[category] = {
            "n": len(numbers),
            "refused": rate(sum(verdict == "missed_call" for verdict, _ in verdicts), len(numbers)),
            "called": rate(sum(verdict in ("false_call", "malformed") for _, verdict in verdicts), len(numbers)),
            "both_right": rate(sum(is_valid(fitting[n]) and is_valid(unfit[n]) for n in numbers), len(numbers)),
        }
    return found


def is_call_due(category: str) -> bool:
    """Return True if the right answers of a category are calls."""
    return category not in _WITHOUT_CALL and not category.endswith(NO_CALL)


def average_by_kind(accuracies: Mapping[str, float]) -> dict[bool, float]:
    """Return the mean accuracies over categories where a call is due (True) and where none is (False).

    Args:
        accuracies: Share of right answers by category.
    """
    groups: dict[bool, list[float]] = {}
    for category, accuracy in accuracies.items():
        groups.setdefault(is_call_due(category), []).append(accuracy)
    return {is_due: statistics.mean(group) for is_due, group in groups.items()}


def balance_accuracy(accuracies: Mapping[str, float]) -> float:
    """Return the harmonic mean of the accuracies where a call is due and where none is.

    A plain mean rewards a model that never calls; this one is then 0. If all categories are of one kind, it is their
    mean.
    """
    return statistics.harmonic_mean(list(average_by_kind(accuracies).values()))


def format_pairs(pairs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return pairs by model as a Markdown table; empty without any.

    Args:
        pairs: ``summarise_pairs`` of each model by its name.
    """
    lines = [
        "| | | pairs | refuses where a tool fits | calls where none fits | both right |",
        "|---|---|---|---|---|---|",
    ]
    for model, sets in pairs.items():
        for name, one in sets.items():
            cells = [
                "{rate:.1%} ({low:.1%} - {high:.1%})".format(**one[key]) for key in ("refused", "called", "both_right")
            ]
            lines.append(f"| {name} | {HEADS[model]} | {one['n']} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _rates(rows: Sequence[Row]) -> dict[str, Any]:
    num_right = sum(map(is_valid, rows))
    low, high = wilson_interval(num_right, len(rows))
    lenient = sum(is_valid(row["lenient"]) for row in rows)
    return {"strict": num_right / len(rows), "low": low, "high": high, "lenient": lenient / len(rows)}


def format_table(summary: dict[str, Any]) -> str:
    """Return the summary as a Markdown table; every lenient reading is shown where the base was asked in two ways."""
    columns = [("before", "strict"), ("after", "strict"), ("after", "lenient")]
    if any(PROMPTED in one for one in summary.values()):
        columns = [(name, reading) for name in HEADS for reading in ("strict", "lenient")]
    heads = [HEADS[name] if reading == "strict" else f"{HEADS[name]}, lenient" for name, reading in columns]
    lines = [f"| | cases | {' | '.join(heads)} | difference | p |", "|---" * (len(heads) + 4) + "|"]
    for category, one in summary.items():
        cells = [_format_rate(one.get(name), reading) for name, reading in columns]
        difference = "{:+.1%} ({:+.1%} to {:+.1%})".format(*one["difference"]) if "difference" in one else "-"
        p = f"{one['p']:.1g}" if "p" in one else "-"
        lines.append(f"| {category} | {one['n']} | {' | '.join(cells)} | {difference} | {p} |")
    return "\n".join(lines)


def _format_rate(rates: dict[str, float] | None, reading: str) -> str:
    if rates is None:
        return "-"
    return "{strict:.1%} ({low:.1%} - {high:.1%})".format(**rates) if reading == "strict" else f"{rates[reading]:.1%}"
