"""Ranks that know of one another whatever state their collectives are in: signs of life, samples, and how a run ends.

All of it goes through a key-value store over TCP, beside the process groups that are measured. A thread of each rank
gives its sign of life, hears signals, and sees when a rank is gone or stuck; one rank then writes the result, and all
leave at once, since their main threads may be waiting in a collective for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fctune.acceptance.config import LimitsConfig
from fctune.training.distributed import Launch, World

logger = logging.getLogger("fctune")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_BEAT_S = 0.25
_GRACE_S = (
    3.0  # after a rank's last word, for the others' words: what a death does to the rest comes sooner than silence
)
_DEAD_S = 2.5  # without a beat within the grace: that one is gone, and the words of the others are consequences

EndKind = Literal["absent", "silent", "stuck", "crashed", "asked", "lost"]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended before its last phase; ``ranks`` are those it is laid to, none for one that was asked for."""

    kind: EndKind
    ranks: tuple[int, ...]
    says: str


@dataclass(slots=True)
class _Peer:
    """What is known of a rank from its last beat; ``seen`` by this rank's clock."""

    beat: bytes = b""
    seen: float = field(default_factory=time.monotonic)
    progress: list[int] = field(default_factory=list)  # points passed, measurements begun since
    overdue: bool = False
    what: str = "starting"


def clone(store: Any) -> Store:
    """A connection of its own to the same store: one that waits holds up what else goes over it."""
    cloned: Store = store.clone()
    return cloned


class Session:
    """This rank among all.

    Args:
        launch: what the launcher says of this process.
        limits: seconds after which a rank is given up.
        folder: of the result, where ranks that lost the store find out which of them writes it.
        on_end: writes the result of a run that ended early; called in a thread, on one rank.

    Raises:
        ConnectionError: rank 0, where the ranks meet, was not there in time; ``on_end`` has been called.
    """

    def __init__(self, launch: Launch, limits: LimitsConfig, folder: Path, on_end: Callable[[Ending], None]):
        self.launch, self.limits = launch, limits
        self._folder, self._on_end = folder, on_end
        self._files: set[Path] = set()
        self._points, self._within, self._what, self._deadline = 0, 0, "starting", float("inf")
        self._trace = ""
        self._peers = {rank: _Peer() for rank in range(launch.world_size)}
        self._words: dict[int, tuple[int, str, str]] = {}  # rank -> order, kind, text
        self._first_word: float | None = None
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": torch.cuda.device_count()}
        self.hellos: dict[int, dict[str, Any]] = {launch.rank: mine}  # of every rank, once all have arrived
        self._arrived = False
        self._started, self._ended = time.monotonic(), 0.0
        self._lock = folder / f".writer-{launch.restart}-{launch.port}"
        with contextlib.suppress(OSError):  # of an earlier run
            if time.time() - self._lock.stat().st_mtime > limits.arrive_s:
                self._lock.unlink()
        self._stop = threading.Event()
        self._store = self._connect()
        self._watch_store = clone(self._store)
        self._signals, self._wakeup = os.pipe()
        for end in (self._signals, self._wakeup):
            os.set_blocking(end, False)
        self._old_handlers: dict[int, Any] = {}
        self._old_wakeup = -1
        if threading.current_thread() is threading.main_thread():
            self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
            self._old_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="session", daemon=True)

    # --- the main thread ---

    def arrive(self) -> None:
        """Say hello, and wait until every rank has; the watch ends the run where one does not in time."""
        self._beat()
        self.put("hello", self.hellos[self.launch.rank])
        self._thread.start()
        hellos = [f"hello/{rank}" for rank in self._peers]
        while not self._store.check(hellos):
            time.sleep(0.05)
        for peer in self._peers.values():
            peer.seen = time.monotonic()
        self.hellos = {rank: json.loads(text) for rank, text in self.read("hello").items()}
        self._arrived = True

    def enter(self, what: str, limit_s: float | None = None) -> None:
        """This rank begins a measurement, which must end within its limit."""
        self._within += what != self._what
        self._what = what
        self._deadline = time.monotonic() + (self.limits.step_s if limit_s is None else limit_s)

    def _reach(self, what: str, limit_s: float | None) -> None:
        """A point that every rank comes by: how far a rank is counts from there."""
        self._points += 1
        self._within = 0
        self.enter(what, limit_s)

    def meet(self, name: str, limit_s: float | None = None) -> None:
        """Wait until every rank has called this with the name, over the store."""
        self._reach(f"waiting for the others at {name}", limit_s)
        self._store.set(f"meet/{name}/{self.launch.rank}", "")
        keys = [f"meet/{name}/{rank}" for rank in range(self.launch.world_size)]
        wait = 0.002
        while not self._store.check(keys):
            time.sleep(wait)
            wait = min(2 * wait, 0.1)
        self._deadline = float("inf")

    def put(self, name: str, value: Any) -> None:
        """Leave a value for whoever reads it; a later one of the same name takes its place."""
        self._store.set(f"{name}/{self.launch.rank}", json.dumps(value))

    def read(self, name: str) -> dict[int, str]:
        """The JSON of each rank that has left one of this name."""
        store = self._watch_store if threading.current_thread() is self._thread else self._store
        ranks = range(self.launch.world_size)
        return {r: store.get(f"{name}/{r}").decode() for r in ranks if store.check([f"{name}/{r}"])}

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes of it, on every rank; small, and plain JSON."""
        self._reach(f"waiting for rank 0 to say: {name}", self.limits.build_s)
        if self.launch.rank == 0:
            value = make()
            self._deadline = float("inf")
            self._store.set(f"shared/{name}", json.dumps(value))
            return value
        while not self._store.check([f"shared/{name}"]):
            time.sleep(0.005)
        self._deadline = float("inf")
        return json.loads(self._store.get(f"shared/{name}"))

    def join(self, name: str, ranks: Sequence[int], device: torch.device) -> World:
        """Be one of a process group of these ranks, in place of the one before."""
        self.leave_group()
        self._reach(f"joining the group {name}", self.limits.build_s)
        group_rank, size = list(ranks).index(self.launch.rank), len(ranks)
        store = PrefixStore(f"group/{name}/{ranks[0]}", clone(self._store))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self.limits.total_s + self.limits.build_s)  # the watch is sooner
        dist.init_process_group(backend, store=store, rank=group_rank, world_size=size, timeout=timeout)
        return World(group_rank, size, self.launch.local_rank, device, min(size, self.launch.ranks_per_node))

    def leave_group(self) -> None:
        """Leave the process group, where there is one; the barrier keeps gloo from aborting at exit now and then."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def keep_clean(self, path: Path) -> None:
        """Remove a path however the run ends."""
        self._files.add(path)

    def clean(self) -> None:
        """Remove what was to be removed."""
        for path in self._files:
            shutil.rmtree(path, ignore_errors=True)

    def fail(self, error: BaseException) -> None:
        """This rank met an error: it says so, stays so that the others are not torn along, and leaves with them."""
        self._trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):  # of a store that is gone, which the watch finds too
            self._say("crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        self._thread.join()

    def close(self) -> None:
        """Leave after all have: rank 0 last, since the store may be its own."""
        self._stop.set()
        self._thread.join()
        self.clean()
        ranks = range(self.launch.world_size)
        self._store.set(f"gone/{self.launch.rank}", "")
        deadline = time.monotonic() + self.limits.silence_s
        if self.launch.rank == 0:
            while not self._store.check([f"gone/{r}" for r in ranks]) and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._old_handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
        for end in (self._signals, self._wakeup):
            os.close(end)

    # --- the watch ---

    def _connect(self) -> Store:
        launch = self.launch
        timeout = datetime.timedelta(seconds=self.limits.arrive_s)
        keeps = launch.rank == 0 and not launch.has_agent
        try:
            store: Any = TCPStore(
                launch.address, launch.port, None, keeps, timeout, wait_for_workers=False, multi_tenant=True
            )
        except Exception as error:  # torch raises several kinds
            says = f"not at {launch.address}:{launch.port}, where the ranks meet, within {self.limits.arrive_s:g} s"
            if self._may_write():
                self._on_end(Ending("absent", (0,), says))
            raise ConnectionError(f"rank 0: {says} ({' '.join(str(error).split())[:200]})") from None
        found: Store = PrefixStore(f"acceptance-{launch.restart}", store)
        return found

    def _watch(self) -> None:
        lost_since: float | None = None
        while not self._stop.wait(_BEAT_S):
            try:
                self._beat()
                self._hear_signals()
                ending = self._find_ending()
                if ending is not None and ending.kind == "crashed" and self.launch.rank in ending.ranks:
                    logger.error("rank %d:\n%s", self.launch.rank, self._trace)
                if self._watch_store.check(["end"]):
                    self._leave()
                lost_since = None
            except Exception as error:  # torch raises several kinds when the store is gone
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since < 1 or self._stop.is_set():
                    continue
                if self._may_write():
                    says = f"the ranks' meeting point is gone ({' '.join(str(error).split())[:200]})"
                    self._on_end(Ending("lost", (0,), says))
                self._leave()
            if ending is not None:
                self._end(ending)

    def _beat(self) -> None:
        overdue = time.monotonic() > self._deadline
        beat = json.dumps([time.monotonic(), [self._points, self._within], overdue, self._what])
        self._watch_store.set(f"beat/{self.launch.rank}", beat)
        if not self._arrived:
            return
        keys = [f"beat/{rank}" for rank in self._peers]
        if not self._watch_store.check(keys):
            return  # a rank that has said hello and not begun
        now = time.monotonic()
        for rank, value in zip(self._peers, self._watch_store.multi_get(keys), strict=True):
            peer = self._peers[rank]
            if value != peer.beat:
                peer.beat, peer.seen = value, now
                _, peer.progress, peer.overdue, peer.what = json.loads(value)

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._signals, 64):
                if number in SIGNALS and self.launch.rank not in self._words:
                    self._say("asked", signal.Signals(number).name)
        for rank, text in self.read("word").items():
            self._words.setdefault(rank, tuple(json.loads(text)))
        if self._words and self._first_word is None:
            self._first_word = time.monotonic()

    def _say(self, kind: str, text: str) -> None:
        """A rank's last word; the store numbers them."""
        store = self._watch_store if threading.current_thread() is self._thread else self._store
        order = store.add("words", 1)
        store.set(f"word/{self.launch.rank}", json.dumps([order, kind, text]))

    def _find_ending(self) -> Ending | None:
        now = time.monotonic()
        silence = {rank: now - peer.seen for rank, peer in self._peers.items()}
        if self._first_word is not None:
            return self._read_words(silence, now)
        if not self._arrived:
            if now - self._started < self.limits.arrive_s:
                return None
            missing = tuple(r for r in self._peers if not self._watch_store.check([f"hello/{r}"]))
            says = f"not there within {self.limits.arrive_s:g} s"
            return Ending("absent", missing, says) if missing else None
        silent = tuple(rank for rank, quiet in silence.items() if quiet > self.limits.silence_s)
        if silent:
            what = self._peers[silent[0]].what
            return Ending("silent", silent, f"no sign of life for {self.limits.silence_s:g} s, last in: {what}")
        if any(peer.overdue for peer in self._peers.values()):
            least = min(peer.progress for peer in self._peers.values())
            behind = tuple(rank for rank, peer in self._peers.items() if peer.progress == least)
            return Ending("stuck", behind, f"did not end in time: {self._peers[behind[0]].what}")
        return None

    def _read_words(self, silence: dict[int, float], now: float) -> Ending | None:
        """What the last words say, once those who can have spoken: a death explains the errors of the others."""
        assert self._first_word is not None
        everyone = set(self._words) == set(self._peers)
        if now - self._first_word < _GRACE_S and not everyone:
            return None
        if self._arrived:
            gone = tuple(r for r in self._peers if r not in self._words and silence[r] > _DEAD_S)
            if gone:
                return Ending("silent", gone, f"its process is gone, last in: {self._peers[gone[0]].what}")
        crashed = sorted((order, rank) for rank, (order, kind, _) in self._words.items() if kind == "crashed")
        if crashed:
            rank = crashed[0][1]
            return Ending("crashed", (rank,), f"{self._words[rank][2]} (in: {self._peers[rank].what})")
        return Ending("asked", (), next(iter(self._words.values()))[2])

    def _end(self, ending: Ending) -> None:
        """The lowest rank that lives writes; the others wait for its word, and not for ever."""
        alive = [r for r in self._peers if r not in ending.ranks or ending.kind in ("stuck", "crashed")]
        if not self._arrived:
            alive = [rank for rank in alive if self._watch_store.check([f"hello/{rank}"])]
        self._ended = self._ended or time.monotonic()
        if self.launch.rank == min(alive, default=self.launch.rank):
            self._may_write()
            try:
                self._on_end(ending)
            except Exception:  # a disk that is full, or a defect: the others must be let go all the same
                logger.exception("the result of a run that ended early (%s) cannot be written", ending.says)
            self._watch_store.set("end", "")
            if self.launch.rank == 0 and not self.launch.has_agent:
                time.sleep(4 * _BEAT_S)  # the store is this process's: the others must read the word first
            self._leave()
        elif time.monotonic() - self._ended > 4 * _GRACE_S:
            self._leave()

    def _may_write(self) -> bool:
        """Whether this rank is the first of its file system to write of this end, where none can be asked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _leave(self) -> None:
        self.clean()
        os._exit(1)
