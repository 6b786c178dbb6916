"""Records of logs whose messages, up to their last answer, are the beginning of another record's.

An agent's run of n model calls is logged as n records, each with all messages before it. Trained as they are, early
turns count n times, and one conversation is on both sides of a split.

Logs of requests alone begin with one that has no answer yet, which is the beginning of those that have it.

Many clients don't send reasoning back, so that only the record that ends with a turn has its reasoning. Messages are
compared without it, and the kept record gets the reasoning of its turns from the others.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import compress, islice

import numpy as np
import xxhash

from fctune.config.sections.data import Fold
from fctune.data.call_ids import write_names_into_ids
from fctune.data.conversation import Conversation
from fctune.data.sources.row_builder import ParsedRow

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]

_MAX_PENDING = 2**20  # hashes between two removals of repeated ones


def hash_beginning(conversation: Conversation) -> int:
    """Return a hash of a conversation up to its first answer, which the records and branches of a run share."""
    first = _find_first_answer(conversation)
    index = len(conversation.messages) - 1 if first is None else first
    return next(islice(_iter_hashes(conversation, has_reasoning=False, has_weights=False), index, None))


def _find_first_answer(conversation: Conversation) -> int | None:
    """Return the index of the first answer to the user; a greeting before, which all runs share, is none."""
    roles = [message.role for message in conversation.messages]
    start = roles.index("user") if "user" in roles else 0
    return roles.index("assistant", start) if "assistant" in roles[start:] else None


def find_run(parsed: ParsedRow, fold: Fold = "auto") -> str | None:
    """Return the digest of the run that a row is of; None for rows that are neither a log's nor all folded."""
    if parsed.run is not None or parsed.mark is not None:
        return parsed.run
    return f"{hash_beginning(parsed.conversation):016x}" if parsed.is_record or fold == "always" else None


def with_run(parsed: ParsedRow, fold: Fold = "auto") -> ParsedRow:
    """Return a row with its run in the metadata, by which the written row stays with the run's others."""
    run = find_run(parsed, fold)
    if run is None or parsed.run is not None:
        return parsed
    metadata = parsed.raw.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return replace(parsed, raw={**parsed.raw, "metadata": {**metadata, "run": run}})


class FoldIndex:
    """Finds the records that others continue, from hashes of the beginnings of all.

    Holds 24 bytes for each distinct turn, and the compressed reasoning of turns that end a record.
    """

    def __init__(self) -> None:
        self._exact = _Hashes()
        self._records = _Hashes()  # without reasoning
        self._messages = _Hashes()  # without reasoning and tools
        self._reasoning: dict[int, bytes] = {}  # of the turn at the end of each beginning without reasoning
        self._ambiguous: set[int] = set()  # beginnings that had several reasonings

    def add(self, conversation: Conversation | None) -> None:
        """Add the next record; None for one that is never folded, as it cannot be read or is not a log's."""
        if conversation is None:
            for hashes in (self._exact, self._records, self._messages):
                hashes.add(0, ())
            return
        tools = _hash(",".join(tool.to_json() for tool in conversation.tools), 0)
        # A turn that is context in one record is trained in the other, so that neither replaces the other.
        bare = list(_iter_hashes(conversation, has_reasoning=False, has_weights=True))
        exact = list(_iter_hashes(conversation, has_reasoning=True, has_weights=True))
        # What follows the last answer, as in a session that was interrupted, is not trained.
        answers = [message.role == "assistant" for message in conversation.messages]
        while any(answers) and not answers[-1]:
            del answers[-1], bare[-1], exact[-1]
        last = conversation.messages[len(answers) - 1]
        if first := _find_first_answer(conversation):
            answers[first - 1] = True  # the end of the first request
        answers[-1] = False
        for hashes, values, key in (
            (self._exact, exact, tools),
            (self._records, bare, tools),
            (self._messages, bare, 0),
        ):
            hashes.add(values[-1] ^ key or 1, [value ^ key for value in compress(values, answers)])
        if (reasoning := last.reasoning) and last.role == "assistant":
            self._add_reasoning(bare[-1] ^ tools or 1, zlib.compress(reasoning.encode("utf-8", "surrogatepass"), 1))

    def _add_reasoning(self, beginning: int, reasoning: bytes) -> None:
        if self._reasoning.setdefault(beginning, reasoning) != reasoning:
            self._ambiguous.add(beginning)

    def find_folded(self) -> tuple[Mask, Mask]:
        """Return masks ``[records]`` of those that begin another kept one, and of those that only equal a later one.

        Records are compared up to their last answer.
        """
        ambiguous = np.fromiter(self._ambiguous, np.uint64, len(self._ambiguous))
        is_plain = ~np.isin(self._records.get_records(), ambiguous)
        begins: Mask = self._exact.find_continued() | (self._records.find_continued() & is_plain)
        equals: Mask = self._exact.find_repeated() | (self._records.find_repeated() & is_plain)
        return begins, equals & ~begins

    def find_changed(self) -> Mask:
        """Return a mask ``[records]`` of those whose messages begin those of another record with other tools only."""
        changed: Mask = self._messages.find_continued() & ~self._records.find_continued()
        return changed

    @property
    def has_reasoning(self) -> bool:
        """True if a record ends with a turn that has reasoning."""
        return bool(self._reasoning)

    def find_reasoning(self, conversation: Conversation) -> dict[int, str]:
        """Return the reasoning that turns of the record lack and other records have, by the index of its message."""
        tools = _hash(",".join(tool.to_json() for tool in conversation.tools), 0)
        found = {}
        hashes = _iter_hashes(conversation, has_reasoning=False, has_weights=True)
        for i, (message, value) in enumerate(zip(conversation.messages, hashes, strict=True)):
            beginning = value ^ tools or 1
            if message.role == "assistant" and not message.reasoning and beginning not in self._ambiguous:
                reasoning = self._reasoning.get(beginning)
                if reasoning is not None:
                    found[i] = zlib.decompress(reasoning).decode("utf-8", "surrogatepass")
        return found


class BeginningIndex:
    """Finds conversations that another one continues, as records of a log are if they are not folded."""

    def __init__(self) -> None:
        self._hashes = _Hashes()

    def add(self, conversation: Conversation) -> None:
        """Add the next conversation."""
        tools = _hash(",".join(tool.to_json() for tool in conversation.tools), 0)
        hashes = _iter_hashes(conversation, has_reasoning=False, has_weights=True)
        values = [
            value ^ tools or 1
            for message, value in zip(conversation.messages, hashes, strict=True)
            if message.role == "assistant"
        ]
        self._hashes.add(values[-1] if values else 0, values[:-1])

    def find(self) -> list[int]:
        """Return the numbers of those conversations, from 0."""
        return [int(number) for number in np.flatnonzero(self._hashes.find_continued())]


class _Hashes:
    """Hashes of records, and of the beginnings of all records, each once."""

    def __init__(self) -> None:
        self._records = array("Q")  # 0 for one without a conversation
        self._pending = array("Q")
        self._beginnings = np.zeros(0, np.uint64)

    def add(self, record: int, beginnings: Iterable[int]) -> None:
        self._records.append(record)
        self._pending.extend(beginnings)
        if len(self._pending) >= _MAX_PENDING:
            self._compact()

    def _compact(self) -> None:
        pending = np.frombuffer(self._pending, np.uint64)
        self._beginnings = np.unique(np.concatenate([self._beginnings, pending]))
        self._pending = array("Q")

    def get_records(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.frombuffer(self._records, np.uint64)

    def find_continued(self) -> Mask:
        """Return a mask ``[records]`` of those that are the beginning of another."""
        self._compact()
        records = self.get_records()
        continued: Mask = np.isin(records, self._beginnings) & (records != 0)
        return continued

    def find_repeated(self) -> Mask:
        """Return a mask ``[records]`` of those that equal a later one."""
        records = self.get_records()
        _, last = np.unique(records[::-1], return_index=True)
        is_last = np.zeros(len(records), np.bool_)
        is_last[len(records) - 1 - last] = True
        repeated: Mask = ~is_last & (records != 0)
        return repeated


def _iter_hashes(conversation: Conversation, *, has_reasoning: bool, has_weights: bool) -> Iterator[int]:
    """Yield a hash of the conversation's beginning up to each message."""
    value = _hash(_COMPACT.encode(conversation.template_args), 0)
    # A call that is asked for twice has two ids, and a client may add the names of results.
    for message in write_names_into_ids(conversation.messages):
        if message.role == "tool" and message.name is not None:
            message = replace(message, name=None)
        if message.reasoning and not has_reasoning:
            message = replace(message, reasoning=None)
        if message.calls and message.content == "":  # responses have null where clients send an empty text
            message = replace(message, content=None)
        weight = f"{message.weight:g}" if has_weights and message.role == "assistant" else ""
        value = _hash(_COMPACT.encode(message.to_openai()) + weight, value)
        yield value


def _hash(text: str, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed=seed)
