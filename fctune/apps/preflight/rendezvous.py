"""Exchange of preflight results between the nodes of a run."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

_POLL_S = 0.05


class RendezvousError(Exception):
    """The nodes could not exchange their results; the message names the missing nodes and what to check."""


@dataclass(frozen=True, slots=True)
class Node:
    """This node's position among the nodes of a run; rank 0 is the head."""

    rank: int
    count: int
    address: str  # the head's
    port: int
    wait_s: float = 60.0  # maximum wait for another node

    @property
    def is_head(self) -> bool:
        """True on the node that hosts the store and acts for all."""
        return self.rank == 0


class Rendezvous:
    """A key-value store hosted by the head, on the port that training uses later.

    Every method raises RendezvousError if the head is lost.

    Raises:
        RendezvousError: The head is unreachable, or its port is in use.
    """

    def __init__(self, node: Node):
        self.node = node
        timeout = datetime.timedelta(seconds=node.wait_s)
        try:
            self._store = TCPStore(node.address, node.port, None, node.is_head, timeout, wait_for_workers=False)
        except (DistError, RuntimeError) as error:
            raise RendezvousError(_explain(node, str(error))) from None

    def gather(self, name: str, value: Any) -> list[Any]:
        """Publish this node's value (small, JSON-serializable) and return those of all nodes, by rank.

        Raises:
            RendezvousError: A node did not publish its value within ``wait_s``.
        """
        self.publish(f"{name}/{self.node.rank}", value)
        deadline = time.monotonic() + self.node.wait_s
        waiting = list(range(self.node.count))
        while waiting := [rank for rank in waiting if not self._has(f"{name}/{rank}")]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, waiting))
                raise RendezvousError(
                    f"node {ranks} of {self.node.count} did not respond within {self.node.wait_s:.0f} s. "
                    "Check its log: either it did not start or it cannot reach the head."
                )
            time.sleep(_POLL_S)
        return [self._get(f"{name}/{rank}") for rank in range(self.node.count)]

    def publish(self, name: str, value: Any) -> None:
        """Store a JSON-serializable value for all nodes."""
        with _head_errors():
            self._store.set(name, json.dumps(value))

    def wait_for(self, name: str, wait_s: float | None = None) -> Any:
        """Return a value as soon as it is published; without a limit, wait for as long as the head is alive.

        Raises:
            RendezvousError: It was not published within ``wait_s``.
        """
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while not self._has(name):
            if deadline is not None and time.monotonic() > deadline:
                raise RendezvousError(f"the head did not publish {name} within {wait_s:.0f} s. Check its log.")
            time.sleep(_POLL_S)
        return self._get(name)

    def close(self) -> None:
        """Leave the rendezvous; the head leaves last, because the store ends with its process."""
        self.publish(f"closed/{self.node.rank}", True)
        if self.node.is_head:
            self.gather("closed", True)

    def _has(self, key: str) -> bool:
        with _head_errors():
            return self._store.check([key])

    def _get(self, key: str) -> Any:
        with _head_errors():
            return json.loads(self._store.get(key))


@contextmanager
def _head_errors() -> Iterator[None]:
    try:
        yield
    except (DistError, RuntimeError):
        raise RendezvousError("lost the connection to the head. Check its log.") from None


def _explain(node: Node, reason: str) -> str:
    where = f"{node.address}:{node.port}"
    if "EADDRINUSE" in reason or "address already in use" in reason:
        return (
            f"port {node.port} of the head is in use. Stop the process that uses it "
            f"(ss -ltnp 'sport = :{node.port}'), or set MASTER_PORT to another port on every node."
        )
    if node.is_head:
        return f"{where}: the head cannot listen there ({' '.join(reason.split())[:160]})."
    return (
        f"{where}: could not reach the head within {node.wait_s:.0f} s. Check its log, and whether this node can "
        f"connect to it (nc -vz {node.address} {node.port})."
    )
