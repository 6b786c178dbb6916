"""``fctune push`` and ``fctune serve``: an export goes to the hub, or behind an API."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from fctune.config import read_environment


def add_commands(commands: Any) -> None:
    """Add ``fctune push`` and ``fctune serve`` to the command."""
    push = commands.add_parser("push", help="send a run's export to the Hugging Face hub, with HF_TOKEN")
    push.add_argument("model", metavar="PATH", help="a run's output directory, a model directory, or an adapter's")
    push.add_argument("name", metavar="OWNER/NAME", help="of the repository; made where it is not there")
    push.add_argument("--public", action="store_true", help="a repository that is made is private otherwise")
    push.add_argument("--revision", metavar="BRANCH", help="default: main")
    push.set_defaults(run=_push)
    serve = commands.add_parser("serve", help="a run's export by vLLM, with the tool parser of what it was trained in")
    serve.add_argument("model", metavar="PATH", help="a run's output directory, or a model directory")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--name", help="that callers ask for; default: the run's")
    serve.add_argument("--python", default=sys.executable, help="one that has vLLM; default: this one")
    serve.add_argument("--print", action="store_true", dest="print_only", help="the command, and do not run it")
    serve.add_argument("--vllm", default="", metavar="OPTIONS", help='of vLLM, as one text: "--max-model-len 8192"')
    serve.set_defaults(run=_serve)


def _push(arguments: argparse.Namespace) -> int:
    from fctune.launch.hub import push

    print(push(arguments.model, arguments.name, not arguments.public, arguments.revision, read_environment()))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from fctune.launch.serving import server_options

    options = server_options(arguments.model, arguments.name)
    command = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", *options, "--port", str(arguments.port)]
    command += shlex.split(arguments.vllm)
    print(shlex.join(command), flush=True)
    if not arguments.print_only:
        os.execvp(command[0], command)
    return 0
