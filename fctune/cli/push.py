"""The ``fctune push`` command."""

from __future__ import annotations

import argparse
from typing import Any

from fctune.config.loading import read_environment


def add_commands(commands: Any) -> None:
    """Add ``fctune push`` to the command-line parser."""
    push = commands.add_parser("push", help="upload a run's export to the Hugging Face hub, with the token in HF_TOKEN")
    push.add_argument("model", metavar="PATH", help="a run's output directory, a model directory or an adapter")
    push.add_argument("name", metavar="OWNER/NAME", help="the repository; created if it does not exist")
    push.add_argument("--public", action="store_true", help="create a public repository; default: private")
    push.add_argument("--revision", metavar="BRANCH", help="default: main")
    push.set_defaults(run=_push)


def _push(arguments: argparse.Namespace) -> int:
    from fctune.launch.hub import push

    print(push(arguments.model, arguments.name, not arguments.public, arguments.revision, read_environment()))
    return 0
