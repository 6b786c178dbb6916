"""Suites and cases in files: YAML suites, JSONL files of cases, and the benchmarks that rows belong to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.config.loading import format_problems, read_yaml_mapping
from fctune.config.parsing import describe_no_file, parse_dataclass
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.data.synthetic import iter_cases
from fctune.tasks.benchmarks import Benchmark, find_benchmarks
from fctune.tasks.suite import Suite
from fctune.tasks.task import Case

_NUM_SHOWN = 10
_NO_CALL = {"role": "assistant", "content": "No call."}


@dataclass(frozen=True, slots=True)
class _Synthetic:
    num_cases: int
    seed: int = 42


@dataclass(frozen=True, slots=True)
class _SuiteFile:
    """A suite in YAML: ``cases`` (with ``tools`` that all of them offer), or ``synthetic``, or a benchmark's key."""

    description: str
    benchmark: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    synthetic: _Synthetic | None = None


def load_suite(
    path: str | Path,
    *,
    seed: int | None = None,
    num_cases: int | None = None,
    categories: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    has_plain_names: bool = False,
    has_multi_turn: bool = False,
) -> Suite:
    """Load a suite from a YAML file, or from a JSONL file of cases; see ``read_cases``.

    Args:
        path: The ``.yaml`` or JSONL file.
        seed: Seed of a synthetic suite; default: the file's.
        num_cases: Size of a synthetic suite; default: the file's.
        categories: Categories to run; empty: all that the file names.
        options: Values of the benchmark's options by name, such as ``bfcl_data``; others are ignored.
        has_plain_names: Write underscores for dots in the tools' names, as servers' own protocols require.
        has_multi_turn: Include the benchmark's multi-turn categories.

    Raises:
        ConfigError: The file is missing or not a suite, or it does not have one of the categories.
        DataError: There are invalid cases: no expected calls, calls of tools that are not on offer, repeated ids.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        return Suite(path.stem, tuple(read_cases(path)), read_mark(path)).select(categories)
    spec, benchmark, settings = _read_spec(path)
    if benchmark is not None:
        suite = benchmark.load(settings, str(path), categories, options or {}, has_plain_names, has_multi_turn)
        suite.benchmark = spec.benchmark or benchmark.title
        return suite
    if spec.synthetic is not None:
        made = iter_cases(num_cases or spec.synthetic.num_cases, spec.synthetic.seed if seed is None else seed)
        rows = [case.to_json() for case in made]
    else:
        tools = [{"type": "function", "function": tool} for tool in spec.tools]
        rows = [{**({"tools": tools} if tools else {}), **row} for row in spec.cases]
    named = ((f"{path}: case {row.get('id', number)}", number, row) for number, row in enumerate(rows, start=1))
    return Suite(path.stem, tuple(make_cases(path, named)), spec.benchmark).select(categories)


def benchmark_of(suite: Suite) -> str | None:
    """Return the benchmark that a suite belongs to, by its declaration or by the ids of its cases, or None."""
    return suite.benchmark or find_benchmark([{"id": case.id} for case in suite.all_cases])


def find_benchmark(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the benchmark that rows belong to, by the marks in their metadata or by their ids, or None."""
    known = find_benchmarks().values()
    for row in rows:
        metadata = row.get("metadata")
        if isinstance(metadata, dict) and isinstance(metadata.get("benchmark"), str):
            return str(metadata["benchmark"])
        if (case_id := row.get("id")) is not None:
            for benchmark in known:
                if benchmark.owns(str(case_id)):
                    return benchmark.title
    return None


def read_mark(path: Path) -> str | None:
    """Return the benchmark that the rows of a JSONL file are marked with, or None.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with open(path, "rb") as lines:
            marked = (json.loads(line) for line in lines if b'"benchmark"' in line)
            return find_benchmark({"metadata": row.get("metadata")} for row in marked if isinstance(row, dict))
    except OSError as error:
        raise _unreadable(path, error) from None


def _read_spec(path: Path) -> tuple[_SuiteFile, Benchmark | None, Any]:
    """Return a suite's file, and the benchmark that it names with that key's value."""
    raw = read_yaml_mapping(path)
    named = {name: raw.pop(name) for name in find_benchmarks() if name in raw}
    problems: list[str] = []
    spec: _SuiteFile | None = parse_dataclass(_SuiteFile, raw, "", problems)
    if spec is not None and len(named) + bool(spec.cases) + bool(spec.synthetic) != 1:
        problems.append(f"expected one of cases, synthetic and {', '.join(find_benchmarks())}")
    if problems or spec is None:
        raise ConfigError(format_problems(str(path), problems))
    name = next(iter(named), None)
    return (spec, None, None) if name is None else (spec, find_benchmarks()[name], named[name])


def read_cases(path: str | Path) -> list[Case]:
    """Read a JSONL file of cases.

    Rows have OpenAI's shape: ``messages`` and ``tools``, with ``expected_calls`` (a list of name and arguments, empty
    if no call is due), or without it if the last message is the expected answer. Only tools on offer may be expected.
    ``id`` and ``kind`` name the case and its category; the defaults are the line number and "all".

    Raises:
        DataError: The file is missing, unreadable or empty, or has invalid rows, all of which are reported.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path}: {describe_no_file(path)}. Pass a JSONL file of cases with messages, tools and expected_calls."
        )
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return make_cases(path, _decode_lines(path, lines))
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror}). Check the file and its permissions.")


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
    counts = Counter(case.id for case in cases)
    problems += [f"{path}: {n} cases have the id {i!r}; ids must be unique" for i, n in counts.items() if n > 1]
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
