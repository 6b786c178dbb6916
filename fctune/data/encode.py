"""Rows of the configured sources as tokens, in their order, on all cores where there are enough of them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fctune.config import DataConfig
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, describe_defects, read_source
from fctune.data.template import ChatTemplate, Encoded, Policy
from fctune.errors import DataError

# Starting worker processes takes some 3 s; below this many conversations one process is done sooner.
_MIN_PARALLEL = 10_000
# What loading a tokenizer imports, once for all workers.
_PRELOADED = (
    "fctune.data.template",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_template_utils",
)
_CHUNK = 256  # conversations handed to a worker at a time
_AHEAD = 4  # chunks in flight for each worker, which bounds memory

Fate = Literal["kept", "cut", "overlong", "unsupervised", "thinned", "defect"]


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


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A conversation as tokens (int32) with their loss weights (float32), and how often it appears an epoch."""

    digest: str
    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    repeats: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row."""

    fate: Fate
    row: EncodedRow | None = None
    defect: Defect | None = None


class RowEncoder:
    """Encodes conversations under a data config."""

    def __init__(self, config: DataConfig, model_dir: Path):
        self.config = config
        self.template = ChatTemplate(model_dir, Policy(config.train_on, config.call_weight, config.parallel_calls))

    def encode(self, conversation: Conversation, weight: float) -> Outcome:
        """The row's tokens or what kept it out; ``weight`` is its source's."""
        digest = conversation.digest()
        repeats = count_repeats(digest, weight)
        if not repeats:
            return Outcome("thinned")
        fate: Fate = "kept"
        try:
            encoded = self.template.encode(conversation)
            if len(encoded.tokens) > self.config.seq_len:
                if self.config.overlong == "fail":
                    raise DataError(
                        f"{len(encoded.tokens):,} tokens, over data.seq_len={self.config.seq_len}; raise it, or set "
                        "data.overlong to drop or cut"
                    )
                shorter = self._cut(conversation) if self.config.overlong == "cut" else None
                if shorter is None:
                    return Outcome("overlong")
                encoded, fate = shorter, "cut"
        except DataError as error:
            file, _, line = conversation.source.rpartition(":")
            number = int(line) if line.isdigit() else 0
            return Outcome("defect", defect=Defect(file, number, "messages", "not_renderable", str(error)))
        if not encoded.num_supervised:
            return Outcome("unsupervised")
        tokens = np.asarray(encoded.tokens, dtype=np.int32)
        return Outcome(fate, EncodedRow(digest, tokens, np.asarray(encoded.weights, dtype=np.float32), repeats))

    def _cut(self, conversation: Conversation) -> Encoded | None:
        """The longest beginning that fits and ends with an assistant's turn; None where none does."""
        messages = conversation.messages
        ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
        for end in reversed(ends[:-1]):
            shorter = self.template.encode(Conversation(messages[:end], conversation.tools, conversation.source))
            if len(shorter.tokens) <= self.config.seq_len:
                return shorter
        return None


def count_repeats(digest: str, weight: float) -> int:
    """Times a row appears an epoch: the whole part of the weight, and one more for the fraction's share of rows."""
    whole = int(weight)
    return whole + (int(digest[8:16], 16) < (weight - whole) * 2**32)


def encode_rows(
    config: DataConfig, model_dir: Path, counts: Counts, num_workers: int | None = None
) -> Iterator[EncodedRow]:
    """The kept rows of all sources in order; ``counts`` is kept up to date.

    Args:
        config: sources and policies.
        model_dir: tokenizer and template.
        counts: of the rows so far; changed in place.
        num_workers: processes that encode; None is one a core, and one in all for a small set.

    Raises:
        DataError: at the end, with all defects, where ``on_invalid`` is fail.
    """
    defects: list[Defect] = []
    items = _read_items(config)
    workers = len(os.sched_getaffinity(0)) if num_workers is None else num_workers
    first = list(itertools.islice(items, _MIN_PARALLEL)) if num_workers is None else []
    is_small = num_workers is None and len(first) < _MIN_PARALLEL
    items = itertools.chain(first, items)
    outcomes = (
        _encode_here(items, config, model_dir)
        if is_small or workers < 2
        else _encode_apart(items, config, model_dir, workers)
    )
    for outcome in outcomes:
        counts.rows += 1
        if outcome.defect is not None:
            defects.append(outcome.defect)
        counts.cut += outcome.fate == "cut"
        counts.overlong += outcome.fate == "overlong"
        counts.unsupervised += outcome.fate == "unsupervised"
        if outcome.row is not None:
            counts.conversations += 1
            counts.tokens += len(outcome.row.tokens)
            counts.supervised += int(np.count_nonzero(outcome.row.weights))
            yield outcome.row
    counts.invalid = len(defects)
    if defects and (config.on_invalid == "fail" or not counts.conversations):
        raise DataError(describe_defects(defects, counts.rows))


Item = tuple[Conversation | Defect, float]


def _read_items(config: DataConfig) -> Iterator[Item]:
    for source in config.sources:
        for item in read_source(source.path, source.format, config.max_samples):
            yield item, source.weight


def _encode_here(items: Iterable[Item], config: DataConfig, model_dir: Path) -> Iterator[Outcome]:
    encoder = RowEncoder(config, model_dir)
    for item, weight in items:
        yield Outcome("defect", defect=item) if isinstance(item, Defect) else encoder.encode(item, weight)


def _encode_apart(items: Iterator[Item], config: DataConfig, model_dir: Path, workers: int) -> Iterator[Outcome]:
    """As ``_encode_here``, by processes; the order is that of the items."""
    RowEncoder(config, model_dir)  # a template that is refused is refused here, in one sentence
    context = multiprocessing.get_context("forkserver")  # fork would copy the threads' locks of a process group
    context.set_forkserver_preload(list(_PRELOADED))
    pool = ProcessPoolExecutor(workers, context, _start_worker, (config, model_dir))
    pending: deque[Future[list[Outcome]]] = deque()
    try:
        while chunk := list(itertools.islice(items, _CHUNK)):
            pending.append(pool.submit(_encode_chunk, chunk))
            if len(pending) >= workers * _AHEAD:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: RowEncoder  # of a worker process


def _start_worker(config: DataConfig, model_dir: Path) -> None:
    global _encoder
    _encoder = RowEncoder(config, model_dir)


def _encode_chunk(chunk: list[Item]) -> list[Outcome]:
    return [
        Outcome("defect", defect=item) if isinstance(item, Defect) else _encoder.encode(item, weight)
        for item, weight in chunk
    ]
