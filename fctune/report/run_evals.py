"""Tool-call accuracy of a run: results of its base and of what it left, found by the model they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.metrics import rate
from fctune.errors import DataError
from fctune.evaluation.paired import Comparison, compare_rows
from fctune.evaluation.results import Row, read_rows, read_settings
from fctune.report.eval_page import make_case
from fctune.report.page import Page, escape, make_table
from fctune.report.run_data import RunRecord

_PLACES = ("*.summary.json", "eval/*.summary.json", "eval/*/*.summary.json")
_MAX_CASES = 300


@dataclass(frozen=True, slots=True)
class Results:
    """One evaluation on disk."""

    path: Path  # results.jsonl
    suite: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A suite under what the run left, and under its base where that was measured on the same cases."""

    suite: str
    after: Results
    before: Results | None

    @property
    def has_total(self) -> bool:
        """Whether categories may be taken together; a benchmark's may not."""
        return not any("bfcl" in row for row in self.after.rows)

    def rates(self) -> list[tuple[str, dict[str, Any]]]:
        """The strict rate of each category after the run, with its interval."""
        categories = sorted({row["category"] for row in self.after.rows} - {"all"})
        found = []
        for name in [*categories, *(["all"] if self.has_total or not categories else [])]:
            held = [row["verdict"] == "correct" for row in self.after.rows if name in ("all", row["category"])]
            found.append((name, rate(sum(held), len(held))))
        return found

    def compare(self) -> list[Comparison]:
        """The categories before and after; none without results of the base."""
        return compare_rows(self.before.rows, self.after.rows, self.has_total) if self.before else []


def read_results(path: str | Path) -> Results:
    """The results of a file that ``eval.tool_calls`` wrote.

    Raises:
        DataError: it is none, or holds none.
    """
    path = Path(path)
    rows = read_rows(path, is_partial=False)
    if not rows:
        raise DataError(f"{path}: holds no results.")
    return Results(path, str((read_settings(path) or {}).get("suite", path.stem)), rows)


def find_accuracies(record: RunRecord) -> list[Accuracy]:
    """Results in the run's directory, beside it, and in ``eval/`` of both, of its exports and of its base.

    Of a suite that was run more than once the newest counts; the base must have been asked the same cases. Results that
    are older than the run are of an earlier one, which was moved to make room.
    """
    after: dict[str, Path] = {}
    before: list[Path] = []
    base = record.config.get("model", {}).get("path")
    for summary_path in sorted(_summaries(record.path), key=lambda path: path.stat().st_mtime):
        try:
            summary = json.loads(summary_path.read_text(encoding="utf-8"))
            model, adapter, suite = Path(summary["model"]), summary.get("adapter"), str(summary["suite"])
            places = [model, Path(adapter)] if adapter else [model]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        rows = summary_path.with_name(summary_path.name.removesuffix(".summary.json") + ".jsonl")
        if not rows.is_file():
            continue
        if any(_is_inside(place, record.path) for place in places):
            if not record.began_after(summary_path):
                after[suite] = rows
        elif adapter is None and base is not None and _is_same(model, base):
            before.append(rows)
    found = []
    for _, rows in sorted(after.items()):
        base_rows = next((path for path in reversed(before) if _same_cases(path, rows)), None)
        found.append(pair_results(rows, base_rows))
    return found


def pair_results(after: str | Path, before: str | Path | None) -> Accuracy:
    """Two results files as one accuracy."""
    results = read_results(after)
    return Accuracy(results.suite, results, read_results(before) if before else None)


def add_accuracy(page: Page, accuracy: Accuracy) -> None:
    """Adds the categories with their intervals, and the failures to look at."""
    compared = {row.category: row for row in accuracy.compare()}
    heads = [("Category", False), ("n", True)]
    heads += [("Before", True), ("95 % interval", True)] if compared else []
    heads += [("After" if compared else "Right", True), ("95 % interval", True), ("0 to 100 %", False)]
    heads += [("Difference", True), ("95 % interval", True), ("p", True)] if compared else []
    body = []
    for category, after in accuracy.rates():
        cells = [escape(category), escape(after["n"])]
        before = None
        if compared:
            row = compared[category]
            before = rate(row.num_right_before, row.n)
            cells += [f"{before['rate']:.1%}", _bounds(before)]
        cells += [f"{after['rate']:.1%}", _bounds(after), _draw(after, before)]
        if compared:
            difference, low, high = row.difference
            p = "&lt; 0.0001" if row.p_value < 0.0001 else f"{row.p_value:.4f}"
            cells += [f"{difference:+.1%}", f"{low:+.1%} to {high:+.1%}", p]
        marks = [' class="num"' if is_number else "" for _, is_number in heads]
        body.append("<tr>" + "".join(f"<td{m}>{c}</td>" for m, c in zip(marks, cells, strict=True)) + "</tr>")
    head = "".join(f"<th{' class=num' if is_number else ''}>{escape(name)}</th>" for name, is_number in heads)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    lead = "Strict reading, Wilson intervals (dot, bar)."
    if compared:
        lead += " Before (ring) is the base on the same cases; differences are paired (Tango), p is McNemar's."
    page.add_section(f"Tool-call accuracy: {accuracy.suite}", table, *_make_failures(page, accuracy), lead=lead)


def _make_failures(page: Page, accuracy: Accuracy) -> list[str]:
    failures = [row for row in accuracy.after.rows if row["verdict"] != "correct"]
    if not failures:
        return ["<h3>Failures</h3><p>None.</p>"]
    shown = f"<p>The first {_MAX_CASES:,} of {len(failures):,}; {escape(accuracy.after.path.name)} holds all.</p>"
    facets = {"verdict": "Error class", "category": "Category", "tool": "Tool due"}
    try:
        cases = page.make_cases([make_case(row) for row in failures[:_MAX_CASES]], facets)
    except KeyError:  # results of an earlier version, whose rows say less
        rows = [[row["id"], row["category"], row["verdict"]] for row in failures[:_MAX_CASES]]
        cases = make_table([("Case", False), ("Category", False), ("Error class", False)], rows)
    return [f"<h3>Failures: {len(failures):,}</h3>", shown if len(failures) > _MAX_CASES else "", cases]


def _draw(after: dict[str, Any], before: dict[str, Any] | None) -> str:
    low, high, middle = (f"{6 + 188 * after[key]:.1f}" for key in ("low", "high", "rate"))
    label = f"{after['rate']:.1%}, {_bounds(after)}" + ("" if before is None else f"; before {before['rate']:.1%}")
    ring = "" if before is None else f'<circle class="other" cx="{6 + 188 * before["rate"]:.1f}" cy="8" r="5"/>'
    return (
        f'<svg class="interval" style="width:110px" viewBox="0 0 200 16" role="img" aria-label="{escape(label)}">'
        '<line class="track" x1="6" x2="194" y1="8" y2="8"/>'
        f'<line class="range" x1="{low}" x2="{high}" y1="8" y2="8"/>{ring}'
        f'<circle class="point" cx="{middle}" cy="8" r="3"/></svg>'
    )


def _bounds(of: dict[str, Any]) -> str:
    return f"{of['low']:.1%} - {of['high']:.1%}"


def _summaries(run: Path) -> Iterator[Path]:
    for folder in (run, run.resolve().parent):
        for place in _PLACES:
            yield from folder.glob(place)


def _is_inside(place: Path, run: Path) -> bool:
    return place.resolve().is_relative_to(run.resolve())


def _is_same(model: Path, base: str) -> bool:
    return model.resolve() == Path(base).resolve()


def _same_cases(before: Path, after: Path) -> bool:
    first, second = read_settings(before) or {}, read_settings(after) or {}
    keys: Sequence[str] = ("suite", "cases_digest", "max_new_tokens")
    if not first and not second:  # results without settings are compared by their cases alone
        return {row["id"] for row in read_rows(before)} == {row["id"] for row in read_rows(after)}
    return all(first.get(key) == second.get(key) for key in keys)
