"""``fctune preflight``: is this cluster fit for a run, on every node of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fctune.cli.files import write_file
from fctune.config.loading import read_environment


def add_commands(commands: Any) -> None:
    """Add ``fctune preflight`` to the command."""
    preflight = commands.add_parser("preflight", help="whether the nodes are fit for a run; a line for each fault")
    preflight.add_argument("--config", type=Path, required=True, metavar="FILE")
    preflight.add_argument("--nodes", type=int, default=1, metavar="N", help="of the run; default: %(default)s")
    preflight.add_argument("--node-rank", type=int, default=0, metavar="R", help="of this one; 0 is the head")
    preflight.add_argument("--gpus", type=int, default=0, metavar="N", help="that each node must have")
    preflight.add_argument("--address", default="127.0.0.1", metavar="HOST", help="of the head")
    preflight.add_argument("--port", type=int, default=29500, help="of the head, where nodes meet and training will")
    preflight.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="for other nodes; default: %(default)g"
    )
    preflight.add_argument("--launch", type=Path, metavar="FILE", help="write what training is told, for a shell")
    preflight.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    preflight.set_defaults(run=_preflight)


def _preflight(arguments: argparse.Namespace) -> int:
    from fctune.launch.checks import Mounts
    from fctune.launch.preflight import Request, run_preflight
    from fctune.launch.rendezvous import Node

    environment = read_environment()
    mounts = Mounts(
        Path(environment.get("FCTUNE_SHARED") or "/mnt/shared"),
        Path(environment.get("FCTUNE_NETWORK") or "/mnt/network"),
    )
    node = Node(arguments.node_rank, arguments.nodes, arguments.address, arguments.port, arguments.wait)
    request = Request(arguments.config, arguments.overrides, arguments.gpus, mounts, environment)
    code, launch = run_preflight(node, request, _show)
    if launch is not None and arguments.launch is not None:
        launch.prepare(is_head=node.is_head)
        text = launch.to_shell(node.rank)
        write_file(arguments.launch, "--launch", lambda: text)
    return code


def _show(line: str) -> None:
    print(line, flush=True)
