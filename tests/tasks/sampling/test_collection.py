"""Batches of rollouts: drawn in order, refilled, bounded, and collected again from what a checkpoint holds."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.grpo import GRPOConfig
from fctune.tasks.rollouts import Request, Rollout
from fctune.tasks.sampling.collection import Position, RolloutBatch, RolloutCollector, TaskOrder

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


class Batches:
    """Batches one after the other, with the answers of a player; ``done`` are answers from before a restart."""

    def __init__(
        self, player: Player, position: Position | None = None, num_flat: int = 0, ahead: int = 0, **options: object
    ):
        options = {"prompts_per_step": 3, "group_size": 2, **options}
        config = GRPOConfig(cases="synthetic:train:10", **options)  # type: ignore[arg-type]
        self.player, self.said = player, list[str]()
        order = TaskOrder(IDS, 7, CATEGORIES, config.category_shares)
        self.collector = RolloutCollector(config, order, num_ahead=ahead, log=self.said.append)
        if position is not None:
            self.collector.restore({"position": position, "num_flat": num_flat})

    def collect(self, number: int) -> RolloutBatch:
        return self.collector.collect(number, self.player)


def mixed(request: Request) -> Rollout:
    return answer(request, float(request.sample % 2))


def test_failed_answers_are_counted_with_the_reason_of_one() -> None:
    def fail_some(request: Request) -> Rollout:
        return answer(request, 0.5, error="the shop is closed." if request.sample == 2 else None)

    batches = Batches(Player(fail_some), group_size=3, drop_flat_groups=False, max_flat_batches=2)
    batch = batches.collect(1)
    said = r"3 of 9 answers failed, for example case \d: the shop is closed"
    assert re.fullmatch(said, str(batch.describe_failures()))
    with pytest.raises(DataError, match=rf"2 batches in a row .*\(mean reward 0\.5\); {said}\. Use cases"):
        batches.collect(2)
    assert Batches(Player(mixed)).collect(1).describe_failures() is None


def test_a_pass_asks_each_case_once_with_its_own_seeds() -> None:
    player = Player(mixed)
    batches = Batches(player)
    position: Position = (0,)
    for number in range(1, 6):
        batch = batches.collect(number)
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

    batches = Batches(Player(make), max_refills=2)
    order = [draw.case_id for draw in TaskOrder(IDS, 7).draw((0,), [10])[0]]
    taught |= {order[1], order[4]}
    batch = batches.collect(1)
    assert [group[0].case_id for group in batch.groups] == [order[1], order[4]]
    assert (batch.num_rounds, batch.stop) == (2, (3 + 2 + 1,))
    assert len(batch.dropped) == 4
    assert len(batch.rollouts) == 12
    kept = Batches(Player(make), drop_flat_groups=False).collect(1)
    assert len(kept.groups) == 3


def test_a_dropped_group_is_replaced_by_a_case_of_its_category() -> None:
    """There are two cases of no_call, and every other group of their answers is flat."""

    def make(request: Request) -> Rollout:
        is_flat = CATEGORIES[request.case_id] == "no_call" and (request.sample // 2) % 2 == 0
        return answer(request, 0.0 if is_flat else float(request.sample % 2))

    config: dict[str, object] = {"prompts_per_step": 4, "category_shares": {"no_call": 0.5}}
    batch = Batches(Player(make), **config).collect(1)  # type: ignore[arg-type]
    assert [CATEGORIES[group[0].case_id] for group in batch.groups].count("no_call") == 2
    assert len(batch.groups) == 4
    assert {CATEGORIES[group[0].case_id] for group in batch.dropped} == {"no_call"}
    assert batch.stop == (4, 2), "two cases of no_call, twice each, and two calls"
    again = Batches(Player(make), **config)  # type: ignore[arg-type]
    again.collector.ask()
    for one in batch.rollouts[:4:3]:
        again.collector.add(one)
    assert resume(again).collect(1).groups == batch.groups


@pytest.mark.parametrize("drops", [True, False])
def test_batches_that_teach_nothing_end_the_run(drops: bool) -> None:
    player = Player(lambda request: answer(request, 0.25))
    batches = Batches(player, drop_flat_groups=drops, max_refills=1, max_flat_batches=3)
    if not drops:
        assert [batches.collect(number).num_flat for number in (1, 2)] == [1, 2]
    with pytest.raises(DataError, match=r"3 batches in a row .* equal rewards .*mean reward 0\.25"):
        batches.collect(3)
    assert len(player.asked) <= 2 * 3 * 5


def test_equal_rewards_of_all_tasks_are_said_after_the_first_batch() -> None:
    options: dict[str, object] = {"prompts_per_step": 16, "group_size": 8, "drop_flat_groups": False}
    batches = Batches(Player(lambda request: answer(request, 0.25)), **options)  # type: ignore[arg-type]
    batches.collect(1)
    batch = batches.collect(2)
    assert batches.said == [f"batch 1: all {len(batch.rollouts)} answers have the reward 0.25, which teaches nothing"]
    by_case = Player(lambda request: answer(request, float(request.case_id[-1])))
    others = Batches(by_case, **options)  # type: ignore[arg-type]
    assert others.collect(1).num_flat == 1
    assert not others.said, "each group has equal rewards, but some tasks are solved"


def resume(batches: Batches) -> Batches:
    """Return new batches that continue from the state of others, as a checkpoint holds it."""
    made = Batches(batches.player)
    made.collector = RolloutCollector(
        batches.collector._config, batches.collector._order, None, batches.collector._num_ahead
    )
    made.collector.restore(json.loads(json.dumps(batches.collector.state())))
    return made


def test_a_batch_is_collected_again_from_the_answers_that_there_are() -> None:
    whole = Batches(Player(mixed), position=(5,)).collect(4)
    part, player = Batches(Player(mixed), position=(5,)), Player(mixed)
    part.collector.update(4)
    requests = part.collector.ask()
    done = list(map(mixed, requests))[::2]
    for one in done:
        part.collector.add(one)
    part.player = player
    again = resume(part).collect(4)
    assert again.groups == whole.groups
    assert len(player.asked) == len(whole.rollouts) - len(done)
    assert not {(one.case_id, one.sample) for one in player.asked} & {(one.case_id, one.sample) for one in done}


def test_answers_that_an_earlier_version_saved_by_batch_are_asked_again() -> None:
    player = Player(mixed)
    batches = Batches(player)
    batches.collector.restore({"position": [5], "num_flat": 0, "ahead": {"4": [mixed(Request("a", 0, 0)).to_json()]}})
    assert batches.collect(4).groups == Batches(Player(mixed), position=(5,)).collect(4).groups
    assert len(player.asked) == 6


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("shares", [None, {"no_call": 0.4}])
@pytest.mark.parametrize("seed", range(4))
def test_with_batches_ahead_each_answer_is_in_one_batch_and_none_is_too_old(
    ahead: int, shares: dict[str, float] | None, seed: int
) -> None:
    """Answers arrive in a random order, some after ages; policies change between; the run restarts now and then."""
    rng, num_batches = random.Random(seed), 12
    config = GRPOConfig(cases="x", prompts_per_step=4, group_size=2, category_shares=shares, max_staleness=ahead)
    order = TaskOrder(IDS, 7, CATEGORIES, shares)
    collector = RolloutCollector(config, order, num_batches, ahead)
    flying: list[tuple[Request, int]] = []  # with the version that is asked
    asked, version, batches = Counter[tuple[str, int]](), 0, list[RolloutBatch]()
    for number in range(1, num_batches + 1):
        version = number - 1
        if rng.random() < 0.3:  # a restart: what was under way is asked again
            state = json.loads(json.dumps(collector.state()))
            asked -= Counter((one.case_id, one.sample) for one, _ in flying)
            collector, flying = RolloutCollector(config, order, num_batches, ahead), []
            collector.restore(state)
        collector.update(number)
        while True:
            requests = collector.ask()
            asked.update((one.case_id, one.sample) for one in requests)
            flying += [(one, version) for one in requests]
            if (batch := collector.take()) is not None:
                break
            slow = max(1, len(flying) // 4)
            request, since = flying.pop(rng.randrange(slow, len(flying)) if len(flying) > slow else 0)
            is_flat = request.seed % 3 == 0
            collector.add(answer(request, 0.0 if is_flat else float(request.sample % 2), version=since))
        batches.append(batch)
        assert len(batch.groups) == 4
        if shares is not None:
            pools = Counter(CATEGORIES[group[0].case_id] for group in batch.groups)
            assert pools["no_call"] == order.count_prompts(number, 4)[0]
        assert all(number - 1 - one.version <= ahead for one in batch.rollouts)
        assert sum(batch.stop) - sum(batch.start) == len(batch.groups) + len(batch.dropped)
    logged = Counter((one.case_id, one.sample) for batch in batches for one in batch.rollouts)
    assert set(logged.values()) == {1}
    assert logged == asked, "nothing is asked that is not used"
    assert not flying
    assert all(before.stop == after.start for before, after in itertools.pairwise(batches))


def test_with_batches_ahead_a_slow_group_delays_only_the_batch_in_which_it_is_due() -> None:
    config = GRPOConfig(cases="x", prompts_per_step=2, group_size=2)
    collector, slow = RolloutCollector(config, TaskOrder(IDS, 7), None, 2), TaskOrder(IDS, 7).draw((0,), [1])[0][0]
    late: list[Request] = []
    for number in (1, 2, 3):
        collector.update(number)
        for request in collector.ask():
            if request.case_id == slow.case_id:
                late.append(request)
            else:
                collector.add(mixed(request))
        batch = collector.take()
        assert (batch is None) == (number == 3), number
    for request in late:
        collector.add(mixed(request))
    batch = collector.take()
    assert batch is not None
    assert batch.number == 3
    assert slow.case_id in [group[0].case_id for group in batch.groups]


def test_cut_answers_count_in_their_group_and_are_not_trained() -> None:
    batches = Batches(Player(lambda request: answer(request, float(request.sample), is_cut=request.sample == 1)))
    batch = batches.collect(1)
    assert [[batches.collector.is_trained(one) for one in group] for group in batch.groups] == [[True, False]] * 3
    unmasked = Batches(Player(mixed), mask_cut=False)
    assert unmasked.collector.is_trained(answer(Request("a", 0, 0), 1.0, is_cut=True))


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
        Batches(Player(lambda request: answer(request, 1.0, **changes))).collect(1)
