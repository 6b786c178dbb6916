"""Page of a sampling run: pass rates, what is always, sometimes and never right, and the cases with their answers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.apps.report.eval_page import FACETS, make_case
from fctune.config.intervals import format_count
from fctune.pages.page import Cell, Page, Tone, draw_interval, make_count_tile, make_table
from fctune.pages.run_text import format_bounds
from fctune.tasks.evaluation.cases import Case, Suite
from fctune.tasks.evaluation.judging import is_valid, to_plain_calls
from fctune.tasks.sampling.rewards import REWARD_PARTS
from fctune.tasks.sampling.run import count_right, name_share
from fctune.tasks.sampling.selection import group_by_case

_MAX_CASES = 1_000
_SHARES = ("always", "sometimes", "never", "unanswered")

Row = Mapping[str, Any]


def write_sample_html(
    summary: Mapping[str, Any], suite: Suite, rows: Sequence[Row], path: str | os.PathLike[str]
) -> None:
    """Write the page of a sampling run from its summary and rows, as ``fctune.tasks.sampling.run`` returns them."""
    footer = f"fctune {summary['settings'].get('fctune', '')}, {format_count(summary['num_answers'], 'answer')}"
    make_sample_page(summary, suite, rows).write(path, footer)


def make_sample_page(summary: Mapping[str, Any], suite: Suite, rows: Sequence[Row]) -> Page:
    """Make the page of a sampling run; arguments as in ``write_sample_html``."""
    page = Page(f"Sampled answers: {summary['model']} on {summary['suite']}", _headline(summary))
    _add_tiles(page, summary)
    if (benchmark := summary["settings"].get("benchmark")) is not None:
        page.add_section(
            "Benchmark",
            f"<p>These are questions of a benchmark ({benchmark}), sampled by force. A model that learns from them "
            "must not be measured with it.</p>",
        )
    _add_pass_rates(page, summary)
    _add_shares(page, summary)
    _add_reward(page, summary)
    _add_cases(page, suite, rows)
    if summary["not_run"]:
        table = make_table([("Category", False), ("Reason", False)], list(summary["not_run"].items()))
        page.add_section("Not asked", table)
    settings = [[k, v if isinstance(v, str | int | float) else json.dumps(v)] for k, v in summary["settings"].items()]
    page.add_section("Settings", make_table([("Setting", False), ("Value", False)], settings))
    return page


def _headline(summary: Mapping[str, Any]) -> str:
    rates = summary["pass_rates"].get("all")
    if not rates or rates[0]["rate"] is None:
        answers, cases = format_count(summary["num_answers"], "answer"), format_count(summary["num_cases"], "case")
        return f"{answers} to {cases}; rates are given by category."
    first = rates[0]
    # Where a budget ended the run, the cases with most answers are not all cases.
    last = next(rate for rate in reversed(rates) if rate["n"] == first["n"])
    more = ""
    if last["k"] > 1:
        more = f"; at least one of {last['k']} answers is right in {last['rate']:.1%}"
    return f"{first['rate']:.1%} of the answers are right (95 % interval {format_bounds(first)}){more}."


def _add_tiles(page: Page, summary: Mapping[str, Any]) -> None:
    counts = Counter[str]()
    for name, shares in summary["shares"].items():
        if name != "all" or len(summary["shares"]) == 1:
            counts.update(shares)
    mean = summary["mean_tokens"]
    tiles: list[tuple[str, str, Tone]] = [
        make_count_tile(summary["num_cases"], "case"),
        make_count_tile(summary["num_answers"], "answer"),
        make_count_tile(counts["always"], "case", "good", " always right"),
        make_count_tile(counts["sometimes"], "case", "", " sometimes right"),
        make_count_tile(counts["never"], "case", "bad" if counts["never"] else "", " never right"),
        make_count_tile(summary["num_missing"], "answer", "warn" if summary["num_missing"] else "", " missing"),
        ("unknown" if mean is None else f"{mean:,.1f}", "tokens per answer", ""),
    ]
    page.add_tiles(tiles)


def _add_pass_rates(page: Page, summary: Mapping[str, Any]) -> None:
    rows = []
    for category, estimates in _distinct(summary["pass_rates"]).items():
        for one in estimates:
            if one["rate"] is None:
                continue
            label = f"{one['rate']:.1%}, {format_bounds(one)}"
            drawing = Cell(draw_interval(one, None, label), is_html=True)
            rows.append([category, one["k"], one["n"], f"{one['rate']:.1%}", format_bounds(one), drawing])
    heads = [("Category", False), ("k", True), ("Cases", True), ("pass@k", True), ("95 % interval", True)]
    lead = (
        "The probability that at least one of k answers is right, in the strict reading: the unbiased estimator of "
        "Chen et al. (2021). The interval is that of new cases; all answers to a case are one cluster."
    )
    page.add_section("pass@k", make_table([*heads, ("0 to 100 %", False)], rows, is_stacked=True), lead=lead)


def _add_shares(page: Page, summary: Mapping[str, Any]) -> None:
    rows = []
    for category, shares in _distinct(summary["shares"]).items():
        total = sum(shares.values()) or 1
        cells = [
            Cell(shares[name] or "", classes="heat", style=f"--heat: {shares[name] / total:.3f}") for name in _SHARES
        ]
        rows.append([category, *cells])
    lead = "Cases by how many of their answers are right. Only those that are sometimes right give preference pairs."
    heads = [("Category", False), *((name.capitalize(), True) for name in _SHARES)]
    page.add_section("Always, sometimes, never right", make_table(heads, rows), lead=lead)


def _add_reward(page: Page, summary: Mapping[str, Any]) -> None:
    reward = summary["reward"]
    if not reward["parts"]:
        return
    rows: list[list[object]] = [
        [name, REWARD_PARTS[name], reward["weights"].get(name, ""), f"{mean:.3f}"]
        for name, mean in reward["parts"].items()
    ]
    rows.append(["reward", "the weighted sum", "", f"{reward['mean']:.3f}"])
    heads = [("Part", False), ("Meaning", False), ("Weight", True), ("Mean", True)]
    page.add_section("Reward", make_table(heads, rows))


def _add_cases(page: Page, suite: Suite, rows: Sequence[Row]) -> None:
    groups = group_by_case(dict(row) for row in rows)
    shown = []
    for case in suite.cases:
        answers = groups.get(case.id, [])
        if (found := next((row for row in answers if not is_valid(row)), None)) is not None:
            shown.append(_make_case(case, answers, found))
    if not shown:
        page.add_section("Cases", "<p>Every answer is right.</p>")
        return
    lead = "Cases with a wrong answer: the first wrong one in full, then every answer."
    if len(shown) > _MAX_CASES:
        lead += f" The first {_MAX_CASES:,} of {len(shown):,} are shown."
    facets = {"share": "Right", **FACETS}
    page.add_section("Cases", page.make_cases(shown[:_MAX_CASES], facets), lead=lead)


def _make_case(case: Case, answers: Sequence[Row], wrong: Row) -> dict[str, Any]:
    whole = {
        **wrong,
        "id": case.id,
        "messages": [message.to_openai() for message in case.prompt.messages],
        "tools": [tool.to_openai() for tool in case.prompt.tools],
        "expected_calls": to_plain_calls(case.expected),
    }
    made = make_case(whole)
    answered = [row for row in answers if row.get("error") is None]
    num_answers, num_right = count_right([dict(row) for row in answered])
    lines = [f"{row['sample']}: {row['verdict']}: {' '.join(row['answer'].split())[:300]}" for row in answers]
    made["tags"] = [f"{num_right} of {num_answers} right", *made["tags"]]
    made["facets"]["share"] = name_share(num_answers, num_right)
    made["parts"].insert(3, {"heading": "All answers", "text": "\n".join(lines), "kind": "list"})
    return made


def _distinct(by_category: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by category; without those of all cases if there is one category, which has the same."""
    found = dict(by_category)
    if len(found) == 2:
        found.pop("all", None)
    return found
