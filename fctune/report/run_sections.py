"""Sections of a run's page: subject, data, success criteria and tool-call accuracy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fctune.calls.metrics import rate
from fctune.report.eval_page import make_case
from fctune.report.page import Page, Tone, escape, make_table
from fctune.runs.record import RunRecord
from fctune.runs.results import Accuracy
from fctune.runs.success import Criterion, CriterionStatus

_MAX_CASES = 300
_TONES: dict[CriterionStatus, Tone] = {"PASS": "good", "FAIL": "bad", "not measured": "warn"}

DATA_REPORT = "data_report.json"  # of ``fctune data check --json``, where someone put it into the run's directory
_REPORTED = ("rows", "conversations", "calls", "tools", "defects", "warnings", "duplicates", "near_duplicates")
_COUNTS = {
    "rows": "rows read",
    "invalid": "rows skipped as invalid",
    "overlong": "conversations dropped, too long",
    "cut": "conversations cut",
    "unsupervised": "conversations dropped, nothing to learn",
    "supervised": "tokens that are learnt",
}


def add_subject(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Adds what was trained on what, by which command and versions."""
    run, config = record.run, record.config
    data, versions = config.get("data", {}), run.get("versions", {})
    sources = [
        f"{source['path']}" + (f" x {source['weight']:g}" if source.get("weight", 1.0) != 1.0 else "")
        for source in data.get("sources", ())
    ]
    rows: list[list[object]] = [
        ["model", config.get("model", {}).get("path")],
        ["trained", _describe_method(config.get("adapter")) if config else None],
        ["data", ", ".join(sources)],
        ["tokens a row", data.get("seq_len")],
        ["rows a step", config.get("global_batch_size")],
        ["optimizer", format_value(config.get("optimizer")) if config else None],
        ["command", _command(record)],
        ["ranks", run.get("world_size")],
        ["device", run.get("device")],
        ["started", run.get("started_at")],
        ["ended, or last written", record.ended_at.strftime("%Y-%m-%dT%H:%M:%SZ") if record.ended_at else None],
        ["git revision", run.get("git_revision")],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
        ["directory", str(record.path)],
        ["profiles in it", _list(record.path, "profile/*.json.gz")],
        ["memory when it was full", _list(record.path, "out-of-memory-*.pickle")],
    ]
    said = [row for row in rows if row[1] not in (None, "")]
    page.add_section(f"What was trained{suffix}", _make_facts(said))


def add_data(page: Page, record: RunRecord, suffix: str = "") -> None:
    """Adds where the rows came from, and what became of them."""
    prepared = record.run.get("data")
    if not isinstance(prepared, dict):
        return
    rows: list[list[object]] = [["fingerprint", prepared.get("fingerprint")], ["prepared in", prepared.get("path")]]
    inputs = prepared.get("inputs", {})
    for source in inputs.get("sources", ()):
        rows.append(["source", f"{source.get('path')}, content {source.get('content', 'not hashed')}"])
    counts = _read_json(Path(str(prepared.get("path"))) / "meta.json").get("counts", {})
    rows += [[_COUNTS.get(name, name), count] for name, count in counts.items() if count]
    if report := _read_json(record.path / DATA_REPORT):
        rows += [[f"{DATA_REPORT}: {name.replace('_', ' ')}", report[name]] for name in _REPORTED if name in report]
    page.add_section(f"Data{suffix}", _make_facts(rows))


def format_value(value: Any) -> str:
    """A value of a config to its last digit, as JSON where it is no text."""
    return value if isinstance(value, str) else json.dumps(value)


def _make_facts(rows: list[list[object]]) -> str:
    """HTML of a table of what there is to say, whose first column is of words that stay whole on a phone."""
    return f'<div class="facts">{make_table([("What", False), ("Value", False)], rows)}</div>'


def _describe_method(adapter: dict[str, Any] | None) -> str:
    if not adapter:
        return "all weights"
    kinds = [adapter.get("scaling", "standard"), *(["DoRA"] if adapter.get("dora") else [])]
    base = f", base in {adapter['base']}" if "base" in adapter else ""
    return f"LoRA, rank {adapter['rank']}, alpha {adapter['alpha']:g} ({', '.join(kinds)}){base}"


def _list(folder: Path, pattern: str) -> str:
    return ", ".join(sorted(str(file.relative_to(folder)) for file in folder.glob(pattern)))


def _command(record: RunRecord) -> str:
    """As it was given; for runs that have not kept it, one that is as good, over the config below."""
    if isinstance(argv := record.run.get("command"), list):
        return shlex.join(map(str, argv))
    if not record.config:
        return ""
    recipe = "lora_fc_distributed" if record.config.get("adapter") else "full_fc_distributed"
    ranks = record.run.get("world_size") or 1
    return f"not kept; as good: tune run --nproc_per_node {ranks} recipes/{recipe} --config FILE, with the config here"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def add_success(page: Page, judged: Sequence[Criterion], suffix: str = "", is_over: bool = True) -> None:
    """Adds the table of verdicts; of a run that is not over, they are on what it is so far."""
    body = "".join(
        f'<tr><td class="{_TONES[one.status]}" style="white-space:nowrap">{one.status}</td>'
        f'<td style="min-width:6em">{escape(one.name)}</td><td style="white-space:nowrap">{escape(one.wanted)}</td>'
        f'<td style="min-width:5em">{escape(one.shown)}</td></tr>'
        for one in judged
    )
    head = "<th>CriterionStatus</th><th>What</th><th>Wanted</th><th>Found</th>"
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    lead = "" if is_over else "Where it stands: the run has not said that it ended."
    page.add_section(f"What it had to reach{suffix}", table, lead=lead)


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
