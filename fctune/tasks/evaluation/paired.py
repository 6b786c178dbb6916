"""Compare two models on the same cases: the paired difference in accuracy and its significance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.tasks.judge import Row, is_measured, is_valid

_Z = NormalDist().inv_cdf(0.975)  # of the intervals, which are of 95 %


class PairedOutcome(NamedTuple):
    """One item that two models were asked: its id, and if each of them got it right."""

    id: str
    before: bool
    after: bool


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


def compare_outcomes(category: str, outcomes: Iterable[PairedOutcome]) -> Comparison:
    """Compare two models on the items of one category."""
    items = list(outcomes)
    right = tuple(item.id for item in items if item.after and not item.before)
    wrong = tuple(item.id for item in items if item.before and not item.after)
    num_before = sum(item.before for item in items)
    return Comparison(category, len(items), num_before, num_before + len(right) - len(wrong), right, wrong)


def compare_rows(
    before: Sequence[Row], after: Sequence[Row], has_total: bool = True, lenient: bool = False
) -> list[Comparison]:
    """Compare each category, and ``all`` of them at the end; tasks that failed in one of the results are left out.

    Args:
        before: Rows of results.
        after: Rows of results of the same cases.
        has_total: Also compare all categories together; not for a benchmark.
        lenient: Compare the lenient reading.

    Raises:
        DataError: The rows are of different cases, or none was measured in both.
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
    first = {i: row for i, row in first.items() if is_measured(row) and is_measured(second[i])}
    if not first:
        raise DataError("no case was measured in both results. Evaluate both models again.")
    categories = sorted({row["category"] for row in first.values()} - {"all"})
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


def paired_difference_interval(turned_right: float, turned_wrong: float, n: int) -> tuple[float, float]:
    """Return the 95% score interval of the difference between two paired proportions; (-1, 1) if ``n`` is 0.

    T. Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample design,
    Statistics in Medicine 17 (1998): the differences that a score test does not reject. Unlike Wald's interval, it
    keeps its coverage with few cases and few changes. The changes may be means over repeated trainings.
    """
    if n == 0:
        return -1.0, 1.0
    return (
        _solve(lambda difference: _score(turned_right, turned_wrong, n, difference) - _Z),
        _solve(lambda difference: _score(turned_right, turned_wrong, n, difference) + _Z),
    )


def fewest_pairs(tolerance: float) -> int:
    """Return the fewest pairs of which, if none changes, the interval of the difference ends above ``-tolerance``.

    Without changes, the lower end of ``paired_difference_interval`` is ``-z**2 / (n + z**2)``.
    """
    return math.floor(_Z**2 * (1 - tolerance) / tolerance) + 1


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, so that all tests together keep the level of one.

    S. Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979).
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


@lru_cache(maxsize=1000)
def find_smallest_fall(
    n: int, flip_rate: float, level: float = 0.05, tolerance: float = 0.0, power: float = 0.8
) -> float | None:
    """Return the smallest fall in accuracy that a test of ``n`` pairs finds with probability ``power``.

    A fall is found if McNemar's exact p is below ``level`` and the observed fall exceeds ``tolerance``.

    Args:
        n: Number of pairs.
        flip_rate: Probability that an item turns right by chance; as many turn wrong by chance.
        level: Two-sided level of the test.
        tolerance: Fall, from 0 to 1, that must be exceeded.
        power: Probability of finding it.

    Returns:
        A fall from 0 to 1, to 0.1 points; None if not even the largest one would be found.
    """
    flip_rate = min(flip_rate, 0.5)
    low, high = 0, math.floor(1000 * (1 - 2 * flip_rate))
    if n == 0 or find_power(n, flip_rate, high / 1000, level, tolerance) < power:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        is_found = find_power(n, flip_rate, middle / 1000, level, tolerance) >= power
        low, high = (low, middle) if is_found else (middle, high)
    return high / 1000


def find_power(n: int, flip_rate: float, fall: float, level: float, tolerance: float) -> float:
    """Return the probability that ``find_smallest_fall``'s test finds a true fall; exact, by summing over all changes.

    Args:
        n: Number of pairs.
        flip_rate: Probability that an item turns right; it turns wrong with this probability plus ``fall``.
        fall: The true fall, from 0 to 1.
        level: Two-sided level of the test.
        tolerance: Fall that must be exceeded.
    """
    changed = 2 * flip_rate + fall
    if changed <= 0:
        return 0.0
    wrong_share, total = (flip_rate + fall) / changed, 0.0
    middle, spread = n * changed, 7 * math.sqrt(n * changed * (1 - min(changed, 1.0))) + 1
    for num_changed in range(max(1, math.floor(middle - spread)), min(n, math.ceil(middle + spread)) + 1):
        least = _find_critical_count(num_changed, level, math.floor(tolerance * n + 1e-9))
        tail = sum(_binomial(wrong, num_changed, wrong_share) for wrong in range(least, num_changed + 1))
        total += _binomial(num_changed, n, min(changed, 1.0)) * tail
    return total


@lru_cache(maxsize=100_000)
def _find_critical_count(num_changed: int, level: float, least_fall: int) -> int:
    """Return the least number that turned wrong, of those that changed, that is found; ``num_changed`` + 1 if none."""
    least = max((num_changed + least_fall) // 2 + 1, num_changed // 2 + 1)  # more turned wrong than right by the fall
    low, high = least - 1, num_changed + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_found = mcnemar_p(num_changed - middle, middle) < level
        low, high = (low, middle) if is_found else (middle, high)
    return high


def _binomial(k: int, n: int, share: float) -> float:
    """Return the probability of ``k`` of ``n``."""
    if share <= 0.0 or share >= 1.0:
        return float(k == (0 if share <= 0.0 else n))
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(share) + (n - k) * math.log1p(-share))


def _compare(name: str, before: dict[str, Row], after: dict[str, Row], lenient: bool) -> Comparison:
    def is_right(row: Row) -> bool:
        return is_valid(row["lenient"] if lenient else row)

    ids = (i for i, row in before.items() if name in ("all", row["category"]))
    return compare_outcomes(name, (PairedOutcome(i, is_right(before[i]), is_right(after[i])) for i in ids))


def _score(right: float, wrong: float, n: int, difference: float) -> float:
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
