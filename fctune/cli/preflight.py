"""``fctune preflight``: check the nodes of a run before it starts, or prepare what it needs."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError, Interrupted
from fctune.cli.files import write_file
from fctune.cli.parser import add_config_arguments
from fctune.config.loading import read_environment

if TYPE_CHECKING:
    from fctune.training.env_overrides import LaunchSpec


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
    preflight.add_argument(
        "--prepare", action="store_true", help="download and prepare what the run needs, on a node without GPUs"
    )
    preflight.set_defaults(run=_preflight)


def _preflight(arguments: argparse.Namespace) -> int:
    from fctune.training.env_overrides import resolve_launch

    environment = read_environment()
    shared = Path(environment.get("FCTUNE_SHARED") or "/mnt/shared")
    launch = None
    if arguments.nodes == 1:  # no other node waits for this one's report of a wrong config
        launch = resolve_launch(Path(arguments.config), environment, arguments.overrides, shared)
    if arguments.prepare:
        if launch is None or arguments.gpus:
            raise ConfigError("--prepare: prepares on one node without GPUs; leave out --nodes and --gpus.")
        return _prepare(launch, environment)
    from fctune.apps.preflight.checks import Mounts
    from fctune.apps.preflight.preflight import Request, run_preflight
    from fctune.apps.preflight.rendezvous import Node

    mounts = Mounts(shared, Path(environment.get("FCTUNE_NETWORK") or "/mnt/network"))
    node = Node(arguments.node_rank, arguments.nodes, arguments.address, arguments.port, arguments.wait)
    request = Request(Path(arguments.config), arguments.overrides, arguments.gpus, mounts, environment)
    code, checked, unfit = run_preflight(node, request, _show)
    if arguments.launch is not None and (checked is not None or unfit):
        text = f"faulty_nodes='{' '.join(map(str, unfit))}'\n"
        if checked is not None:
            checked.prepare()
            text = checked.to_shell(node.rank)
        write_file(arguments.launch, "--launch", lambda: text)
    return code


def _prepare(launch: LaunchSpec, environment: Mapping[str, str]) -> int:
    from fctune.apps.preflight.preparation import prepare_run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also removes the unfinished set
    try:
        return prepare_run(launch, environment, _show)
    except KeyboardInterrupt:
        raise Interrupted("run the same command again: downloads resume, unfinished rows start over") from None


def _show(line: str) -> None:
    print(line, flush=True)
