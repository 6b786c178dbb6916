"""A run's training data and its evaluation cases: cases found in the data, and cases of what was held out."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.config.conditions import parse_conditions
from fctune.config.sections.data import DataConfig, Fold, RedactConfig, SourceConfig
from fctune.config.sections.rollouts import RECORDED, is_dialogue_source
from fctune.data.chunk_encoder import count_repeats
from fctune.data.conversation import Conversation, Message
from fctune.data.prepared_set import PreparedSet
from fctune.data.redaction import Redactor
from fctune.data.sources import DEFAULT_SELECTION, Selection, scan_source
from fctune.data.sources.columns import Columns
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import RowReader, parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import find_run_dir
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import AnyCase, Case, Task

HELD_OUT_FILE = "held_out.jsonl"  # held-out cases in a run's directory; their ids are the digests of the rows

# A run's exports are at most this many directories below it: export/merged, checkpoints/best/adapter.
_MAX_DEPTH = 3


class Leaks(NamedTuple):
    """Comparison of cases with a run's training data.

    Attributes:
        run: The run's directory.
        case_ids: Cases whose questions are in a training row, in the order of the suite.
        unread: The sources that could not be compared, with the reason.
    """

    run: Path
    case_ids: tuple[str, ...]
    unread: dict[str, str]


def find_leaks(cases: Sequence[Task], model: str | Path, adapter: str | Path | None = None) -> Leaks | None:
    """Look for cases in the training data of the run that a model or adapter is from; None if there is no run.

    A case is found if a training row, a pair's prompt or a case of reinforcement opens with the same turns of the user,
    white space aside. Rows that the run held out for validation are among them, except those that it wrote as cases.
    Tasks of environments and servers have no rows.
    """
    runs = [find_run(Path(path)) for path in (adapter, model) if path is not None]
    run = next((run for run in runs if run is not None), None)
    if run is None:
        return None
    found, unread = _find_cases(cases, _read_sources(run), _read_held_out(run))
    return Leaks(run, found, unread)


def _find_cases(
    cases: Sequence[Task], sources: Iterable[_Source], held_out: frozenset[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the ids of the cases that sources ask, without their rows of ``held_out``, and the unreadable sources."""
    found: set[str] = set()
    unread: dict[str, str] = {}
    search = QuestionSearch(cases)
    for source in sources:
        try:
            for messages in _iter_messages(source, held_out):
                found |= search.find(messages)
        except (ConfigError, DataError, OSError) as error:
            unread[source.path] = str(error).split("\n")[0]
    return tuple(case.id for case in cases if case.id in found), unread


class QuestionSearch:
    """Finds cases in training rows: those that open with the same turns of the user, white space aside."""

    def __init__(self, cases: Sequence[Task]):
        self._ids: dict[tuple[str, ...], list[str]] = {}
        for case in cases:
            if key := read_questions(case.questions):
                self._ids.setdefault(key, []).append(case.id)

    def find(self, messages: Iterable[Message]) -> set[str]:
        """Return the ids of the cases that a row's messages open with."""
        turns = read_questions(messages)
        return {i for length in range(1, len(turns) + 1) for i in self._ids.get(turns[:length], ())}


def iter_training_rows(run: Path) -> Iterator[tuple[str, ParsedRow]]:
    """Yield source and row of what a run was trained on, once each, without those that it wrote as held-out cases.

    Pairs, cases of reinforcement, and sources that cannot be read give none.
    """
    held_out = _read_held_out(run)
    for source in _read_sources(run):
        if source.kind == "rows":
            with contextlib.suppress(ConfigError, DataError, OSError):
                yield from ((source.path, row) for row in _parse_rows(source, held_out))


def iter_rows_of(paths: Iterable[str], run: Path | None) -> Iterator[tuple[str, ParsedRow]]:
    """Yield source and row of named sources, without the rows that a run wrote as held-out cases.

    Raises:
        DataError: A source cannot be read.
    """
    held_out = frozenset[str]() if run is None else _read_held_out(run)
    for path in paths:
        yield from ((path, row) for row in _parse_rows(_Source(path), held_out))


def find_run(path: Path) -> Path | None:
    """Return the run that a model, adapter or tune directory is from, or None."""
    path = find_run_dir(path).resolve()
    return next((found for found in (path, *path.parents[:_MAX_DEPTH]) if RunFiles(found).run.is_file()), None)


class _Source(NamedTuple):
    """Something that a run was trained on: rows, preference pairs, or cases that it answered itself.

    Of rows and pairs, only the first ``max_samples`` are read, and those that ``weight`` leaves out are skipped.
    """

    path: str
    kind: Literal["rows", "pairs", "cases"] = "rows"
    row_format: str = "auto"
    columns: Columns | None = None
    fold: Fold = "auto"
    selection: Selection = DEFAULT_SELECTION
    redact: RedactConfig | None = None  # of a run that replaces secrets
    max_samples: int | None = None
    weight: float = 1.0


def _read_sources(run: Path) -> list[_Source]:
    try:
        config = json.loads(RunFiles(run).run.read_text(encoding="utf-8"))["config"]
        rollouts, sources = config.get("grpo") or config.get("distill"), _list_sources(config["data"])
        cases = "" if rollouts is None else str(rollouts["cases"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{RunFiles(run).run}: does not name the run's training data ({type(error).__name__}). "
            "Copy the file from the run again, or move it away to evaluate without comparing."
        ) from None
    if cases.startswith((RECORDED, "synthetic:")):
        sources.append(_Source(cases.removeprefix(RECORDED)))
    elif cases and not is_dialogue_source(cases):  # which offer tasks, no rows
        sources.append(_Source(cases, "cases"))
    return sources


def _list_sources(data: Mapping[str, Any]) -> list[_Source]:
    """Return the sources of a config's ``data`` section."""
    kind: Literal["rows", "pairs"] = "pairs" if data.get("pairs") else "rows"
    redact = RedactConfig(**(data.get("redact") or {})) if data.get("secrets") == "redact" else None
    replayed = [{**source, "weight": 1.0} for source in (data.get("replay") or {}).get("sources", ())]  # drawn instead
    return [
        _Source(
            str(source["path"]),
            kind,
            str(source.get("format", "auto")),
            source.get("columns"),
            source.get("fold", "never"),  # as runs did before the key existed
            Selection(
                parse_conditions(source.get("where", "")),
                source.get("failed", "keep"),
                source.get("wrong_turns", "train"),
            ),
            redact,
            data.get("max_samples"),
            float(source.get("weight", 1.0)),
        )
        for source in (*data["sources"], *replayed)
        if source["path"]
    ]


def _read_held_out(run: Path) -> frozenset[str]:
    """Return the digests of the held-out rows that the run wrote as cases."""
    try:
        with open(run / HELD_OUT_FILE, encoding="utf-8") as lines:  # splitlines would also split at U+2028 in texts
            return frozenset(json.loads(line)["id"] for line in lines)
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def _iter_messages(source: _Source, held_out: frozenset[str]) -> Iterator[Iterable[Message]]:
    """Yield the messages of each row but those held out; of a pair, those of either conversation."""
    if source.kind == "cases":
        yield from (case.questions for case in load_suite(source.path, has_multi_turn=True).all_cases)
    elif source.kind == "pairs":
        from fctune.data.pairs import PAIRS_FORMAT, Pair, PairReader

        reader = PairReader(source.columns)
        for row in islice(scan_source(source.path, PAIRS_FORMAT, source.columns, "never"), source.max_samples):
            if isinstance(pair := reader.read(row), Pair) and count_repeats(pair.digest(), source.weight):
                yield from ((*pair.prompt.messages, *answer.messages) for answer in pair.answers)
    else:
        redactor = None if source.redact is None else Redactor(source.redact)
        for parsed in _parse_rows(source, held_out):
            yield parsed.conversation.messages
            if redactor is not None:  # cases of the run have its placeholders, those of users may have the secrets
                yield redactor.redact(parsed)[0].conversation.messages


def _parse_rows(source: _Source, held_out: frozenset[str]) -> Iterator[ParsedRow]:
    """Yield the rows of a source that are trained on, as the preparation reads them."""
    selection = source.selection
    reader = RowReader(source.row_format, source.columns, selection=selection)
    scanned = scan_source(source.path, source.row_format, source.columns, source.fold, selection)
    for row in islice(scanned, source.max_samples):
        parsed = reader.read(row)
        if isinstance(parsed, ParsedRow):
            digest = parsed.digest()
            if digest not in held_out and count_repeats(digest, source.weight):
                yield parsed


def read_questions(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return what the user says in each turn, white space aside."""
    return tuple(" ".join(m.content.split()) for m in messages if m.role == "user" and m.content)


@dataclass(slots=True)
class DistinctRequests:
    """The different requests of rows with tools, as hashes; a repeated one teaches no more than one.

    Attributes:
        found: All of them.
        no_call: Those of rows that need no call.
    """

    found: set[int] = field(default_factory=set)
    no_call: set[int] = field(default_factory=set)

    def add(self, conversation: Conversation) -> None:
        """Add the request of a row; one without tools is left out."""
        if not conversation.tools:
            return
        request = hash(read_questions(conversation.messages))
        self.found.add(request)
        if not any(message.calls for message in conversation.messages):
            self.no_call.add(request)

    @property
    def no_call_share(self) -> float:
        """Share of the requests that need no call; 0 without requests."""
        return len(self.no_call) / len(self.found) if self.found else 0.0


_MAX_WRITTEN = 600  # as many as a thorough gate asks


def write_held_out_cases(config: DataConfig, prepared: PreparedSet, run: Path) -> None:
    """Write the first cases of a run's held-out conversations to its directory, to evaluate its exports with.

    Cases whose questions a training row asks as well are left out. Without cases, nothing is written.
    """
    if config.pairs or not len(prepared.packs["validation"][0]):
        return
    with contextlib.suppress(DataError, OSError):  # the file is a convenience; the run is complete without it
        cases, _ = make_held_out_cases(config, prepared)
        if cases:
            lines = "".join(json.dumps(_to_row(case), ensure_ascii=False) + "\n" for case in cases)
            write_atomically(run / HELD_OUT_FILE, lines)


def make_held_out_cases(config: DataConfig, prepared: PreparedSet) -> tuple[list[Case], int]:
    """Make the cases that a run writes; returns them, and how many are left out because training rows ask the same.

    Raises:
        NothingHeldOutError: Nothing with tools is held out.
        DataError: A source cannot be read.
    """
    cases = find_held_out_cases(config, prepared, _MAX_WRITTEN)
    leaked = find_asked(cases, config, frozenset(case.id for case in cases))
    return [case for case in cases if case.id not in leaked], len(leaked)


def find_asked(cases: Sequence[AnyCase], config: DataConfig, held_out: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the ids of the cases whose questions are in a row to train on, white space aside.

    Args:
        cases: The cases.
        config: Names the rows.
        held_out: Digests of rows that are not trained on.
    """
    return _find_cases(cases, _list_sources(asdict(config)), held_out)[0]


def _to_row(case: Case) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in case.expected]
    return {"id": case.id, "kind": case.category, **case.prompt.to_openai(), "expected_calls": calls}


class NothingHeldOutError(DataError):
    """No held-out conversation can be made a case of."""


def find_held_out_cases(config: DataConfig, prepared: PreparedSet, max_cases: int | None = None) -> list[Case]:
    """Make a case of each conversation with tools in the validation split.

    The case is the first supervised turn of the assistant that calls a function, else its last one. With
    ``max_cases``, each source gives an equal share, and is read no further than that.

    Raises:
        NothingHeldOutError: Nothing with tools is held out.
        DataError: A source cannot be read.
    """
    quota = None if max_cases is None else math.ceil(max_cases / len(config.sources))
    cases = [
        case
        for rows in _iter_held_out(config, prepared)
        for case in islice(filter(None, starmap(_make_case, rows)), quota)
    ][:max_cases]
    if not cases:
        raise NothingHeldOutError(
            "eval.cases=validation: no held-out conversation has tools and an answer. Specify a JSONL file of cases, "
            "hold out more with data.validation_share, or set eval.every=0."
        )
    return cases


def iter_held_out_conversations(config: DataConfig, prepared: PreparedSet) -> Iterator[Conversation]:
    """Yield the conversations of the validation split, each once; of a pair, that with the chosen answer."""
    if config.pairs:
        yield from _iter_chosen(config, prepared)
        return
    for rows in _iter_held_out(config, prepared):
        for conversation, _ in rows:
            yield conversation


def _iter_held_out(config: DataConfig, prepared: PreparedSet) -> Iterator[Iterator[tuple[Conversation, str]]]:
    """Yield, for each source, an iterator of its held-out conversations and their digests."""
    held_out = _list_held_out(prepared)
    redactor = Redactor(config.redact) if config.secrets == "redact" else None
    for source in config.sources:
        yield _take_held_out(source, config.max_samples, held_out, redactor)


def _list_held_out(prepared: PreparedSet) -> set[int]:
    flat, _ = prepared.packs["validation"]
    return {int(digest) for digest in prepared.digests[flat]}


def _iter_chosen(config: DataConfig, prepared: PreparedSet) -> Iterator[Conversation]:
    """Yield prompt and chosen answer of each held-out pair; one that is given as token ids has no messages."""
    from fctune.data.pairs import PAIRS_FORMAT, Pair, PairReader

    held_out = _list_held_out(prepared)
    for source in config.sources:
        reader = PairReader(source.columns)
        for row in islice(scan_source(source.path, PAIRS_FORMAT, source.columns, "never"), config.max_samples):
            pair = reader.read(row)
            if not isinstance(pair, Pair) or (digest := int(pair.digest(), 16)) not in held_out:
                continue
            held_out.remove(digest)
            if pair.chosen.token_ids is None:
                earlier = (replace(message, weight=0.0) for message in pair.prompt.messages)
                yield replace(pair.prompt, messages=(*earlier, *pair.chosen.messages))


def _take_held_out(
    source: SourceConfig, max_rows: int | None, held_out: set[int], redactor: Redactor | None
) -> Iterator[tuple[Conversation, str]]:
    """Yield the rows of a source; they are taken out of ``held_out``, so that repeated ones count once."""
    selection = Selection.from_config(source)
    rows = parse_source(source.path, source.format, source.columns, fold=source.fold, selection=selection)
    for row in islice(rows, max_rows):
        if isinstance(row, Defect):
            continue
        digest = row.digest()
        if int(digest, 16) not in held_out:
            continue
        held_out.remove(int(digest, 16))
        if redactor is not None:
            row, _ = redactor.redact(row)
        yield row.conversation, digest


def cut_after_answer(conversation: Conversation) -> Conversation | None:
    """Return a conversation up to the answer that its case asks for, which is included; None if it makes no case."""
    index = _find_answer(conversation)
    return None if index is None else replace(conversation, messages=conversation.messages[: index + 1])


def _find_answer(conversation: Conversation) -> int | None:
    """Return the index of the first supervised turn that calls, else of the last one; None without any."""
    messages = conversation.messages
    answers = [
        index for index, message in enumerate(messages) if message.role == "assistant" and index and message.weight
    ]
    if not answers or not conversation.tools:
        return None
    return next((index for index in answers if messages[index].calls), answers[-1])


def _make_case(conversation: Conversation, name: str) -> Case | None:
    messages = conversation.messages
    index = _find_answer(conversation)
    if index is None:
        return None
    expected = messages[index].calls
    prompt = replace(conversation, messages=messages[:index])
    return Case(id=name, category="call" if expected else "no_call", prompt=prompt, expected=expected)
