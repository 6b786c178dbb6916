"""Cases of an evaluation: a conversation, the tools on offer, the calls that are due, and how an answer is judged."""

from __future__ import annotations

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.calls.judge import Judgement, judge, judge_failure
from fctune.config.intervals import format_count
from fctune.config.parsing import describe_no_file
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.data.tool_schema import ToolSet

if TYPE_CHECKING:
    from fctune.tasks.benchmarks import Benchmark

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
    benchmark_name: ClassVar[str | None] = None  # key of the benchmark's own verdict in result rows

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


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's messages that open a turn, and the tools on offer from then on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


class SimulatedTools(Protocol):
    """The tools of a multi-turn case, with their state."""

    def play(self, calls: Sequence[Call]) -> Sequence[str]:
        """Make the calls of one answer, and return the result of each.

        Raises:
            TimeoutError: The calls take too long; the message says so.
        """


@dataclass(frozen=True)
class MultiTurnCase(ABC):
    """A conversation with several user turns, in which simulated tools answer.

    In each turn the model is queried until it makes no more calls. The conversation ends if it calls in more than
    ``max_steps`` answers of one turn.
    """

    id: str
    category: str
    turns: tuple[Turn, ...]
    max_steps: int
    benchmark_name: ClassVar[str | None] = None

    @property
    @abstractmethod
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """The calls that are due in each turn."""

    @abstractmethod
    def start(self) -> SimulatedTools:
        """Create the tools in their initial state."""

    @abstractmethod
    def judge(
        self,
        turns: Sequence[Sequence[Parsed]],
        stopped: str | None = None,
        is_unanswered: bool = False,
        decoded: Sequence[Sequence[Parsed]] | None = None,
    ) -> Judgement:
        """Judge one reading of a conversation.

        Args:
            turns: The steps of each turn; fewer turns if the conversation was stopped.
            stopped: Why the conversation was stopped early; None if it was not.
            is_unanswered: The conversation was stopped because the model could not answer.
            decoded: The steps as a benchmark's own decoder reads them; see ``Reading.decoded``. None: as read.
        """

    @abstractmethod
    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that ended without an answer."""

    @abstractmethod
    def describe(self) -> Any:
        """Return, as JSON values, what decides verdicts besides the turns; part of the suite's digest."""


AnyCase = Case | MultiTurnCase


@dataclass(eq=False)
class Suite:
    """Cases of one or several turns, which judge the answers to them.

    Attributes:
        name: The suite's name.
        cases: Cases that one answer settles.
        benchmark: The public benchmark that the cases belong to: it must not be trained on, and its categories are not
            summed up.
        not_run: Categories that were requested and left out, with the reason.
        multi_turn: Multi-turn cases.
        release: The package and version that the cases come from, such as ``bfcl-eval 2026.3.23``; None if unknown.
        call_format: The format in which the prompts themselves ask for calls; None: the model's own.
        plug_in: The benchmark's plug-in, which weighs categories; None without one.
    """

    name: str
    cases: tuple[Case, ...]
    benchmark: str | None = None
    not_run: dict[str, str] = field(default_factory=dict)
    multi_turn: tuple[MultiTurnCase, ...] = ()
    release: str | None = None
    call_format: CallFormat | None = None
    plug_in: Benchmark | None = None

    def __post_init__(self) -> None:
        self._by_id: dict[str, AnyCase] = {case.id: case for case in self.all_cases}

    @property
    def all_cases(self) -> list[AnyCase]:
        """Single-turn and multi-turn cases, in order."""
        return [*self.cases, *self.multi_turn]

    def find(self, case_id: str) -> AnyCase | None:
        """Return the case with this id, or None."""
        return self._by_id.get(case_id)

    def find_category(self, case_id: str) -> str | None:
        """Return the category that an id names, whether or not the case exists; None if ids name none."""
        return None

    def digest(self) -> str:
        """Return a hex digest, 16 characters, of the cases: ids, prompts and expected calls."""
        digest = hashlib.blake2b(digest_size=8)
        for case in self.cases:
            expected = [[call.name, call.arguments] for call in case.expected]
            row: list[Any] = [case.id, case.category, case.prompt.digest(), expected]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        for dialogue in self.multi_turn:
            turns = [Conversation(turn.messages, turn.tools).digest() for turn in dialogue.turns]
            row = [dialogue.id, dialogue.category, turns, dialogue.describe(), dialogue.max_steps]
            digest.update(json.dumps(row, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def select(self, categories: Sequence[str] = (), limit: int | None = None) -> Suite:
        """Return the suite with these categories only, or all if empty, and the first ``limit`` cases of each.

        Raises:
            ConfigError: No case has one of the categories.
        """
        known = {case.category for case in self.all_cases} | self.not_run.keys()
        if unknown := [name for name in categories if name not in known]:
            raise ConfigError(
                f"--categories {unknown[0]}: not a category of {self.name}; it has {', '.join(sorted(known))}."
            )
        seen: Counter[str] = Counter()

        def is_kept(case: AnyCase) -> bool:
            seen[case.category] += 1
            return (not categories or case.category in categories) and (limit is None or seen[case.category] <= limit)

        return self.with_cases(list(filter(is_kept, self.cases)), list(filter(is_kept, self.multi_turn)))

    def with_cases(self, cases: Sequence[Case], multi_turn: Sequence[MultiTurnCase] = ()) -> Suite:
        """Return a suite with other cases and the description of this one."""
        described = {field.name: getattr(self, field.name) for field in fields(Suite)}
        return Suite(**described | {"cases": tuple(cases), "multi_turn": tuple(multi_turn)})


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
