"""Cases of an evaluation: a conversation, the tools on offer, the calls that are due, and how an answer is judged."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import Judgement, judge, judge_failure
from fctune.config.intervals import format_count
from fctune.config.parsing import describe_no_file
from fctune.data.conversation import Call, Conversation
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.data.tool_schema import ToolSet
from fctune.errors import DataError

_NUM_SHOWN = 10


@dataclass(frozen=True)
class Case:
    """One question: the conversation up to where the model is to act, and the calls that are due, if any.

    ``sample`` numbers the answers to the same question where several are asked for.
    """

    id: str
    category: str
    prompt: Conversation
    expected: tuple[Call, ...]
    sample: int = field(default=0, kw_only=True)

    @functools.cached_property
    def _tools(self) -> ToolSet:
        return ToolSet(self.prompt.tools)

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge one reading of an answer: correct if its calls are the expected ones, typed and in any order.

        Args:
            parsed: The answer as read.
            decoded: The answer as a benchmark's own decoder reads it, if that differs.
        """
        return judge(self.expected, parsed, self._tools)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        return judge_failure(len(self.expected), reason)

    def describe_differences(self, parsed: Parsed, judgement: Judgement) -> tuple[str, ...]:
        """List everything that is wrong with an answer, one line each."""
        return judgement.differences


def read_cases(path: str | Path) -> list[Case]:
    """Read a JSONL file of cases.

    Rows have OpenAI's shape: ``messages`` and ``tools``, with ``expected_calls`` (a list of name and arguments, empty
    if no call is due), or without it if the last message is the expected answer. Only tools on offer may be expected.
    ``id`` and ``kind`` name the case and its category; the defaults are the line number and "all".

    Raises:
        DataError: The file is missing or empty, or has invalid rows, all of which are reported.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: {describe_no_file(path)}. Pass a JSONL file of cases with messages, tools and expected_calls."
        )
    with open(path, encoding="utf-8", errors="replace") as lines:
        return make_cases(path, _decode_lines(path, lines))


def make_cases(path: Path, rows: Iterable[tuple[str, int, Any]]) -> list[Case]:
    """Make cases of rows with the shape that ``read_cases`` documents.

    Args:
        path: The file they come from, for messages.
        rows: Position of each row for messages, its number, and the row or the ``RowError`` that reading it raised.

    Raises:
        DataError: There are no rows, or invalid ones, all of which are reported.
    """
    cases: list[Case] = []
    problems: list[str] = []
    context = ReadContext()
    for where, number, row in rows:
        try:
            cases.append(_read_case(row, where, number, context))
        except RowError as error:
            problems.append(f"{where}: {error.pointer + ': ' if error.pointer else ''}{error.reason}")
    problems += [f"{path}: {n} cases have the id {i!r}; ids must be unique" for i, n in _repeated_ids(cases)]
    check_rows(path, "case", len(cases), problems)
    return cases


def check_rows(path: str | Path, noun: str, num_rows: int, problems: Sequence[str]) -> None:
    """Check that a file contained rows, and no invalid ones.

    Args:
        path: The file.
        noun: Name for a row, such as ``case``.
        num_rows: Number of rows read.
        problems: One line for each invalid row.

    Raises:
        DataError: There are no rows, or invalid ones; the first of them are listed.
    """
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_NUM_SHOWN])
        count = format_count(len(problems), f"invalid {noun}")
        raise DataError(f"{path}: {count}\n{shown}\nFix these rows or remove them.")
    if not num_rows:
        raise DataError(f"{path}: contains no {noun}s.")


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
    no_answer = "no expected_calls, and the last message is not the assistant's answer"
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
        raise RowError("", "unknown_row_format", no_answer)
    columns = {name: value for name, value in row.items() if name != "expected_calls"}
    conversation = read_row(columns, "openai", context, where).conversation
    *prompt, last = conversation.messages
    if last.role != "assistant" or not prompt:
        raise RowError("messages", "no_assistant", no_answer)
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
