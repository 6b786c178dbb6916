"""Rows to imitate and questions to keep out, from the user's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.data.check.overlap import iter_items
from fctune.data.secrets import SecretCounts, SecretScanner, list_counts, shows
from fctune.data.sources.reader import parse_source
from fctune.data.sources.row_builder import ParsedRow
from fctune.tasks.evaluation.held_out import read_questions
from fctune.tasks.suite_files import find_benchmark, load_suite

_MAX_EXAMPLES = 500


@dataclass(slots=True)
class Examples:
    """Requests to imitate, and what became of the rows without one.

    Attributes:
        requests: The requests.
        secrets: Counts of the secrets in requests that were left out because they have some.
        defects: Rows that cannot be read, by kind.
        left_out: Records that are left out, by kind.
        num_silent: Rows without a message of the user.
        has_more: The source has rows after those that are read.
    """

    requests: list[str] = field(default_factory=list)
    secrets: SecretCounts = field(default_factory=SecretCounts)
    defects: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    num_silent: int = 0
    has_more: bool = False

    def describe(self) -> str | None:
        """Return what was not used and why; None if everything was."""
        parts = []
        if self.secrets.rows:
            parts.append(f"left out {self.secrets.describe(is_redacted=False)}")
        for found, what in ((self.defects, "cannot be read"), (self.left_out, "left out")):
            if found:
                parts.append(f"{format_count(found.total(), 'row')} {what} ({list_counts(found, ())})")
        if self.num_silent:
            parts.append(f"{format_count(self.num_silent, 'row')} without a message of the user")
        if self.has_more:
            parts.append(f"only the first {_MAX_EXAMPLES} rows are read")
        return "; ".join(parts) or None


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
    rows = parse_source(path, left_out=found.left_out)
    for row in islice(rows, _MAX_EXAMPLES):
        if not isinstance(row, ParsedRow):
            found.defects[row.kind] += 1
            continue
        if (benchmark := row.benchmark or find_benchmark([row.raw])) is not None:
            raise ConfigError(
                f"--seed-rows {path}: belongs to a benchmark ({benchmark}), whose questions rows must not imitate. "
                "Use your own rows."
            )
        requests = read_questions(row.conversation.messages)
        found.num_silent += not requests
        for request in requests[:1]:
            known = scanner.find(row.conversation) | scanner.find_in_text(request)
            if kinds := [kind for secret, kind in known.items() if shows(request, {secret: kind})]:
                found.secrets.rows += 1
                for kind in kinds:
                    found.secrets.kinds[kind] = found.secrets.kinds.get(kind, 0) + 1
            else:
                found.requests.append(request)
    left_out = found.left_out.copy()
    found.has_more = next(rows, None) is not None
    found.left_out = left_out  # of what was read
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
