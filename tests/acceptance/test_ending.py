"""Whom an end is laid to, from what is known of every rank."""

from __future__ import annotations

import pytest

from fctune.acceptance.config import LimitsConfig
from fctune.acceptance.ending import Ending, Peer, Position, Word, find_culprits, read_words

NOW = 1_000.0
LIMITS = LimitsConfig(silence_s=10.0, total_s=60.0, cut_s=5.0)


def peers(
    *progress: list[int], quiet: dict[int, float] | None = None, overdue: tuple[int, ...] = ()
) -> dict[int, Peer]:
    made = {}
    for rank, points in enumerate(progress):
        seen = NOW - (quiet or {}).get(rank, 0.2)
        made[rank] = Peer(b"", seen, points, NOW - 60, rank in overdue, f"task {points[0]}")
    return made


def test_ranks_that_beat_and_are_in_time_end_nothing() -> None:
    assert find_culprits(peers([3, 0], [3, 1], [2, 0]), LIMITS, NOW, over_s=-1.0) is None


def test_silence_is_laid_to_those_that_are_silent() -> None:
    found = find_culprits(peers([3, 0], [3, 0], [3, 0], quiet={1: 10.5}, overdue=(0,)), LIMITS, NOW, over_s=-1.0)
    assert found == Ending("silent", (1,), "no sign of life for 10 s, last in: task 3")


def test_whoever_waits_too_long_is_not_named_but_those_that_are_behind() -> None:
    found = find_culprits(peers([4, 0], [4, 0], [3, 1], [3, 2], overdue=(0, 1)), LIMITS, NOW, over_s=-1.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("stuck", (2,))
    assert found.is_failure


def test_when_the_time_is_over_no_one_is_named_where_all_are_as_far() -> None:
    found = find_culprits(peers([4, 0], [4, 0]), LIMITS, NOW, over_s=0.1)
    assert found is not None
    assert (found.kind, found.ranks) == ("late", ())
    assert not found.is_failure
    assert "limits.total_s=60 and limits.cut_s=5 over, in: task 4" in found.says


@pytest.mark.parametrize(
    ("since_s", "over_s", "kind"), [(60.0, 0.1, "stuck"), (3.5, 3.1, "stuck"), (0.5, 0.1, None), (0.5, 3.1, "late")]
)
def test_when_the_time_is_over_only_one_that_has_not_moved_for_long_holds_the_others_up(
    since_s: float, over_s: float, kind: str | None
) -> None:
    known = peers([4, 0], [3, 0])
    known[1].moved = NOW - since_s
    found = find_culprits(known, LIMITS, NOW, over_s)
    assert (found and found.kind) == kind
    assert (found.ranks if found else ()) == ((1,) if kind == "stuck" else ())


def test_a_death_explains_the_errors_of_the_others() -> None:
    words = {0: Word(1, "crashed", "connection closed"), 1: Word(2, "asked", "SIGTERM")}
    found = read_words(words, peers([3, 0], [3, 0], [3, 0], quiet={2: 3.0}), NOW, has_arrived=True)
    assert (found.kind, found.ranks) == ("silent", (2,))


def test_of_several_errors_the_first_is_the_cause_and_a_signal_is_none() -> None:
    words = {0: Word(3, "crashed", "later"), 1: Word(2, "crashed", "first"), 2: Word(1, "asked", "SIGINT")}
    found = read_words(words, peers([3, 0], [3, 0], [3, 0]), NOW, has_arrived=True)
    assert found == Ending("crashed", (1,), "first (in: task 3)")
    found = read_words({2: words[2]}, peers([3, 0], [3, 0], [3, 0]), NOW, has_arrived=True)
    assert found == Ending("asked", (), "SIGINT")


def test_progress_counts_points_and_what_has_begun_since() -> None:
    position = Position()
    position.enter("a", 5)
    position.enter("a", 5)
    position.enter("b", 5)
    assert (position.points, position.within) == (0, 2)
    assert position.deadline < float("inf")
    position.reach("a meeting", 5)
    assert (position.points, position.within) == (1, 1)
    position.pass_on()
    assert position.deadline == float("inf")
