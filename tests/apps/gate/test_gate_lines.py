"""Verdicts of lines: against counting, against simulation, and in the limits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fctune.apps.gate.cases import HeldOutCases
from fctune.apps.gate.lines import Line, Remedy, judge_lines
from fctune.apps.gate.outcomes import make_lines
from fctune.apps.gate.plan import Plan
from fctune.apps.gate.report import GateReport
from fctune.data.conversation import Conversation, Message
from fctune.tasks.benchmarks import GateSample
from fctune.tasks.evaluation.paired import (
    PairedOutcome,
    adjust_p_values,
    find_power,
    find_smallest_fall,
    mcnemar_p,
)
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case


def make_line(name: str, both: int, lost: int, won: int, neither: int = 0) -> Line:
    kinds = [(True, True)] * both + [(True, False)] * lost + [(False, True)] * won + [(False, False)] * neither
    return Line(name, name, [PairedOutcome(f"{name}{i}", *kind) for i, kind in enumerate(kinds)])


@pytest.mark.parametrize(
    ("counts", "tolerance", "verdict"),
    [
        ((100, 0, 0), 0.10, "safe"),
        ((10, 0, 0), 0.10, "undecided"),  # the interval reaches 28 points
        ((100, 60, 0), 0.10, "worse"),
        ((192, 8, 0), 0.10, "safe"),  # significant, but within the tolerance
        ((186, 14, 0), 0.05, "worse"),
        ((95, 9, 0), 0.10, "undecided"),  # significant, but only near the tolerance
        ((80, 20, 20), 0.10, "undecided"),  # no fall, and too much noise
        ((0, 0, 80, 20), 0.10, "safe"),
    ],
)
def test_a_line_is_worse_safe_or_undecided(counts: Sequence[int], tolerance: float, verdict: str) -> None:
    (judged,) = judge_lines([make_line("one", *counts)], tolerance)
    assert judged.verdict == verdict


def test_a_line_among_many_needs_a_smaller_p() -> None:
    fallen, others = make_line("fallen", 40, 7, 0), [make_line(f"other{i}", 47, 0, 0) for i in range(9)]
    assert judge_lines([fallen], 0.1)[0].verdict == "worse"
    judged = judge_lines([fallen, *others], 0.1)[0]
    assert judged.comparison.p_value == mcnemar_p(0, 7) == 2 / 2**7
    assert judged.p_adjusted == 10 * judged.comparison.p_value
    assert judged.verdict == "undecided"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_adjusted_p_values_reject_what_holms_procedure_does(p_values: list[float]) -> None:
    """Step down: the smallest p against level / m, the next against level / (m - 1), and so on to the first failure."""
    rejected = set()
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[i] * (len(p_values) - rank) >= 0.05:
            break
        rejected.add(i)
    adjusted = adjust_p_values(p_values)
    assert {i for i, p in enumerate(adjusted) if p < 0.05} == rejected
    assert all(own <= p <= 1 for own, p in zip(p_values, adjusted, strict=True))


@pytest.mark.parametrize(
    ("n", "flip_rate", "fall", "level", "tolerance"), [(40, 0.05, 0.3, 0.01, 0.1), (150, 0.1, 0.15, 0.05, 0.0)]
)
def test_the_power_is_that_of_simulated_gates(
    n: int, flip_rate: float, fall: float, level: float, tolerance: float
) -> None:
    rng, num_found, trials = random.Random(0), 0, 4000
    for _ in range(trials):
        draws = [rng.random() for _ in range(n)]
        right = sum(draw < flip_rate for draw in draws)
        wrong = sum(flip_rate <= draw < 2 * flip_rate + fall for draw in draws)
        num_found += mcnemar_p(right, wrong) < level and wrong - right > tolerance * n
    expected = find_power(n, flip_rate, fall, level, tolerance)
    assert abs(num_found / trials - expected) < 4 * (expected * (1 - expected) / trials) ** 0.5 + 1e-9


def test_the_smallest_fall_is_where_the_power_is_reached() -> None:
    fall = find_smallest_fall(100, 0.05, 0.01, 0.1)
    assert fall is not None
    assert find_power(100, 0.05, fall, 0.01, 0.1) >= 0.8 > find_power(100, 0.05, fall - 0.002, 0.01, 0.1)
    assert find_smallest_fall(5, 0.0, 0.05) is None, "five of five changes have a p of 0.06"
    assert find_smallest_fall(6, 0.0, 0.05) is not None
    assert find_smallest_fall(0, 0.0) is None


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((5, 0, 0), "5 items are too few"),
        ((1, 0, 30, 30), "gets only 1 of 61 right"),
        ((0, 0, 30, 19), "the base gets none of the 49 right, so there is nothing to lose"),
    ],
)
def test_a_line_that_finds_nothing_says_why(counts: Sequence[int], words: str) -> None:
    (judged,) = judge_lines([make_line("one", *counts)], 0.1)
    assert words in str(judged.blindness)


@pytest.mark.parametrize(("tolerance", "needed"), [(0.1, 35), (0.05, 73), (0.2, 16)])
def test_a_line_too_small_ever_to_be_safe_says_so(tolerance: float, needed: int) -> None:
    (enough,) = judge_lines([make_line("one", needed, 0, 0)], tolerance)
    assert (enough.verdict, enough.shortage) == ("safe", None)
    (short,) = judge_lines([make_line("one", needed - 1, 0, 0)], tolerance)
    assert short.verdict == "undecided"
    assert f"{needed - 1} items are too few for safe: even if no answer changes, that takes {needed}" in str(
        short.shortage
    )


def test_lines_that_were_not_run_are_neither_passed_nor_failed_in_junit() -> None:
    lines = judge_lines([make_line("good", 100, 0, 0), make_line("b\x01ad", 10, 90, 0), make_line("dim", 9, 1, 0)], 0.1)
    report = GateReport("a", "b", tuple(lines), {"other": "no data\ud800"}, {"require_safe": False})
    assert report.verdict == "worse"
    text = report.to_junit()
    assert 'tests="4" failures="1" errors="0" skipped="2"' in text
    assert "not run: no data?" in text
    strict = GateReport("a", "b", tuple(lines[2:]), {}, {"require_safe": True})
    assert (strict.verdict, strict.is_blocked) == ("undecided", True)
    assert GateReport("a", "b", (), {"all": "none"}, {"require_safe": False}).verdict == "undecided"
    empty = GateReport("a", "b", (), {"all": "none"}, {"require_safe": True})
    assert 'tests="2" failures="1" errors="0" skipped="1"' in empty.to_junit()
    assert "no line ran" in empty.to_junit()


def test_a_blocked_result_tells_where_its_mark_is_or_that_it_has_none(tmp_path: Path) -> None:
    lines = tuple(judge_lines([make_line("bad", 10, 90, 0)], 0.1))
    for tuned in ("http://host:8000", "hf:me/model"):
        told = GateReport("a", tuned, lines, {}, {"require_safe": False}).describe_block()
        assert "no mark can be written" in told
        assert "serve" not in told
    told = GateReport("a", str(tmp_path), lines, {}, {"require_safe": False}).describe_block()
    assert told.endswith(f"mark: {tmp_path / 'not_released'}")


def test_reports_hold_ids_of_any_character(tmp_path: Path) -> None:
    lines = judge_lines([make_line("odd \ud800 \ufffe \x00 <b>", 10, 90, 0)], 0.1)
    report = GateReport("a", "b", tuple(lines), {"other": "\uffff"}, {"require_safe": False})
    path = report.write(tmp_path)
    assert json.loads(path.read_text(encoding="utf-8"))["lines"][0]["turned_wrong"][0] == "odd ? \ufffe \x00 <b>10"
    failure = ElementTree.parse(tmp_path / "gate.xml").getroot().find("*/failure")
    assert failure is not None
    assert "odd ? ? ? <b>10" in str(failure.text)


def test_a_finding_of_several_lines_is_told_once_and_those_of_undecided_lines_only_if_none_is_worse() -> None:
    lines = judge_lines([make_line("one", 10, 90, 0), make_line("two", 10, 90, 0), make_line("dim", 9, 1, 0)], 0.1)
    found, other = Remedy("few negatives", {"data.augment.take_away": "30%"}), Remedy("rate", {}, "a note")
    lines = [replace(line, remedies=(other if line.line.name == "dim" else found,)) for line in lines]
    assert GateReport("a", "b", tuple(lines), {}, {}).describe_findings() == ["one, two: few negatives"]
    assert GateReport("a", "b", tuple(lines[2:]), {}, {}).describe_findings() == ["dim: rate (a note)"]


def test_cases_that_were_made_are_told_apart_and_decide_the_cause() -> None:
    def make_case(name: str) -> Case:
        return Case(name, "no_call", Conversation((Message("user", "Hello"),), ()), ())

    own, made = ("a", "b"), ("c", "d", "e")
    suite = Suite("held_out", tuple(map(make_case, own + made)))
    before = {"held_out": {name: {"id": name, "verdict": "correct"} for name in own + made}}
    for lost, cause in ((("a", "c", "d"), "missing_tool"), (("a", "b", "c"), "")):
        after = {
            "held_out": {i: {"id": i, "verdict": "unexpected_call" if i in lost else "correct"} for i in own + made}
        }
        held_out = HeldOutCases(suite, suite.cases, (), own, made, (), "")
        lines, _, _ = make_lines(Plan(held_out), before, after)
        (line,) = (line for line in lines if line.name == "over_calling")
        assert line.cause == cause
        num_own, num_made = (sum(name not in lost for name in part) for part in (own, made))
        assert line.note == (
            f"2 cases from your rows: 2 right before, {num_own} after; 3 cases made by taking the tool away: 3 right "
            f"before, {num_made} after"
        )


def test_answers_that_are_cut_are_told_and_are_no_right_refusals() -> None:
    names = [f"c{i}" for i in range(10)]
    suite = Suite("held_out", tuple(Case(i, "no_call", Conversation((Message("user", "Hi"),), ()), ()) for i in names))
    held_out = HeldOutCases(suite, suite.cases, (), tuple(names), (), (), "")
    plain = {i: {"id": i, "verdict": "correct", "calls": [], "is_cut": False} for i in names}
    cut = plain | {"c3": {**plain["c3"], "is_cut": True}}
    lines, _, warnings = make_lines(Plan(held_out), {"held_out": plain}, {"held_out": cut})
    (line,) = (line for line in lines if line.name == "over_calling")
    assert [outcome.id for outcome in line.outcomes if not outcome.after] == ["c3"]
    assert warnings[0].startswith("held_out: 1 of 10 answers of the result were cut off at the limit of tokens")


def test_mistakes_in_calls_are_compared_where_the_base_calls() -> None:
    """A base that calls nothing invents nothing, which is no merit that a result could lose."""
    names = [f"c{i}" for i in range(6)]
    call = {"name": "look_up", "arguments": {}}
    suite = Suite("held_out", tuple(Case(i, "call", Conversation((Message("user", "Hi"),), ()), ()) for i in names))
    held_out = HeldOutCases(suite, suite.cases, tuple(names), (), (), (), "")
    silent = {i: {"id": i, "verdict": "missing_call", "calls": [], "defects": []} for i in names}
    half = silent | {i: {**silent[i], "calls": [call]} for i in names[:2]}
    half |= {"c2": {**silent["c2"], "defects": ["malformed"]}}
    inventing = {i: {**silent[i], "calls": [call], "defects": ["invented_argument"]} for i in names}

    def judge(base: dict[str, dict[str, Any]]) -> tuple[dict[str, Line], dict[str, str]]:
        lines, not_run, _ = make_lines(Plan(held_out), {"held_out": base}, {"held_out": inventing})
        return {line.name: line for line in lines}, not_run

    lines, not_run = judge(silent)
    assert "abandoned" in lines
    assert not {"malformed", "invented_tool", "invented_argument"} & set(lines)
    reason = "the base calls nothing on the held-out cases; {} have it"
    assert not_run["invented_argument"] == reason.format("6 answers of the result")
    assert not_run["malformed"] == reason.format("0 answers of the result")
    lines, not_run = judge(half)
    line = lines["invented_argument"]
    assert [outcome.id for outcome in line.outcomes] == ["c0", "c1", "c2"]
    assert [(outcome.before, outcome.after) for outcome in line.outcomes] == [(True, False)] * 3
    assert line.note == "the 3 cases in which the base calls"
    assert len(lines["abandoned"].outcomes) == 6


def test_a_benchmark_of_which_the_base_answers_nothing_is_not_run() -> None:
    case = Case("1", "irrelevance", Conversation((Message("user", "Hello"),), ()), ())
    suite, sample = Suite("irrelevance", (case,)), GateSample("irrelevance", "no call", ("irrelevance",), 1)
    failed = {"irrelevance": {"1": {"id": "1", "verdict": "error", "error": "too long"}}}
    lines, not_run, warnings = make_lines(Plan(samples=[(sample, suite)]), failed, failed)
    assert not lines
    assert not_run == {"irrelevance": "the base answered none of its cases"}
    assert "1 case has no answer of a model, such as 1" in warnings[0]
