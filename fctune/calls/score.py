"""From calls to numbers: the verdict of a case, and rates with their intervals by category."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, get_args

from fctune.calls.match import align, count_equal_arguments, describe_differences, is_exact_match
from fctune.calls.schema import schema_errors
from fctune.calls.wire import Parsed
from fctune.data.conversation import Call, Tool

Verdict = Literal["correct", "wrong_name", "wrong_arguments", "wrong_count", "missed_call", "false_call", "malformed"]
VERDICTS: tuple[str, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case: its verdict, why, and the counts that rates are made of.

    ``num_malformed`` counts stretches that were meant as calls and are none. Arguments are counted over calls that
    pair with an expected one of the same name. ``num_schema_valid`` is None where the tools are not known.
    """

    verdict: Verdict
    num_expected: int
    num_called: int
    num_malformed: int = 0
    num_names_matched: int = 0
    num_arguments_expected: int = 0
    num_arguments_called: int = 0
    num_arguments_matched: int = 0
    num_schema_valid: int | None = None
    differences: tuple[str, ...] = ()

    @property
    def is_correct(self) -> bool:
        """Whether the case counts as solved."""
        return self.verdict == "correct"


def judge(expected: Sequence[Call], parsed: Parsed, tools: Sequence[Tool] = ()) -> Outcome:
    """The outcome of one case.

    A malformed stretch decides it, whatever stands beside it: it is neither a call nor an abstention. A case whose
    answer never came is judged as one malformed stretch of no length with the failure as its reason, so that
    it stays in every denominator.

    Args:
        expected: The calls that are due; none where the model is to abstain.
        parsed: What the model wrote.
        tools: What was on offer; with it the calls are held against the schemas.
    """
    calls = parsed.calls
    pairs = [(expected[row], calls[column]) for row, column in align(expected, calls)]
    errors = [schema_errors(call, tools) for call in calls] if tools else []
    differences = [f"malformed: {stretch.reason}" for stretch in parsed.malformed]
    differences.extend(describe_differences(expected, calls))
    differences.extend(f"schema: {line}" for lines in errors for line in lines)
    return Outcome(
        verdict=_verdict(expected, parsed),
        num_expected=len(expected),
        num_called=len(calls),
        num_malformed=len(parsed.malformed),
        num_names_matched=len(pairs),
        num_arguments_expected=sum(len(due.arguments) for due, _ in pairs),
        num_arguments_called=sum(len(given.arguments) for _, given in pairs),
        num_arguments_matched=sum(count_equal_arguments(due, given) for due, given in pairs),
        num_schema_valid=sum(not lines for lines in errors) if tools else None,
        differences=tuple(differences),
    )


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of the share that a count of ``successes`` in ``n`` speaks for; (0, 1) where ``n`` is 0.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At the ends rounding would leave the share itself outside.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def score(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, Any]]:
    """Per category: ``n``, the count of each verdict under ``verdicts``, and ``rates`` by name.

    A rate is ``{"rate", "successes", "n", "low", "high"}``: a share, what it counts, and its Wilson interval at 95 %;
    ``rate`` is None where nothing was to count. There is no rate over categories: their mix is the suite's, not
    the model's.

    - of all cases: ``accuracy``, ``well_formed``;
    - of cases with a call due: ``tool_selection`` (the names are right), ``call_count``, ``missed_call``;
    - of cases with none due: ``abstention``, ``false_call``; what is left to 1 is malformed;
    - of calls: ``tool_precision``, ``tool_recall``, ``tool_f1`` by name, a malformed stretch being a wrong call;
      ``schema_valid`` of the well-formed calls;
    - of arguments of calls whose name is right: ``argument_precision``, ``argument_recall``, ``argument_f1``.
    """
    return {category: _score_category(cases) for category, cases in outcomes.items()}


def _verdict(expected: Sequence[Call], parsed: Parsed) -> Verdict:
    if parsed.malformed:
        return "malformed"
    if is_exact_match(expected, parsed.calls):
        return "correct"
    if not expected:
        return "false_call"
    if not parsed.calls:
        return "missed_call"
    if len(expected) != len(parsed.calls):
        return "wrong_count"
    if Counter(call.name for call in expected) != Counter(call.name for call in parsed.calls):
        return "wrong_name"
    return "wrong_arguments"


def _score_category(cases: Sequence[Outcome]) -> dict[str, Any]:
    due = [case for case in cases if case.num_expected]
    undue = [case for case in cases if not case.num_expected]
    verdicts: Counter[str] = Counter(case.verdict for case in cases)
    checked = [case for case in cases if case.num_schema_valid is not None]
    return {
        "n": len(cases),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "rates": {
            "accuracy": _rate(verdicts["correct"], len(cases)),
            "well_formed": _rate(len(cases) - verdicts["malformed"], len(cases)),
            "tool_selection": _rate(sum(case.verdict in ("correct", "wrong_arguments") for case in due), len(due)),
            "call_count": _rate(
                sum(case.num_called == case.num_expected and not case.num_malformed for case in due), len(due)
            ),
            "missed_call": _rate(verdicts["missed_call"], len(due)),
            "abstention": _rate(sum(case.is_correct for case in undue), len(undue)),
            "false_call": _rate(verdicts["false_call"], len(undue)),
            **_set_rates(
                "tool",
                sum(case.num_names_matched for case in cases),
                sum(case.num_called + case.num_malformed for case in cases),
                sum(case.num_expected for case in cases),
            ),
            **_set_rates(
                "argument",
                sum(case.num_arguments_matched for case in cases),
                sum(case.num_arguments_called for case in cases),
                sum(case.num_arguments_expected for case in cases),
            ),
            "schema_valid": _rate(
                sum(case.num_schema_valid or 0 for case in checked), sum(case.num_called for case in checked)
            ),
        },
    }


def _rate(successes: int, n: int) -> dict[str, Any]:
    low, high = wilson_interval(successes, n)
    return {"rate": successes / n if n else None, "successes": successes, "n": n, "low": low, "high": high}


def _set_rates(what: str, matched: int, given: int, due: int) -> dict[str, dict[str, Any]]:
    """Precision, recall and F1 of two sets of which ``matched`` members are common.

    F1 is no share of anything, but it grows with one: that of the common members among all, J, as F1 = 2J / (1 + J).
    Its interval is J's, taken through the same formula.
    """
    joint = _rate(matched, given + due - matched)

    def to_f1(share: float | None) -> float | None:
        return None if share is None else 2 * share / (1 + share)

    return {
        f"{what}_precision": _rate(matched, given),
        f"{what}_recall": _rate(matched, due),
        f"{what}_f1": {**joint, **{key: to_f1(joint[key]) for key in ("rate", "low", "high")}},
    }
