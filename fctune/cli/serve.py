"""``fctune serve``: serve a model with vLLM."""

from __future__ import annotations

import argparse
import shlex
import sys
from math import isfinite
from typing import Any

from fctune.base.errors import ConfigError
from fctune.base.processes import run_command
from fctune.base.terminal import escape_controls
from fctune.cli.parser import add_template_args_argument


def add_commands(commands: Any) -> None:
    """Add ``fctune serve`` to the command-line parser."""
    serve = commands.add_parser("serve", help="serve a run's export with vLLM and the matching tool parser")
    serve.add_argument("model", metavar="PATH", help="directory of a run or a tune, a model directory or an adapter")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--name", help="the served model's name; default: the run's")
    serve.add_argument("--python", default=sys.executable, help="Python with vLLM; default: this one")
    serve.add_argument(
        "--adapters",
        type=int,
        metavar="RANK",
        help="serve a base for reinforcement: adapters up to this rank are loaded while it runs",
    )
    serve.add_argument(
        "--stop-idle",
        type=float,
        default=0,
        metavar="MINUTES",
        help="end the server after this many minutes without a request; 0: never; default: %(default)s",
    )
    serve.add_argument("--print", action="store_true", dest="print_only", help="print the command without running it")
    serve.add_argument("--vllm", default="", metavar="OPTIONS", help='further vLLM options: --vllm="--enforce-eager"')
    serve.add_argument("--force", action="store_true", help="serve a model that fctune gate has stopped")
    add_template_args_argument(serve)
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from fctune.apps.serve.server import find_host, require_agreement
    from fctune.engines.vllm_options import RUN_TIME_ADAPTERS, default_name, server_options
    from fctune.runs.release import require_released

    require_released(arguments.model, "not served", arguments.force)
    if not 1 <= arguments.port <= 65535:
        raise ConfigError(f"--port {arguments.port}: expected 1 to 65535.")
    if not (arguments.stop_idle >= 0 and isfinite(arguments.stop_idle)):
        raise ConfigError(f"--stop-idle {arguments.stop_idle:g}: expected minutes, or 0 for never.")
    try:
        further = shlex.split(arguments.vllm)
    except ValueError as error:
        raise ConfigError(f"--vllm {arguments.vllm}: {error}.") from None
    options = server_options(
        arguments.model,
        arguments.name,
        arguments.template_args,
        arguments.adapters,
        say=lambda line: print(escape_controls(line), file=sys.stderr, flush=True),
    )
    require_agreement(options, further)
    if arguments.stop_idle and "--disable-log-stats" in further:
        raise ConfigError("--stop-idle needs vLLM's metrics. Leave out --disable-log-stats of --vllm.")
    command = [arguments.python, "-m", "vllm.entrypoints.openai.api_server", *options, "--port", str(arguments.port)]
    command += further
    environment = {} if arguments.adapters is None else RUN_TIME_ADAPTERS
    print(" ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)]), flush=True)
    if arguments.print_only:
        return 0
    require_vllm(arguments.python)
    from fctune.apps.serve.server import ServerEndedError, run_server

    host = find_host(further)
    url = f"http://{host}:{arguments.port}/v1"
    chat = ["fctune", "chat", url]
    if "--lora-modules" in options:  # the server lists the base, too
        chat += ["--served-model", arguments.name or default_name(arguments.model)]

    def announce(seconds: float) -> None:
        print(f"ready after {seconds:.0f} s: {url}   ({shlex.join(chat)}; Ctrl-C ends it)", flush=True)

    try:
        limit_s = arguments.stop_idle * 60 or None
        if run_server(command, arguments.port, announce, environment=environment, host=host, idle_limit_s=limit_s):
            print(f"stopped after {arguments.stop_idle:g} minutes without a request (--stop-idle)", flush=True)
    except ServerEndedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def require_vllm(python: str, option: str = "--python") -> None:
    """Check that a Python has vLLM.

    Args:
        python: Its executable.
        option: How the user names it, for the error.

    Raises:
        ConfigError: It cannot be started, or has no vLLM.
    """
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = run_command([python, "-c", look])
    except OSError as error:
        raise ConfigError(
            f"{option} {python}: cannot be started ({error.strerror}). Pass the Python of an environment with vLLM."
        ) from None
    if done.code != 0:
        raise ConfigError(
            f"{python} has no vLLM. Install it in an environment of its own (pip install vllm), and pass {option} "
            "THAT/bin/python."
        )
