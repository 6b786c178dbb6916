"""Page of an evaluation: accuracy with intervals, error classes, confusions and every failure."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fctune.calls.judge import ERROR_KINDS
from fctune.config.intervals import format_count
from fctune.pages.page import Cell, Page, Tone, draw_interval, escape, make_count_tile, make_table
from fctune.pages.run_text import format_bounds
from fctune.tasks.evaluation.judging import is_valid

_MAX_CASES = 1_000
_MAX_CHARACTERS = 4_000
_NUM_CONFUSIONS = 20
_RATE_NAMES = {
    "accuracy": "correct",
    "well_formed": "well-formed answers",
    "tool_selection": "correct tools, where a call is expected",
    "call_count": "correct number of calls, where a call is expected",
    "missed_call": "missed calls, where a call is expected",
    "abstention": "no call, where none is expected",
    "false_call": "false calls, where none is expected",
    "schema_valid": "calls that match their tool's schema",
}

FACETS = {"verdict": "Error class", "category": "Category", "tool": "Expected tool"}  # filters of ``make_case``

Row = Mapping[str, Any]


def write_eval_html(summary: Mapping[str, Any], rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Write the page of an evaluation from its summary and rows, as ``fctune.tasks.evaluation`` returns them."""
    footer = f"fctune {summary['settings'].get('fctune', '')}, results of {format_count(summary['num_cases'], 'case')}"
    make_eval_page(summary, rows).write(path, footer)


def make_eval_page(summary: Mapping[str, Any], rows: Sequence[Row]) -> Page:
    """Make the page of an evaluation; arguments as in ``write_eval_html``."""
    failures = [row for row in rows if not is_valid(row)]
    title = f"Tool calls: {summary['model']} on {summary['suite']}"
    page = Page(title, _headline(summary, len(failures)))
    _add_tiles(page, summary, rows, len(failures))
    _add_accuracy(page, summary)
    _add_leaderboard(page, summary)
    _add_error_classes(page, summary)
    _add_confusions(page, rows)
    _add_failures(page, failures)
    _add_rates(page, summary)
    _add_reasoning(page, summary)
    if summary["not_run"]:
        table = make_table([("Category", False), ("Reason", False)], list(summary["not_run"].items()))
        page.add_section("Not run", table, lead="Categories of the suite that were skipped; they are in no figure.")
    settings = [
        [key, value if isinstance(value, str | int | float) else json.dumps(value)]
        for key, value in summary["settings"].items()
    ]
    page.add_section("Settings", make_table([("Setting", False), ("Value", False)], settings))
    return page


def _headline(summary: Mapping[str, Any], num_failures: int) -> str:
    if "all" not in summary["scores"]:
        return f"{num_failures:,} of {format_count(summary['num_cases'], 'case')} failed; rates are given by category."
    rate = summary["scores"]["all"]["rates"]["accuracy"]
    return f"{_percent(rate)} of {format_count(rate['n'], 'case')} correct (95 % interval {format_bounds(rate)})."


def _add_tiles(page: Page, summary: Mapping[str, Any], rows: Sequence[Row], num_failures: int) -> None:
    num_right, num_lenient = len(rows) - num_failures, sum(is_valid(row["lenient"]) for row in rows)
    num_lost, num_cut = summary["num_no_answer"], summary["num_cut"]
    tiles: list[tuple[str, str, Tone]] = [
        make_count_tile(summary["num_cases"], "case"),
        (f"{num_right:,}", "correct, strict reading", "good" if num_right else ""),
        (f"{num_lenient:,}", "correct, lenient reading", ""),
        (f"{num_failures:,}", "failed", "bad" if num_failures else ""),
        (f"{num_lost:,}", "without an answer", "bad" if num_lost else ""),
        (f"{num_cut:,}", "cut off at the token limit", "warn" if num_cut else ""),
    ]
    page.add_tiles(tiles)


def _add_accuracy(page: Page, summary: Mapping[str, Any]) -> None:
    typed = summary.get("typed", {})
    heads = [("Category", False), ("n", True), ("Correct", True), ("95 % interval", True), ("0 to 100 %", False)]
    heads += [("Lenient", True), *([("Typed", True)] if typed else [])]
    rows = []
    for category, scores in _distinct_scores(summary).items():
        rate, lenient = scores["rates"]["accuracy"], summary["lenient"][category]["rates"]["accuracy"]
        label = f"{_percent(rate)}, {format_bounds(rate)}; lenient {_percent(lenient)}"
        drawing = Cell(draw_interval(rate, lenient["rate"], label), is_html=True)
        cells = [category, rate["n"], _percent(rate), format_bounds(rate), drawing, _percent(lenient)]
        cells += [_percent(typed[category])] if typed else []
        rows.append(cells)
    lead = (
        "The strict reading accepts the model's own call format only (dot, with its Wilson interval as a bar); the "
        "lenient one parses as serving engines do (ring)."
    )
    if typed:
        lead += (
            " Correct is the benchmark's own judgement, which treats a malformed call as no call; typed is exact match."
        )
    page.add_section("Accuracy", make_table(heads, rows, is_stacked=True), lead=lead)


def _add_leaderboard(page: Page, summary: Mapping[str, Any]) -> None:
    if (found := summary.get("leaderboard")) is None:
        return
    rows = [
        [name.replace("_", " "), f"{found['weights'][name]} %", f"{share:.1%}"]
        for name, share in found["parts"].items()
    ]
    lead = (
        f"{found['overall']:.2%} overall, with the weights of the leaderboard "
        f"({summary.get('release') or 'version unknown'}), where a category that is not measured counts as 0."
    )
    if missing := found["not_measured"]:
        lead += f" Not measured: {', '.join(missing)}."
    if incomplete := found["incomplete"]:
        lead += f" Measured on fewer cases than the leaderboard's: {', '.join(incomplete)}."
    table = make_table([("Part", False), ("Weight", True), ("Accuracy", True)], rows)
    page.add_section("Leaderboard", table, lead=lead)


def _distinct_scores(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores by category; without those of all cases if there is one category, which has the same."""
    scores = dict(summary["scores"])
    if len(scores) == 2:
        scores.pop("all", None)
    return scores


def _add_error_classes(page: Page, summary: Mapping[str, Any]) -> None:
    counts = {category: scores["verdicts"] for category, scores in _distinct_scores(summary).items()}
    seen = [verdict for verdict in ERROR_KINDS if any(row[verdict] for row in counts.values())]
    page.add_section(
        "Error classes",
        _make_heatmap("Category", list(counts), seen, lambda category, verdict: counts[category][verdict]),
        lead="Cases by category and error class, each in exactly one class; the shade is the share of the category.",
    )


def _add_confusions(page: Page, rows: Sequence[Row]) -> None:
    pairs = Counter((row["verdict"], row["lenient"]["verdict"]) for row in rows)
    strict = [verdict for verdict in ERROR_KINDS if any(pair[0] == verdict for pair in pairs)]
    lenient = [verdict for verdict in ERROR_KINDS if any(pair[1] == verdict for pair in pairs)]
    readings = _make_heatmap("Strict / lenient", strict, lenient, lambda first, second: pairs[first, second])
    tools: Counter[tuple[str, str]] = Counter()
    for row in rows:
        expected = Counter(call["name"] for call in row["expected_calls"])
        made = Counter(call["name"] for call in row["calls"])
        missing, extra = list((expected - made).elements()), list((made - expected).elements())
        if row["verdict"] in ("wrong_name", "false_call", "missed_call", "wrong_count"):
            tools.update(itertools.zip_longest(missing, extra, fillvalue="no call"))
    parts = [f"<h3>Strict and lenient reading</h3>{readings}"]
    if tools:
        most = [[count, expected, made[:80]] for (expected, made), count in tools.most_common(_NUM_CONFUSIONS)]
        table = make_table([("Calls", True), ("Expected", False), ("Called instead", False)], most)
        rest = len(tools) - len(most)
        more = f'<p class="muted">and {format_count(rest, "more pair")}</p>' if rest > 0 else ""
        parts.append(f"<h3>Confused tools</h3>{table}{more}")
    page.add_section("Confusions", *parts)


def _make_heatmap(corner: str, names: Sequence[str], columns: Sequence[str], count: Callable[[str, str], int]) -> str:
    rows = []
    for name in names:
        counts = [count(name, column) for column in columns]
        total = sum(counts) or 1
        cells = [
            Cell(n or "", classes="heat right" if column == "correct" else "heat", style=f"--heat: {n / total:.3f}")
            for n, column in zip(counts, columns, strict=True)
        ]
        rows.append([name.replace("_", " ") if name in ERROR_KINDS else name, *cells])
    return make_table([(corner, False), *((column.replace("_", " "), True) for column in columns)], rows)


def _add_failures(page: Page, failures: Sequence[Row]) -> None:
    if not failures:
        page.add_section("Failures", "<p>None.</p>")
        return
    lead = "Each case with its prompt, the expected calls, the calls made, and the differences."
    if len(failures) > _MAX_CASES:
        lead += f" The first {_MAX_CASES:,} of {len(failures):,} are shown; the results file contains all of them."
    page.add_section("Failures", page.make_cases([make_case(row) for row in failures[:_MAX_CASES]], FACETS), lead=lead)


def make_case(row: Row) -> dict[str, Any]:
    """Convert a failed row to a case of ``Page.make_cases``, with the facets of ``FACETS``."""
    expected, made = _format_calls(row["expected_calls"]), _format_calls(row["calls"])
    question = next((m.get("content") or "" for m in reversed(row["messages"]) if m["role"] == "user"), "")
    lenient = row["lenient"]["verdict"]
    parts = [
        _part("Differences", "\n".join(row["differences"]) or "none in the calls", "list"),
        {**_part("Expected", expected, "code"), "other": made, "mark": "lacking"},
        {**_part("Got", made, "code"), "other": expected, "mark": "wrong"},
        *_reasoning_parts(row),
        _part("Raw answer", row["answer"] or row.get("error") or "(empty)", "text"),
        _part("Prompt", "\n\n".join(map(_format_message, row["messages"])), "text"),
    ]
    if row.get("tools"):
        tools = "\n".join(_format_tool(tool["function"]) for tool in row["tools"])
        parts.append(_part("Available tools", tools, "list"))
    tags = [row["verdict"], *([f"lenient: {lenient}"] if lenient != row["verdict"] else [])]
    return {
        "title": f"{row['id']}: {' '.join(question.split())[:160]}",
        "tags": tags + (["cut off"] if row.get("is_cut") else []),
        "facets": {
            "verdict": row["verdict"],
            "category": row["category"],
            "tool": [call["name"] for call in row["expected_calls"]] or ["none"],
        },
        "parts": parts,
    }


def _reasoning_parts(row: Row) -> list[dict[str, str]]:
    """Return the reasoning of an answer, or of all answers of a conversation, folded; nothing without any."""
    answers = [step for turn in row["turns"] for step in turn] if "turns" in row else [row]
    found = [reasoning for answer in answers if (reasoning := answer.get("reasoning")) is not None]
    if not any(reasoning["text"] for reasoning in found):
        return []
    counts = [reasoning["num_tokens"] for reasoning in found]
    notes = [] if None in counts else [f"{format_count(sum(counts), 'token')}"]
    notes += [] if all(reasoning["is_closed"] for reasoning in found) else ["never closed"]
    heading = f"Reasoning ({', '.join(notes)})" if notes else "Reasoning"
    return [_part(heading, "\n\n".join(reasoning["text"] for reasoning in found), "folded")]


def _part(heading: str, text: str, kind: str) -> dict[str, str]:
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}\n... {len(text) - _MAX_CHARACTERS:,} more characters"
    return {"heading": heading, "text": text, "kind": kind}


def _format_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    if not calls:
        return "no call"
    lines = []
    for call in calls:
        arguments = [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in call["arguments"].items()]
        lines.append("\n".join([call["name"], *arguments]))
    return "\n".join(lines)


def _format_message(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = [f"({message['reasoning_content']})"] if message.get("reasoning_content") else []
    text += [message["content"]] if message.get("content") else []
    return f"{message['role']}: " + "\n".join(text + ([_format_calls(calls)] if calls else []))


def _format_tool(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    shown = [
        f"{name}{'' if name in required else '?'}: {schema.get('type', 'any') if isinstance(schema, dict) else 'any'}"
        for name, schema in properties.items()
    ]
    return f"{function['name']}({', '.join(shown)})"


def _add_rates(page: Page, summary: Mapping[str, Any]) -> None:
    parts, scored = [], _distinct_scores(summary)
    for category, scores in scored.items():
        rows = [
            [_RATE_NAMES.get(name, name.replace("_", " ")), rate["n"], _percent(rate), format_bounds(rate)]
            for name, rate in scores["rates"].items()
            if rate["rate"] is not None
        ]
        table = make_table([("Rate", False), ("n", True), ("Value", True), ("95 % interval", True)], rows)
        is_open = " open" if category == "all" or len(scored) == 1 else ""
        parts.append(f"<details{is_open}><summary>{escape(category)}</summary>{table}</details>")
    page.add_section("All rates", *parts, lead="Strict reading. Precision and recall are over calls and arguments.")


def _add_reasoning(page: Page, summary: Mapping[str, Any]) -> None:
    if not (by_category := summary.get("reasoning")):
        return
    heads = [("Category", False), ("Answers", True), ("That reason", True), ("Mean tokens", True)]
    heads += [("Never closed", True), ("Of them cut off", True)]
    rows = [
        [
            category,
            use["reasoned"]["n"],
            _percent(use["reasoned"]),
            "" if use["mean_tokens"] is None else f"{use['mean_tokens']:,.1f}",
            f"{use['unclosed']['successes']:,} ({_percent(use['unclosed'])})",
            f"{use['cut']['successes']:,}",
        ]
        for category, use in by_category.items()
    ]
    lead = (
        "Reasoning is never judged: a call inside it does not count. An answer whose reasoning never closes has no "
        "calls; where the token limit cut it off, raise --max-new-tokens."
    )
    page.add_section("Reasoning", make_table(heads, rows), lead=lead)


def _percent(rate: Mapping[str, Any]) -> str:
    return "" if rate["rate"] is None else f"{rate['rate']:.1%}"
