"""The ``fctune serve`` command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from fctune.cli.parser import add_template_args_argument


def add_commands(commands: Any) -> None:
    """Add ``fctune serve`` to the command-line parser."""
    serve = commands.add_parser("serve", help="serve a run's export with vLLM and the matching tool parser")
    serve.add_argument("model", metavar="PATH", help="a run's output directory, or a model directory")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--name", help="the served model's name; default: the run's")
    serve.add_argument("--python", default=sys.executable, help="Python with vLLM; default: this one")
    serve.add_argument("--print", action="store_true", dest="print_only", help="print the command without running it")
    serve.add_argument("--vllm", default="", metavar="OPTIONS", help='further vLLM options: "--max-model-len 8192"')
    add_template_args_argument(serve)
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from fctune.launch.serving import server_options

    options = server_options(arguments.model, arguments.name, arguments.template_args)
    command = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", *options, "--port", str(arguments.port)]
    command += shlex.split(arguments.vllm)
    print(shlex.join(command), flush=True)
    if not arguments.print_only:
        os.execvp(command[0], command)
    return 0
