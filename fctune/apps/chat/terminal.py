"""The terminal's side of a conversation: what the user types, and what is printed."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.apps.chat.chat import Chat, run_tool, simulate_result
from fctune.base.errors import ConfigError, DataError
from fctune.base.terminal import Terminal, escape_controls
from fctune.config.intervals import format_count
from fctune.data.conversation import Call
from fctune.tasks.task import EpisodeStopped, Step

_HELP = """\
/tools        list the tools      /reasoning  show what the model thought last
/save FILE    append the conversation to FILE as a row of training data
/reset        start again         /quit       leave (also Ctrl-D)
Ctrl-C        cancel the answer"""
_MAX_CALL_ROUNDS = 20


class ChatTerminal:
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
        self._has_ended = False  # the input, if it is a file or a pipe

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
        if stopped is not None and self._has_ended and style == "yellow":
            self._print(stopped, "dim")  # nothing went wrong, and nobody is there to say it again
        elif stopped is not None:
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
        results = []
        for call in calls:
            result = self._find_result(chat, call)
            if result is None and self._has_ended:
                raise EpisodeStopped(
                    f"end of the input, which has no line with the result of {call.name} (--simulate makes results up)"
                )
            if result is None:
                raise EpisodeStopped("call dropped: no result given")
            results.append(result)
        return results

    def _find_result(self, chat: Chat, call: Call) -> str | None:
        """Return a call's result: simulated, of its command, or as typed; None if the user gives none."""
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
        self._console.print(text, style=style, soft_wrap=True)

    def _read(self, prompt: str) -> str | None:
        """Read a line; None at the end of input."""
        try:
            if sys.stdin.isatty():
                return input(escape_controls(prompt))  # with names and arguments from the model
            line = sys.stdin.readline()
        except EOFError:
            return None
        if not line:
            self._has_ended = True
            return None
        self._print(f"{prompt}{line.rstrip()}", "dim")  # a transcript of what was fed in
        return line.rstrip("\n")


def _format_call(call: Call) -> str:
    return f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
