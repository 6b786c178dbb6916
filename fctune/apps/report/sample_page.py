"""Page of a sampling run: pass rates, what is always, sometimes and never right, and the cases with their answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.apps.report.eval_page import (
    FACETS,
    MAX_CASES,
    Row,
    add_settings,
    count_answers,
    distinct,
    make_case,
)
from fctune.pages.page import (
    Cases,
    Interval,
    Num,
    Page,
    Table,
    Tile,
    make_count_tile,
    make_heat_row,
)
from fctune.pages.run_text import format_bounds
from fctune.tasks.judge import is_valid, to_plain_calls
from fctune.tasks.rewards import REWARD_PARTS
from fctune.tasks.sampling.run import count_right, name_share
from fctune.tasks.sampling.selection import group_by_case
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

_SHARES = ("always", "sometimes", "never", "unanswered")


def write_sample_html(
    summary: Mapping[str, Any], suite: Suite, rows: Sequence[Row], path: str | os.PathLike[str]
) -> None:
    """Write the page of a sampling run from its summary and rows, as ``fctune.tasks.sampling.run`` returns them."""
    page = Page(f"Sampled answers: {summary['model']} on {summary['suite']}", _headline(summary))
    counts = Counter[str]()
    for name, shares in summary["shares"].items():
        if name != "all" or len(summary["shares"]) == 1:
            counts.update(shares)
    mean = summary["mean_tokens"]
    tiles: list[Tile] = [
        make_count_tile(summary["num_cases"], "case"),
        make_count_tile(summary["num_answers"], "answer"),
        make_count_tile(counts["always"], "case", "good", " always right"),
        make_count_tile(counts["sometimes"], "case", "", " sometimes right"),
        make_count_tile(counts["never"], "case", "bad", " never right"),
        make_count_tile(summary["num_missing"], "answer", "warn", " missing"),
        ("unknown" if mean is None else f"{mean:,.1f}", "tokens per answer", ""),
    ]
    page.add_tiles(tiles)
    if (benchmark := summary["settings"].get("benchmark")) is not None:
        page.add_section(
            "Benchmark",
            f"These are questions of a benchmark ({benchmark}), sampled by force. A model that learns from them must "
            "not be measured with it.",
        )
    _add_pass_rates(page, summary)
    _add_shares(page, summary)
    _add_reward(page, summary)
    _add_cases(page, suite, rows)
    add_settings(page, summary, "Not asked")
    page.write(path, f"fctune {summary['settings'].get('fctune', '')}, {count_answers(summary, 'answer')}")


def _headline(summary: Mapping[str, Any]) -> str:
    rates = summary["pass_rates"].get("all")
    if not rates or rates[0]["rate"] is None:
        return f"{count_answers(summary, 'answer')} to {count_answers(summary, 'case')}; rates are given by category."
    first = rates[0]
    # Where a budget ended the run, the cases with most answers are not all cases.
    last = next(rate for rate in reversed(rates) if rate["n"] == first["n"])
    more = ""
    if last["k"] > 1:
        more = f"; at least one of {last['k']} answers is right in {last['rate']:.1%}"
    return f"{first['rate']:.1%} of the answers are right (95 % interval {format_bounds(first)}){more}."


def _add_pass_rates(page: Page, summary: Mapping[str, Any]) -> None:
    rows = []
    for category, estimates in distinct(summary["pass_rates"]).items():
        for one in estimates:
            if one["rate"] is None:
                continue
            percent, bounds = f"{one['rate']:.1%}", format_bounds(one)
            drawing = Interval(one["rate"], one["low"], one["high"], None, f"{percent}, {bounds}")
            rows.append([category, one["k"], one["n"], percent, bounds, drawing])
    heads = ["Category", Num("k"), Num("Cases"), Num("pass@k"), Num("95 % interval"), "0 to 100 %"]
    lead = (
        "The probability that at least one of k answers is right, in the strict reading: the unbiased estimator of "
        "Chen et al. (2021). The interval is that of new cases; all answers to a case are one cluster."
    )
    page.add_section("pass@k", Table(heads, rows, is_stacked=True), lead=lead)


def _add_shares(page: Page, summary: Mapping[str, Any]) -> None:
    rows = [
        [category, *make_heat_row([shares[name] for name in _SHARES])]
        for category, shares in distinct(summary["shares"]).items()
    ]
    lead = "Cases by how many of their answers are right. Only those that are sometimes right give preference pairs."
    heads = ["Category", *(Num(name.capitalize()) for name in _SHARES)]
    page.add_section("Always, sometimes, never right", Table(heads, rows), lead=lead)


def _add_reward(page: Page, summary: Mapping[str, Any]) -> None:
    reward = summary["reward"]
    if not reward["parts"]:
        return
    rows = [
        [name, REWARD_PARTS[name], reward["weights"].get(name, ""), f"{mean:.3f}"]
        for name, mean in reward["parts"].items()
    ]
    rows.append(["reward", "the weighted sum", "", f"{reward['mean']:.3f}"])
    page.add_section("Reward", Table(["Part", "Meaning", Num("Weight"), Num("Mean")], rows))


def _add_cases(page: Page, suite: Suite, rows: Sequence[Row]) -> None:
    groups = group_by_case(dict(row) for row in rows)
    shown = []
    for case in suite.cases:
        answers = groups.get(case.id, [])
        if (found := next((row for row in answers if not is_valid(row)), None)) is not None:
            shown.append(_make_case(case, answers, found))
    if not shown:
        page.add_section("Cases", "Every answer is right.")
        return
    lead = "Cases with a wrong answer: the first wrong one in full, then every answer."
    if len(shown) > MAX_CASES:
        lead += f" The first {MAX_CASES:,} of {len(shown):,} are shown."
    page.add_section("Cases", Cases(shown[:MAX_CASES], {"share": "Right", **FACETS}), lead=lead)


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
