"""A thread of each rank that gives its sign of life, hears signals, and sees when a rank is gone or stuck.

One rank then writes the result, and all leave at once, since their main threads may be waiting in a collective for
ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from fctune.acceptance.config import LimitsConfig
from fctune.acceptance.ending import GRACE_S, Ending, Peer, Position, Word, find_culprits, read_words
from fctune.distributed import LauncherEnvironment

logger = logging.getLogger("fctune")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_BEAT_S = 0.25


class Signals:
    """The signals that ask a run to end, heard by a thread while the main one may be in C code for long."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            self._old_wakeup = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)

    def hear(self) -> Iterator[str]:
        """The names of those that came since."""
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._ends[0], 64):
                if number in SIGNALS:
                    yield signal.Signals(number).name

    def close(self) -> None:
        """Leave them to whoever heard them before."""
        if self._old:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old.items():
                signal.signal(number, handler)
        for end in self._ends:
            os.close(end)


class Writer:
    """Writes the result of a run that ends early; of ranks that cannot ask one another, the first of a file system.

    Args:
        launch: what the launcher says of this process.
        folder: of the result.
        on_end: writes it.
        stale_s: age from which on the mark of the first is of another run.
    """

    def __init__(self, launch: LauncherEnvironment, folder: Path, on_end: Callable[[Ending], None], stale_s: float):
        self._folder, self._on_end = folder, on_end
        self._lock = folder / f".writer-{launch.restart}-{launch.port}"
        with contextlib.suppress(OSError):  # of an earlier run
            if time.time() - self._lock.stat().st_mtime > stale_s:
                self._lock.unlink()

    def write(self, ending: Ending) -> None:
        """Write, whoever else has."""
        self._claim()
        try:
            self._on_end(ending)
        except Exception:  # a disk that is full, or a defect: the others must be let go all the same
            logger.exception("the result of a run that ended early (%s) cannot be written", ending.says)

    def write_first(self, ending: Ending) -> None:
        """Write, unless another has."""
        if self._claim():
            self._on_end(ending)

    def _claim(self) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # a disk that is full or not there: the attempt to write says so
            return True
        return True


class Watch:
    """Of this rank, over all.

    Args:
        launch: what the launcher says of this process.
        limits: seconds after which a rank is given up.
        store: a connection of its own.
        position: of this rank.
        writer: of the result.
        clean: removes what the run leaves on disks.
    """

    def __init__(
        self,
        launch: LauncherEnvironment,
        limits: LimitsConfig,
        store: Store,
        position: Position,
        writer: Writer,
        clean: Callable[[], None],
    ):
        self._launch, self._limits, self._store = launch, limits, store
        self._position, self._writer, self._clean = position, writer, clean
        self._peers = {rank: Peer() for rank in range(launch.world_size)}
        self._words: dict[int, Word] = {}
        self._first_word: float | None = None
        self._has_arrived = False
        self._started, self._ended = time.monotonic(), 0.0
        self._signals = Signals()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.trace = ""  # of this rank's error
        self.over_at = float("inf")  # when what is being measured is cut

    def start(self) -> None:
        """Give the first sign of life, and go on."""
        self._beat()
        self._thread.start()

    def see_all_arrive(self) -> None:
        """Every rank has said hello: from now on silence counts."""
        for peer in self._peers.values():
            peer.seen = time.monotonic()
        self._has_arrived = True

    def say(self, kind: str, text: str, store: Store | None = None) -> None:
        """This rank's last word; the store, another thread's where it calls this, numbers them."""
        store = store or self._store
        order = store.add("words", 1)
        store.set(f"word/{self._launch.rank}", json.dumps([order, kind, text]))

    def wait(self) -> None:
        """For the end, which this thread makes."""
        self._thread.join()

    def stop(self) -> None:
        """The run has come to its own end."""
        self._stop.set()
        self._thread.join()
        self._signals.close()

    def is_here(self) -> bool:
        """Whether this is the thread that asks."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(_BEAT_S):
            ending = None
            try:
                self._beat()
                self._hear()
                ending = self._find_ending()
                if ending is not None and ending.kind == "crashed" and self._launch.rank in ending.ranks:
                    logger.error("rank %d:\n%s", self._launch.rank, self.trace)
                if self._store.check(["end"]):
                    self._leave()
                lost_since = None
            except Exception as error:  # torch raises several kinds when the store is gone
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since < 1 or self._stop.is_set():
                    continue
                says = f"the ranks' meeting point is gone ({' '.join(str(error).split())[:200]})"
                with contextlib.suppress(Exception):  # whatever the disk does, this process must not stay
                    self._writer.write_first(Ending("lost", (0,), says))
                self._leave()
            if ending is not None:
                self._end(ending)

    def _beat(self) -> None:
        position = self._position
        overdue = time.monotonic() > position.deadline
        beat = json.dumps([time.monotonic(), [position.points, position.within], overdue, position.what])
        self._store.set(f"beat/{self._launch.rank}", beat)
        if not self._has_arrived:
            return
        keys = [f"beat/{rank}" for rank in self._peers]
        if not self._store.check(keys):
            return  # a rank that has said hello and not begun
        now = time.monotonic()
        for rank, value in zip(self._peers, self._store.multi_get(keys), strict=True):
            peer = self._peers[rank]
            if value != peer.beat:
                before, peer.beat, peer.seen = peer.progress, value, now
                _, peer.progress, peer.overdue, peer.what = json.loads(value)
                if peer.progress != before:
                    peer.moved = now

    def _hear(self) -> None:
        for name in self._signals.hear():
            if self._launch.rank not in self._words:
                self.say("asked", name)
        for rank in self._peers:
            if rank not in self._words and self._store.check([f"word/{rank}"]):
                self._words[rank] = Word(*json.loads(self._store.get(f"word/{rank}")))
        if self._words and self._first_word is None:
            self._first_word = time.monotonic()

    def _find_ending(self) -> Ending | None:
        now = time.monotonic()
        if self._first_word is not None:
            if now - self._first_word < GRACE_S and len(self._words) < len(self._peers):
                return None
            return read_words(self._words, self._peers, now, self._has_arrived)
        if self._has_arrived:
            if now - self._peers[self._launch.rank].seen > 4 * _BEAT_S:
                return None  # this rank stood still, or the store did: it saw nobody, whoever moved
            return find_culprits(self._peers, self._limits, now, now - self.over_at)
        if now - self._started < self._limits.arrive_s:
            return None
        missing = tuple(r for r in self._peers if not self._store.check([f"hello/{r}"]))
        says = f"not there within {self._limits.arrive_s:g} s"
        return Ending("absent", missing, says) if missing else None

    def _end(self, ending: Ending) -> None:
        """The lowest rank that lives writes; the others wait for its word, and not for ever."""
        alive = [r for r in self._peers if r not in ending.ranks or ending.kind in ("stuck", "crashed")]
        if not self._has_arrived:
            alive = [rank for rank in alive if self._store.check([f"hello/{rank}"])]
        self._ended = self._ended or time.monotonic()
        if self._launch.rank == min(alive, default=self._launch.rank):
            self._writer.write(ending)
            self._store.set("end", "")
            if self._launch.rank == 0 and not self._launch.has_agent:
                time.sleep(4 * _BEAT_S)  # the store is this process's: the others must read the word first
            self._leave()
        elif time.monotonic() - self._ended > 4 * GRACE_S:
            self._leave()

    def _leave(self) -> None:
        self._clean()
        os._exit(1)
