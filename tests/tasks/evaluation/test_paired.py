"""Paired comparison: the interval checked against its definition, p against counting."""

from __future__ import annotations

import io
import itertools
import math
import random

import pytest

from fctune.base.errors import DataError
from fctune.base.terminal import Terminal
from fctune.cli.tables import make_table
from fctune.tasks.evaluation.paired import compare_rows, mcnemar_p, paired_difference_interval

Z = 1.959963984540054


def likelihood(right: int, wrong: int, n: int, p: float, q: float) -> float:
    rest = 1 - p - q
    if min(p, q, rest) < 0:
        return -math.inf
    terms = ((right, p), (wrong, q), (n - right - wrong, rest))
    if any(count and share <= 0 for count, share in terms):
        return -math.inf
    return sum(count * math.log(share) for count, share in terms if count)


def score_by_search(right: int, wrong: int, n: int, difference: float) -> float:
    """The score statistic with the constrained likeliest probabilities found by trying them all."""
    best = max((i / 200_000 for i in range(200_001)), key=lambda q: likelihood(right, wrong, n, q + difference, q))
    variance = n * (2 * best + difference - difference**2)
    return (right - wrong - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("right", "wrong", "n"), [(7, 2, 30), (1, 9, 40), (5, 0, 12)])
def test_the_bounds_are_where_the_score_test_stops_rejecting(right: int, wrong: int, n: int) -> None:
    low, high = paired_difference_interval(right, wrong, n)
    assert low < (right - wrong) / n < high
    assert score_by_search(right, wrong, n, low) == pytest.approx(Z, abs=2e-3)
    assert score_by_search(right, wrong, n, high) == pytest.approx(-Z, abs=2e-3)


def test_no_difference_is_outside_exactly_when_mcnemars_statistic_says_so() -> None:
    for right, wrong in itertools.product(range(14), repeat=2):
        low, high = paired_difference_interval(right, wrong, 60)
        rejects = right + wrong > 0 and (right - wrong) ** 2 / (right + wrong) > Z * Z
        assert (low > 0 or high < 0) == rejects, (right, wrong)


def test_swapping_the_models_mirrors_the_interval() -> None:
    for right, wrong, n in ((3, 8, 20), (0, 0, 5), (20, 0, 20)):
        low, high = paired_difference_interval(right, wrong, n)
        assert paired_difference_interval(wrong, right, n) == pytest.approx((-high, -low), abs=1e-12)


@pytest.mark.parametrize(("right", "wrong", "n"), [(0, 0, 10), (10, 0, 10), (0, 10, 10), (0, 0, 1), (1, 0, 1)])
def test_the_ends_are_kept_in(right: int, wrong: int, n: int) -> None:
    low, high = paired_difference_interval(right, wrong, n)
    assert -1 <= low <= (right - wrong) / n <= high <= 1
    assert high - low > 0.1


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.1), (0.1, 0.1), (0.05, 0.02), (0.5, 0.02)])
def test_the_interval_covers_as_often_as_it_says(p: float, q: float) -> None:
    """Over every outcome of 30 cases, weighted by its probability."""
    n, covered = 30, 0.0
    for right in range(n + 1):
        for wrong in range(n + 1 - right):
            ways = math.comb(n, right) * math.comb(n - right, wrong)
            chance = ways * p**right * q**wrong * (1 - p - q) ** (n - right - wrong)
            if chance > 1e-9:
                low, high = paired_difference_interval(right, wrong, n)
                covered += chance * (low <= p - q <= high)
    assert 0.93 < covered < 0.99


def test_p_is_the_share_of_coin_tosses_that_are_as_lopsided() -> None:
    for right, wrong in ((0, 0), (3, 3), (1, 7), (0, 6), (9, 2)):
        n = right + wrong
        tosses = itertools.product((0, 1), repeat=n)
        as_far = sum(abs(sum(toss) - n / 2) >= abs(right - n / 2) for toss in tosses)
        assert mcnemar_p(right, wrong) == pytest.approx(as_far / 2**n)


def test_p_is_found_for_thousands_of_changes() -> None:
    assert mcnemar_p(3000, 3000) == 1.0
    assert 0.04 < mcnemar_p(2922, 3078) < 0.05
    assert mcnemar_p(0, 5000) == 0.0


def rows(verdicts: dict[str, bool], category: str = "x") -> list[dict[str, object]]:
    return [
        {"id": i, "category": category, "verdict": "correct" if right else "wrong_name", "expected_calls": []}
        for i, right in verdicts.items()
    ]


def test_cases_are_paired_by_id_whatever_their_order() -> None:
    before = {str(i): i < 4 for i in range(10)}
    after = {str(i): i >= 2 for i in range(10)}
    shuffled = rows(after)
    random.Random(0).shuffle(shuffled)
    x, everything = compare_rows(rows(before), shuffled)
    assert (x.category, everything.category) == ("x", "all")
    assert (x.n, x.num_right_before, x.num_right_after) == (10, 4, 8)
    assert x.turned_right == ("4", "5", "6", "7", "8", "9")
    assert x.turned_wrong == ("0", "1")
    assert x.difference[0] == pytest.approx(0.4)
    assert [c.category for c in compare_rows(rows(before), rows(after), has_total=False)] == ["x"]


def test_other_cases_are_refused() -> None:
    with pytest.raises(DataError, match="2 cases are in only one of the two results"):
        compare_rows(rows({"a": True}), rows({"b": True}))
    changed = rows({"a": True})
    changed[0]["expected_calls"] = [{"name": "f", "arguments": {}}]
    with pytest.raises(DataError, match="expects different calls"):
        compare_rows(rows({"a": True}), changed)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_number_is_cut_or_broken_on_a_narrow_terminal(width: int) -> None:
    cells = ["parallel_multiple", "1,300", "10.0% (7.1% - 13.9%)", "+85.3% (+80.7% to +89.0%)", "< 0.0001"]
    table = make_table("accuracy", "category", "n", "before", "difference", "p")
    table.add_row(*cells)
    shown = io.StringIO()
    Terminal(width=width, file=shown).print(table)
    lines = shown.getvalue().splitlines()
    assert all(any(cell in line for line in lines) for cell in cells), lines
    assert max(map(len, lines)) <= width
