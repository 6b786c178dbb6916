"""Rows of the configured sources as tokens, in their order, on all cores where there are enough of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fctune.config.schema import DataConfig
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, RowReader, UnreadRow, describe_defects, scan_source
from fctune.data.supervision import ConversationEncoder, Encoded, Policy
from fctune.errors import DataError

_CHUNK = 64  # rows handed to a process at a time
_AHEAD = 3  # chunks in flight for each process, which bounds memory
# Other processes are ready after about a second: with fewer chunks than the first one process is done as soon, and the
# second is what this one encodes until then.
_MIN_PARALLEL, _BEFORE_SHARING = 64, 20
_MAX_PROCESSES = 16  # each holds what the launching script imports; more than these outrun the one that writes
# What decoding a row imports, once for all processes.
_PRELOADED = ("fctune.data.encoding", "transformers.utils.chat_template_utils")


@dataclass(slots=True)
class Counts:
    """What became of the rows."""

    rows: int = 0
    conversations: int = 0  # kept, both splits
    invalid: int = 0  # defects, skipped
    overlong: int = 0  # over seq_len, dropped
    cut: int = 0  # over seq_len, cut at a turn's end
    unsupervised: int = 0  # nothing to learn under train_on and weights, dropped
    tokens: int = 0
    supervised: int = 0

    def add(self, other: Counts) -> None:
        """Count another part's rows too."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class Chunk(NamedTuple):
    """Consecutive rows of one source, which is given by its place in the config."""

    source: int
    rows: list[UnreadRow]


@dataclass(slots=True)
class EncodedChunk:
    """What became of a chunk's rows; of those kept, n conversations with t tokens in all, in order.

    ``tokens`` [t] int32 and ``weights`` [t] float32, the loss weight of each, are flat; ``lengths`` [n], ``digests``
    [n] uint64 and ``repeats`` [n], how often it appears an epoch, are by conversation.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]
    repeats: NDArray[np.int64]
    counts: Counts
    defects: list[Defect]


@dataclass(slots=True)
class _Kept:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    weights: array[float] = field(default_factory=lambda: array("f"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    repeats: array[int] = field(default_factory=lambda: array("q"))


class ChunkEncoder:
    """Reads and encodes rows under a data config; sent to another process, it loads nothing there."""

    def __init__(self, config: DataConfig, encoder: ConversationEncoder):
        self.config = config
        self.encoder = encoder
        self._readers = [RowReader(source.format) for source in config.sources]

    def __reduce__(self) -> tuple[type[ChunkEncoder], tuple[DataConfig, ConversationEncoder]]:
        return ChunkEncoder, (self.config, self.encoder)  # a reader is of one process

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """The rows' tokens, and what kept rows out."""
        reader, source_weight = self._readers[chunk.source], self.config.sources[chunk.source].weight
        kept, counts, defects = _Kept(), Counts(rows=len(chunk.rows)), []
        for row in chunk.rows:
            parsed = reader.read(row)
            if isinstance(parsed, Defect):
                defects.append(parsed)
                continue
            digest = parsed.conversation.digest()
            repeats = count_repeats(digest, source_weight)
            if not repeats:
                continue
            try:
                encoded = self._encode_within(parsed.conversation, counts)
            except DataError as error:
                defects.append(Defect(row.file, row.line, "messages", "not_renderable", str(error)))
                continue
            if encoded is None:
                continue
            if not any(encoded.weights):
                counts.unsupervised += 1
                continue
            kept.tokens.extend(encoded.tokens)
            kept.weights.extend(encoded.weights)
            kept.lengths.append(len(encoded.tokens))
            kept.digests.append(int(digest, 16))
            kept.repeats.append(repeats)
        weights = np.frombuffer(kept.weights, np.float32)
        counts.conversations, counts.tokens = len(kept.lengths), len(weights)
        counts.supervised, counts.invalid = int(np.count_nonzero(weights)), len(defects)
        return EncodedChunk(
            np.frombuffer(kept.tokens, np.int32),
            weights,
            np.frombuffer(kept.lengths, np.int64),
            np.frombuffer(kept.digests, np.uint64),
            np.frombuffer(kept.repeats, np.int64),
            counts,
            defects,
        )

    def _encode_within(self, conversation: Conversation, counts: Counts) -> Encoded | None:
        """The conversation within seq_len tokens; None where it is dropped."""
        encoded = self.encoder.encode(conversation)
        if len(encoded.tokens) <= self.config.seq_len:
            return encoded
        if self.config.overlong == "fail":
            raise DataError(
                f"{len(encoded.tokens):,} tokens, over data.seq_len={self.config.seq_len}; raise it, or set "
                "data.overlong to drop or cut"
            )
        shorter = self._cut(conversation) if self.config.overlong == "cut" else None
        counts.cut += shorter is not None
        counts.overlong += shorter is None
        return shorter

    def _cut(self, conversation: Conversation) -> Encoded | None:
        """The longest beginning that fits and ends with an assistant's turn; None where none does."""
        messages = conversation.messages
        ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
        for end in reversed(ends[:-1]):
            shorter = self.encoder.encode(Conversation(messages[:end], conversation.tools, conversation.source))
            if len(shorter.tokens) <= self.config.seq_len:
                return shorter
        return None


def count_repeats(digest: str, weight: float) -> int:
    """Times a row appears an epoch: the whole part of the weight, and one more for the fraction's share of rows."""
    whole = int(weight)
    return whole + (int(digest[8:16], 16) < (weight - whole) * 2**32)


def encode_sources(
    config: DataConfig, model_dir: Path, counts: Counts, num_processes: int | None = None
) -> Iterator[EncodedChunk]:
    """The kept rows of all sources in order, some at a time; ``counts`` is kept up to date.

    Args:
        config: sources and policies.
        model_dir: tokenizer and template.
        counts: of the rows so far; changed in place.
        num_processes: how many encode, this one included; None is one a core up to 16, and one in all for a small
            set.

    Raises:
        DataError: at the end, with all defects, where ``on_invalid`` is fail.
    """
    chunks = _scan_chunks(config)
    if num_processes is None:
        first = list(itertools.islice(chunks, _MIN_PARALLEL))
        cores = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        num_processes = cores if len(first) == _MIN_PARALLEL else 1
        chunks = itertools.chain(first, chunks)
    if num_processes > 1:  # it imports while we load and begin
        forkserver.set_forkserver_preload(list(_PRELOADED))
        forkserver.ensure_running()
    template = ChatTemplate(model_dir, Policy(config.train_on, config.call_weight, config.parallel_calls))
    encoder = ChunkEncoder(config, template.encoder)
    defects: list[Defect] = []
    for part in map(encoder.encode, chunks) if num_processes < 2 else _share(encoder, chunks, num_processes - 1):
        counts.add(part.counts)
        defects += part.defects
        yield part
    if defects and (config.on_invalid == "fail" or not counts.conversations):
        raise DataError(describe_defects(defects, counts.rows))


def _scan_chunks(config: DataConfig) -> Iterator[Chunk]:
    for place, source in enumerate(config.sources):
        rows = itertools.islice(scan_source(source.path, source.format), config.max_samples)
        while some := list(itertools.islice(rows, _CHUNK)):
            yield Chunk(place, some)


def _share(encoder: ChunkEncoder, chunks: Iterator[Chunk], num_others: int) -> Iterator[EncodedChunk]:
    """As ``map(encoder.encode, chunks)``, with other processes; this one encodes what they have no room for."""
    # Not fork, which would copy the locks of a process group's threads.
    pool = ProcessPoolExecutor(num_others, multiprocessing.get_context("forkserver"), _receive, (encoder,))
    parts: deque[Future[EncodedChunk] | EncodedChunk] = deque()
    try:
        yield from map(encoder.encode, itertools.islice(chunks, _BEFORE_SHARING))
        for chunk in chunks:
            waiting = sum(isinstance(part, Future) and not part.done() for part in parts)
            parts.append(pool.submit(_encode, chunk) if waiting < num_others * _AHEAD else encoder.encode(chunk))
            while parts and (not isinstance(parts[0], Future) or parts[0].done()):
                yield _get(parts.popleft())
        while parts:
            yield _get(parts.popleft())
    except BrokenProcessPool:
        raise DataError(
            "a process that encodes rows was killed: most often the memory is full. Free some, or prepare the set "
            "elsewhere with `fctune data prepare`."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _get(part: Future[EncodedChunk] | EncodedChunk) -> EncodedChunk:
    return part.result() if isinstance(part, Future) else part


_received: ChunkEncoder  # of another process


def _receive(encoder: ChunkEncoder) -> None:
    global _received
    _received = encoder


def _encode(chunk: Chunk) -> EncodedChunk:
    return _received.encode(chunk)
