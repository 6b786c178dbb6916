"""Cases made of training rows, and their split into training and test.

By tool, so that test cases are about tools that no training row has; by question where the rows share their tools.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.config.sections.data import Fold, RedactConfig
from fctune.data.check.similarity import SimilarityIndex, WordHasher
from fctune.data.conversation import Conversation, Message, Tool
from fctune.data.conversion import to_openai_row
from fctune.data.fold import with_run
from fctune.data.redaction import SecretScreen
from fctune.data.secrets import SecretCounts
from fctune.data.sources import (
    DEFAULT_SELECTION,
    LEFT_OUT_KINDS,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
    scan_source,
)
from fctune.data.sources.columns import Columns
from fctune.data.sources.unmatched import require_selected
from fctune.tasks.evaluation.held_out import read_questions
from fctune.tasks.suite_files import find_benchmark

Turns = Literal["last", "each"]

# What gives no case, next to the kinds of ``LEFT_OUT_KINDS``: the kinds in ``RowCases.left_out``, and their singulars.
_SINGULAR = {
    "rows that cannot be read": "row that cannot be read",
    "rows without tools": "row without tools",
    "duplicate questions": "duplicate question",
    "greetings with a request that is not answered": "greeting with a request that is not answered",
    "turns with weight 0": "turn with weight 0",
    "turns that call a tool that is not on offer": "turn that calls a tool that is not on offer",
}


@dataclass(frozen=True, slots=True)
class RowCase:
    """A case as a row that both training and evaluation read: its last message is the expected answer.

    Attributes:
        row: The row in OpenAI's format, with ``id`` and ``kind``; earlier turns of the assistant have weight 0.
        offered: Names of the tools on offer.
        called: Names of the tools that the answer calls.
        questions: What the user says in each turn.
        origin: Digest of the row's run, of the row that it was made of by augmentation, or of the row itself.
    """

    row: dict[str, Any]
    offered: frozenset[str]
    called: frozenset[str]
    questions: tuple[str, ...]
    origin: str


@dataclass(slots=True)
class RowCases:
    """The cases of a row set, with counts by reason of what gave none, of the secrets in rows with tools, and the
    benchmark that rows belong to.
    """

    cases: list[RowCase] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    benchmark: str | None = None
    secrets: SecretCounts = field(default_factory=SecretCounts)


@dataclass(frozen=True, slots=True)
class CaseSplit:
    """Cases of a split by tool or by question.

    Attributes:
        train: Cases to learn from; split by tool, they offer no tool of the test.
        test: Cases to test with; split by tool, they call tools of the test alone, or offer one and call none.
        num_dropped: Cases that mix the two, or whose conversation a training case begins or continues.
        test_tools: Names of the tools of the test; empty if split by question.
    """

    train: list[RowCase]
    test: list[RowCase]
    num_dropped: int
    test_tools: frozenset[str]


def make_row_cases(
    paths: Sequence[str],
    turns: Turns = "last",
    row_format: str = "auto",
    max_samples: int | None = None,
    columns: Columns | None = None,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    redact: RedactConfig | None = None,
    tools: tuple[Tool, ...] = (),
) -> RowCases:
    """Make cases of rows: of each conversation's last turn of the assistant, or of each of its turns.

    Conversations without tools give none, nor do turns with weight 0, turns that call a tool that is not on offer, and
    repeated questions.

    Args:
        paths: Sources of rows, as ``fctune.data.sources.read_source`` takes them.
        turns: The turns that become cases.
        row_format: Format of the rows; auto detects it.
        max_samples: Rows to read from each source; None reads all.
        columns: The format's name for each column of another name, or ``ignore``.
        fold: Leave out records that others continue: always, never, or in logs (auto).
        selection: Which rows are read, and which of their turns are context.
        redact: Replace secrets by placeholders; None counts them.
        tools: Tools of the rows that have none.

    Raises:
        DataError: A source cannot be read, or no row yields a case.
    """
    made, seen, screen = RowCases(), set[str](), SecretScreen(redact)
    made.secrets.searched = list(screen.scanner.kinds)
    for path in paths:
        reader = RowReader(row_format, columns, tools, keeps_questions=True, selection=selection)
        for row in islice(scan_source(path, row_format, columns, fold, selection, tools), max_samples):
            parsed = reader.read(row)
            made.left_out.update(row.left_out or {})
            if isinstance(parsed, LeftOut):
                made.left_out[parsed.kind] += 1
                continue
            made.num_rows += 1
            if isinstance(parsed, Defect):
                made.left_out["rows that cannot be read"] += 1
                continue
            raw = parsed.raw if isinstance(parsed.raw, dict) else {}
            made.benchmark = made.benchmark or find_benchmark([raw])
            if not parsed.conversation.tools:
                made.left_out["rows without tools"] += 1
                continue
            parsed, redaction = screen.screen(with_run(parsed, fold))
            made.secrets.count(redaction.findings, redaction.num_turns)
            for case in _iter_cases(parsed, turns, made.left_out):
                if case.row["id"] in seen:
                    made.left_out["duplicate questions"] += 1
                else:
                    seen.add(case.row["id"])
                    made.cases.append(case)
    if not made.num_rows:
        require_selected(paths, made.left_out, row_format, columns, fold, selection)
    if not made.cases:
        reasons = ", ".join(describe_left_out(made.left_out))
        raise DataError(f"{', '.join(paths)}: no row yields a case ({reasons or 'no answers of an assistant'}).")
    return made


def describe_left_out(left_out: Counter[str]) -> list[str]:
    """Return the number of each kind of what gave no case, such as ``3 rows without tools``, most frequent first."""
    return [
        f"{count:,} {LEFT_OUT_KINDS[reason]}"
        if reason in LEFT_OUT_KINDS
        else format_count(count, _SINGULAR[reason], reason)
        for reason, count in left_out.most_common()
    ]


def check_benchmark(benchmark: str | None, where: str, is_forced: bool) -> None:
    """Refuse to learn from a benchmark's questions, unless that is forced.

    Raises:
        ConfigError: They belong to a benchmark, and it is not forced.
    """
    if benchmark is not None and not is_forced:
        raise ConfigError(
            f"{where}: belongs to a benchmark ({benchmark}), which says nothing about a model that has learned from "
            "it. Use other cases, or pass --force-benchmark; every file and run made from them then says so."
        )


def split_cases(cases: Sequence[RowCase], test_share: float = 0.2, seed: int = 0) -> CaseSplit:
    """Split cases by tool, or by question where that is impossible or would drop more than half of them.

    Raises:
        DataError: One side would be empty either way.
    """
    try:
        split = split_by_tool(cases, test_share, seed)
    except DataError:
        return split_by_question(cases, test_share, seed)
    return split if split.num_dropped <= len(cases) / 2 else split_by_question(cases, test_share, seed)


def split_by_question(cases: Sequence[RowCase], test_share: float = 0.2, seed: int = 0) -> CaseSplit:
    """Split cases so that neither a question, nor one that nearly repeats it, nor a conversation is on both sides.

    The choice depends on the questions and the seed alone, not on the order of the cases.

    Args:
        cases: The cases.
        test_share: Share of the cases to test with, approximately.
        seed: Seed of the choice.

    Raises:
        DataError: One side would be empty.
    """
    groups = sorted(_group_questions(cases), key=lambda group: rank_by_hash("\n".join(group[0].questions), seed))
    wanted, test = test_share * len(cases), list[RowCase]()
    for group in groups:
        if len(test) + len(group) <= wanted:
            test += group
    if not test and len(groups) > 1:
        smallest = min(len(group) for group in groups)
        test = next(group for group in groups if len(group) == smallest)
    chosen = {id(case) for case in test}
    train = [case for case in cases if id(case) not in chosen]
    test = _drop_asked([case for case in cases if id(case) in chosen], train)
    if not train or not test:
        raise DataError(
            f"the cases cannot be split: all {len(cases):,} offer the same tools and ask nearly the same question. Add "
            "other rows, or leave out --test."
        )
    return CaseSplit(train, test, len(cases) - len(train) - len(test), frozenset())


def _drop_asked(test: list[RowCase], train: list[RowCase]) -> list[RowCase]:
    """Return test cases of no training conversation: not of its run, and none whose questions begin or continue it."""
    origins = {case.origin for case in train}
    asked = {case.questions[:length] for case in train for length in range(1, len(case.questions) + 1)}
    complete: dict[str, tuple[str, ...]] = {}
    for case in train:
        complete[case.origin] = max(complete.get(case.origin, ()), case.questions, key=len)
    ended = set(complete.values())
    return [
        case
        for case in test
        if case.origin not in origins
        and case.questions not in asked
        and not any(case.questions[:length] in ended for length in range(1, len(case.questions)))
    ]


def _group_questions(cases: Sequence[RowCase]) -> list[list[RowCase]]:
    """Return groups of cases of one conversation, or with questions that are the same or nearly so."""
    ordered = sorted(cases, key=lambda case: (case.questions, case.row["id"]))
    index = SimilarityIndex(WordHasher())
    try:
        for number, case in enumerate(ordered):
            spoken = tuple(Message(role="user", content=text) for text in case.questions)
            index.add(Conversation(messages=spoken, tools=()), 0, number)
        earlier = index.find_earlier()
    finally:
        index.close()
    groups: dict[int, list[int]] = {number: [number] for number in range(len(ordered))}
    group_of = list(range(len(ordered)))

    def merge(one: int, other: int) -> None:
        small, large = sorted((group_of[one], group_of[other]), key=lambda name: len(groups[name]))
        if small != large:
            for member in groups[small]:
                group_of[member] = large
            groups[large] += groups.pop(small)

    first_of_origin: dict[str, int] = {}
    for number, case in enumerate(ordered):
        merge(number, first_of_origin.setdefault(case.origin, number))
        if earlier[number] >= 0:
            merge(number, int(earlier[number]))
    return [[ordered[member] for member in sorted(members)] for members in groups.values()]


def split_by_tool(cases: Sequence[RowCase], test_share: float = 0.2, seed: int = 0) -> CaseSplit:
    """Split cases so that no tool of a test case is on offer in a training case, and no question is in both.

    Tools that are offered together stay together where that is possible. Where nearly all are, some of them become the
    test's, and the cases that mix these with others are dropped. The choice depends on the names and the seed alone.

    Args:
        cases: The cases.
        test_share: Share of the cases to test with, approximately.
        seed: Seed of the choice.

    Raises:
        DataError: One side would be empty.
    """
    wanted = test_share * len(cases)
    order = sorted({tool for case in cases for tool in case.offered}, key=lambda tool: rank_by_hash(tool, seed))
    groups = _group_tools(cases, order)
    sizes = Counter(groups[min(case.offered)] for case in cases)
    test_tools: set[str] = set()
    num_test = 0
    for name in dict.fromkeys(groups[tool] for tool in order):
        if num_test + sizes[name] <= wanted:
            num_test += sizes[name]
            test_tools |= {tool for tool in order if groups[tool] == name}
    if num_test < wanted / 2:
        largest = max(sizes, key=lambda name: (sizes[name], name))
        for tool in order:
            if num_test >= wanted:
                break
            if groups[tool] == largest:
                test_tools.add(tool)
                num_test = sum(_is_test(case, test_tools) for case in cases)
    train = [case for case in cases if not case.offered & test_tools]
    test = _drop_asked([case for case in cases if _is_test(case, test_tools)], train)
    if not train or not test:
        side = "training" if not train else "test"
        raise DataError(
            f"the split by tool leaves no {side} case: {format_count(len(order), 'tool is', 'tools are')} offered by "
            f"{format_count(len(cases), 'case')}. "
            "Add rows with other tools, or change --test-share or --seed."
        )
    return CaseSplit(train, test, len(cases) - len(train) - len(test), frozenset(test_tools))


def _iter_cases(parsed: ParsedRow, turns: Turns, left_out: Counter[str]) -> Iterator[RowCase]:
    conversation = parsed.conversation
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index > 0]
    offered = frozenset(tool.name for tool in conversation.tools)
    origin = parsed.run or parsed.digest()
    if not answers and messages[-1].role == "user" and messages[0].role == "assistant":
        left_out["greetings with a request that is not answered"] += 1
    elif not answers and messages[-1].role == "user":  # no call is right, and the row has no text of the answer
        row = {**to_openai_row(conversation), "expected_calls": []}
        row = {"id": conversation.digest(), "kind": "no_call", **row}
        yield RowCase(row, offered, frozenset(), read_questions(messages), origin)
    for index in answers if turns == "each" else answers[-1:]:
        answer = messages[index]
        called = frozenset(call.name for call in answer.calls)
        if answer.weight == 0:
            left_out["turns with weight 0"] += 1
            continue
        if not called <= offered:
            left_out["turns that call a tool that is not on offer"] += 1
            continue
        context = tuple(replace(m, weight=0.0) if m.role == "assistant" else m for m in messages[:index])
        prompt = replace(conversation, messages=messages[:index])
        row = to_openai_row(replace(conversation, messages=(*context, answer)))
        kind = "call" if called else "no_call"
        row = {"id": prompt.digest(), "kind": kind, **row}
        yield RowCase(row, offered, called, read_questions(prompt.messages), origin)


def _is_test(case: RowCase, test_tools: set[str]) -> bool:
    return case.called <= test_tools if case.called else bool(case.offered & test_tools)


def _group_tools(cases: Sequence[RowCase], tools: Sequence[str]) -> dict[str, str]:
    """Return a name for each tool that is equal for tools which cases offer together, directly or through others."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for offered in {case.offered for case in cases}:
        first = min(offered)
        neighbours[first] |= offered
        for tool in offered:
            neighbours[tool].add(first)
    groups: dict[str, str] = {}
    for tool in tools:
        waiting = [tool]
        while waiting:
            if (found := waiting.pop()) not in groups:
                groups[found] = tool
                waiting += neighbours[found]
    return groups


def rank_by_hash(text: str, seed: int) -> bytes:
    """Return a key that sorts texts, such as ids, in a random order which depends on each text and the seed alone."""
    return hashlib.blake2b(f"{seed} {text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
