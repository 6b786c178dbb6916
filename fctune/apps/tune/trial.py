"""What a user needs to try the result in a chat: the rows' tools, and a held-out question with its system prompt."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fctune.data.conversation import Tool
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import Case

TOOLS = "tools.json"
_EXAMPLE_TOOLS, _SYSTEM = "example_tools.json", "system.txt"
_MAX_TOOLS = 16  # that a chat offers at once, if no row offers half as many
_MAX_QUESTION, _MAX_SYSTEM = 300, 80  # characters on the screen


def render_tools(tools: Sequence[Tool]) -> str:
    """Return the text of a file of tools, as ``fctune chat --tools`` reads it."""
    return json.dumps([tool.to_openai() for tool in tools], indent=2, ensure_ascii=False) + "\n"


def describe_trial(
    folder: Path, run: Path, cases: Path, num_tools: int, most_offered: int, write: Callable[[str, str], Path]
) -> list[str]:
    """Return the command that chats with the result, with the rows' tools, and a held-out question to ask.

    Args:
        folder: Directory of the tune.
        run: Directory of its run.
        cases: File of the held-out cases.
        num_tools: Number of tools in ``TOOLS``.
        most_offered: Largest number of tools that a row offers.
        write: Writes a file of the tune by its name, and returns its path.
    """
    example = _find_example(load_suite(cases).cases) if cases.is_file() else None
    tools = folder / TOOLS
    if example is not None and (not tools.is_file() or num_tools > max(_MAX_TOOLS, 2 * most_offered)):
        tools = write(_EXAMPLE_TOOLS, render_tools(example.prompt.tools))
    command = shlex.join(["fctune", "chat", str(run), *(["--tools", str(tools)] if tools.is_file() else [])])
    if example is None:
        return [command]
    if system := _read_system(example):
        is_short = len(system) <= _MAX_SYSTEM and system.isprintable()
        path = None if is_short else write(_SYSTEM, system)
        command += " --system " + (shlex.quote(system) if path is None else f'"$(cat {shlex.quote(str(path))})"')
    calls = "; ".join(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in example.expected)
    question = (example.prompt.messages[-1].content or "").strip()
    return [command, f"and ask, for example: {question}", f"which your rows answer by {calls}"]


def _find_example(cases: Sequence[Case]) -> Case | None:
    """Return the first case that is a short question with a call, and has the system prompt of most such cases."""
    usable = [
        case
        for case in cases
        if case.expected
        and [message.role for message in case.prompt.messages if message.role != "system"] == ["user"]
        and (question := (case.prompt.messages[-1].content or "").strip())
        and len(question) <= _MAX_QUESTION
        and question.isprintable()
    ]
    if not usable:
        return None
    ((usual, _),) = Counter(map(_read_system, usable)).most_common(1)
    return next(case for case in usable if _read_system(case) == usual)


def _read_system(case: Case) -> str:
    return next((message.content or "" for message in case.prompt.messages if message.role == "system"), "")
