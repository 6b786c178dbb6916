"""Coordination of the ranks independent of the collectives being measured: barriers, shared values, deadlines.

Everything goes through a key-value store over TCP, which ``watch`` also uses to detect dead and stuck ranks.
"""

from __future__ import annotations

import contextlib
import datetime
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
from torch._C._distributed_c10d import PrefixStore, Store

from fctune.apps.acceptance.config import LimitsConfig
from fctune.apps.acceptance.watch import EarlyEnd, Position, ResultWriter, Watch
from fctune.base.distributed import LauncherEnvironment, World
from fctune.base.exchange import Exchange, connect_store
from fctune.base.network import set_gloo_interface


class OutOfTime(Exception):
    """The run's time is over; raised on all ranks at the same point."""


class Session:
    """One rank's connection to the others.

    Args:
        launch: This process's launch.
        limits: Timeouts of the run.
        folder: Directory of the result; ranks that lost the store elect the one that writes it there.
        write_early: Writes the result of a run that ended early; called on one rank, in a thread.

    Raises:
        ConnectionError: Rank 0's store was not reachable in time; ``write_early`` has been called.
    """

    def __init__(
        self, launch: LauncherEnvironment, limits: LimitsConfig, folder: Path, write_early: Callable[[EarlyEnd], None]
    ):
        self.launch, self.limits = launch, limits
        self._temporary: set[Path] = set()
        self._position = Position()
        hello = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": torch.cuda.device_count()}
        self.hellos: dict[int, dict[str, Any]] = {launch.rank: hello}  # of all ranks, once they have arrived
        self._started, self._over_at = time.monotonic(), float("inf")
        writer = ResultWriter(launch, folder, write_early, limits.arrive_s)
        store = _connect(launch, limits, writer)
        self._exchange = Exchange(store, launch.rank, launch.world_size)
        self._watch_exchange = Exchange(_clone(store), launch.rank, launch.world_size)
        self._watch = Watch(launch, limits, self._watch_exchange.store, self._position, writer, self.clean_up)

    def arrive(self) -> None:
        """Announce this rank and wait until every rank has; the watch ends the run if one does not in time."""
        self.publish("hello", self.hellos[self.launch.rank])
        self._watch.start()
        self._exchange.wait_for_all("hello")
        self._watch.confirm_arrival()
        self.hellos = self.read("hello")
        elapsed_s = self.broadcast("the time elapsed", lambda: time.monotonic() - self._started)
        self._over_at = time.monotonic() + self.limits.total_s - elapsed_s
        self._watch.over_at = self._over_at + self.limits.grace_s

    def enter(self, activity: str, limit_s: float | None = None) -> None:
        """Start an activity of this rank that must end within its limit, by default ``step_s``."""
        self._position.enter(activity, self.limits.step_s if limit_s is None else limit_s)

    def barrier(self, name: str, limit_s: float | None = None) -> None:
        """Wait until every rank has reached this point, without collectives."""
        limit_s = self.limits.step_s if limit_s is None else limit_s
        self._position.reach(f"waiting for the others at {name}", limit_s)
        point = f"barrier/{self._position.sync_points}"
        self._exchange.publish(point)
        self._exchange.wait_for_all(point, poll_s=0.1)
        self._position.leave()

    def publish(self, name: str, value: Any) -> None:
        """Publish a JSON-serializable value of this rank, replacing an earlier one of the same name."""
        self._exchange.publish(name, value)

    def read(self, name: str) -> dict[int, Any]:
        """Return the values that ranks have published under a name, by rank."""
        return (self._watch_exchange if self._watch.is_current_thread() else self._exchange).read(name)

    def broadcast(self, name: str, make: Callable[[], Any]) -> Any:
        """Call ``make`` on rank 0 and return its result (small, JSON-serializable) on every rank."""
        self._position.reach(f"waiting for rank 0: {name}", self.limits.build_s)
        key = f"broadcast/{self._position.sync_points}"
        if self.launch.rank == 0:
            value = make()
            self._position.leave()
            self._exchange.set(key, value)
            return value
        self._exchange.wait_for([key], poll_s=0.005)
        self._position.leave()
        return self._exchange.get(key)

    def time_left(self) -> float:
        """Return the seconds left of the run's time by rank 0's clock, the same on every rank.

        Every rank calls this before each piece of a long measurement.

        Raises:
            OutOfTime: No time is left.
        """
        left = float(self.broadcast("the time left", lambda: self._over_at - time.monotonic()))
        if left <= 0:
            raise OutOfTime(f"out of time: limits.total_s={self.limits.total_s:g} exceeded")
        return left

    @property
    def is_out_of_time(self) -> bool:
        """True if the run's time is over by this rank's clock; broadcast it before acting on it."""
        return time.monotonic() >= self._over_at

    def lift_time_limit(self) -> None:
        """Stop enforcing the run's time, once everything is measured."""
        self._watch.over_at = float("inf")

    def join_group(self, name: str, ranks: Sequence[int], device: torch.device) -> World:
        """Leave the current process group and join one of ``ranks``."""
        self.leave_group()
        self._position.reach(f"joining the group {name}", self.limits.build_s)
        group_rank, size = list(ranks).index(self.launch.rank), len(ranks)
        if self.launch.world_size > self.launch.ranks_per_node:
            set_gloo_interface(self.launch.address)
        store = PrefixStore(f"group/{name}/{ranks[0]}", _clone(self._exchange.store))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self.limits.total_s + self.limits.build_s)  # the watch acts earlier
        dist.init_process_group(backend, store=store, rank=group_rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects in the first collective, which needs all ranks
        return World(group_rank, size, self.launch.local_rank, device, min(size, self.launch.ranks_per_node))

    def leave_group(self) -> None:
        """Leave the process group, if there is one; without the barrier, gloo sometimes aborts at exit."""
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def remove_at_exit(self, path: Path) -> None:
        """Register a path to be removed when the run ends, however it ends."""
        self._temporary.add(path)

    def clean_up(self) -> None:
        """Delete the temporary files and folders that this rank's checks registered."""
        for path in self._temporary:
            shutil.rmtree(path, ignore_errors=True)

    def fail(self, error: BaseException) -> None:
        """Report this rank's error and wait for the watch to end the process, together with the other ranks."""
        self._watch.traceback = "".join(traceback.format_exception(error))
        with contextlib.suppress(Exception):  # a lost store, which the watch notices too
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            self._watch.report("crashed", text, self._exchange.store)
        self._watch.wait()

    def close(self) -> None:
        """Leave after a complete run; rank 0 leaves last, because it may host the store."""
        self._watch.stop()
        self.clean_up()
        self._exchange.publish("closed")
        if self.launch.rank == 0:
            self._exchange.wait_for_all("closed", self.limits.silence_s, poll_s=0.01)


def _connect(launch: LauncherEnvironment, limits: LimitsConfig, writer: ResultWriter) -> Store:
    hosts_store = launch.rank == 0 and not launch.has_agent
    try:
        store = connect_store(launch.address, launch.port, hosts_store, limits.arrive_s, is_shared=True)
    except ConnectionError as error:
        reason = f"not reachable at {launch.address}:{launch.port} within {limits.arrive_s:g} s"
        writer.write_once(EarlyEnd("absent", (0,), reason))
        raise ConnectionError(f"rank 0: {reason} ({error})") from None
    return PrefixStore(f"acceptance-{launch.restart}", store)


def _clone(store: Any) -> Store:
    """Open another connection to a store: a waiting call blocks everything else on its connection."""
    cloned: Store = store.clone()
    return cloned
