"""Statistics: bandwidth formulas and the isolation of slow ranks and links, on hand-written cases."""

from __future__ import annotations

import pytest

from fctune.apps.acceptance.collectives import schedule_pairs
from fctune.apps.acceptance.devices import count_xids
from fctune.apps.acceptance.metrics import (
    compute_bandwidth,
    compute_slowdowns,
    find_outliers,
    isolate_slow_pairs,
    percentile,
    summarize_times,
)


@pytest.mark.parametrize(
    ("operation", "num_ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 16, 1.875),
        ("all_gather", 16, 0.9375),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 4, 0.75),
        ("broadcast", 16, 1.0),
        ("point_to_point", 2, 1.0),
    ],
)
def test_busbw_is_algbw_times_the_factor_of_nccl_tests(operation: str, num_ranks: int, factor: float) -> None:
    algbw, busbw = compute_bandwidth(operation, 2_000_000_000, num_ranks, 0.5)
    assert algbw == 4.0
    assert busbw == pytest.approx(4.0 * factor)


def test_a_published_measurement_is_reproduced() -> None:
    # nccl-tests' PERFORMANCE.md: 8 ranks, 1 GiB in 7.5 ms: algbw 143.2 and, times 2 x 7 / 8, busbw 250.5.
    algbw, busbw = compute_bandwidth("all_reduce", 2**30, 8, 0.0075)
    assert algbw == pytest.approx(143.17, abs=0.01)
    assert busbw == pytest.approx(250.54, abs=0.01)


def test_percentiles_are_samples_not_interpolations() -> None:
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7
    assert summarize_times([1.0, 2.0, 9.0]) == {"mean_s": 4.0, "p50_s": 2.0, "p99_s": 9.0, "best_s": 1.0}


def test_slowdowns_are_relative_to_the_median_of_the_others() -> None:
    assert compute_slowdowns({0: 1.0, 1: 1.0, 2: 3.0, 3: 1.0}) == {0: 0.0, 1: 0.0, 2: 2.0, 3: 0.0}
    assert compute_slowdowns({0: 1.0, 1: 4.0}) == {0: -0.75, 1: 3.0}
    assert compute_slowdowns({0: 5.0}) == {0: 0.0}
    assert compute_slowdowns({0: 0.001, 1: 0.005}, floor_s=0.02)[1] == pytest.approx(0.2)


def pairs(num_ranks: int, slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(a, b): slow.get((a, b), 1.0) for a in range(num_ranks) for b in range(a + 1, num_ranks)}


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_a_rank_that_is_slow_with_every_partner_is_isolated(num_ranks: int) -> None:
    slow = {(a, b): 4.0 for a in range(num_ranks) for b in range(a + 1, num_ranks) if 1 in (a, b)}
    assert isolate_slow_pairs(pairs(num_ranks, slow), 0.5) == ([1], [])


def test_a_single_slow_pair_is_a_slow_link() -> None:
    assert isolate_slow_pairs(pairs(8, {(2, 5): 3.0}), 0.5) == ([], [(2, 5)])


def test_a_slow_rank_and_a_slow_link_elsewhere_are_distinguished() -> None:
    slow = {(a, b): 4.0 for a in range(8) for b in range(a + 1, 8) if 0 in (a, b)} | {(3, 4): 3.0}
    assert isolate_slow_pairs(pairs(8, slow), 0.5) == ([0], [(3, 4)])


def test_equal_pairs_and_a_single_pair_isolate_nothing() -> None:
    assert isolate_slow_pairs(pairs(6, {}), 0.1) == ([], [])
    assert isolate_slow_pairs({(0, 1): 9.0}, 0.1) == ([], [])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16])
def test_every_two_ranks_meet_once_and_no_rank_twice_in_a_round(num_ranks: int) -> None:
    rounds = schedule_pairs(num_ranks)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    for together in rounds:
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_outliers_differ_from_the_majority() -> None:
    assert find_outliers({0: "a", 1: "a", 2: "b", 3: "a"}) == [2]
    assert find_outliers({0: "a", 1: "a"}) == []
    assert find_outliers({0: "a", 1: "b"}) is None
    assert find_outliers({0: "a", 1: "a", 2: "b", 3: "b"}) is None


def test_xids_are_counted_by_gpu() -> None:
    log = (
        "3,1234,5,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "3,1235,6,-;NVRM: Xid (PCI:0000:1B:00.0): 63, ECC page retirement\n"
        "3,1236,7,-;NVRM: Xid (PCI:0000:43:00): 31, MMU Fault\n"
        "6,1237,8,-;eth0: link up\n"
    )
    assert count_xids(log, "0000:1b:00") == 2
    assert count_xids(log, "0000:43:00") == 1
    assert count_xids(log, "0000:44:00") == 0
