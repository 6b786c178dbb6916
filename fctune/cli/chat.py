"""``fctune chat``: talk to a model in the terminal, see its calls, and give their results."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fctune.base.errors import ConfigError, DataError
from fctune.base.terminal import Terminal, escape_controls
from fctune.cli.parser import add_template_args_argument
from fctune.config.intervals import format_count
from fctune.config.loading import read_environment
from fctune.config.shipped import resolve_shipped_path
from fctune.engines.model_files import check_model_paths

if TYPE_CHECKING:
    from fctune.data.conversation import Call, Tool
    from fctune.tasks.chat import Chat
    from fctune.tasks.task import Step

_HELP = """\
/tools        list the tools      /reasoning  show what the model thought last
/save FILE    append the conversation to FILE as a row of training data
/reset        start again         /quit       leave (also Ctrl-D)
Ctrl-C        cancel the answer"""
_MAX_CALL_ROUNDS = 20


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
        metavar="FILE|URL",
        help="tools as JSON, in any form that rows may have, or the URL of an MCP server, whose token is in "
        "FCTUNE_MCP_TOKEN; repeatable",
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
    terminal = _ChatTerminal(Terminal(highlight=False), commands, arguments.exec_timeout, arguments.simulate)
    has_failed = terminal.run(_open(arguments, tools))
    return int(has_failed and not sys.stdin.isatty())  # whoever pipes lines in reads the code, not the screen


def _read_tools(given: list[str]) -> tuple[Tool, ...]:
    from fctune.data.sources.tool_file import read_tool_files, read_tool_texts

    tools: list[Tool] = []
    servers = [name for name in given if name.startswith(("http://", "https://"))]
    for name in given:
        if name in servers:
            from fctune.engines.mcp_tools import choose_mcp_token, fetch_mcp_tools

            pages = fetch_mcp_tools(name, choose_mcp_token(read_environment().get("FCTUNE_MCP_TOKEN"), name, servers))
            tools += read_tool_texts(pages, [name] * len(pages))
        else:
            tools += read_tool_files([Path(name)])
    names = [tool.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--tools: {', '.join(sorted(repeated))}: given twice; a model could not distinguish them.")
    return tuple(tools)


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
    from fctune.calls.formats.registry import get_format
    from fctune.cli.engines import find_files, open_engine
    from fctune.engines.engine import Sampling
    from fctune.tasks.chat import Chat

    engine, call_format = open_engine(
        arguments.model,
        find_files(arguments.model, arguments.adapter),
        get_format(arguments.format) if arguments.format else None,
        sampling=Sampling(arguments.temperature, arguments.seed),
        template_args=arguments.template_args,
        served_model=arguments.served_model,
    )
    return Chat(engine, call_format, tools, arguments.system, arguments.max_new_tokens)


class _ChatTerminal:
    """The terminal's side of a conversation; reads lines from standard input, which may be a file.

    Args:
        console: Where to print.
        commands: Command of each tool that may be run, once confirmed.
        timeout_s: Seconds that a command may take.
        simulates: Make results up instead of asking.
    """

    def __init__(self, console: Terminal, commands: Mapping[str, list[str]], timeout_s: float, simulates: bool) -> None:
        self._console = console
        self._commands = commands
        self._timeout_s = timeout_s
        self._simulates = simulates
        self._thought = ""
        self._has_failed = False

    def run(self, chat: Chat) -> bool:
        """Talk until the user leaves; returns True if an answer failed."""
        num_tools = len(chat.tools)
        self._print(f"{format_count(num_tools, 'tool')}. /help lists what can be typed here.", "dim")
        while (line := self._read("> ")) is not None:
            line = line.strip()
            if line in ("/quit", "/exit"):
                break
            if line.startswith("/"):
                self._obey(chat, line)
            elif line:
                self._talk(chat, line)
        return self._has_failed

    def _talk(self, chat: Chat, text: str) -> None:
        """Take the user's turn, which is not kept unless it ends with an answer."""
        from fctune.tasks.task import EpisodeStopped

        style, num_rounds = "yellow", 0

        def respond(step: Step) -> Sequence[str]:
            nonlocal num_rounds
            self._show(step)
            if step.calls and num_rounds == _MAX_CALL_ROUNDS:
                raise EpisodeStopped(f"stopped after {_MAX_CALL_ROUNDS} rounds of calls without a final answer")
            num_rounds += 1
            return self._find_results(chat, step.calls)

        try:
            stopped = chat.say(text, respond)
        except (ConfigError, DataError) as error:
            stopped, style = str(error), "red"
            self._has_failed = True
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # nobody is there to type something else
                raise
            stopped = "\nanswer cancelled"  # below the ^C that the terminal shows
        if stopped is not None:
            self._print(stopped, style)
            self._print("your message was taken back", "dim")

    def _show(self, step: Step) -> None:
        self._thought = step.thought or ""
        if self._thought:
            self._print(f"[reasoning, {format_count(len(self._thought.split()), 'word')}; /reasoning shows it]", "dim")
        if step.content:
            self._print(step.content)
        for call in step.calls:
            self._print(_format_call(call), "bold cyan")
        for stretch in step.parsed.malformed:
            self._print(f"malformed call: {stretch.reason}", "red")
        if step.answer.is_cut:
            self._print("[cut off by --max-new-tokens]", "yellow")

    def _find_results(self, chat: Chat, calls: Sequence[Call]) -> list[str]:
        """Return the calls' results in their order; ends the turn as soon as the user gives none."""
        from fctune.tasks.task import EpisodeStopped

        results = []
        for call in calls:
            result = self._find_result(chat, call)
            if result is None:
                raise EpisodeStopped("call dropped: no result given")
            results.append(result)
        return results

    def _find_result(self, chat: Chat, call: Call) -> str | None:
        """Return a call's result: simulated, of its command, or as typed; None if the user gives none."""
        from fctune.tasks.chat import simulate_result

        tool = next((tool for tool in chat.tools if tool.name == call.name), None)
        if self._simulates:
            result = simulate_result(tool)
            self._print(f"simulated: {result}", "dim")
            return result
        command = self._commands.get(call.name)
        if command is not None:
            reply = self._read(f"run {shlex.join(command)} for {_format_call(call)}? [y/N] ")
            if reply is not None and reply.strip().lower() in ("y", "yes"):
                return self._execute(command, call.arguments)
        typed = self._read(f"result of {call.name} (JSON or text; /cancel): ")
        return None if typed is not None and typed.strip() == "/cancel" else typed

    def _execute(self, command: list[str], arguments: Mapping[str, Any]) -> str:
        from fctune.tasks.chat import run_tool

        result = run_tool(command, arguments, self._timeout_s)
        self._print(f"result: {result}", "dim")
        return result

    def _obey(self, chat: Chat, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            chat.reset()
        elif word == "/tools":
            for tool in chat.tools:
                self._print(f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})")
        elif word == "/reasoning":
            self._print(self._thought or "none", "dim")
        elif word == "/save" and rest:
            try:
                with open(rest, "a", encoding="utf-8") as file:
                    file.write(json.dumps(chat.to_row(), ensure_ascii=False) + "\n")
                self._print(f"appended to {rest}", "dim")
            except OSError as error:
                self._print(f"{rest}: cannot be written ({error.strerror})", "red")
        else:
            self._print(_HELP, "dim")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def _read(self, prompt: str) -> str | None:
        """Read a line; None at the end of input."""
        try:
            if sys.stdin.isatty():
                return input(escape_controls(prompt))  # with names and arguments from the model
            line = sys.stdin.readline()
        except EOFError:
            return None
        if not line:
            return None
        self._print(f"{prompt}{line.rstrip()}", "dim")  # a transcript of what was fed in
        return line.rstrip("\n")


def _format_call(call: Call) -> str:
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
