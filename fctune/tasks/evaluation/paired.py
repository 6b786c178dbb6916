"""Compare two models on the same cases: the paired difference in accuracy and its significance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.tasks.judge import Row, is_valid


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of two models on one category of cases, paired by case.

    ``turned_right`` and ``turned_wrong`` hold the ids of the cases that changed.
    """

    category: str
    n: int
    num_right_before: int
    num_right_after: int
    turned_right: tuple[str, ...]
    turned_wrong: tuple[str, ...]

    @property
    def difference(self) -> tuple[float, float, float]:
        """Accuracy after minus accuracy before, with the bounds of its 95 % interval."""
        right, wrong = len(self.turned_right), len(self.turned_wrong)
        return ((right - wrong) / self.n, *paired_difference_interval(right, wrong, self.n))

    @property
    def p_value(self) -> float:
        """Two-sided p-value of McNemar's exact test."""
        return mcnemar_p(len(self.turned_right), len(self.turned_wrong))


def compare_rows(
    before: Sequence[Row], after: Sequence[Row], has_total: bool = True, lenient: bool = False
) -> list[Comparison]:
    """Compare each category, and ``all`` of them at the end.

    Args:
        before: Rows of results.
        after: Rows of results of the same cases.
        has_total: Also compare all categories together; not for a benchmark.
        lenient: Compare the lenient reading.

    Raises:
        DataError: The rows are of different cases.
    """
    first, second = {row["id"]: row for row in before}, {row["id"]: row for row in after}
    if unpaired := first.keys() ^ second.keys():
        raise DataError(
            f"{format_count(len(unpaired), 'case is', 'cases are')} in only one of the two results, such as "
            f"{min(unpaired)!r}. Evaluate both models on the same cases."
        )
    for i, row in first.items():
        if row.get("expected_calls") != second[i].get("expected_calls"):
            raise DataError(
                f"case {i!r} expects different calls in the two results. Evaluate both models on the same cases."
            )
    categories = sorted({row["category"] for row in before} - {"all"})
    names = [*categories, "all"] if has_total or not categories else categories
    return [_compare(name, first, second, lenient) for name in names]


def mcnemar_p(turned_right: int, turned_wrong: int) -> float:
    """Return the two-sided p-value of McNemar's exact test on the cases that changed.

    Q. McNemar, Psychometrika 12 (1947), with binomial probabilities instead of the chi-square approximation.
    """
    n = turned_right + turned_wrong
    tail, ways = 1, 1
    for k in range(min(turned_right, turned_wrong)):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    # Integer division: 2.0 ** n overflows with a thousand changes.
    share: float = 2 * tail / 2**n
    return min(1.0, share)


def paired_difference_interval(
    turned_right: int, turned_wrong: int, n: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the score interval of the difference between two paired proportions; (-1, 1) if ``n`` is 0.

    T. Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17 (1998): the differences that a score test does not reject. Unlike Wald's interval, it
    keeps its coverage with few cases and few changes.
    """
    if n == 0:
        return -1.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    return (
        _solve(lambda difference: _score(turned_right, turned_wrong, n, difference) - z),
        _solve(lambda difference: _score(turned_right, turned_wrong, n, difference) + z),
    )


def _compare(name: str, before: dict[str, Row], after: dict[str, Row], lenient: bool) -> Comparison:
    def is_right(row: Row) -> bool:
        return is_valid(row["lenient"] if lenient else row)

    ids = [i for i, row in before.items() if name in ("all", row["category"])]
    right = [i for i in ids if is_right(after[i]) and not is_right(before[i])]
    wrong = [i for i in ids if is_right(before[i]) and not is_right(after[i])]
    num_before = sum(is_right(before[i]) for i in ids)
    return Comparison(name, len(ids), num_before, num_before + len(right) - len(wrong), tuple(right), tuple(wrong))


def _score(right: int, wrong: int, n: int, difference: float) -> float:
    """Return Tango's statistic: the observed minus the assumed difference, in standard errors."""
    a = 2 * n
    b = (2 * n - right + wrong) * difference - right - wrong
    c = -wrong * difference * (1 - difference)
    # Maximum likelihood estimate of the probability of turning wrong, given the difference.
    q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
    variance = n * (2 * q + difference * (1 - difference))
    distance = right - wrong - n * difference
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def _solve(decreasing: Callable[[float], float]) -> float:
    """Find the zero of a decreasing function on [-1, 1] by bisection."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return (low + high) / 2
