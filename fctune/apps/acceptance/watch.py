"""Liveness of the ranks: heartbeats, signals, and the decision to end a run early and whom to blame.

A thread of each rank does this, because main threads may wait in a collective forever. When the run ends early, one
rank writes the result and all leave at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from torch._C._distributed_c10d import Store

from fctune.apps.acceptance.config import LimitsConfig
from fctune.base.distributed import LauncherEnvironment
from fctune.base.signals import SignalPipe

logger = logging.getLogger("fctune")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

GRACE_S = 3.0  # after the first final report, for the others': errors caused by a death come before it is noticed
_DEAD_S = 2.5  # without a heartbeat within the grace period: this rank died, and the others' errors are consequences
_HEARTBEAT_S = 0.25

EndKind = Literal["absent", "silent", "stuck", "crashed", "interrupted", "out_of_time", "lost"]


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """Reason for a run's early end, and the ranks to blame; none if it was interrupted or ran out of time."""

    kind: EndKind
    ranks: tuple[int, ...]
    reason: str

    @property
    def is_failure(self) -> bool:
        """True if a rank is to blame."""
        return self.kind not in ("interrupted", "out_of_time")


@dataclass(slots=True)
class Position:
    """Progress of a rank: set by its main thread, published by its watch."""

    sync_points: int = 0  # passed by every rank in the same order
    activities: int = 0  # started since the last sync point
    activity: str = "starting"
    deadline: float = float("inf")

    def enter(self, activity: str, limit_s: float) -> None:
        """Start an activity of this rank that must end within ``limit_s``."""
        self.activities += activity != self.activity
        self.activity = activity
        self.deadline = time.monotonic() + limit_s

    def reach(self, activity: str, limit_s: float) -> None:
        """Reach a sync point, where this rank waits for others for at most ``limit_s``."""
        self.sync_points += 1
        self.activities = 0
        self.enter(activity, limit_s)

    def leave(self) -> None:
        """End the current activity, which lifts its deadline."""
        self.deadline = float("inf")


@dataclass(slots=True)
class Peer:
    """State of a rank according to its last heartbeat; times are this rank's ``time.monotonic``."""

    heartbeat: bytes = b""
    seen: float = field(default_factory=time.monotonic)
    progress: list[int] = field(default_factory=list)  # sync points, and activities since
    moved: float = field(default_factory=time.monotonic)  # last change of progress
    overdue: bool = False
    activity: str = "starting"


class FinalReport(NamedTuple):
    """A rank's final report before it stops; ``order`` is its position among the reports of all ranks."""

    order: int
    kind: str
    text: str


def find_early_end(peers: Mapping[int, Peer], limits: LimitsConfig, now: float, over_s: float) -> EarlyEnd | None:
    """Find ranks that are silent or hold up the others; None if the run can continue.

    Args:
        peers: All ranks, which have all arrived.
        limits: Limits of the run.
        now: ``time.monotonic``.
        over_s: Seconds since the run's time and grace period ended; negative before.
    """
    silent = tuple(rank for rank, peer in peers.items() if now - peer.seen > limits.silence_s)
    if silent:
        activity = peers[silent[0]].activity
        return EarlyEnd("silent", silent, f"no heartbeat for {limits.silence_s:g} s, last in: {activity}")
    least = min(peer.progress for peer in peers.values())
    behind = tuple(rank for rank, peer in peers.items() if peer.progress == least)
    activity = peers[behind[0]].activity
    if any(peer.overdue for peer in peers.values()):
        return EarlyEnd("stuck", behind, f"did not end in time: {activity}")
    if over_s < 0:
        return None
    limit = f"limits.total_s={limits.total_s:g} and limits.grace_s={limits.grace_s:g} exceeded"
    if len(behind) < len(peers):
        if all(now - peers[rank].moved > GRACE_S for rank in behind):
            return EarlyEnd("stuck", behind, f"held up the others, {limit}: {activity}")
        if over_s < GRACE_S:  # by then it is clear whether the ranks behind are still moving
            return None
    return EarlyEnd("out_of_time", (), f"out of time: {limit}, in: {activity}")


def explain_reports(
    reports: Mapping[int, FinalReport], peers: Mapping[int, Peer], now: float, has_arrived: bool
) -> EarlyEnd:
    """Find the cause behind the final reports: a rank that died without one explains the errors of the others."""
    dead = tuple(r for r, peer in peers.items() if r not in reports and now - peer.seen > _DEAD_S)
    if dead and has_arrived:
        return EarlyEnd("silent", dead, f"its process is gone, last in: {peers[dead[0]].activity}")
    crashed = sorted((report.order, rank) for rank, report in reports.items() if report.kind == "crashed")
    if crashed:
        rank = crashed[0][1]
        return EarlyEnd("crashed", (rank,), f"{reports[rank].text} (in: {peers[rank].activity})")
    return EarlyEnd("interrupted", (), next(iter(reports.values())).text)


class Signals:
    """Catches signals that ask the run to end, readable by a thread while the main thread is in C code."""

    def __init__(self) -> None:
        self._pipe = SignalPipe(SIGNALS)
        os.set_blocking(self._pipe.read_end, False)

    def read(self) -> Iterator[str]:
        """Yield the names of signals received since the last call."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._pipe.read_end, 64):
                if number in SIGNALS:
                    yield signal.Signals(number).name

    def close(self) -> None:
        """Restore the signal handlers that were installed before, and close the pipe."""
        self._pipe.close()


class ResultWriter:
    """Writes the result of a run that ends early; ranks that lost the store elect the writer with a lock file.

    A lock file older than ``stale_s`` belongs to an earlier run.
    """

    def __init__(
        self, launch: LauncherEnvironment, folder: Path, write_result: Callable[[EarlyEnd], None], stale_s: float
    ):
        self._folder, self._write_result = folder, write_result
        self._lock = folder / f".writer-{launch.restart}-{launch.port}"
        with contextlib.suppress(OSError):
            if time.time() - self._lock.stat().st_mtime > stale_s:
                self._lock.unlink()

    def write(self, end: EarlyEnd) -> None:
        """Write the result, even if another rank has."""
        self._claim()
        try:
            self._write_result(end)
        except Exception:  # a full disk or a defect: the other ranks must still be released
            logger.exception("cannot write the result of a run that ended early (%s)", end.reason)

    def write_once(self, end: EarlyEnd) -> None:
        """Write the result unless another rank has."""
        if self._claim():
            self._write_result(end)

    def _claim(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # a full or missing disk, which writing the result will report
            return True
        return True


class Watch:
    """The watch thread of one rank, with a store connection that no other thread uses.

    ``clean_up`` removes the run's files from the measured disks before the process exits.
    """

    def __init__(
        self,
        launch: LauncherEnvironment,
        limits: LimitsConfig,
        store: Store,
        position: Position,
        writer: ResultWriter,
        clean_up: Callable[[], None],
    ):
        self._launch, self._limits, self._store = launch, limits, store
        self._position, self._writer, self._clean_up = position, writer, clean_up
        self._peers = {rank: Peer() for rank in range(launch.world_size)}
        self._reports: dict[int, FinalReport] = {}
        self._first_report: float | None = None
        self._has_arrived = False
        self._started, self._ended = time.monotonic(), 0.0
        self._signals = Signals()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.traceback = ""  # of this rank's error
        self.over_at = float("inf")  # when the grace period ends

    def start(self) -> None:
        """Publish the first heartbeat and start the thread."""
        self._publish_heartbeat()
        self._thread.start()

    def confirm_arrival(self) -> None:
        """Start counting silence: every rank has arrived."""
        for peer in self._peers.values():
            peer.seen = time.monotonic()
        self._has_arrived = True

    def report(self, kind: str, text: str, store: Store | None = None) -> None:
        """Publish this rank's final report; a caller in another thread passes its own store connection."""
        store = store or self._store
        order = store.add("reports", 1)
        store.set(f"report/{self._launch.rank}", json.dumps([order, kind, text]))

    def wait(self) -> None:
        """Block until the watch thread ends this process."""
        self._thread.join()

    def stop(self) -> None:
        """Stop the thread after a complete run."""
        self._stop.set()
        self._thread.join()
        self._signals.close()

    def is_current_thread(self) -> bool:
        """Return True if the caller runs in the watch's thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(_HEARTBEAT_S):
            end = None
            try:
                self._publish_heartbeat()
                self._read_reports()
                end = self._find_end()
                if end is not None and end.kind == "crashed" and self._launch.rank in end.ranks:
                    logger.error("rank %d:\n%s", self._launch.rank, self.traceback)
                if self._store.check(["end"]):
                    self._leave()
                lost_since = None
            except Exception as error:  # torch raises several kinds when the store is gone
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since < 1 or self._stop.is_set():
                    continue
                reason = f"lost the connection to the store ({' '.join(str(error).split())[:200]})"
                with contextlib.suppress(Exception):  # this process must end even if the disk fails
                    self._writer.write_once(EarlyEnd("lost", (0,), reason))
                self._leave()
            if end is not None:
                self._finish(end)

    def _publish_heartbeat(self) -> None:
        position = self._position
        overdue = time.monotonic() > position.deadline
        progress = [position.sync_points, position.activities]
        heartbeat = json.dumps([time.monotonic(), progress, overdue, position.activity])
        self._store.set(f"heartbeat/{self._launch.rank}", heartbeat)
        if not self._has_arrived:
            return
        keys = [f"heartbeat/{rank}" for rank in self._peers]
        if not self._store.check(keys):
            return  # a rank has arrived, but not started its watch yet
        now = time.monotonic()
        for rank, value in zip(self._peers, self._store.multi_get(keys), strict=True):
            peer = self._peers[rank]
            if value != peer.heartbeat:
                before, peer.heartbeat, peer.seen = peer.progress, value, now
                _, peer.progress, peer.overdue, peer.activity = json.loads(value)
                if peer.progress != before:
                    peer.moved = now

    def _read_reports(self) -> None:
        for name in self._signals.read():
            if self._launch.rank not in self._reports:
                self.report("interrupted", name)
        for rank in self._peers:
            if rank not in self._reports and self._store.check([f"report/{rank}"]):
                self._reports[rank] = FinalReport(*json.loads(self._store.get(f"report/{rank}")))
        if self._reports and self._first_report is None:
            self._first_report = time.monotonic()

    def _find_end(self) -> EarlyEnd | None:
        now = time.monotonic()
        if self._first_report is not None:
            if now - self._first_report < GRACE_S and len(self._reports) < len(self._peers):
                return None
            return explain_reports(self._reports, self._peers, now, self._has_arrived)
        if self._has_arrived:
            if now - self._peers[self._launch.rank].seen > 4 * _HEARTBEAT_S:
                return None  # this rank or the store was suspended, so what it knows of the others is out of date
            return find_early_end(self._peers, self._limits, now, now - self.over_at)
        if now - self._started < self._limits.arrive_s:
            return None
        missing = tuple(r for r in self._peers if not self._store.check([f"hello/{r}"]))
        reason = f"did not start within {self._limits.arrive_s:g} s"
        return EarlyEnd("absent", missing, reason) if missing else None

    def _finish(self, end: EarlyEnd) -> None:
        """Write the result on the lowest live rank; the others wait for it, for a limited time."""
        alive = [r for r in self._peers if r not in end.ranks or end.kind in ("stuck", "crashed")]
        if not self._has_arrived:
            alive = [rank for rank in alive if self._store.check([f"hello/{rank}"])]
        self._ended = self._ended or time.monotonic()
        if self._launch.rank == min(alive, default=self._launch.rank):
            self._writer.write(end)
            self._store.set("end", "")
            if self._launch.rank == 0 and not self._launch.has_agent:
                time.sleep(4 * _HEARTBEAT_S)  # this process hosts the store, from which the others must read "end"
            self._leave()
        elif time.monotonic() - self._ended > 4 * GRACE_S:
            self._leave()

    def _leave(self) -> None:
        self._clean_up()
        os._exit(1)
