"""What came of a run, from its rows: rates by category in both readings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.calls.metrics import Outcome, rate, score
from fctune.evaluation.judging import Row, judge_row
from fctune.evaluation.suites import Suite

# What these measure is not given where any call will do.
_NAMED_RATES = ("tool_", "argument_")


def summarise(suite: Suite, rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run as it is written.

    ``scores`` and ``lenient`` hold what ``fctune.calls.metrics.score`` gives, by category; with one ``all`` over them
    unless the suite is a benchmark, whose categories are not to be summed up. A case without a row counts as one
    without an answer. Of the leaderboard there are also ``official``, its own verdict, also on what is malformed, and
    ``typed``, the strict typed match.
    """
    by_id = {row["id"]: row for row in rows}
    readings: dict[str, dict[str, list[Outcome]]] = {"scores": defaultdict(list), "lenient": defaultdict(list)}
    official: dict[str, dict[str, list[bool]]] = {"official": defaultdict(list), "typed": defaultdict(list)}
    for case in suite.cases:
        row = by_id.get(case.id, {"error": "no row in the results"})
        for name, outcomes in readings.items():
            outcome = judge_row(suite, case, row, lenient=name == "lenient")[0]
            outcomes[case.category].append(outcome)
            if suite.benchmark is None and case.category != "all":
                outcomes["all"].append(outcome)
        verdict = row.get("bfcl", {})
        official["official"][case.category].append(bool(verdict.get("valid")))
        official["typed"][case.category].append(verdict.get("typed") == "correct")
    summary = {
        "suite": suite.name,
        "benchmark": suite.benchmark,
        "num_cases": len(suite.cases),
        "num_no_answer": sum(by_id.get(case.id, {"error": ""}).get("error") is not None for case in suite.cases),
        "num_cut": sum(bool(row.get("is_cut")) for row in rows),
        "not_run": dict(suite.not_run),
        "settings": dict(settings),
        **{name: _score(outcomes) for name, outcomes in readings.items()},
    }
    if any("bfcl" in row for row in rows):
        for name, by_category in official.items():
            summary[name] = {category: rate(sum(held), len(held)) for category, held in by_category.items()}
    return summary


def _score(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    names = sorted(outcomes, key=lambda name: (name == "all", name))
    scores = score({name: outcomes[name] for name in names})
    if "live_relevance" in scores:
        rates = scores["live_relevance"]["rates"]
        scores["live_relevance"]["rates"] = {n: rate for n, rate in rates.items() if not n.startswith(_NAMED_RATES)}
    return scores
