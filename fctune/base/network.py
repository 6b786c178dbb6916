"""The network interface through which this machine reaches the others of a run."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

import psutil

# Reserved for documentation (RFC 5737); asking for the route to it sends nothing.
_ANYWHERE = "192.0.2.1"


def find_interface(head: str) -> str | None:
    """Return the name of the interface that routes to a run's head; None if there is no route.

    On the head itself, whose name may stand for a loopback address in /etc/hosts, it is the interface of the default
    route; only a head that is given as a loopback address has all nodes on one machine.
    """
    try:
        address = socket.getaddrinfo(head, None, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return None
    own = _own_address(str(address))
    if own is not None and ipaddress.ip_address(own).is_loopback and not is_loopback(head):
        own = _own_address(_ANYWHERE)
    for name, entries in psutil.net_if_addrs().items():
        if own is not None and any(entry.address.partition("%")[0] == own for entry in entries):
            return name
    return None


def set_gloo_interface(head: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo listen on the interface that routes to the head, unless the user has chosen one.

    By default it listens on what this machine's name stands for, which no other node may reach.
    """
    if not environment.get("GLOO_SOCKET_IFNAME") and (interface := find_interface(head)) is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface


def _own_address(other: str) -> str | None:
    """Return this machine's address on the route to another; None without a route."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0]).partition("%")[0]


def find_port_problem(port: int) -> OSError | None:
    """Return why this process cannot listen on a port of all its addresses; None if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error
    return None


def is_loopback(host: str) -> bool:
    """Return True for an address or a name of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
