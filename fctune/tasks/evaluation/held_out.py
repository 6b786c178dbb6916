"""A run's training data and its evaluation cases: cases found in the data, and cases of what was held out."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fctune.base.errors import ConfigError, DataError
from fctune.base.files import write_atomically
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.config.sections.rollouts import ENVIRONMENT, RECORDED
from fctune.data.conversation import Conversation, Message
from fctune.data.prepared_set import PreparedSet
from fctune.data.sources import read_source, scan_source
from fctune.data.sources.columns import Columns
from fctune.data.sources.defects import Defect
from fctune.data.sources.reader import parse_source
from fctune.runs.directory import RunFiles
from fctune.tasks.suite_files import load_suite
from fctune.tasks.task import AnyCase, Case

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


def find_leaks(cases: Sequence[AnyCase], model: str | Path, adapter: str | Path | None = None) -> Leaks | None:
    """Look for cases in the training data of the run that a model or adapter is from; None if there is no run.

    A case is found if a training row, a pair's prompt or a case of reinforcement opens with the same turns of the user,
    white space aside. Rows that the run held out for validation are among them, except those that it wrote as cases.
    Tasks of environments have no rows.
    """
    runs = [_find_run(Path(path)) for path in (adapter, model) if path is not None]
    run = next((run for run in runs if run is not None), None)
    if run is None:
        return None
    questions: dict[tuple[str, ...], list[str]] = {}
    for case in cases:
        if key := read_questions(case.questions):
            questions.setdefault(key, []).append(case.id)
    found: set[str] = set()
    held_out = _read_held_out(run)
    unread: dict[str, str] = {}
    for source in _read_sources(run):
        try:
            for messages in _iter_messages(source, held_out):
                turns = read_questions(messages)
                for length in range(1, len(turns) + 1):
                    found.update(questions.get(turns[:length], ()))
        except (ConfigError, DataError, OSError) as error:
            unread[source.path] = str(error).split("\n")[0]
    return Leaks(run, tuple(case.id for case in cases if case.id in found), unread)


def _find_run(path: Path) -> Path | None:
    path = path.resolve()
    return next((found for found in (path, *path.parents[:_MAX_DEPTH]) if RunFiles(found).run.is_file()), None)


class _Source(NamedTuple):
    """Something that a run was trained on: rows, preference pairs, or cases of reinforcement."""

    path: str
    kind: Literal["rows", "pairs", "cases"] = "rows"
    row_format: str = "auto"
    columns: Columns | None = None


def _read_sources(run: Path) -> list[_Source]:
    try:
        config = json.loads(RunFiles(run).run.read_text(encoding="utf-8"))["config"]
        data, grpo = config["data"], config.get("grpo")
        kind: Literal["rows", "pairs"] = "pairs" if data.get("pairs") else "rows"
        named = [source for source in data["sources"] if source["path"]]
        sources = [
            _Source(str(source["path"]), kind, str(source.get("format", "auto")), source.get("columns"))
            for source in named
        ]
        cases = "" if grpo is None else str(grpo["cases"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{RunFiles(run).run}: does not name the run's training data ({type(error).__name__}). "
            "Copy the file from the run again, or move it away to evaluate without comparing."
        ) from None
    if cases.startswith((RECORDED, "synthetic:")):
        sources.append(_Source(cases.removeprefix(RECORDED)))
    elif cases and not cases.startswith(ENVIRONMENT):
        sources.append(_Source(cases, "cases"))
    return sources


def _read_held_out(run: Path) -> frozenset[str]:
    """Return the digests of the held-out rows that the run wrote as cases."""
    try:
        lines = (run / HELD_OUT_FILE).read_text(encoding="utf-8").splitlines()
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
        for row in scan_source(source.path, PAIRS_FORMAT, source.columns):
            if isinstance(pair := reader.read(row), Pair):
                yield from ((*pair.prompt.messages, *answer.messages) for answer in pair.answers)
    else:
        rows = read_source(source.path, source.row_format, columns=source.columns)
        conversations = (row for row in rows if isinstance(row, Conversation))
        yield from (row.messages for row in conversations if not held_out or row.digest() not in held_out)


def read_questions(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return what the user says in each turn, white space aside."""
    return tuple(" ".join(m.content.split()) for m in messages if m.role == "user" and m.content)


_MAX_WRITTEN = 200
_MAX_COMPARED_ROWS = 100_000  # comparing more takes minutes


def write_held_out_cases(config: DataConfig, prepared: PreparedSet, run: Path) -> None:
    """Write the first cases of a run's held-out conversations to its directory, to evaluate its exports with.

    Of small sets, cases whose questions a training row asks as well are left out. Without cases, nothing is written.
    """
    if config.pairs or not len(prepared.packs["validation"][0]):
        return
    with contextlib.suppress(DataError, OSError):  # the file is a convenience; the run is complete without it
        cases = find_held_out_cases(config, prepared, _MAX_WRITTEN)
        _write(cases, run / HELD_OUT_FILE)
        leaks = find_leaks(cases, run) if prepared.counts.rows <= _MAX_COMPARED_ROWS else None
        if leaks is not None and leaks.case_ids:
            _write([case for case in cases if case.id not in leaks.case_ids], run / HELD_OUT_FILE)


def _write(cases: Sequence[Case], path: Path) -> None:
    if cases:
        write_atomically(path, "".join(json.dumps(_to_row(case), ensure_ascii=False) + "\n" for case in cases))
    else:
        path.unlink()


def _to_row(case: Case) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": call.arguments} for call in case.expected]
    return {"id": case.id, "kind": case.category, **case.prompt.to_openai(), "expected_calls": calls}


def find_held_out_cases(config: DataConfig, prepared: PreparedSet, max_cases: int | None = None) -> list[Case]:
    """Make a case of each conversation with tools in the validation split.

    The case is the first turn of the assistant that calls a function, else its last turn. With ``max_cases``, each
    source gives an equal share, and is read no further than that.

    Raises:
        DataError: Nothing with tools is held out, or a source cannot be read.
    """
    flat, _ = prepared.packs["validation"]
    held_out = {int(digest) for digest in prepared.digests[flat]}
    quota = None if max_cases is None else math.ceil(max_cases / len(config.sources))
    cases = [
        case for source in config.sources for case in islice(_iter_cases(source, config.max_samples, held_out), quota)
    ][:max_cases]
    if not cases:
        raise DataError(
            "eval.cases=validation: no held-out conversation has tools and an answer. Specify a JSONL file of cases, "
            "hold out more with data.validation_share, or set eval.every=0."
        )
    return cases


def _iter_cases(source: SourceConfig, max_rows: int | None, held_out: set[int]) -> Iterator[Case]:
    """Yield the cases of a source; conversations are taken out of ``held_out``, so that repeated ones count once."""
    for row in islice(parse_source(source.path, source.format, source.columns), max_rows):
        if isinstance(row, Defect):
            continue
        digest = row.conversation.digest()
        if int(digest, 16) not in held_out:
            continue
        held_out.remove(int(digest, 16))
        if (case := _make_case(row.conversation, digest)) is not None:
            yield case


def _make_case(conversation: Conversation, name: str) -> Case | None:
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message.role == "assistant" and index > 0]
    if not answers or not conversation.tools:
        return None
    index = next((index for index in answers if messages[index].calls), answers[-1])
    expected = messages[index].calls
    prompt = replace(conversation, messages=messages[:index])
    return Case(id=name, category="call" if expected else "no_call", prompt=prompt, expected=expected)
