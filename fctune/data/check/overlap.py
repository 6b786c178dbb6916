"""Overlap of held-out questions with training rows, by runs of words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from fctune.base.errors import DataError
from fctune.data.check.similarity import WordHasher
from fctune.data.conversation import Conversation
from fctune.data.sources import ParsedRow, parse_source
from fctune.data.sources.defects import RowError
from fctune.data.sources.files import open_rows
from fctune.data.sources.reader import list_files
from fctune.data.sources.row_json import RowJsonReader

Purpose = Literal["validation", "eval"]

RUN_WORDS = 8
MIN_WORDS = 6
FOUND_SHARE = 0.5
_NUM_SHOWN = 10
_QUESTION_KEYS = ("question", "query", "prompt", "input", "messages", "conversations", "turns")


@dataclass(slots=True)
class Overlap:
    """The number of items of a held-out set that were found in the rows, with examples."""

    against: str
    purpose: Purpose
    num_items: int
    num_found: int = 0
    num_rows: int = 0
    examples: list[tuple[str, str, float]] = field(default_factory=list)
    """(row, item, share of the item's runs that the row contains)."""


class OverlapIndex:
    """Index of the runs of ``RUN_WORDS`` words in a held-out set's user turns; a shorter turn is a single run.

    Turns under ``MIN_WORDS`` words are ignored: "Hello" and "What can you do?" occur in BFCL and everywhere else. An
    item counts as found if one row's user turns contain ``FOUND_SHARE`` of its runs. The method is that of GPT-3's
    contamination study (Brown et al. 2020, appendix C), with shorter runs since questions are short.

    Args:
        path: The held-out set.
        purpose: Whether its items are rows or the questions of a suite.
        hasher: Hashes the words.
        items: Name and user turns of each item, if they were read already.
    """

    def __init__(
        self, path: str, purpose: Purpose, hasher: WordHasher, items: Iterable[tuple[str, list[str]]] | None = None
    ) -> None:
        self.hasher = hasher
        self._names: list[str] = []
        runs, owners = [], []
        for name, texts in iter_items(path, purpose) if items is None else items:
            hashes = self._hash(texts)
            if len(hashes):
                runs.append(hashes)
                owners.append(np.full(len(hashes), len(self._names), np.int64))
                self._names.append(name)
        if not runs:
            raise DataError(f"{path}: no user turn of six words or more to compare with. Expected questions.")
        self._runs = np.concatenate(runs)
        owner = np.concatenate(owners)
        order = np.argsort(self._runs, kind="stable")
        self._runs, self._owners = self._runs[order], owner[order]
        self._sizes = np.bincount(owner, minlength=len(self._names))
        self._found = np.zeros(len(self._names), np.bool_)
        self.overlap = Overlap(path, purpose, len(self._names))

    def add(self, conversation: Conversation) -> bool:
        """Look up a training row; returns True if an item was found in it."""
        texts = [message.content for message in conversation.messages if message.role == "user" and message.content]
        hashes = self._hash(texts)
        left = np.searchsorted(self._runs, hashes, "left")
        right = np.searchsorted(self._runs, hashes, "right")
        hits = np.flatnonzero(right > left)
        if not len(hits):
            return False
        owners = np.concatenate([np.unique(self._owners[left[i] : right[i]]) for i in hits])
        items, counts = np.unique(owners, return_counts=True)
        shares = counts / self._sizes[items]
        found = shares >= FOUND_SHARE
        if found.any():
            overlap = self.overlap
            overlap.num_rows += 1
            for item, share in zip(items[found].tolist(), shares[found].tolist(), strict=True):
                if not self._found[item] and len(overlap.examples) < _NUM_SHOWN:
                    overlap.examples.append((conversation.source, self._names[item], float(share)))
                self._found[item] = True
            overlap.num_found = int(self._found.sum())
        return bool(found.any())

    def _hash(self, texts: list[str]) -> Any:
        """Return hashes of all n-grams, each once."""
        turns = (self.hasher.hash_words(text) for text in texts)
        runs = [self.hasher.hash_runs(words, RUN_WORDS) for words in turns if len(words) >= MIN_WORDS]
        return np.unique(np.concatenate(runs)) if runs else np.zeros(0, np.uint64)


def iter_items(path: str, purpose: Purpose) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and user turns of each item: rows of any known format, or questions of an eval suite."""
    if purpose == "validation":
        for row in parse_source(path):
            if isinstance(row, ParsedRow):
                messages = row.conversation.messages
                yield row.conversation.source, [m.content for m in messages if m.role == "user" and m.content]
        return
    if Path(path).suffix in (".yaml", ".yml"):
        yield from _iter_suite(path)
        return
    json = RowJsonReader()
    for file in list_files(path):
        for raw in open_rows(file):
            try:
                row = json.decode((raw.data or b"null").decode("utf-8", "replace"))
            except RowError:
                continue
            if isinstance(row, dict):
                name = f"{file}:{raw.line}" + (f" ({row['id']})" if isinstance(row.get("id"), str | int) else "")
                yield name, [text for key in _QUESTION_KEYS for text in _collect(row.get(key))]


def _iter_suite(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and user turns of each case of a suite in YAML."""
    try:
        suite = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read as a suite ({' '.join(str(error).split())}).") from None
    cases = suite.get("cases") if isinstance(suite, dict) else None
    for number, case in enumerate(cases if isinstance(cases, list) else (), start=1):
        if isinstance(case, dict):
            yield f"{path}: case {case.get('id', number)}", _collect(case.get("messages"))


def _collect(value: Any, depth: int = 6) -> list[str]:
    """Return the user's texts in a string, a message, or nested lists of messages (BFCL: turns of messages)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and depth:
        return [text for item in value if not isinstance(item, str) for text in _collect(item, depth - 1)]
    if isinstance(value, dict) and value.get("role", value.get("from")) in ("user", "human"):
        text = value.get("content", value.get("value"))
        return [text] if isinstance(text, str) else []
    return []
