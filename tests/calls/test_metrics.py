"""Verdicts on cases, and rates that count every case."""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import NormalDist
from typing import Any

import pytest

from fctune.calls.formats.base import Malformed, Parsed
from fctune.calls.formats.registry import get_format
from fctune.calls.judge import ERROR_KINDS, Judgement, judge, judge_failure
from fctune.calls.metrics import score_outcomes, wilson_interval
from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet
from tests.conftest import ROOT

ONE, TWO = Call("f", {"a": 1, "b": "x"}), Call("g", {"a": 2})
TOOLS = tuple(
    Tool(
        {
            "name": name,
            "parameters": {
                "type": "dict",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                "required": ["a"],
            },
        }
    )
    for name in "fg"
)


def parsed(*calls: Call, malformed: int = 0) -> Parsed:
    return Parsed(calls, (Malformed(0, 1, "broken"),) * malformed)


@pytest.mark.parametrize(
    ("expected", "actual", "verdict"),
    [
        ([ONE], parsed(ONE), "correct"),
        ([ONE, TWO], parsed(TWO, ONE), "correct"),
        ([], parsed(), "correct"),
        ([ONE], parsed(), "missed_call"),
        ([], parsed(ONE), "false_call"),
        ([ONE], parsed(Call("g", ONE.arguments)), "wrong_name"),
        ([ONE, TWO], parsed(TWO, TWO), "wrong_name"),
        ([ONE], parsed(Call("f", {"a": 1})), "wrong_arguments"),
        ([ONE], parsed(Call("f", {"a": "1", "b": "x"})), "wrong_arguments"),
        ([ONE], parsed(ONE, ONE), "wrong_count"),
        ([ONE], parsed(malformed=1), "malformed"),
        ([], parsed(malformed=1), "malformed"),
        ([ONE], parsed(ONE, malformed=1), "malformed"),
    ],
)
def test_each_case_has_one_verdict(expected: list[Call], actual: Parsed, verdict: str) -> None:
    judgement = judge(expected, actual, TOOLS)
    assert judgement.outcome.verdict == verdict
    assert verdict in ERROR_KINDS
    assert judgement.is_valid == judgement.outcome.is_correct == (verdict == "correct")
    assert bool(judgement.differences) == bool(judgement.reason) == (verdict != "correct")


def test_a_malformed_call_never_counts_as_abstaining() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}'
    rates = rates_by_name(judge([], get_format("hermes").parse(text)))
    assert rates["abstention"]["rate"] == 0
    assert rates["false_call"]["rate"] == 0
    assert rates["well_formed"]["rate"] == 0
    assert rates["accuracy"] | {"low": 0, "high": 0} == {"rate": 0, "successes": 0, "n": 1, "low": 0, "high": 0}


def test_an_answer_that_never_came_is_wrong_and_in_every_denominator() -> None:
    cases = [judge_failure(0, "timed out"), judge_failure(2, "timed out"), judge([], parsed())]
    assert {case.outcome.verdict for case in cases} == {"no_answer", "correct"}
    assert cases[0].reason == "timed out"
    assert cases[0].differences == ("no answer: timed out",)
    rates = rates_of(*cases)
    for name, counts in {
        "accuracy": (1, 3), "well_formed": (1, 3), "tool_selection": (0, 1), "call_count": (0, 1),
        "missed_call": (0, 1), "abstention": (1, 2), "false_call": (0, 2), "tool_recall": (0, 2),
    }.items():  # fmt: skip
        assert rates[name] == counts, name


def test_counted_outcomes_score_as_a_list_of_them() -> None:
    judged = [judge([ONE], parsed(ONE), TOOLS)] * 3 + [judge([ONE, TWO], parsed(TWO), TOOLS)] * 2
    outcomes = [judgement.outcome for judgement in judged]
    assert score_outcomes({"all": outcomes}) == score_outcomes({"all": Counter(outcomes)})


def test_tools_may_be_made_ready_once() -> None:
    tools = ToolSet(TOOLS)
    for actual in (parsed(ONE), parsed(Call("f", {"a": "1"})), parsed(Call("h", {}))):
        assert judge([ONE], actual, tools) == judge([ONE], actual, TOOLS)
    assert judge([ONE], parsed(ONE), ToolSet(())).outcome.num_schema_valid is None


def score_judged(cases: dict[str, list[Judgement]]) -> dict[str, Any]:
    return score_outcomes({name: [judgement.outcome for judgement in judged] for name, judged in cases.items()})


def rates_by_name(*cases: Judgement) -> dict[str, Any]:
    rates: dict[str, Any] = score_judged({"all": list(cases)})["all"]["rates"]
    return rates


def rates_of(*cases: Judgement) -> dict[str, Any]:
    return {name: (rate["successes"], rate["n"]) for name, rate in rates_by_name(*cases).items()}


def test_rates_have_the_documented_numerators_and_denominators() -> None:
    rates = rates_of(
        judge([ONE], parsed(ONE), TOOLS),
        judge([ONE], parsed(Call("f", {"a": 1, "b": "y", "c": 3})), TOOLS),
        judge([ONE], parsed(TWO), TOOLS),
        judge([ONE, TWO], parsed(ONE), TOOLS),
        judge([ONE], parsed(), TOOLS),
        judge([ONE], parsed(malformed=1), TOOLS),
        judge([], parsed(), TOOLS),
        judge([], parsed(Call("h", {})), TOOLS),
        judge([], parsed(malformed=1), TOOLS),
    )
    assert rates == {
        "accuracy": (2, 9),
        "well_formed": (7, 9),
        "tool_selection": (2, 6),
        "call_count": (3, 6),
        "missed_call": (1, 6),
        "abstention": (1, 3),
        "false_call": (1, 3),
        "tool_precision": (3, 7),
        "tool_recall": (3, 7),
        "tool_f1": (3, 11),
        "argument_precision": (5, 7),
        "argument_recall": (5, 6),
        "argument_f1": (5, 8),
        "schema_valid": (3, 5),
    }


def test_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    cases = [judge([ONE], parsed(ONE)), judge([ONE, TWO], parsed(ONE)), judge([], parsed(ONE, TWO))]
    rates = rates_by_name(*cases)
    precision, recall, f1 = (rates[f"tool_{name}"]["rate"] for name in ("precision", "recall", "f1"))
    assert f1 == pytest.approx(2 * precision * recall / (precision + recall))
    assert rates["tool_f1"]["low"] < f1 < rates["tool_f1"]["high"]


def test_a_rate_over_nothing_is_none() -> None:
    rates = score_judged({"irrelevance": [judge([], parsed())], "empty": []})
    assert rates["irrelevance"]["rates"]["missed_call"]["rate"] is None
    assert rates["irrelevance"]["rates"]["schema_valid"]["rate"] is None
    assert rates["empty"]["n"] == 0
    assert rates["empty"]["rates"]["accuracy"] == {"rate": None, "successes": 0, "n": 0, "low": 0.0, "high": 1.0}


def test_categories_are_never_summed() -> None:
    scores = score_judged({"a": [judge([], parsed())], "b": [judge([ONE], parsed())]})
    assert list(scores) == ["a", "b"]
    assert [scores[name]["rates"]["accuracy"]["rate"] for name in "ab"] == [1.0, 0.0]
    assert [scores[name]["verdicts"]["missed_call"] for name in "ab"] == [0, 1]


@pytest.mark.parametrize("n", [1, 2, 16, 24, 200, 1053])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_bounds_are_where_the_score_test_turns(n: int, confidence: float) -> None:
    """Wilson's bounds are the shares p at which the count is z standard deviations of p from n * p."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    for successes in {0, 1, n // 2, n - 1, n}:
        low, high = wilson_interval(successes, n, confidence)
        assert 0 <= low <= successes / n <= high <= 1
        for bound in {low, high} - {0.0, 1.0}:
            assert abs(successes / n - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n))


def test_small_categories_have_wide_intervals() -> None:
    assert [round(bound, 2) for bound in wilson_interval(13, 16)] == [0.57, 0.93]
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(16, 16)[1] == 1.0
    assert wilson_interval(16, 16)[0] < 0.81


def test_intervals_in_readme_and_docs_are_wilsons() -> None:
    """In tables that give the number of cases, or in the cell itself as ``(of N)``."""
    found = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in page.read_text(encoding="utf-8").splitlines():
            cases = re.match(r"\| [^|]+ \| \**(\d+)\** \|", line)
            for rate, low, high in re.findall(r"([\d.]+) %\**\s\(([\d.]+) - ([\d.]+)\)", line) if cases else ():
                n, num_decimals = int(cases[1]), len(rate.partition(".")[2])  # type: ignore[index]
                bounds = wilson_interval(round(float(rate) * n / 100), n)
                assert [f"{100 * bound:.{num_decimals}f}" for bound in bounds] == [low, high], f"{page.name}: {line}"
                found += 1
    assert found > 30
