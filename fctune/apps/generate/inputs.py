"""Rows to imitate and questions to keep out, from the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.data.check.overlap import iter_items
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.tasks.evaluation.held_out import read_questions
from fctune.tasks.suite_files import find_benchmark, load_suite

_MAX_EXAMPLES = 500


def read_examples(path: str | None) -> list[str]:
    """Return the first requests of a source's rows, to imitate; none without a source.

    Raises:
        ConfigError: The rows belong to a benchmark, or none has a request.
        DataError: The source cannot be read.
    """
    if path is None:
        return []
    found: list[str] = []
    for row in islice(parse_source(path), _MAX_EXAMPLES):
        if not isinstance(row, ParsedRow):
            continue
        if (benchmark := row.benchmark or find_benchmark([row.raw])) is not None:
            raise ConfigError(
                f"--seed-rows {path}: belongs to a benchmark ({benchmark}), whose questions rows must not imitate. "
                "Use your own rows."
            )
        found += read_questions(row.conversation.messages)[:1]
    if not found:
        raise ConfigError(
            f"--seed-rows {path}: no row with a message of the user. `fctune data check {path}` lists why."
        )
    return found


def read_held_out(paths: Sequence[str]) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the name and user turns of each case or row of files, by file.

    Args:
        paths: Suites in YAML, or files of cases, questions or rows.

    Raises:
        ConfigError: A suite is missing or malformed.
        DataError: A file cannot be read, or has no questions.
    """
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for path in paths:
        if Path(path).suffix in (".yaml", ".yml"):
            cases = load_suite(path, has_multi_turn=True).all_cases
            items = [(case.id, list(read_questions(case.questions))) for case in cases]
        else:
            items = list(iter_items(path, "eval"))
        found[path] = [(name, texts) for name, texts in items if texts]
        if not found[path]:
            raise DataError(f"--held-out {path}: no questions in it. Expected a suite, cases or rows.")
    return found
