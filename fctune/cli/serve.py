"""``fctune serve``: an export goes behind an API."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any


def add_commands(commands: Any) -> None:
    """Add ``fctune serve`` to the command."""
    serve = commands.add_parser("serve", help="a run's export by vLLM, with the tool parser of what it was trained in")
    serve.add_argument("model", metavar="PATH", help="a run's output directory, or a model directory")
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--name", help="that callers ask for; default: the run's")
    serve.add_argument("--python", default=sys.executable, help="one that has vLLM; default: this one")
    serve.add_argument("--print", action="store_true", dest="print_only", help="the command, and do not run it")
    serve.add_argument("--vllm", default="", metavar="OPTIONS", help='of vLLM, as one text: "--max-model-len 8192"')
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from fctune.launch.serving import server_options

    options = server_options(arguments.model, arguments.name)
    command = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", *options, "--port", str(arguments.port)]
    command += shlex.split(arguments.vllm)
    print(shlex.join(command), flush=True)
    if not arguments.print_only:
        os.execvp(command[0], command)
    return 0
