"""Cases of an evaluation: a conversation, the tools on offer, and the calls that are due."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fctune.data.conversation import Call, Conversation
from fctune.data.sources.defects import RowError
from fctune.data.sources.row_builder import ReadContext
from fctune.data.sources.row_formats import read_row
from fctune.errors import DataError

_NUM_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Case:
    """One question: the conversation up to where the model is to act, and the calls that are due there, if any."""

    id: str
    category: str
    prompt: Conversation
    expected: tuple[Call, ...]


def read_cases(path: str | Path) -> list[Case]:
    """The cases of a JSONL file.

    A row is in OpenAI shape: ``messages`` and ``tools``, with ``expected_calls`` (a list of name and arguments, empty
    where no call is due), or without it where the last message is the assistant's answer that is expected. Calls are
    of tools that are on offer. ``id`` and ``kind`` name the case and its category; absent, they are the line's number
    and "all".

    Raises:
        DataError: no such file, no rows, or rows that are no cases, all of them in one report.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file. Pass a JSONL file of cases with messages, tools and expected_calls.")
    with open(path, encoding="utf-8", errors="replace") as lines:
        return make_cases(path, _decode_lines(path, lines))


def make_cases(path: Path, rows: Iterable[tuple[str, int, Any]]) -> list[Case]:
    """The cases of rows, as ``read_cases`` takes them.

    Args:
        path: of the file that they are from, for messages.
        rows: where each stands, its number, and the row, or the ``RowError`` that it is.

    Raises:
        DataError: no rows, or rows that are no cases, all of them in one report.
    """
    cases: list[Case] = []
    problems: list[str] = []
    context = ReadContext()
    for where, number, row in rows:
        try:
            cases.append(_read_case(row, where, number, context))
        except RowError as error:
            problems.append(f"{where}: {error.pointer + ': ' if error.pointer else ''}{error.reason}")
    problems += [f"{path}: {n} cases have the id {i!r}; ids must differ" for i, n in _repeated_ids(cases)]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_NUM_SHOWN])
        count = "1 row is no case" if len(problems) == 1 else f"{len(problems):,} rows are no cases"
        raise DataError(f"{path}: {count}\n{shown}\nFix what is named, or take it out.")
    if not cases:
        raise DataError(f"{path}: holds no cases.")
    return cases


def _decode_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row: Any
            try:
                row = json.loads(line)
            except ValueError as error:
                row = RowError("", "not_json", f"not JSON ({error})")
            yield f"{path}:{number}", number, row


def _read_case(row: Any, where: str, number: int, context: ReadContext) -> Case:
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise RowError("", "unknown_row_format", "expected an object with messages, tools and expected_calls")
    expected = row.get("expected_calls")
    if expected is not None:
        if not isinstance(expected, list):
            raise RowError("expected_calls", "call_shape", f"expected a list of calls, got {type(expected).__name__}")
        calls = [{"type": "function", "function": call} for call in expected]
        answer = {"role": "assistant", "content": None, "tool_calls": calls} if calls else _NO_CALL
        row = {**row, "messages": [*row["messages"], answer]}
    elif (
        not row["messages"]
        or not isinstance(row["messages"][-1], dict)
        or row["messages"][-1].get("role") != "assistant"
    ):
        raise RowError("", "unknown_row_format", "no expected_calls, and the last message is not the assistant's")
    conversation = read_row(row, "openai", context, where).conversation
    *prompt, last = conversation.messages
    if last.role != "assistant" or not prompt:
        raise RowError("messages", "no_assistant", "no expected_calls, and the last message is not the assistant's")
    offered = {tool.name for tool in conversation.tools}
    if missing := [call.name for call in last.calls if call.name not in offered]:
        known = ", ".join(sorted(offered)) or "none"
        reason = f"expects a call of {missing[0]}, which is not on offer (tools: {known})"
        raise RowError("expected_calls", "unknown_tool", reason)
    return Case(
        id=str(number if row.get("id") is None else row["id"]),
        category=str(row.get("kind", row.get("category", "all"))),
        prompt=replace(conversation, messages=tuple(prompt), source=where),
        expected=last.calls,
    )


_NO_CALL = {"role": "assistant", "content": "No call."}


def _repeated_ids(cases: list[Case]) -> list[tuple[str, int]]:
    return [(i, n) for i, n in Counter(case.id for case in cases).items() if n > 1]
