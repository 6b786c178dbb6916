"""Exchange of JSON values between the processes of a launch through a key-value store over TCP; no collectives."""

from __future__ import annotations

import datetime
import errno
import json
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from fctune.base.errors import one_line
from fctune.base.network import find_port_problem


class PortInUseError(ConnectionError):
    """The store's port is taken by another process."""


def connect_store(address: str, port: int, is_host: bool, wait_s: float, is_shared: bool = False) -> Store:
    """Connect to the store of a launch, and host it if ``is_host``.

    Args:
        address: Address of the process that hosts it.
        port: Port that it listens on.
        is_host: Host the store in this process.
        wait_s: Limit for the host to answer.
        is_shared: Another store of this process may use the port.

    Raises:
        PortInUseError: The port to listen on is taken.
        ConnectionError: The host cannot be reached in time, or cannot listen; gives torch's reason.
    """
    timeout = datetime.timedelta(seconds=wait_s)
    try:
        return TCPStore(address, port, None, is_host, timeout, wait_for_workers=False, multi_tenant=is_shared)
    except Exception as error:  # torch raises several kinds
        reason = one_line(error, 200)
        problem = find_port_problem(port) if is_host else None
        if problem is not None and problem.errno == errno.EADDRINUSE:
            raise PortInUseError(reason) from None
        raise ConnectionError(reason) from None


class Exchange:
    """Values that the processes of a launch publish for each other; each must fit into JSON.

    torch's errors of a lost host are passed on.

    Args:
        store: Connection to the store. A call that waits blocks all others on its connection.
        rank: Rank of this process.
        count: Number of processes.
    """

    def __init__(self, store: Store, rank: int, count: int):
        self.store, self.rank, self.count = store, rank, count

    def set(self, key: str, value: Any = None) -> None:
        """Store a value for all processes, replacing an earlier one."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """Return a value; waits for it up to the store's time limit."""
        return json.loads(self.store.get(key))

    def publish(self, name: str, value: Any = None) -> None:
        """Store this process's value under a name that all processes use."""
        self.set(f"{name}/{self.rank}", value)

    def read(self, name: str) -> dict[int, Any]:
        """Return the values that processes have published under a name so far, by rank."""
        missing = self.list_missing(name)
        return {rank: self.get(f"{name}/{rank}") for rank in range(self.count) if rank not in missing}

    def list_missing(self, name: str) -> list[int]:
        """Return the ranks of the processes that have not published a value under a name."""
        return [rank for rank in range(self.count) if not self.store.check([f"{name}/{rank}"])]

    def wait_for(self, keys: Sequence[str], limit_s: float | None = None, poll_s: float = 0.05) -> bool:
        """Wait until all keys have values; False if one still has none after ``limit_s``.

        The first looks are closer together than ``poll_s``.
        """
        deadline, pause_s = None if limit_s is None else time.monotonic() + limit_s, min(0.002, poll_s)
        while not self.store.check(list(keys)):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, poll_s)
        return True

    def wait_for_all(self, name: str, limit_s: float | None = None, poll_s: float = 0.05) -> bool:
        """Wait until every process has published a value under a name; see ``wait_for``."""
        return self.wait_for([f"{name}/{rank}" for rank in range(self.count)], limit_s, poll_s)
