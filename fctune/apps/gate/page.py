"""Page of a gate: the verdicts, what was not run, what treats a fall, and the items that turned wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fctune import __version__
from fctune.apps.gate.lines import JudgedLine, format_points
from fctune.apps.gate.report import GateReport
from fctune.calls.metrics import rate
from fctune.pages.page import (
    NO_WRAP,
    Cases,
    Cell,
    Heading,
    Interval,
    Items,
    Num,
    Page,
    Part,
    Pre,
    Table,
    Text,
    Tile,
    Tone,
    make_settings,
)
from fctune.pages.run_text import format_bounds
from fctune.tasks.judge import Row

_TONES: dict[str, Tone] = {"worse": "bad", "undecided": "warn", "safe": "good"}
_MAX_ITEMS = 50  # of a line
_MAX_CHARACTERS = 2_000
_HEADLINES = {
    "worse": "Worse than its base: a line fell significantly, and by more than its tolerance.",
    "undecided": "Undecided: no line is worse, but not all are shown to have kept within their tolerance.",
    "safe": "Safe: every line that ran kept within its tolerance.",
}

Answers = Mapping[str, Mapping[str, Mapping[str, Row]]]
"""Rows of results by side, suite and case."""


def write_gate_html(report: GateReport, answers: Answers, path: Path) -> None:
    """Write the page of a report."""
    headline = _HEADLINES[report.verdict] if report.lines else "Undecided: no line ran."
    if block := report.describe_block():
        headline += f" {block[0].upper()}{block[1:]}."
    page = Page(f"Gate: {Path(report.tuned).name}", headline, _TONES[report.verdict])
    counts = {verdict: sum(line.verdict == verdict for line in report.lines) for verdict in _TONES}
    tiles: list[Tile] = [(f"{n:,}", verdict, _TONES[verdict] if n else "") for verdict, n in counts.items()]
    page.add_tiles([*tiles, (f"{len(report.not_run):,}", "not run", "warn" if report.not_run else "")])
    if report.warnings:
        page.add_section("Read first", Items(list(report.warnings)))
    _add_lines(page, report)
    _add_remedies(page, report)
    for name, table in report.tables.items():
        page.add_section(name, Table(table["columns"], table["rows"], is_stacked=True), lead=table["lead"])
    if report.not_run:
        rows = [[name, reason] for name, reason in report.not_run.items()]
        page.add_section("Not run", Table(["Line", "Reason"], rows), lead="These count as neither passed nor failed.")
    _add_items(page, report, answers)
    settings = {"base": report.base, "result": report.tuned, **report.settings}
    page.add_section("Settings", make_settings("Setting", settings), is_folded=True)
    page.write(path, f"fctune {__version__}, gate of {report.tuned} against {report.base}")


def _add_lines(page: Page, report: GateReport) -> None:
    rows = []
    for line in report.lines:
        one, (difference, low, high) = line.comparison, line.interval
        before, after = rate(one.num_right_before, one.n), rate(one.num_right_after, one.n)
        label = f"{after['rate']:.1%}, {format_bounds(after)}; before {before['rate']:.1%}"
        rows.append(
            [
                Cell(line.verdict, _TONES[line.verdict], NO_WRAP),
                Cell(line.line.title, style="min-width:11em"),
                one.n,
                f"{before['rate']:.1%}",
                f"{after['rate']:.1%}",
                Interval(after["rate"], after["low"], after["high"], before["rate"], label, width_px=110),
                Cell(f"{format_points(difference)} ({format_points(low)} to {format_points(high)})", style=NO_WRAP),
                f"{one.p_value:.2g}",
                f"{line.p_adjusted:.2g}",
                Cell(line.fall_found, style=NO_WRAP),
            ]
        )
    heads = ["Verdict", "Line", Num("n"), Num("Before"), Num("After"), "0 to 100 %"]
    heads += [Num("Difference (95 %)"), Num("p"), Num("p, Holm"), Num("Smallest fall")]
    tolerance = f"{100 * report.settings['tolerance']:g} points"
    lead = (
        "Shares of right items: the result (dot, with its Wilson interval) and the base (ring) on the same items. The "
        "difference is paired (Tango's interval), p is McNemar's exact test, alone and adjusted for the number of "
        f"lines. Worse: adjusted p below 0.05, and more than {tolerance} lost. Safe: the interval excludes a loss of "
        f"{tolerance}. The last column is the true fall that is found with a probability of 80 %."
    )
    notes = [f"{line.line.name}: {line.line.note}" for line in report.lines if line.line.note]
    page.add_section("Lines", Table(heads, rows, is_stacked=True), *([Items(notes)] if notes else []), lead=lead)


def _add_remedies(page: Page, report: GateReport) -> None:
    parts: list[Part] = []
    for line in report.lines:
        if not line.remedies:
            continue
        parts.append(Heading(line.line.title, line.verdict, _TONES[line.verdict]))
        for remedy in line.remedies:
            parts.append(remedy.finding + ("." if not remedy.overrides else ":"))
            if remedy.overrides:
                parts.append(Pre("\n".join(f"{key}={value}" for key, value in remedy.overrides.items())))
            if remedy.note:
                parts.append(Text(remedy.note, "muted"))
    if report.commands:
        parts += [Heading("Train again"), *(Pre(command) for command in report.commands)]
    if parts:
        page.add_section("Remedies", *parts, lead="What the training rows lack, and the settings that treat it.")


def _add_items(page: Page, report: GateReport, answers: Answers) -> None:
    cases = [case for line in report.lines if line.has_fallen for case in _make_cases(line, answers)]
    if cases:
        lead = f"What the result lost on lines that fell, at most {_MAX_ITEMS} of each, with both answers."
        page.add_section("Turned wrong", Cases(cases, {"line": "Line"}), lead=lead)


def _make_cases(line: JudgedLine, answers: Answers) -> list[dict[str, Any]]:
    before, after = (answers[side][line.line.suite] for side in ("base", "tuned"))
    return [_make_case(line, i, before[i], after[i]) for i in line.comparison.turned_wrong[:_MAX_ITEMS]]


def _make_case(line: JudgedLine, case_id: str, before: Row, after: Row) -> dict[str, Any]:
    question = next((m.get("content") or "" for m in reversed(before["messages"]) if m["role"] == "user"), "")
    parts = [
        ("Expected", _format_calls(before["expected_calls"])),
        ("Base", _format_answer(before)),
        ("Result", _format_answer(after)),
    ]
    return {
        "title": f"{case_id}: {' '.join(question.split())[:160]}",
        "tags": [line.line.name],
        "facets": {"line": line.line.name},
        "parts": [{"heading": heading, "text": text[:_MAX_CHARACTERS], "kind": "text"} for heading, text in parts],
    }


def _format_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    shown = (f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls)
    return "\n".join(shown) or "no call"


def _format_answer(row: Row) -> str:
    if row.get("error") is not None:
        return f"no answer: {row['error']}"
    calls = _format_calls(row["calls"]) + "\n" if row["calls"] else ""
    return calls + (row["answer"] or "(empty)")
