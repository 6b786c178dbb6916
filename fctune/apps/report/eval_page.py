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
from fctune.pages.page import (
    Cases,
    Fold,
    Heading,
    Interval,
    Num,
    Page,
    Part,
    Table,
    Text,
    Tile,
    make_count_tile,
    make_heat_row,
    make_settings,
)
from fctune.pages.run_text import format_bounds
from fctune.tasks.judge import is_valid

MAX_CASES = 1_000
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
    failures = [row for row in rows if not is_valid(row)]
    page = Page(f"Tool calls: {summary['model']} on {summary['suite']}", _headline(summary, len(failures)))
    num_right, num_lenient = len(rows) - len(failures), sum(is_valid(row["lenient"]) for row in rows)
    tiles: list[Tile] = [
        make_count_tile(summary["num_cases"], "case"),
        (f"{num_right:,}", "correct, strict reading", "good" if num_right else ""),
        (f"{num_lenient:,}", "correct, lenient reading", ""),
        (f"{len(failures):,}", "failed", "bad" if failures else ""),
        (f"{summary['num_no_answer']:,}", "without an answer", "bad" if summary["num_no_answer"] else ""),
        (f"{summary['num_cut']:,}", "cut off at the token limit", "warn" if summary["num_cut"] else ""),
    ]
    page.add_tiles(tiles)
    _add_accuracy(page, summary)
    _add_leaderboard(page, summary)
    _add_figures(page, summary)
    _add_error_classes(page, summary)
    _add_confusions(page, rows)
    _add_failures(page, failures)
    _add_rates(page, summary)
    _add_defects(page, summary)
    _add_reasoning(page, summary)
    lead = "Categories of the suite that were skipped; they are in no figure."
    add_settings(page, summary, "Not run", lead)
    page.write(path, f"fctune {summary['settings'].get('fctune', '')}, results of {count_answers(summary, 'case')}")


def count_answers(summary: Mapping[str, Any], noun: str) -> str:
    """Return the number of cases or answers of a summary, with its noun."""
    return format_count(summary[f"num_{noun}s"], noun)


def _headline(summary: Mapping[str, Any], num_failures: int) -> str:
    if "all" not in summary["scores"]:
        return f"{num_failures:,} of {count_answers(summary, 'case')} failed; rates are given by category."
    rate = summary["scores"]["all"]["rates"]["accuracy"]
    return f"{_percent(rate)} of {format_count(rate['n'], 'case')} correct (95 % interval {format_bounds(rate)})."


def distinct(by_category: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by category; without those of all cases if there is one category, which has the same."""
    found = dict(by_category)
    if len(found) == 2:
        found.pop("all", None)
    return found


def add_settings(page: Page, summary: Mapping[str, Any], skipped: str, lead: str = "") -> None:
    """Add the categories that were skipped, with the reasons, and the settings of the run."""
    if summary["not_run"]:
        page.add_section(skipped, Table(["Category", "Reason"], list(summary["not_run"].items())), lead=lead)
    page.add_section("Settings", make_settings("Setting", summary["settings"]))


def _add_accuracy(page: Page, summary: Mapping[str, Any]) -> None:
    typed = summary.get("typed", {})
    heads = ["Category", Num("n"), Num("Correct"), Num("95 % interval"), "0 to 100 %"]
    heads += [Num("Lenient"), *([Num("Typed")] if typed else [])]
    rows = []
    for category, scores in distinct(summary["scores"]).items():
        rate, lenient = scores["rates"]["accuracy"], summary["lenient"][category]["rates"]["accuracy"]
        label = f"{_percent(rate)}, {format_bounds(rate)}; lenient {_percent(lenient)}"
        drawing = Interval(rate["rate"], rate["low"], rate["high"], lenient["rate"], label)
        cells = [category, rate["n"], _percent(rate), format_bounds(rate), drawing, _percent(lenient)]
        rows.append(cells + ([_percent(typed[category])] if typed else []))
    lead = (
        "The strict reading accepts the model's own call format only (dot, with its Wilson interval as a bar); the "
        "lenient one parses as serving engines do (ring)."
    )
    if typed:
        lead += (
            " Correct is the benchmark's own judgement, which treats a malformed call as no call; typed is exact match."
        )
    page.add_section("Accuracy", Table(heads, rows, is_stacked=True), lead=lead)


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
    page.add_section("Leaderboard", Table(["Part", Num("Weight"), Num("Accuracy")], rows), lead=lead)


def _add_figures(page: Page, summary: Mapping[str, Any]) -> None:
    if (figures := summary.get("figures")) is None:
        return
    rows = [
        [name.replace("_", " "), rate["n"], _percent(rate), format_bounds(rate)]
        for name, rate in figures.get("rates", {}).items()
        if rate["n"]
    ]
    rows += [[name.replace("_", " "), "", f"{value:.3f}", ""] for name, value in figures.get("values", {}).items()]
    parts: list[Part] = [Table(["Figure", Num("n"), Num("Value"), Num("95 % interval")], rows)]
    if counts := figures.get("table"):
        columns = list(next(iter(counts.values())))
        heads = ["", *(Num(column.replace("_", " ")) for column in columns)]
        parts.append(Table(heads, [[name, *(row[column] for column in columns)] for name, row in counts.items()]))
    page.add_section("Further figures", *parts, lead=" ".join(figures.get("notes", ())))


def _add_defects(page: Page, summary: Mapping[str, Any]) -> None:
    if not (by_category := summary.get("defects")):
        return
    names = list(next(iter(by_category.values())))
    rows = [
        [category, rates[names[0]]["n"], *(rates[name]["successes"] for name in names)]
        for category, rates in distinct(by_category).items()
    ]
    heads = ["Category", Num("Answers"), *(Num(name.replace("_", " ").capitalize()) for name in names)]
    lead = (
        "Answers with each defect, whatever was expected: abandoned after the reasoning or inside a call, with calls "
    )
    lead += "that cannot be read, of tools that are not on offer, or with arguments that the tool does not declare."
    page.add_section("Answers with defects", Table(heads, rows), lead=lead)


def _add_error_classes(page: Page, summary: Mapping[str, Any]) -> None:
    counts = {category: scores["verdicts"] for category, scores in distinct(summary["scores"]).items()}
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
    parts: list[Part] = [Heading("Strict and lenient reading"), readings]
    if tools:
        most = [[count, expected, made[:80]] for (expected, made), count in tools.most_common(_NUM_CONFUSIONS)]
        parts += [Heading("Confused tools"), Table([Num("Calls"), "Expected", "Called instead"], most)]
        if (rest := len(tools) - len(most)) > 0:
            parts.append(Text(f"and {format_count(rest, 'more pair')}", "muted"))
    page.add_section("Confusions", *parts)


def _make_heatmap(corner: str, names: Sequence[str], columns: Sequence[str], count: Callable[[str, str], int]) -> Table:
    rights = [column == "correct" for column in columns]
    rows = [
        [
            name.replace("_", " ") if name in ERROR_KINDS else name,
            *make_heat_row([count(name, column) for column in columns], rights),
        ]
        for name in names
    ]
    return Table([corner, *(Num(column.replace("_", " ")) for column in columns)], rows)


def _add_failures(page: Page, failures: Sequence[Row]) -> None:
    if not failures:
        page.add_section("Failures", "None.")
        return
    lead = "Each case with its prompt, the expected calls, the calls made, and the differences."
    if len(failures) > MAX_CASES:
        lead += f" The first {MAX_CASES:,} of {len(failures):,} are shown; the results file contains all of them."
    page.add_section("Failures", Cases([make_case(row) for row in failures[:MAX_CASES]], FACETS), lead=lead)


def _add_rates(page: Page, summary: Mapping[str, Any]) -> None:
    parts, scored = [], distinct(summary["scores"])
    for category, scores in scored.items():
        rows = [
            [_RATE_NAMES.get(name, name.replace("_", " ")), rate["n"], _percent(rate), format_bounds(rate)]
            for name, rate in scores["rates"].items()
            if rate["rate"] is not None
        ]
        table = Table(["Rate", Num("n"), Num("Value"), Num("95 % interval")], rows)
        parts.append(Fold(category, [table], is_open=category == "all" or len(scored) == 1))
    page.add_section("All rates", *parts, lead="Strict reading. Precision and recall are over calls and arguments.")


def _add_reasoning(page: Page, summary: Mapping[str, Any]) -> None:
    if not (by_category := summary.get("reasoning")):
        return
    numbers = ("Answers", "That reason", "Mean tokens", "Never closed", "Of them cut off")
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
    page.add_section("Reasoning", Table(["Category", *map(Num, numbers)], rows), lead=lead)


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


def _percent(rate: Mapping[str, Any]) -> str:
    return "" if rate["rate"] is None else f"{rate['rate']:.1%}"
