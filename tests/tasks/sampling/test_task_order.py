"""The order of tasks: complete passes, given shares of categories, and the same draws from any position."""

from __future__ import annotations

from collections import Counter

import pytest

from fctune.base.errors import ConfigError
from fctune.tasks.sampling.collection import Position, TaskOrder

IDS = [f"case {number}" for number in range(30)]
CATEGORIES = {one: ("call", "call", "call", "no_call", "clarify")[n % 5] for n, one in enumerate(IDS)}


def draw_batches(order: TaskOrder, num_batches: int, num_prompts: int) -> tuple[list[list[str]], Position]:
    position, batches = order.start, []
    for number in range(1, num_batches + 1):
        draws, position = order.draw(position, order.count_prompts(number, num_prompts))
        batches.append([draw.case_id for draw in draws])
    return batches, position


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"no_call": 0.5}, {"call": 0.375, "no_call": 0.5, "clarify": 0.125}),
        ({"no_call": 0.3, "call": 0.6, "clarify": 0.1}, {"call": 0.6, "no_call": 0.3, "clarify": 0.1}),
        ({"clarify": 0.0}, {"call": 0.75, "no_call": 0.25, "clarify": 0.0}),
    ],
    ids=["one", "all", "none of one"],
)
@pytest.mark.parametrize("num_prompts", [1, 7, 16])
def test_batches_have_the_shares(shares: dict[str, float], expected: dict[str, float], num_prompts: int) -> None:
    order = TaskOrder(IDS, 3, CATEGORIES, shares)
    batches, position = draw_batches(order, 300, num_prompts)
    assert sum(position) == 300 * num_prompts
    totals: Counter[str] = Counter()
    for batch in batches:
        counts = Counter(CATEGORIES[one] for one in batch)
        assert sum(counts.values()) == num_prompts
        for name, share in shares.items():
            assert abs(counts[name] - share * num_prompts) < 1 + 1e-9
        totals += counts
    for name, share in expected.items():
        assert totals[name] / totals.total() == pytest.approx(share, abs=0.01)


def test_each_pool_is_asked_completely_before_a_case_repeats() -> None:
    batches, _ = draw_batches(TaskOrder(IDS, 3, CATEGORIES, {"no_call": 0.5}), 12, 4)
    asked = [one for batch in batches for one in batch]
    calls, others = ([one for one in asked if (CATEGORIES[one] == "no_call") == is_other] for is_other in (False, True))
    assert len(calls) == len(others) == 24
    assert len(set(calls)) == 24
    assert [len(set(others[first : first + 6])) for first in range(0, 24, 6)] == [6] * 4


def test_draws_depend_on_the_position_alone() -> None:
    order = TaskOrder(IDS, 3, CATEGORIES, {"no_call": 0.5})
    draws, position = order.draw((4, 7), [2, 3])
    assert position == (6, 10)
    again = TaskOrder(IDS, 3, CATEGORIES, {"no_call": 0.5})
    assert again.draw((4, 7), [2, 0])[0] + again.draw((6, 7), [0, 3])[0] == draws
    seeds = [seed for draw in draws for seed in order.make_seeds(draw, 8)]
    assert len(set(seeds)) == len(draws) * 8
    # Tasks of equal numbers in different pools have different seeds.
    (one,), (other,) = order.draw((0, 0), [1, 0])[0], order.draw((0, 0), [0, 1])[0]
    assert not set(order.make_seeds(one, 8)) & set(order.make_seeds(other, 8))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"no_cal": 0.5}, r"grpo.category_shares.no_cal: no case has this category; did you mean no_call\? .*clarify"),
        ({"call": 0.5, "no_call": 0.2, "clarify": 0.1}, "of all categories sum to 0.8; expected 1"),
        ({"call": 0.5, "no_call": 0.5}, "cases of clarify would never be asked"),
    ],
    ids=["unknown", "too little", "too much"],
)
def test_shares_that_fit_no_batch_are_refused(shares: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TaskOrder(IDS, 3, CATEGORIES, shares)
