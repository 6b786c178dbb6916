"""Batches of rollouts: drawn in order, refilled, bounded, and collected again from what a checkpoint holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.grpo import GRPOConfig
from fctune.tasks.rollouts import Request, Rollout
from fctune.tasks.sampling.collection import Position, RolloutCollector, TaskOrder

ORDER_IDS = [f"case {number}" for number in range(30)]
ORDER_CATEGORIES = {one: ("call", "call", "call", "no_call", "clarify")[n % 5] for n, one in enumerate(ORDER_IDS)}


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
    order = TaskOrder(ORDER_IDS, 3, ORDER_CATEGORIES, shares)
    batches, position = draw_batches(order, 300, num_prompts)
    assert sum(position) == 300 * num_prompts
    totals: Counter[str] = Counter()
    for batch in batches:
        counts = Counter(ORDER_CATEGORIES[one] for one in batch)
        assert sum(counts.values()) == num_prompts
        for name, share in shares.items():
            assert abs(counts[name] - share * num_prompts) < 1 + 1e-9
        totals += counts
    for name, share in expected.items():
        assert totals[name] / totals.total() == pytest.approx(share, abs=0.01)


def test_each_pool_is_asked_completely_before_a_case_repeats() -> None:
    batches, _ = draw_batches(TaskOrder(ORDER_IDS, 3, ORDER_CATEGORIES, {"no_call": 0.5}), 12, 4)
    asked = [one for batch in batches for one in batch]
    calls, others = (
        [one for one in asked if (ORDER_CATEGORIES[one] == "no_call") == is_other] for is_other in (False, True)
    )
    assert len(calls) == len(others) == 24
    assert len(set(calls)) == 24
    assert [len(set(others[first : first + 6])) for first in range(0, 24, 6)] == [6] * 4


def test_draws_depend_on_the_position_alone() -> None:
    order = TaskOrder(ORDER_IDS, 3, ORDER_CATEGORIES, {"no_call": 0.5})
    draws, position = order.draw((4, 7), [2, 3])
    assert position == (6, 10)
    again = TaskOrder(ORDER_IDS, 3, ORDER_CATEGORIES, {"no_call": 0.5})
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
        TaskOrder(ORDER_IDS, 3, ORDER_CATEGORIES, shares)


IDS = [f"case {number}" for number in range(10)]
CATEGORIES = {one: "no_call" if number in {2, 6} else "call" for number, one in enumerate(IDS)}


def answer(request: Request, reward: float, **changes: object) -> Rollout:
    made = Rollout(request.case_id, request.sample, "all", 0, (1,), (2, 3), (True, True), (-1.0, -1.0), reward=reward)
    return replace(made, **changes)  # type: ignore[arg-type]


class Player:
    """Rewards by a function of the request, and counts what was asked."""

    def __init__(self, make: Callable[[Request], Rollout]):
        self.make, self.asked = make, list[Request]()

    def __call__(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        self.asked += requests
        return (self.make(request) for request in reversed(requests))


def collector(player: Player, **options: object) -> RolloutCollector:
    options = {"prompts_per_step": 3, "group_size": 2, **options}
    config = GRPOConfig(cases="synthetic:train:10", **options)  # type: ignore[arg-type]
    return RolloutCollector(config, TaskOrder(IDS, 7, CATEGORIES, config.category_shares), player)


def mixed(request: Request) -> Rollout:
    return answer(request, float(request.sample % 2))


def test_failed_answers_are_counted_with_the_reason_of_one() -> None:
    def fail_some(request: Request) -> Rollout:
        return answer(request, 0.5, error="the shop is closed." if request.sample == 2 else None)

    batches = collector(Player(fail_some), group_size=3, drop_flat_groups=False, max_flat_batches=2)
    batch = batches.collect(1, (0,))
    said = r"3 of 9 answers failed, for example case \d: the shop is closed"
    assert re.fullmatch(said, str(batch.describe_failures()))
    with pytest.raises(DataError, match=rf"2 batches in a row .*\(mean reward 0\.5\); {said}\. Use cases"):
        batches.collect(2, batch.stop, batch.num_flat)
    assert collector(Player(mixed)).collect(1, (0,)).describe_failures() is None


def test_a_pass_asks_each_case_once_with_its_own_seeds() -> None:
    player = Player(mixed)
    batches = collector(player)
    position = (0,)
    for number in range(1, 6):
        batch = batches.collect(number, position)
        assert batch.start == position
        assert [[one.sample % 2 for one in group] for group in batch.groups] == [[0, 1]] * 3
        position = batch.stop
    assert position == (15,)
    assert sorted(one.case_id for one in player.asked[:20]) == sorted(IDS * 2)
    assert len({one.seed for one in player.asked}) == len(player.asked)


def test_flat_groups_are_dropped_and_replaced_up_to_the_limit() -> None:
    taught: set[str] = set()

    def make(request: Request) -> Rollout:
        return answer(request, float(request.sample) if request.case_id in taught else 1.0)

    batches = collector(Player(make), max_refills=2)
    order = [draw.case_id for draw in TaskOrder(IDS, 7).draw((0,), [10])[0]]
    taught |= {order[1], order[4]}
    batch = batches.collect(1, (0,))
    assert [group[0].case_id for group in batch.groups] == [order[1], order[4]]
    assert (batch.num_rounds, batch.stop) == (2, (3 + 2 + 1,))
    assert len(batch.dropped) == 4
    assert len(batch.rollouts) == 12
    kept = collector(Player(make), drop_flat_groups=False).collect(1, (0,))
    assert len(kept.groups) == 3


def test_a_dropped_group_is_replaced_by_a_case_of_its_category() -> None:
    """There are two cases of no_call, and every other group of their answers is flat."""

    def make(request: Request) -> Rollout:
        is_flat = CATEGORIES[request.case_id] == "no_call" and (request.sample // 2) % 2 == 0
        return answer(request, 0.0 if is_flat else float(request.sample % 2))

    config: dict[str, object] = {"prompts_per_step": 4, "category_shares": {"no_call": 0.5}}
    batch = collector(Player(make), **config).collect(1, (0, 0))
    assert [CATEGORIES[group[0].case_id] for group in batch.groups].count("no_call") == 2
    assert len(batch.groups) == 4
    assert {CATEGORIES[group[0].case_id] for group in batch.dropped} == {"no_call"}
    assert batch.stop == (4, 2), "two cases of no_call, twice each, and two calls"
    again = collector(Player(make), **config).collect(1, (0, 0), done=batch.rollouts[::3])
    assert again.groups == batch.groups


@pytest.mark.parametrize("drops", [True, False])
def test_batches_that_teach_nothing_end_the_run(drops: bool) -> None:
    player = Player(lambda request: answer(request, 0.25))
    batches = collector(player, drop_flat_groups=drops, max_refills=1, max_flat_batches=3)
    num_flat = 0 if drops else batches.collect(2, (0,), batches.collect(1, (0,)).num_flat).num_flat
    with pytest.raises(DataError, match=r"3 batches in a row .* equal rewards .*mean reward 0\.25"):
        batches.collect(3, (0,), num_flat)
    assert len(player.asked) <= 2 * 3 * 5


def test_equal_rewards_of_all_tasks_are_said_after_the_first_batch() -> None:
    config, said = GRPOConfig(cases="synthetic:train:10", drop_flat_groups=False), list[str]()
    always = Player(lambda request: answer(request, 0.25))
    batches = RolloutCollector(config, TaskOrder(IDS, 7), always, said.append)
    batch = batches.collect(2, (0,), batches.collect(1, (0,)).num_flat)
    assert said == [f"batch 1: all {len(batch.rollouts)} answers have the reward 0.25, which teaches nothing"]
    by_case = Player(lambda request: answer(request, float(request.case_id[-1])))
    assert RolloutCollector(config, TaskOrder(IDS, 7), by_case, said.append).collect(1, (0,)).num_flat == 1
    assert len(said) == 1, "each group has equal rewards, but some tasks are solved"


def test_a_batch_is_collected_again_from_the_answers_that_there_are() -> None:
    whole = collector(Player(mixed)).collect(4, (5,))
    player = Player(mixed)
    done = whole.rollouts[::2]
    again = collector(player).collect(4, (5,), done=done)
    assert again.groups == whole.groups
    assert len(player.asked) == len(whole.rollouts) - len(done)
    assert not {(one.case_id, one.sample) for one in player.asked} & {(one.case_id, one.sample) for one in done}


def test_cut_answers_count_in_their_group_and_are_not_trained() -> None:
    batches = collector(Player(lambda request: answer(request, float(request.sample), is_cut=request.sample == 1)))
    batch = batches.collect(1, (0,))
    assert [[batches.is_trained(one) for one in group] for group in batch.groups] == [[True, False]] * 3
    unmasked = collector(Player(mixed), mask_cut=False)
    assert unmasked.is_trained(answer(Request("a", 0, 0), 1.0, is_cut=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": "no route", "ids": (), "is_generated": (), "logprobs": ()}, r"none of 6 answers arrived.*no route"),
        ({"ids": (), "is_generated": (), "logprobs": ()}, "none of 6 answers has a generated token"),
    ],
    ids=["errors", "no tokens"],
)
def test_batches_without_answers_end_the_run(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        collector(Player(lambda request: answer(request, 1.0, **changes))).collect(1, (0,))
