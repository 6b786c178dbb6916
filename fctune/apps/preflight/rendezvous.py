"""Exchange of preflight results between the nodes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fctune.base.exchange import Exchange, PortInUseError, connect_store


class RendezvousError(Exception):
    """The nodes could not exchange their results; the message names the missing nodes and what to check."""


class ListenError(RendezvousError):
    """The head cannot listen at its address, which is so at every start until somebody changes something."""


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
    """Exchange of values hosted by the head, on the port that training uses later.

    Every method raises RendezvousError if the head is lost.

    Raises:
        ListenError: The head's port is in use, or its address belongs to another machine.
        RendezvousError: The head is unreachable.
    """

    def __init__(self, node: Node):
        self.node = node
        where = f"{node.address}:{node.port}"
        try:
            store = connect_store(node.address, node.port, node.is_head, node.wait_s)
        except PortInUseError:
            raise ListenError(
                f"port {node.port} of the head is in use. Stop the process that uses it "
                f"(ss -ltnp 'sport = :{node.port}'), or set MASTER_PORT to another port on every node."
            ) from None
        except ConnectionError as error:
            if node.is_head:
                raise ListenError(f"{where}: the head cannot listen there ({str(error)[:160]}).") from None
            raise RendezvousError(
                f"{where}: could not reach the head within {node.wait_s:.0f} s. Check its log, and whether this node "
                f"can connect to it (nc -vz {node.address} {node.port})."
            ) from None
        self._exchange = Exchange(store, node.rank, node.count)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Publish this node's value (small, JSON-serializable) and return those of all nodes, by rank.

        Raises:
            RendezvousError: A node did not publish its value within ``wait_s``.
        """
        with _head_errors():
            self._exchange.publish(name, value)
            if not self._exchange.wait_for_all(name, self.node.wait_s):
                ranks = ", ".join(map(str, self._exchange.list_missing(name)))
                raise RendezvousError(
                    f"node {ranks} of {self.node.count} did not respond within {self.node.wait_s:.0f} s. "
                    "Check its log: either it did not start or it cannot reach the head."
                )
            return list(self._exchange.read(name).values())

    def publish(self, name: str, value: Any) -> None:
        """Store a JSON-serializable value for all nodes."""
        with _head_errors():
            self._exchange.set(name, value)

    def wait_for(self, name: str, wait_s: float | None = None) -> Any:
        """Return a value as soon as it is published; without a limit, wait for as long as the head is alive.

        Raises:
            RendezvousError: It was not published within ``wait_s``.
        """
        with _head_errors():
            if not self._exchange.wait_for([name], wait_s):
                raise RendezvousError(f"the head did not publish {name} within {wait_s:.0f} s. Check its log.")
            return self._exchange.get(name)

    def close(self) -> None:
        """Leave the rendezvous; the head leaves last, because the store ends with its process."""
        if self.node.is_head:
            self.gather("closed", True)
        else:
            self.publish(f"closed/{self.node.rank}", True)


@contextmanager
def _head_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError:  # torch's, of a store that is gone
        raise RendezvousError("lost the connection to the head. Check its log.") from None
