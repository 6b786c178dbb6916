"""``fctune chat``: talk to a model in the terminal, see its calls, and give their results."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError
from fctune.base.terminal import Terminal
from fctune.cli.parser import add_template_args_argument
from fctune.config.loading import read_environment
from fctune.config.shipped import resolve_shipped_path
from fctune.engines.model_files import check_model_paths

if TYPE_CHECKING:
    from fctune.apps.chat.chat import Chat
    from fctune.data.conversation import Tool


def add_commands(commands: Any) -> None:
    """Add ``fctune chat`` to the command-line parser."""
    chat = commands.add_parser(
        "chat",
        help="talk to a model in the terminal, with tools whose results you give",
        description="Talk to a model in the terminal. Its calls are shown, and you give their results; nothing is "
        "executed, unless you name a command for a tool with --exec and confirm each call.",
    )
    chat.add_argument(
        "model",
        type=resolve_shipped_path,
        metavar="MODEL",
        help="directory, run, adapter, hf:NAME or http(s)://HOST:PORT",
    )
    chat.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="FILE|URL|stdio: COMMAND",
        help="tools as JSON, in any form that rows may have, the URL of an MCP server, whose token is in "
        "FCTUNE_MCP_TOKEN, or the command that starts one, such as 'stdio: python server.py'; repeatable",
    )
    chat.add_argument("--adapter", metavar="DIR", help="PEFT adapter directory to load on top of the model")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--format", help="call format; default: detected from the chat template, or parsed by the server")
    chat.add_argument("--served-model", metavar="NAME", help="model name to request; default: the one it serves")
    chat.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    chat.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s (greedy)")
    chat.add_argument("--seed", type=int, default=0, help="seed of sampling; default: %(default)s")
    results = chat.add_mutually_exclusive_group()
    results.add_argument(
        "--simulate", action="store_true", help="make up results that fit each tool's `returns` schema, and do not ask"
    )
    results.add_argument(
        "--exec",
        action="append",
        default=[],
        metavar="TOOL=COMMAND",
        help="command that runs a tool: the arguments as JSON on its input, the result on its output, of "
        "which 64 KiB are kept; what it leaves running is killed; each call is confirmed; repeatable",
    )
    chat.add_argument(
        "--exec-timeout", type=float, default=30.0, metavar="SECONDS", help="limit of a command; default: %(default)s"
    )
    add_template_args_argument(chat)
    chat.set_defaults(run=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    check_model_paths(arguments.model, arguments.adapter)
    if arguments.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {arguments.max_new_tokens}: expected 1 or more.")
    tools = _read_tools(arguments.tools)
    if not 0 < arguments.exec_timeout < math.inf:
        raise ConfigError(f"--exec-timeout {arguments.exec_timeout:g}: expected seconds, more than 0.")
    commands = _read_commands(arguments.exec, {tool.name for tool in tools})
    from fctune.apps.chat.terminal import ChatTerminal

    terminal = ChatTerminal(Terminal(highlight=False), commands, arguments.exec_timeout, arguments.simulate)
    has_failed = terminal.run(_open(arguments, tools))
    return int(has_failed and not sys.stdin.isatty())  # whoever pipes lines in reads the code, not the screen


def _read_tools(given: list[str]) -> tuple[Tool, ...]:
    from fctune.engines.mcp_tools import read_offered_tools

    return read_offered_tools(given, read_environment().get("FCTUNE_MCP_TOKEN")).tools


def _read_commands(given: list[str], known: set[str]) -> dict[str, list[str]]:
    commands = {}
    for item in given:
        name, _, command = item.partition("=")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--exec {item}: {error}.") from None
        if not words:
            raise ConfigError(f"--exec {item}: expected TOOL=COMMAND, such as get_time='date -u'.")
        if name not in known:
            raise ConfigError(
                f"--exec {item}: no tool {name} in --tools; there are: {', '.join(sorted(known)) or 'none'}."
            )
        commands[name] = words
    return commands


def _open(arguments: argparse.Namespace, tools: tuple[Tool, ...]) -> Chat:
    from fctune.apps.chat.chat import Chat
    from fctune.calls.formats.registry import get_format
    from fctune.engines.engine import Sampling
    from fctune.engines.opening import find_files, open_engine

    engine, call_format = open_engine(
        arguments.model,
        find_files(arguments.model, arguments.adapter),
        get_format(arguments.format) if arguments.format else None,
        sampling=Sampling(arguments.temperature, arguments.seed),
        template_args=arguments.template_args,
        served_model=arguments.served_model,
    )
    return Chat(engine, call_format, tools, arguments.system, arguments.max_new_tokens)
