"""Where the nodes of a run tell one another what they found, before any of them trains."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

_POLL_S = 0.05


class MeetingError(Exception):
    """The nodes did not meet; the message says who was not there, and what to look at."""


@dataclass(frozen=True, slots=True)
class Node:
    """This node among those of a run; rank 0 is the head."""

    rank: int
    count: int
    address: str  # of the head
    port: int
    wait_s: float = 60.0  # for another node to come, or to say what is asked of all

    @property
    def is_head(self) -> bool:
        """Whether this node speaks for all."""
        return self.rank == 0


class Meeting:
    """A key-value store on the head, at the port where training will meet, too.

    Raises:
        MeetingError: the head is not there, or its port is taken.
    """

    def __init__(self, node: Node):
        self.node = node
        timeout = datetime.timedelta(seconds=node.wait_s)
        try:
            self._store = TCPStore(node.address, node.port, None, node.is_head, timeout, wait_for_workers=False)
        except (DistError, RuntimeError) as error:
            raise MeetingError(_explain(node, str(error))) from None

    def gather(self, name: str, value: Any) -> list[Any]:
        """What every node said under this name, by rank; small, and plain JSON.

        Raises:
            MeetingError: a node did not say it in time.
        """
        self._put(f"{name}/{self.node.rank}", value)
        deadline = time.monotonic() + self.node.wait_s
        waiting = list(range(self.node.count))
        while waiting := [rank for rank in waiting if not self._has(f"{name}/{rank}")]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, waiting))
                raise MeetingError(
                    f"node {ranks} of {self.node.count} did not come within {self.node.wait_s:.0f} s. "
                    "Look at its log: it did not start, or cannot reach the head."
                )
            time.sleep(_POLL_S)
        return [self._get(f"{name}/{rank}") for rank in range(self.node.count)]

    def tell(self, name: str, value: Any) -> None:
        """Say something to the nodes that wait for it."""
        self._put(name, value)

    def hear(self, name: str, wait_s: float | None = None) -> Any:
        """What was told under this name, once it is; without a limit, as long as the head lives.

        Raises:
            MeetingError: it was not told in time, or the head is gone.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not self._has(name):
            if deadline is not None and time.monotonic() > deadline:
                raise MeetingError(f"the head said nothing of {name} within {wait_s:.0f} s. Look at its log.")
            time.sleep(_POLL_S)
        return self._get(name)

    def leave(self) -> None:
        """Go; the head last, since the store is its own."""
        self._put(f"gone/{self.node.rank}", True)
        if self.node.is_head:
            self.gather("gone", True)

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except (DistError, RuntimeError):
            raise MeetingError("the head is gone. Look at its log.") from None

    def _get(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except (DistError, RuntimeError):
            raise MeetingError("the head is gone. Look at its log.") from None

    def _put(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except (DistError, RuntimeError):
            raise MeetingError("the head is gone. Look at its log.") from None


def _explain(node: Node, reason: str) -> str:
    where = f"{node.address}:{node.port}"
    if "EADDRINUSE" in reason or "address already in use" in reason:
        return (
            f"port {node.port} of the head is in use. End what holds it (ss -ltnp 'sport = :{node.port}'), "
            "or set MASTER_PORT to another on every node."
        )
    if node.is_head:
        return f"{where}: the head cannot listen there ({' '.join(reason.split())[:160]})."
    return (
        f"{where}: the head was not there within {node.wait_s:.0f} s. Look at its log, and whether this node can reach "
        f"it (nc -vz {node.address} {node.port})."
    )
