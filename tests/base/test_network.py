"""Ranks listen where other nodes reach them, whatever a machine's own name stands for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from fctune.apps.preflight.checks import check_interface
from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.network import find_interface, set_gloo_interface
from tests.ranks import context, find_port


def real_interface() -> tuple[str, str]:
    """Return the name and address of an interface that other machines would reach."""
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return name, entry.address
    pytest.skip("this machine has no interface but the loopback")


def resolve_to(address: str) -> Callable[..., Any]:
    return lambda host, *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 0))]


def test_the_interface_is_that_of_the_route_to_the_head() -> None:
    name, address = real_interface()
    assert find_interface(address) == name
    assert find_interface("127.0.0.1") == "lo"


def test_a_head_whose_own_name_is_a_loopback_address_uses_its_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes ``127.0.1.1 NAME`` into /etc/hosts."""
    name, _ = real_interface()
    monkeypatch.setattr(socket, "getaddrinfo", resolve_to("127.0.1.1"))
    assert find_interface("node-0") == name


def test_an_interface_that_the_user_chose_is_kept() -> None:
    chosen = {"GLOO_SOCKET_IFNAME": "ib0"}
    set_gloo_interface("127.0.0.1", chosen)
    assert chosen == {"GLOO_SOCKET_IFNAME": "ib0"}


def test_the_preflight_reports_a_node_without_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_interface(2, "127.0.0.1") == check_interface(1, "nowhere.invalid") == []
    monkeypatch.setattr(socket, "getaddrinfo", resolve_to("198.51.100.7"))
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    (problem,) = check_interface(2, "node-0")
    assert "no network interface of this node routes to the head, node-0" in str(problem)


def _listen(rank: int, address: str, port: int, sender: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # one rank a node
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    world: World = distributed.init_distributed()
    peers = distributed.all_gather_objects(world.rank)
    connections = psutil.Process().net_connections(kind="tcp")
    sender.send((peers, sorted({c.laddr.ip for c in connections if c.raddr and port not in (c.laddr[1], c.raddr[1])})))
    distributed.shutdown_distributed()


def test_gloo_between_nodes_binds_to_the_interface_that_routes_to_the_head() -> None:
    """This machine's name need not stand for that address: in a container or on Debian it is a loopback address."""
    _, address = real_interface()
    port, pipes = find_port(), [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_listen, args=(rank, address, port, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    for receiver, _ in pipes:
        assert receiver.poll(120)
        peers, addresses = receiver.recv()
        assert peers == [0, 1]
        assert addresses == [address]
    for process in processes:
        process.join(60)
