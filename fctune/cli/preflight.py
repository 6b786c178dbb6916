"""``fctune preflight``: check the nodes of a run before it starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fctune.cli.files import write_file
from fctune.cli.parser import add_config_arguments
from fctune.config.loading import read_environment


def add_commands(commands: Any) -> None:
    """Add ``fctune preflight`` to the command-line parser."""
    preflight = commands.add_parser("preflight", help="check that the nodes of a cluster are fit for a run")
    add_config_arguments(preflight)
    preflight.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes; default: %(default)s")
    preflight.add_argument("--node-rank", type=int, default=0, metavar="R", help="this node's rank; 0 is the head")
    preflight.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs required on each node")
    preflight.add_argument("--address", default="127.0.0.1", metavar="HOST", help="the head's address")
    preflight.add_argument("--port", type=int, default=29500, help="port on the head, used by training afterwards")
    preflight.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="timeout for the other nodes; default: %(default)g"
    )
    preflight.add_argument(
        "--launch", type=Path, metavar="FILE", help="write the launch, or the ranks of faulty nodes, in shell syntax"
    )
    preflight.set_defaults(run=_preflight)


def _preflight(arguments: argparse.Namespace) -> int:
    from fctune.training.env_overrides import resolve_launch

    environment = read_environment()
    shared = Path(environment.get("FCTUNE_SHARED") or "/mnt/shared")
    if arguments.nodes == 1:  # no other node waits for this one's report of a wrong config
        resolve_launch(Path(arguments.config), environment, arguments.overrides, shared)
    from fctune.apps.preflight.checks import Mounts
    from fctune.apps.preflight.preflight import Request, run_preflight
    from fctune.apps.preflight.rendezvous import Node

    mounts = Mounts(shared, Path(environment.get("FCTUNE_NETWORK") or "/mnt/network"))
    node = Node(arguments.node_rank, arguments.nodes, arguments.address, arguments.port, arguments.wait)
    request = Request(Path(arguments.config), arguments.overrides, arguments.gpus, mounts, environment)
    code, launch, unfit = run_preflight(node, request, _show)
    if arguments.launch is not None and (launch is not None or unfit):
        text = f"faulty_nodes='{' '.join(map(str, unfit))}'\n"
        if launch is not None:
            launch.prepare()
            text = launch.to_shell(node.rank)
        write_file(arguments.launch, "--launch", lambda: text)
    return code


def _show(line: str) -> None:
    print(line, flush=True)
