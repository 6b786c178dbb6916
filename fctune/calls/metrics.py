"""Rates over judged cases, with Wilson intervals, by category."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from statistics import NormalDist
from typing import Any

from fctune.calls.judge import ERROR_KINDS, Outcome


def wilson_interval(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion; (0, 1) if ``n`` is 0.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # Rounding would otherwise exclude the share itself at either end.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == n else centre + half)


def rate(successes: int, n: int) -> dict[str, Any]:
    """Return a proportion with its 95 % Wilson interval: ``{"rate", "successes", "n", "low", "high"}``.

    ``rate`` is None if ``n`` is 0.
    """
    low, high = wilson_interval(successes, n)
    return {"rate": successes / n if n else None, "successes": successes, "n": n, "low": low, "high": high}


def score_outcomes(outcomes: Mapping[str, Iterable[Outcome]]) -> dict[str, dict[str, Any]]:
    """Compute, for each category, ``n``, the count of each verdict (``verdicts``) and ``rates`` by name.

    - of all cases: ``accuracy``, ``well_formed`` (an answer without malformed calls);
    - of cases with a call due: ``tool_selection`` (the names are right), ``call_count``, ``missed_call``;
    - of cases with none due: ``abstention``, ``false_call``; the remainder is malformed or unanswered;
    - of calls: ``tool_precision``, ``tool_recall``, ``tool_f1`` by name, where a malformed stretch is a wrong call;
      ``schema_valid`` of the well-formed calls;
    - of arguments, in calls whose name is right: ``argument_precision``, ``argument_recall``, ``argument_f1``.

    Args:
        outcomes: Outcomes by category; in a Counter, an outcome counts as often as it occurs.
    """
    return {
        category: _score_category(cases if isinstance(cases, Counter) else Counter(cases))
        for category, cases in outcomes.items()
    }


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
        "verdicts": {verdict: verdicts[verdict] for verdict in ERROR_KINDS},
        "rates": {
            "accuracy": rate(verdicts["correct"], n),
            "well_formed": rate(n - verdicts["malformed"] - verdicts["no_answer"] - verdicts["not_judged"], n),
            "tool_selection": rate(
                total(lambda case: case.num_expected > 0 and case.verdict in ("correct", "wrong_arguments")), num_due
            ),
            "call_count": rate(
                total(lambda case: 0 < case.num_expected == case.num_called and not case.num_malformed), num_due
            ),
            "missed_call": rate(verdicts["missed_call"], num_due),
            "abstention": rate(total(lambda case: not case.num_expected and case.is_correct), n - num_due),
            "false_call": rate(verdicts["false_call"], n - num_due),
            **_precision_and_recall(
                "tool",
                total(lambda case: case.num_names_matched),
                total(lambda case: case.num_called + case.num_malformed),
                total(lambda case: case.num_expected),
            ),
            **_precision_and_recall(
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


def _precision_and_recall(prefix: str, matched: int, given: int, due: int) -> dict[str, dict[str, Any]]:
    """Compute precision, recall and F1 of two multisets with ``matched`` common members.

    F1 is not a proportion, but a monotonic function of one, the Jaccard index J: F1 = 2J / (1 + J). Its interval is
    J's, mapped through the same formula.
    """
    jaccard = rate(matched, given + due - matched)

    def to_f1(share: float | None) -> float | None:
        return None if share is None else 2 * share / (1 + share)

    return {
        f"{prefix}_precision": rate(matched, given),
        f"{prefix}_recall": rate(matched, due),
        f"{prefix}_f1": {**jaccard, **{key: to_f1(jaccard[key]) for key in ("rate", "low", "high")}},
    }
