"""How a run ends before its last phase: what is known of every rank, and which of them the end is laid to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fctune.acceptance.config import LimitsConfig

# After a rank's last word, for the others' words: what a death does to the rest comes sooner than silence.
GRACE_S = 3.0
_DEAD_S = 2.5  # without a beat within the grace: that one is gone, and the words of the others are consequences

EndKind = Literal["absent", "silent", "stuck", "crashed", "asked", "late", "lost"]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended early; ``ranks`` are those it is laid to, none where it was asked for or its time was over."""

    kind: EndKind
    ranks: tuple[int, ...]
    says: str

    @property
    def is_failure(self) -> bool:
        """Whether a rank is at fault, rather than whoever asked for the end or allowed too little time."""
        return self.kind not in ("asked", "late")


@dataclass(slots=True)
class Position:
    """How far a rank is: its main thread moves it, its watch tells the others."""

    points: int = 0  # that every rank comes by
    within: int = 0  # measurements begun since the last of them
    what: str = "starting"
    deadline: float = float("inf")

    def enter(self, what: str, limit_s: float) -> None:
        """A measurement of this rank begins, which must end within so many seconds."""
        self.within += what != self.what
        self.what = what
        self.deadline = time.monotonic() + limit_s

    def reach(self, what: str, limit_s: float) -> None:
        """A point that every rank comes by: how far a rank is counts from there."""
        self.points += 1
        self.within = 0
        self.enter(what, limit_s)

    def pass_on(self) -> None:
        """What was begun is over."""
        self.deadline = float("inf")


@dataclass(slots=True)
class Peer:
    """What is known of a rank from its last beat; ``seen`` by this rank's clock."""

    beat: bytes = b""
    seen: float = field(default_factory=time.monotonic)
    progress: list[int] = field(default_factory=list)  # points, and within
    moved: float = field(default_factory=time.monotonic)  # when that last changed
    overdue: bool = False
    what: str = "starting"


class Word(NamedTuple):
    """The last word of a rank; ``order`` counts the words of all."""

    order: int
    kind: str
    text: str


def find_culprits(peers: Mapping[int, Peer], limits: LimitsConfig, now: float, over_s: float) -> Ending | None:
    """Who has fallen silent, or holds the others up; None where all is well.

    Args:
        peers: every rank, of which all have arrived.
        limits: of the run.
        now: by the clock of ``Peer.seen``.
        over_s: seconds since the run's time and what may be added to it are over; negative before.
    """
    silent = tuple(rank for rank, peer in peers.items() if now - peer.seen > limits.silence_s)
    if silent:
        what = peers[silent[0]].what
        return Ending("silent", silent, f"no sign of life for {limits.silence_s:g} s, last in: {what}")
    least = min(peer.progress for peer in peers.values())
    behind = tuple(rank for rank, peer in peers.items() if peer.progress == least)
    what = peers[behind[0]].what
    if any(peer.overdue for peer in peers.values()):
        return Ending("stuck", behind, f"did not end in time: {what}")
    if over_s < 0:
        return None
    over = f"limits.total_s={limits.total_s:g} and limits.cut_s={limits.cut_s:g} over"
    if len(behind) < len(peers):
        if all(now - peers[rank].moved > GRACE_S for rank in behind):
            return Ending("stuck", behind, f"held the others up with {over}: {what}")
        if over_s < GRACE_S:  # whether those that are behind move will be seen by then
            return None
    return Ending("late", (), f"out of time: {over}, in: {what}")


def read_words(words: Mapping[int, Word], peers: Mapping[int, Peer], now: float, has_arrived: bool) -> Ending:
    """What the last words say, once those who can have spoken: a death explains the errors of the others."""
    gone = tuple(r for r, peer in peers.items() if r not in words and now - peer.seen > _DEAD_S)
    if gone and has_arrived:
        return Ending("silent", gone, f"its process is gone, last in: {peers[gone[0]].what}")
    crashed = sorted((word.order, rank) for rank, word in words.items() if word.kind == "crashed")
    if crashed:
        rank = crashed[0][1]
        return Ending("crashed", (rank,), f"{words[rank].text} (in: {peers[rank].what})")
    return Ending("asked", (), next(iter(words.values())).text)
