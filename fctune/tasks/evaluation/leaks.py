"""Find evaluation cases among the rows, pairs or cases that a model was trained on, as its run recorded them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from fctune.base.errors import ConfigError, DataError
from fctune.config.sections.rollouts import ENVIRONMENT, RECORDED
from fctune.data.conversation import Conversation, Message
from fctune.data.sources import read_source, scan_source
from fctune.data.sources.columns import Columns
from fctune.runs.directory import RunFiles
from fctune.tasks.evaluation.cases import AnyCase, Case
from fctune.tasks.evaluation.suites import load_suite

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
        if key := read_questions(_messages_of(case)):
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
        yield from (_messages_of(case) for case in load_suite(source.path, has_multi_turn=True).all_cases)
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


def _messages_of(case: AnyCase) -> Iterable[Message]:
    if isinstance(case, Case):
        return case.prompt.messages
    return [message for turn in case.turns for message in turn.messages]


def read_questions(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return what the user says in each turn, white space aside."""
    return tuple(" ".join(m.content.split()) for m in messages if m.role == "user" and m.content)
