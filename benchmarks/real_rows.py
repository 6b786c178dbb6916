"""Training rows and held-out cases of the real-model benchmark, from Seal-Tools, Glaive and the synthetic set.

Cases for testing and for choosing between settings are Seal-Tools questions whose tools are in no training row, called
or offered. No training row has a question of BFCL, or a tool with the name of one of its tools: such rows are left out
while mixing, and the result is checked.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real_requests import (
    leave_other_tools,
    list_called,
    rename_tools,
    take_tools_away,
)
from benchmarks.real_row_maker import RowMaker
from fctune.base.errors import DataError
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.check import check_sources
from fctune.data.check.overlap import OverlapIndex
from fctune.data.check.similarity import WordHasher
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources import read_source
from fctune.data.synthetic import iter_conversations
from fctune.tasks.task import Case

# Rows that call a held-out tool cannot be trained on, so held-out questions are those whose tools few others need.
_MAX_ROWS_PER_TOOL = 2


@dataclass(frozen=True, slots=True)
class Mixture:
    """Numbers of training rows by kind.

    Attributes:
        natural: One-call questions of Seal-Tools with other values and further options.
        seal_copies: Times each Seal-Tools row appears, each time among other tools.
        glaive: Glaive rows, as they are.
        no_call: Questions whose tools were taken away.
        twins: Pairs of such a question and one that needs a tool of those on offer, so that neither refusing nor
            calling is right for a set of tools.
        near_misses: Questions of ``public`` without the tools that they call, but with the others of their row; the
            rows with all of their tools are in ``public``.
        described: Requests written from the description of a tool.
        parallel: Requests for several calls of one tool.
        listed: The same requests where the tool takes a list of values in one call.
        joined: Two or three questions as one.
        quantities: Requests to invented tools for one or more calculations, with numbers and lists of them.
        dialogues: Several questions about the same tools, three to five a row.
        public: Questions of ``benchmarks.real_public_rows`` for other people's tools, as they are.
        guided: Dialogues of ``benchmarks.real_public_rows``.
        synthetic: Rows of this project's synthetic set.
        renamed_share: Share of Seal-Tools' tools that are renamed to snake case or with a dot.
        seed: Seed of the random choices.
    """

    natural: int = 110
    seal_copies: int = 1
    glaive: int = 30
    no_call: int = 210
    twins: int = 0
    near_misses: int = 0
    described: int = 0
    parallel: int = 80
    listed: int = 80
    joined: int = 110
    quantities: int = 0
    dialogues: int = 360
    public: int = 0
    guided: int = 0
    synthetic: int = 20
    renamed_share: float = 0.5
    seed: int = 0


class Split(NamedTuple):
    """Seal-Tools rows by use; the tools that test and validation rows call are in no training row."""

    train: list[Conversation]
    validation: list[Conversation]
    test: list[Conversation]


def split_by_tools(rows: Sequence[Conversation], num_validation: int, num_test: int) -> Split:
    """Split rows so that no tool which a held-out row calls is called or offered in a training row.

    Raises:
        DataError: There are too few rows.
    """
    num_callers = Counter(name for row in rows for name in _called(row))
    order = sorted(rows, key=lambda row: _hash(_question(row)))
    free = [row for row in order if all(num_callers[name] <= _MAX_ROWS_PER_TOOL for name in _called(row))]
    if len(free) < num_validation + num_test:
        raise DataError(
            f"Seal-Tools: {len(rows):,} rows, {len(free):,} of them with tools that few others call; "
            f"{num_validation + num_test} are needed for validation and test. Pass the complete file."
        )
    test, validation = free[:num_test], free[num_test : num_test + num_validation]
    held = frozenset(name for row in (*test, *validation) for name in _called(row))
    questions = {_question(row) for row in (*test, *validation)}
    train = [row for row in order if not held & _called(row) and _question(row) not in questions]
    train = [replace(row, tools=tuple(tool for tool in row.tools if tool.name not in held)) for row in train]
    return Split(train, validation, test)


def to_cases(rows: Sequence[Conversation], kind: str) -> list[dict[str, Any]]:
    """Return rows as the cases of an evaluation: their questions, and the calls of their last message."""
    return [
        {
            "id": f"{kind}-{number}",
            "kind": kind,
            "messages": [message.to_openai() for message in row.messages[:-1]],
            "tools": [tool.to_openai() for tool in row.tools],
            "expected_calls": [{"name": c.name, "arguments": c.arguments} for c in row.messages[-1].calls],
        }
        for number, row in enumerate(rows)
    ]


def mix_rows(
    seal: Sequence[Conversation],
    glaive: Sequence[Conversation],
    mixture: Mixture,
    is_allowed: Callable[[Conversation], bool],
    public: Sequence[Conversation] = (),
    guided: Sequence[Conversation] = (),
) -> list[Conversation]:
    """Return the training rows of a mixture in random order.

    Args:
        seal: Seal-Tools rows to train on.
        glaive: Glaive rows.
        mixture: Numbers of rows by kind.
        is_allowed: Rows that may be trained on; others are left out or drawn again.
        public: Questions for other people's tools.
        guided: Dialogues with other people's tools.
    """
    rng = random.Random(f"mixture:{mixture.seed}")
    seal = [row for row in seal if is_allowed(replace(row, tools=()))]
    seal = [replace(row, tools=tuple(t for t in row.tools if is_allowed(Conversation((), (t,))))) for row in seal]
    seal = [row for row in seal if len(list_called(row)) == len(_called(row))]
    pool = ToolPool()
    for row in seal:
        pool.add(row)
    public = [row for row in public if is_allowed(row)][: mixture.public]
    for row in public:
        pool.add(row)
    maker = RowMaker(seal, glaive, public, mixture.seal_copies, pool, rng)
    kinds: list[tuple[int, Callable[[], tuple[Conversation, ...]]]] = [
        (len(maker.seals), lambda: (maker.make_seal(),)),
        (mixture.natural, lambda: (maker.make_natural(),)),
        (mixture.no_call, lambda: (maker.make_no_call(),)),
        (mixture.twins, maker.make_twins),
        (mixture.described, lambda: (maker.make_described(),)),
        (mixture.parallel, lambda: (maker.make_parallel(),)),
        (mixture.listed, lambda: (maker.make_listed(),)),
        (mixture.joined, lambda: (maker.make_joined(),)),
        (mixture.quantities, lambda: (maker.make_quantities(),)),
        (mixture.dialogues, lambda: (maker.make_dialogue(),)),
    ]
    rows = [row for count, make in kinds for row in _draw_allowed(count, make, mixture.renamed_share, rng, is_allowed)]
    rows += [row for row in glaive if is_allowed(row)][: mixture.glaive]
    rows += public
    if mixture.near_misses:
        near = (leave_other_tools(row, pool, rng) for row in rng.sample(public, len(public)))
        rows += itertools.islice(filter(None, near), mixture.near_misses)
    rows += [row for row in guided if is_allowed(row)][: mixture.guided]
    if mixture.synthetic:
        # Three times as many are read, since those with tools of the benchmark are left out.
        made = iter_conversations("train", 3 * mixture.synthetic, mixture.seed)
        rows += [row for row in made if is_allowed(row)][: mixture.synthetic]
    rng.shuffle(rows)
    return rows


def _draw_allowed(
    count: int,
    make: Callable[[], tuple[Conversation, ...]],
    renamed_share: float,
    rng: random.Random,
    is_allowed: Callable[[Conversation], bool],
) -> Iterator[Conversation]:
    """Yield ``count`` times one row, or a pair of rows with the same tools, which are renamed alike."""
    for _ in range(count):
        for _ in range(20):  # a rename may hit the name of a tool of the benchmark
            try:
                made = make()
            except IndexError:  # no source row is left
                return
            state, rows = rng.getstate(), []
            for row in made:
                rng.setstate(state)
                rows.append(rename_tools(row, renamed_share, rng))
            if all(map(is_allowed, rows)):
                yield from rows
                break


class Contamination(NamedTuple):
    """Questions and tools of a benchmark that training rows contain, with the numbers of both."""

    benchmark: str
    num_rows: int
    num_questions: int
    num_found_questions: int
    num_tools: int
    found_tools: tuple[str, ...]

    def describe(self) -> str:
        """Return one line to print."""
        found = f" ({', '.join(self.found_tools[:5])})" if self.found_tools else ""
        return (
            f"contamination: {self.num_found_questions} of the {self.num_questions:,} questions and "
            f"{len(self.found_tools)} of the {self.num_tools:,} tools of {self.benchmark}{found} "
            f"are in the {self.num_rows:,} training rows"
        )


class BenchmarkFilter:
    """Filter of training rows: rejects rows with a question or a tool of a benchmark.

    Args:
        question_files: The benchmark's files of questions.
        cases: Its cases, with their tools.
    """

    def __init__(self, question_files: Sequence[Path], cases: Iterable[Case]):
        hasher = WordHasher()
        self._indexes = [OverlapIndex(str(file), "eval", hasher) for file in question_files]
        self._names = {plain_name(tool.name) for case in cases for tool in case.prompt.tools}

    def allows(self, row: Conversation) -> bool:
        """Return True if the row has neither; looks for questions as ``fctune data check --eval-suite`` does."""
        if any(plain_name(name) in self._names for name in ({tool.name for tool in row.tools} | _called(row))):
            return False
        for index in self._indexes:
            num_rows = index.overlap.num_rows
            index.add(row)
            if index.overlap.num_rows > num_rows:
                return False
        return True


def plain_name(name: str) -> str:
    """Return a tool's name without case and separators, so that ``getWeather`` equals ``get_weather``."""
    return "".join(filter(str.isalnum, name)).lower()


def check_contamination(
    path: Path,
    question_files: Sequence[Path],
    benchmark: Iterable[Case],
    name: str = "BFCL's categories that are measured",
) -> Contamination:
    """Look for a benchmark's questions and tools in a file of training rows.

    Args:
        path: The training rows.
        question_files: The benchmark's files of questions, for the overlap that ``fctune data check`` reports.
        benchmark: Its cases.
        name: What the benchmark is called.
    """
    report = check_sources([str(path)], eval_suites=[str(file) for file in question_files])
    names = {plain_name(tool.name) for case in benchmark for tool in case.prompt.tools}
    trained: set[str] = set()
    num_rows = 0
    for row in read_source(str(path)):
        if isinstance(row, Conversation):
            num_rows += 1
            trained |= {tool.name for tool in row.tools}
    found = tuple(sorted(name for name in trained if plain_name(name) in names))
    num_items = sum(overlap.num_items for overlap in report.overlaps)
    num_found = sum(overlap.num_found for overlap in report.overlaps)
    return Contamination(name, num_rows, num_items, num_found, len(names), found)


def read_rows(path: str) -> list[Conversation]:
    """Read the usable rows of a source in any row format.

    Raises:
        DataError: The source is missing or has no usable rows.
    """
    rows = [row for row in read_source(path) if isinstance(row, Conversation)]
    if not rows:
        raise DataError(f"{path}: no usable row; `fctune data check {path}` lists why.")
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_no_call_cases(rows: Sequence[Conversation], others: Sequence[Tool]) -> list[Conversation]:
    """Return the questions of rows with one to four tools of other rows, which cannot answer them."""
    rng = random.Random("no-call cases:0")
    pool = ToolPool()
    pool.add(Conversation((), tuple(others)))
    made = [take_tools_away(row, pool, rng) for row in rows]
    assert not any(message.calls for row in made for message in row.messages)
    return made


def in_share(text: str, share: float) -> bool:
    """Return True for a share of texts, chosen by a hash."""
    return _hash(text) < share


def _hash(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") / 2**64


def _question(row: Conversation) -> str:
    return next((message.content or "" for message in row.messages if message.role == "user"), "")


def _called(row: Conversation) -> set[str]:
    return {call.name for message in row.messages for call in message.calls}
