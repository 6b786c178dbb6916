"""Blame for an early end, given the state of all ranks."""

from __future__ import annotations

import pytest

from fctune.apps.acceptance.config import LimitsConfig
from fctune.apps.acceptance.watch import EarlyEnd, FinalReport, Peer, Position, explain_reports, find_early_end

NOW = 1_000.0
LIMITS = LimitsConfig(silence_s=10.0, total_s=60.0, grace_s=5.0)


def peers(
    *progress: list[int], quiet: dict[int, float] | None = None, overdue: tuple[int, ...] = ()
) -> dict[int, Peer]:
    made = {}
    for rank, points in enumerate(progress):
        seen = NOW - (quiet or {}).get(rank, 0.2)
        made[rank] = Peer(b"", seen, points, NOW - 60, rank in overdue, f"task {points[0]}")
    return made


def test_ranks_with_heartbeats_and_time_left_continue() -> None:
    assert find_early_end(peers([3, 0], [3, 1], [2, 0]), LIMITS, NOW, over_s=-1.0) is None


def test_silent_ranks_are_blamed_for_their_silence() -> None:
    found = find_early_end(peers([3, 0], [3, 0], [3, 0], quiet={1: 10.5}, overdue=(0,)), LIMITS, NOW, over_s=-1.0)
    assert found == EarlyEnd("silent", (1,), "no heartbeat for 10 s, last in: task 3")


def test_ranks_behind_the_others_are_blamed_and_not_those_that_wait_for_them() -> None:
    found = find_early_end(peers([4, 0], [4, 0], [3, 1], [3, 2], overdue=(0, 1)), LIMITS, NOW, over_s=-1.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("stuck", (2,))
    assert found.is_failure


def test_nobody_is_blamed_when_time_runs_out_with_all_ranks_at_the_same_point() -> None:
    found = find_early_end(peers([4, 0], [4, 0]), LIMITS, NOW, over_s=0.1)
    assert found is not None
    assert (found.kind, found.ranks) == ("out_of_time", ())
    assert not found.is_failure
    assert "limits.total_s=60 and limits.grace_s=5 exceeded, in: task 4" in found.reason


@pytest.mark.parametrize(
    ("since_s", "over_s", "kind"),
    [(60.0, 0.1, "stuck"), (3.5, 3.1, "stuck"), (0.5, 0.1, None), (0.5, 3.1, "out_of_time")],
)
def test_when_time_runs_out_only_a_rank_without_recent_progress_is_blamed(
    since_s: float, over_s: float, kind: str | None
) -> None:
    known = peers([4, 0], [3, 0])
    known[1].moved = NOW - since_s
    found = find_early_end(known, LIMITS, NOW, over_s)
    assert (found and found.kind) == kind
    assert (found.ranks if found else ()) == ((1,) if kind == "stuck" else ())


def test_a_death_explains_the_errors_of_the_others() -> None:
    reports = {0: FinalReport(1, "crashed", "connection closed"), 1: FinalReport(2, "interrupted", "SIGTERM")}
    found = explain_reports(reports, peers([3, 0], [3, 0], [3, 0], quiet={2: 3.0}), NOW, has_arrived=True)
    assert (found.kind, found.ranks) == ("silent", (2,))


def test_the_first_of_several_errors_is_the_cause_and_a_signal_is_no_error() -> None:
    reports = {
        0: FinalReport(3, "crashed", "later"),
        1: FinalReport(2, "crashed", "first"),
        2: FinalReport(1, "interrupted", "SIGINT"),
    }
    found = explain_reports(reports, peers([3, 0], [3, 0], [3, 0]), NOW, has_arrived=True)
    assert found == EarlyEnd("crashed", (1,), "first (in: task 3)")
    found = explain_reports({2: reports[2]}, peers([3, 0], [3, 0], [3, 0]), NOW, has_arrived=True)
    assert found == EarlyEnd("interrupted", (), "SIGINT")


def test_progress_counts_sync_points_and_activities_since() -> None:
    position = Position()
    position.enter("a", 5)
    position.enter("a", 5)
    position.enter("b", 5)
    assert (position.sync_points, position.activities) == (0, 2)
    assert position.deadline < float("inf")
    position.reach("a barrier", 5)
    assert (position.sync_points, position.activities) == (1, 1)
    position.leave()
    assert position.deadline == float("inf")
