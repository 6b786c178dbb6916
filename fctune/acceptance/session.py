"""Ranks that know of one another whatever state their collectives are in: meeting points, samples, and the time left.

All of it goes through a key-value store over TCP, beside the process groups that are measured; ``watch`` sees over the
same store how the others are.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fctune.acceptance.config import LimitsConfig
from fctune.acceptance.ending import Ending, Position
from fctune.acceptance.watch import Watch, Writer
from fctune.distributed import LauncherEnvironment, World


class OutOfTime(Exception):
    """The run's time is over: raised on every rank at the same point."""


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

    def __init__(
        self, launch: LauncherEnvironment, limits: LimitsConfig, folder: Path, on_end: Callable[[Ending], None]
    ):
        self.launch, self.limits = launch, limits
        self._files: set[Path] = set()
        self._position = Position()
        mine = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": torch.cuda.device_count()}
        self.hellos: dict[int, dict[str, Any]] = {launch.rank: mine}  # of every rank, once all have arrived
        self._started, self._over_at = time.monotonic(), float("inf")
        writer = Writer(launch, folder, on_end, limits.arrive_s)
        self._store = _connect(launch, limits, writer)
        self._watch_store = clone(self._store)
        self._watch = Watch(launch, limits, self._watch_store, self._position, writer, self.clean)

    def arrive(self) -> None:
        """Say hello, and wait until every rank has; the watch ends the run where one does not in time."""
        self.put("hello", self.hellos[self.launch.rank])
        self._watch.start()
        hellos = [f"hello/{rank}" for rank in range(self.launch.world_size)]
        while not self._store.check(hellos):
            time.sleep(0.05)
        self._watch.see_all_arrive()
        self.hellos = {rank: json.loads(text) for rank, text in self.read("hello").items()}
        gone = self.share("the time that is over", lambda: time.monotonic() - self._started)
        self._over_at = time.monotonic() + self.limits.total_s - gone
        self._watch.over_at = self._over_at + self.limits.cut_s

    def enter(self, what: str, limit_s: float | None = None) -> None:
        """This rank begins a measurement, which must end within its limit."""
        self._position.enter(what, self.limits.step_s if limit_s is None else limit_s)

    def meet(self, name: str, limit_s: float | None = None) -> None:
        """Wait until every rank has come to this point, over the store."""
        limit_s = self.limits.step_s if limit_s is None else limit_s
        self._position.reach(f"waiting for the others at {name}", limit_s)
        number = self._position.points
        self._store.set(f"meet/{number}/{self.launch.rank}", "")
        keys = [f"meet/{number}/{rank}" for rank in range(self.launch.world_size)]
        wait = 0.002
        while not self._store.check(keys):
            time.sleep(wait)
            wait = min(2 * wait, 0.1)
        self._position.pass_on()

    def put(self, name: str, value: Any) -> None:
        """Leave a value for whoever reads it; a later one of the same name takes its place."""
        self._store.set(f"{name}/{self.launch.rank}", json.dumps(value))

    def read(self, name: str) -> dict[int, str]:
        """The JSON of each rank that has left one of this name."""
        store = self._watch_store if self._watch.is_here() else self._store
        ranks = range(self.launch.world_size)
        return {r: store.get(f"{name}/{r}").decode() for r in ranks if store.check([f"{name}/{r}"])}

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes of it, on every rank; small, and plain JSON."""
        self._position.reach(f"waiting for rank 0 to say: {name}", self.limits.build_s)
        key = f"shared/{self._position.points}"
        if self.launch.rank == 0:
            value = make()
            self._position.pass_on()
            self._store.set(key, json.dumps(value))
            return value
        while not self._store.check([key]):
            time.sleep(0.005)
        self._position.pass_on()
        return json.loads(self._store.get(key))

    def time_left(self) -> float:
        """Seconds of the run's time that are left, by rank 0's clock; the same on every rank.

        What lasts is measured in pieces, and every rank asks before each.

        Raises:
            OutOfTime: none are.
        """
        left = float(self.share("the time that is left", lambda: self._over_at - time.monotonic()))
        if left <= 0:
            raise OutOfTime(f"out of time: limits.total_s={self.limits.total_s:g} over")
        return left

    @property
    def is_out_of_time(self) -> bool:
        """The same by this rank's own clock; to be shared before it is acted on."""
        return time.monotonic() >= self._over_at

    def end_of_time(self) -> None:
        """All is measured: what remains takes the time it takes."""
        self._watch.over_at = float("inf")

    def join(self, name: str, ranks: Sequence[int], device: torch.device) -> World:
        """Be one of a process group of these ranks, in place of the one before."""
        self.leave_group()
        self._position.reach(f"joining the group {name}", self.limits.build_s)
        group_rank, size = list(ranks).index(self.launch.rank), len(ranks)
        store = PrefixStore(f"group/{name}/{ranks[0]}", clone(self._store))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self.limits.total_s + self.limits.build_s)  # the watch is sooner
        dist.init_process_group(backend, store=store, rank=group_rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects at the first collective, which all must be in
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
        self._watch.trace = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):  # of a store that is gone, which the watch finds too
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self._watch.say("crashed", text, self._store)
        self._watch.wait()

    def close(self) -> None:
        """Leave after all have: rank 0 last, since the store may be its own."""
        self._watch.stop()
        self.clean()
        ranks = range(self.launch.world_size)
        self._store.set(f"gone/{self.launch.rank}", "")
        deadline = time.monotonic() + self.limits.silence_s
        if self.launch.rank == 0:
            while not self._store.check([f"gone/{r}" for r in ranks]) and time.monotonic() < deadline:
                time.sleep(0.01)


def _connect(launch: LauncherEnvironment, limits: LimitsConfig, writer: Writer) -> Store:
    timeout = datetime.timedelta(seconds=limits.arrive_s)
    keeps = launch.rank == 0 and not launch.has_agent
    try:
        store: Any = TCPStore(
            launch.address, launch.port, None, keeps, timeout, wait_for_workers=False, multi_tenant=True
        )
    except Exception as error:  # torch raises several kinds
        says = f"not at {launch.address}:{launch.port}, where the ranks meet, within {limits.arrive_s:g} s"
        writer.write_first(Ending("absent", (0,), says))
        raise ConnectionError(f"rank 0: {says} ({' '.join(str(error).split())[:200]})") from None
    found: Store = PrefixStore(f"acceptance-{launch.restart}", store)
    return found
