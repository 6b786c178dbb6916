"""The page of an evaluation: rates with intervals, what went wrong, and every failure to look at."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.calls.metrics import VERDICTS
from fctune.report.page import Page, Tone, escape, make_table

_MAX_CASES = 1_000
_MAX_LETTERS = 4_000
_NUM_CONFUSIONS = 20
_NOUNS = {
    "accuracy": "right",
    "well_formed": "well-formed answers",
    "tool_selection": "right tools, where a call is due",
    "call_count": "right number of calls, where one is due",
    "missed_call": "missed calls, where one is due",
    "abstention": "no call, where none is due",
    "false_call": "false calls, where none is due",
    "schema_valid": "calls that obey their schema",
}

Row = Mapping[str, Any]


def write_eval_html(summary: Mapping[str, Any], rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes the page of a run's summary and rows, as ``fctune.evaluation`` has them."""
    footer = f"fctune {summary['settings'].get('fctune', '')}, results of {summary['num_cases']:,} cases"
    make_eval_page(summary, rows).write(path, footer)


def make_eval_page(summary: Mapping[str, Any], rows: Sequence[Row]) -> Page:
    """The page: how often it was right, how it was wrong, and the failures."""
    failures = [row for row in rows if row["verdict"] != "correct"]
    title = f"Tool calls: {summary['model']} on {summary['suite']}"
    page = Page(title, *_judge(summary, len(failures)))
    _add_tiles(page, summary, rows, len(failures))
    _add_accuracy(page, summary)
    _add_verdicts(page, summary)
    _add_confusions(page, rows)
    _add_failures(page, failures)
    _add_rates(page, summary)
    if summary["not_run"]:
        table = make_table([("Category", False), ("Why", False)], list(summary["not_run"].items()))
        page.add_section("Not run", table, lead="Named by the suite and left out; they count as nothing.")
    settings = [
        [key, value if isinstance(value, str | int | float) else json.dumps(value)]
        for key, value in summary["settings"].items()
    ]
    page.add_section("Settings", make_table([("Setting", False), ("Value", False)], settings))
    return page


def _judge(summary: Mapping[str, Any], num_failures: int) -> tuple[str, Tone]:
    if "all" not in summary["scores"]:
        return f"{num_failures:,} of {summary['num_cases']:,} cases went wrong; rates are by category.", ""
    rate = summary["scores"]["all"]["rates"]["accuracy"]
    return f"{_percent(rate)} of {rate['n']:,} cases right (95 % interval {_bounds(rate)}).", ""


def _add_tiles(page: Page, summary: Mapping[str, Any], rows: Sequence[Row], num_failures: int) -> None:
    num_lenient = sum(row["lenient"]["verdict"] == "correct" for row in rows)
    lost, cut = summary["num_no_answer"], summary["num_cut"]
    page.add_tiles(
        [
            (f"{summary['num_cases']:,}", "cases", ""),
            (f"{len(rows) - num_failures:,}", "right, read strictly", "good"),
            (f"{num_lenient:,}", "right, read as servers read", ""),
            (f"{num_failures:,}", "wrong", "bad" if num_failures else "good"),
            (f"{lost:,}", "without an answer", "bad" if lost else ""),
            (f"{cut:,}", "cut at the limit of tokens", "warn" if cut else ""),
        ]
    )


def _add_accuracy(page: Page, summary: Mapping[str, Any]) -> None:
    official = summary.get("official", {})
    heads = [("Category", False), ("n", True), ("Right", True), ("95 % interval", True), ("0 to 100 %", False)]
    heads += [("Lenient", True), *([("BFCL", True), ("Typed", True)] if official else [])]
    body = []
    for category, scores in summary["scores"].items():
        rate, lenient = scores["rates"]["accuracy"], summary["lenient"][category]["rates"]["accuracy"]
        cells = [escape(category), escape(rate["n"]), _percent(rate), _bounds(rate), _draw_interval(rate, lenient)]
        cells += [
            _percent(lenient),
            *([_percent(official[category]), _percent(summary["typed"][category])] if official else []),
        ]
        marks = ['class="num"' if is_number else "" for _, is_number in heads]
        body.append("<tr>" + "".join(f"<td {m}>{c}</td>" for m, c in zip(marks, cells, strict=True)) + "</tr>")
    head = "".join(f"<th{' class=num' if is_number else ''}>{escape(name)}</th>" for name, is_number in heads)
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    lead = (
        "Wilson intervals of the strict reading, which takes the model's own format and nothing else (dot, bar); the "
        "lenient one reads as serving engines do (ring)."
    )
    if official:
        lead += (
            " BFCL is the benchmark's own verdict, to which a malformed call is as good as none; typed is exact match."
        )
    page.add_section("Accuracy", table, lead=lead)


def _draw_interval(rate: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    low, high, middle, lenient = (
        f"{6 + 188 * share:.1f}" for share in (rate["low"], rate["high"], rate["rate"], other["rate"])
    )
    label = f"{_percent(rate)}, {_bounds(rate)}; lenient {_percent(other)}"
    return (
        f'<svg class="interval" viewBox="0 0 200 16" role="img" aria-label="{escape(label)}">'
        '<line class="track" x1="6" x2="194" y1="8" y2="8"/>'
        f'<line class="range" x1="{low}" x2="{high}" y1="8" y2="8"/>'
        f'<circle class="other" cx="{lenient}" cy="8" r="5"/>'
        f'<circle class="point" cx="{middle}" cy="8" r="3"/></svg>'
    )


def _add_verdicts(page: Page, summary: Mapping[str, Any]) -> None:
    counts = {category: scores["verdicts"] for category, scores in summary["scores"].items()}
    seen = [verdict for verdict in VERDICTS if any(row[verdict] for row in counts.values())]
    page.add_section(
        "What became of the cases",
        _make_heat("Category", list(counts), seen, lambda category, verdict: counts[category][verdict]),
        lead="Cases by category and error class, each in one class; the shade is the share of the category.",
    )


def _add_confusions(page: Page, rows: Sequence[Row]) -> None:
    pairs = Counter((row["verdict"], row["lenient"]["verdict"]) for row in rows)
    strict = [verdict for verdict in VERDICTS if any(pair[0] == verdict for pair in pairs)]
    lenient = [verdict for verdict in VERDICTS if any(pair[1] == verdict for pair in pairs)]
    readings = _make_heat("Strict, lenient", strict, lenient, lambda first, second: pairs[first, second])
    tools: Counter[tuple[str, str]] = Counter()
    for row in rows:
        due = Counter(call["name"] for call in row["expected_calls"])
        made = Counter(call["name"] for call in row["calls"])
        missing, extra = list((due - made).elements()), list((made - due).elements())
        if row["verdict"] in ("wrong_name", "false_call", "missed_call", "wrong_count"):
            for place in range(max(len(missing), len(extra))):
                pair = [side[place] if place < len(side) else "no call" for side in (missing, extra)]
                tools[pair[0], pair[1]] += 1
    parts = [f"<h3>Strict and lenient reading</h3>{readings}"]
    if tools:
        most = [[count, due, made[:80]] for (due, made), count in tools.most_common(_NUM_CONFUSIONS)]
        table = make_table([("Calls", True), ("Due", False), ("Made instead", False)], most)
        rest = len(tools) - len(most)
        more = f'<p class="muted">and {rest:,} more pairs</p>' if rest > 0 else ""
        parts.append(f"<h3>Tools taken for one another</h3>{table}{more}")
    page.add_section("Confusions", *parts)


def _make_heat(corner: str, names: Sequence[str], columns: Sequence[str], count: Any) -> str:
    head = f"<th>{escape(corner)}</th>" + "".join(f'<th class="num">{escape(c)}</th>' for c in columns)
    body = []
    for name in names:
        counts = [count(name, column) for column in columns]
        total = sum(counts) or 1
        cells = "".join(
            f'<td class="num heat{" right" if column == "correct" else ""}" style="--heat: {n / total:.3f}">'
            f"{escape(n) if n else ''}</td>"
            for n, column in zip(counts, columns, strict=True)
        )
        body.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _add_failures(page: Page, failures: Sequence[Row]) -> None:
    if not failures:
        page.add_section("Failures", "<p>None.</p>")
        return
    facets = {"verdict": "Error class", "category": "Category", "tool": "Tool due"}
    lead = "Each with its prompt, the calls that were due, those that were made, and what differs."
    if len(failures) > _MAX_CASES:
        lead += f" The first {_MAX_CASES:,} of {len(failures):,}; the results file holds all."
    shown = page.make_cases([make_case(row) for row in failures[:_MAX_CASES]], facets)
    page.add_section("Failures", shown, lead=lead)


def make_case(row: Row) -> dict[str, Any]:
    """A failure for ``Page.make_cases``, with the facets verdict, category and tool."""
    due, made = _show_calls(row["expected_calls"]), _show_calls(row["calls"])
    asked = next((m.get("content") or "" for m in reversed(row["messages"]) if m["role"] == "user"), "")
    lenient = row["lenient"]["verdict"]
    parts = [
        _part("What differs", "\n".join(row["differences"]) or "nothing that the calls show", "list"),
        {**_part("Expected", due, "code"), "other": made},
        {**_part("Got", made, "code"), "other": due},
        _part("Answer, as it came", row["answer"] or row.get("error") or "(empty)", "text"),
        _part("Prompt", "\n\n".join(map(_show_message, row["messages"])), "text"),
    ]
    if row.get("tools"):
        parts.append(_part("Tools on offer", "\n".join(_show_tool(tool["function"]) for tool in row["tools"]), "list"))
    tags = [row["verdict"], *([f"lenient: {lenient}"] if lenient != row["verdict"] else [])]
    return {
        "title": f"{row['id']}: {' '.join(asked.split())[:160]}",
        "tags": tags + (["cut"] if row.get("is_cut") else []),
        "facets": {
            "verdict": row["verdict"],
            "category": row["category"],
            "tool": [call["name"] for call in row["expected_calls"]] or ["none"],
        },
        "parts": parts,
    }


def _part(heading: str, text: str, kind: str) -> dict[str, str]:
    if len(text) > _MAX_LETTERS:
        text = f"{text[:_MAX_LETTERS]}\n... {len(text) - _MAX_LETTERS:,} letters more"
    return {"heading": heading, "text": text, "kind": kind}


def _show_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return "no call"
    lines = []
    for call in calls:
        arguments = [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in call["arguments"].items()]
        lines.append("\n".join([call["name"], *arguments]))
    return "\n".join(lines)


def _show_message(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [message["content"]] if message.get("content") else []
    return f"{message['role']}: " + "\n".join(said + ([_show_calls(calls)] if calls else []))


def _show_tool(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    shown = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any') if isinstance(schema, dict) else 'any'}"
        for name, schema in properties.items()
    ]
    return f"{function['name']}({', '.join(shown)})"


def _add_rates(page: Page, summary: Mapping[str, Any]) -> None:
    parts = []
    for category, scores in summary["scores"].items():
        rows = [
            [_NOUNS.get(name, name.replace("_", " ")), rate["n"], _percent(rate), _bounds(rate)]
            for name, rate in scores["rates"].items()
            if rate["rate"] is not None
        ]
        table = make_table([("Rate", False), ("of", True), ("", True), ("95 % interval", True)], rows)
        mark = " open" if category == "all" else ""
        parts.append(f"<details{mark}><summary>{escape(category)}</summary>{table}</details>")
    page.add_section("All rates", *parts, lead="Strict reading. Precision and recall count calls and arguments.")


def _percent(rate: Mapping[str, Any]) -> str:
    return "" if rate["rate"] is None else f"{rate['rate']:.1%}"


def _bounds(rate: Mapping[str, Any]) -> str:
    return f"{rate['low']:.1%} - {rate['high']:.1%}"
