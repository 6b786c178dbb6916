"""Formulas and the isolation of what is slow, against cases made by hand."""

from __future__ import annotations

import pytest

from fctune.acceptance.collectives import make_rounds
from fctune.acceptance.identity import count_xids
from fctune.acceptance.statistics import bandwidth, describe, excess, isolate_pairs, minority, percentile


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
def test_busbw_is_algbw_by_the_factor_of_nccl_tests(operation: str, num_ranks: int, factor: float) -> None:
    algorithm, bus = bandwidth(operation, 2_000_000_000, num_ranks, 0.5)
    assert algorithm == 4.0
    assert bus == pytest.approx(4.0 * factor)


def test_a_published_measurement_comes_out_as_published() -> None:
    # nccl-tests' PERFORMANCE.md: 8 ranks, 1 GiB in 7.5 ms is algbw 143.2 and, by 2 x 7 / 8, busbw 250.5.
    algorithm, bus = bandwidth("all_reduce", 2**30, 8, 0.0075)
    assert algorithm == pytest.approx(143.17, abs=0.01)
    assert bus == pytest.approx(250.54, abs=0.01)


def test_percentiles_are_samples() -> None:
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7
    assert describe([1.0, 2.0, 9.0]) == {"mean_s": 4.0, "p50_s": 2.0, "p99_s": 9.0, "best_s": 1.0}


def test_excess_is_over_the_median_of_the_others() -> None:
    assert excess({0: 1.0, 1: 1.0, 2: 3.0, 3: 1.0}) == {0: 0.0, 1: 0.0, 2: 2.0, 3: 0.0}
    assert excess({0: 1.0, 1: 4.0}) == {0: -0.75, 1: 3.0}
    assert excess({0: 5.0}) == {0: 0.0}
    assert excess({0: 0.001, 1: 0.005}, floor_s=0.02)[1] == pytest.approx(0.2)


def pairs(num_ranks: int, slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(a, b): slow.get((a, b), 1.0) for a in range(num_ranks) for b in range(a + 1, num_ranks)}


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_a_rank_that_is_slow_with_everyone_is_the_rank(num_ranks: int) -> None:
    slow = {(a, b): 4.0 for a in range(num_ranks) for b in range(a + 1, num_ranks) if 1 in (a, b)}
    assert isolate_pairs(pairs(num_ranks, slow), 0.5) == ([1], [])


def test_a_pair_that_alone_is_slow_is_a_link_and_not_its_ranks() -> None:
    assert isolate_pairs(pairs(8, {(2, 5): 3.0}), 0.5) == ([], [(2, 5)])


def test_a_slow_rank_and_a_slow_link_elsewhere_are_told_apart() -> None:
    slow = {(a, b): 4.0 for a in range(8) for b in range(a + 1, 8) if 0 in (a, b)} | {(3, 4): 3.0}
    assert isolate_pairs(pairs(8, slow), 0.5) == ([0], [(3, 4)])


def test_even_pairs_name_no_one_and_two_ranks_cannot_be_told_apart() -> None:
    assert isolate_pairs(pairs(6, {}), 0.1) == ([], [])
    assert isolate_pairs({(0, 1): 9.0}, 0.1) == ([], [])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 16])
def test_every_two_ranks_meet_once_and_no_rank_twice_in_a_round(num_ranks: int) -> None:
    rounds = make_rounds(num_ranks)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    for together in rounds:
        ranks = [rank for pair in together for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_the_odd_ones_are_those_against_more_than_half() -> None:
    assert minority({0: "a", 1: "a", 2: "b", 3: "a"}) == [2]
    assert minority({0: "a", 1: "a"}) == []
    assert minority({0: "a", 1: "b"}) is None
    assert minority({0: "a", 1: "a", 2: "b", 3: "b"}) is None


def test_xids_are_counted_by_the_gpu_they_are_of() -> None:
    log = (
        "3,1234,5,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
        "3,1235,6,-;NVRM: Xid (PCI:0000:1B:00.0): 63, ECC page retirement\n"
        "3,1236,7,-;NVRM: Xid (PCI:0000:43:00): 31, MMU Fault\n"
        "6,1237,8,-;eth0: link up\n"
    )
    assert count_xids(log, "0000:1b:00") == 2
    assert count_xids(log, "0000:43:00") == 1
    assert count_xids(log, "0000:44:00") == 0
