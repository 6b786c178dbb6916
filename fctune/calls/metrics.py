"""From calls to numbers: the verdict of a case, and rates with their intervals by category."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

from fctune.calls.formats.base import Parsed
from fctune.calls.matching import align, count_equal_arguments, describe_differences, is_exact_match
from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet

Verdict = Literal[
    "correct", "wrong_name", "wrong_arguments", "wrong_count", "missed_call", "false_call", "malformed", "no_answer"
]
VERDICTS: tuple[str, ...] = get_args(Verdict)


class Outcome(NamedTuple):
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


def judge(expected: Sequence[Call], parsed: Parsed, tools: Sequence[Tool] | ToolSet = ()) -> Outcome:
    """The outcome of one case.

    A malformed stretch decides it, whatever stands beside it: it is neither a call nor an abstention.

    Args:
        expected: The calls that are due; none where the model is to abstain.
        parsed: What the model wrote.
        tools: What was on offer; with it the calls are held against the schemas.
    """
    calls = parsed.calls
    if not isinstance(tools, ToolSet):
        tools = ToolSet(tools)
    num_schema_valid = sum(map(tools.accepts, calls)) if tools else None
    if not parsed.malformed and num_schema_valid in (None, len(calls)) and is_exact_match(expected, calls):
        num_arguments = sum(len(call.arguments) for call in calls)
        return Outcome(
            "correct", len(calls), len(calls), 0, len(calls), num_arguments, num_arguments, num_arguments,
            num_schema_valid,
        )  # fmt: skip
    pairs = [(expected[row], calls[column]) for row, column in align(expected, calls)]
    differences = [f"malformed: {stretch.reason}" for stretch in parsed.malformed]
    differences.extend(describe_differences(expected, calls))
    differences.extend(f"schema: {line}" for call in calls if tools for line in tools.find_errors(call))
    is_correct = not parsed.malformed and is_exact_match(expected, calls)
    return Outcome(
        verdict="correct" if is_correct else classify([call.name for call in expected], parsed),
        num_expected=len(expected),
        num_called=len(calls),
        num_malformed=len(parsed.malformed),
        num_names_matched=len(pairs),
        num_arguments_expected=sum(len(due.arguments) for due, _ in pairs),
        num_arguments_called=sum(len(given.arguments) for _, given in pairs),
        num_arguments_matched=sum(count_equal_arguments(due, given) for due, given in pairs),
        num_schema_valid=num_schema_valid,
        differences=tuple(differences),
    )


def judge_failure(num_expected: int, reason: str) -> Outcome:
    """The outcome of a case whose answer never came: wrong, also where no call was due, and in every denominator."""
    return Outcome("no_answer", num_expected, num_called=0, differences=(f"no answer: {reason}",))


def classify(names: Sequence[str], parsed: Parsed) -> Verdict:
    """What is wrong with calls that are not the expected ones, of which the names are given."""
    if parsed.malformed:
        return "malformed"
    if not names:
        return "false_call"
    if not parsed.calls:
        return "missed_call"
    if len(names) != len(parsed.calls):
        return "wrong_count"
    return "wrong_arguments" if sorted(names) == sorted(call.name for call in parsed.calls) else "wrong_name"


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


def score(outcomes: Mapping[str, Iterable[Outcome]]) -> dict[str, dict[str, Any]]:
    """Per category: ``n``, the count of each verdict under ``verdicts``, and ``rates`` by name.

    A rate is ``{"rate", "successes", "n", "low", "high"}``: a share, what it counts, and its Wilson interval at 95 %;
    ``rate`` is None where nothing was to count. There is no rate over categories: their mix is the suite's, not
    the model's.

    - of all cases: ``accuracy``, ``well_formed`` (an answer came, with nothing malformed in it);
    - of cases with a call due: ``tool_selection`` (the names are right), ``call_count``, ``missed_call``;
    - of cases with none due: ``abstention``, ``false_call``; what is left to 1 is malformed or missing;
    - of calls: ``tool_precision``, ``tool_recall``, ``tool_f1`` by name, a malformed stretch being a wrong call;
      ``schema_valid`` of the well-formed calls;
    - of arguments of calls whose name is right: ``argument_precision``, ``argument_recall``, ``argument_f1``.

    Args:
        outcomes: By category; a Counter stands for each outcome as often as it counts.
    """
    return {
        category: _score_category(cases if isinstance(cases, Counter) else Counter(cases))
        for category, cases in outcomes.items()
    }


def rate(successes: int, n: int) -> dict[str, Any]:
    """A share with its Wilson interval at 95 %, as ``score`` gives it."""
    low, high = wilson_interval(successes, n)
    return {"rate": successes / n if n else None, "successes": successes, "n": n, "low": low, "high": high}


def _score_category(cases: Counter[Outcome]) -> dict[str, Any]:
    def total(count: Callable[[Outcome], int]) -> int:
        return sum(count(case) * times for case, times in cases.items())

    verdicts: Counter[str] = Counter()
    for case, times in cases.items():
        verdicts[case.verdict] += times
    n = total(lambda case: 1)
    num_due = total(lambda case: case.num_expected > 0)
    return {
        "n": n,
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "rates": {
            "accuracy": rate(verdicts["correct"], n),
            "well_formed": rate(n - verdicts["malformed"] - verdicts["no_answer"], n),
            "tool_selection": rate(
                total(lambda case: case.num_expected > 0 and case.verdict in ("correct", "wrong_arguments")), num_due
            ),
            "call_count": rate(
                total(lambda case: 0 < case.num_expected == case.num_called and not case.num_malformed), num_due
            ),
            "missed_call": rate(verdicts["missed_call"], num_due),
            "abstention": rate(total(lambda case: not case.num_expected and case.is_correct), n - num_due),
            "false_call": rate(verdicts["false_call"], n - num_due),
            **_set_rates(
                "tool",
                total(lambda case: case.num_names_matched),
                total(lambda case: case.num_called + case.num_malformed),
                total(lambda case: case.num_expected),
            ),
            **_set_rates(
                "argument",
                total(lambda case: case.num_arguments_matched),
                total(lambda case: case.num_arguments_called),
                total(lambda case: case.num_arguments_expected),
            ),
            "schema_valid": rate(
                total(lambda case: case.num_schema_valid or 0),
                total(lambda case: case.num_called if case.num_schema_valid is not None else 0),
            ),
        },
    }


def _set_rates(what: str, matched: int, given: int, due: int) -> dict[str, dict[str, Any]]:
    """Precision, recall and F1 of two sets of which ``matched`` members are common.

    F1 is no share of anything, but it grows with one: that of the common members among all, J, as F1 = 2J / (1 + J).
    Its interval is J's, taken through the same formula.
    """
    joint = rate(matched, given + due - matched)

    def to_f1(share: float | None) -> float | None:
        return None if share is None else 2 * share / (1 + share)

    return {
        f"{what}_precision": rate(matched, given),
        f"{what}_recall": rate(matched, due),
        f"{what}_f1": {**joint, **{key: to_f1(joint[key]) for key in ("rate", "low", "high")}},
    }
