"""Rows to imitate and questions to keep out, from the user's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.data.check.overlap import iter_items
from fctune.data.secrets import SecretCounts, SecretScanner, shows
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.tasks.evaluation.held_out import read_questions
from fctune.tasks.suite_files import find_benchmark, load_suite

_MAX_EXAMPLES = 500


@dataclass(frozen=True, slots=True)
class Examples:
    """Requests to imitate, and counts of the secrets in those that were left out because they have some."""

    requests: list[str] = field(default_factory=list)
    secrets: SecretCounts = field(default_factory=SecretCounts)


def read_examples(path: str | None) -> Examples:
    """Return the first requests of a source's rows, to imitate; none without a source.

    Requests with a secret, or with a piece of one that another part of the row shows to be one, are left out: the
    teacher may be on a server of others.

    Raises:
        ConfigError: The rows belong to a benchmark, or none has a request without a secret.
        DataError: The source cannot be read.
    """
    found, scanner = Examples(), SecretScanner()
    if path is None:
        return found
    for row in islice(parse_source(path), _MAX_EXAMPLES):
        if not isinstance(row, ParsedRow):
            continue
        if (benchmark := row.benchmark or find_benchmark([row.raw])) is not None:
            raise ConfigError(
                f"--seed-rows {path}: belongs to a benchmark ({benchmark}), whose questions rows must not imitate. "
                "Use your own rows."
            )
        for request in read_questions(row.conversation.messages)[:1]:
            known = scanner.find(row.conversation) | scanner.find_in_text(request)
            if kinds := [kind for secret, kind in known.items() if shows(request, {secret: kind})]:
                found.secrets.rows += 1
                for kind in kinds:
                    found.secrets.kinds[kind] = found.secrets.kinds.get(kind, 0) + 1
            else:
                found.requests.append(request)
    if not found.requests and found.secrets.rows:
        counts = found.secrets.describe(is_redacted=False)
        raise ConfigError(
            f"--seed-rows {path}: every request has a secret ({counts}). `fctune data convert {path} OUT --redact` "
            "replaces them."
        )
    if not found.requests:
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
