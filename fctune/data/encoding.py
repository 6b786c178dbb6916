"""Parallel encoding of the configured sources' rows to tokens, in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.config.sections.data import DataConfig
from fctune.data.bounded_process import BoundedProcess, LimitError, ProcessDiedError, prepare_processes
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.conversation import Conversation
from fctune.data.conversation_encoder import (
    ConversationEncoder,
    Encoded,
    TemplateLimitError,
    get_defect_kind,
    make_limit_error,
)
from fctune.data.pairs import PAIRS_FORMAT, Pair, PairError, PairReader, encode_pair
from fctune.data.sources import (
    OVERLONG,
    Defect,
    RowReader,
    UnreadRow,
    describe_defects,
    has_reasoning_rows,
    scan_source,
)
from fctune.data.supervision import SupervisionConfig

_CHUNK_ROWS = 64  # rows sent to a process at a time
_MAX_PENDING = 3  # chunks in flight per process, which bounds memory
_MIN_PARALLEL = 64  # chunks; fewer are encoded by one process in the seconds that others take to be ready
_MAX_PROCESSES = 16  # more of them outpace the writing process
_MAX_OVER_LIMIT = 3  # rows whose rendering takes too much; each may take seconds
_ENCODER_FILE = "encoder.pickle"


@dataclass(slots=True)
class Counts:
    """Counts of the rows that were kept, cut, dropped and skipped."""

    rows: int = 0
    conversations: int = 0  # kept, both splits
    samples: int = 0  # of the kept conversations; more than one where the chat template rewrites earlier turns
    invalid: int = 0  # defects, skipped
    overlong: int = 0  # over seq_len, dropped
    cut: int = 0  # over seq_len, cut after a turn
    reasoning: int = 0  # kept and with reasoning that is not dropped
    unsupervised: int = 0  # without supervised tokens under train_on and weights, dropped
    benchmark: int = 0  # kept and marked as questions of a public benchmark
    tokens: int = 0
    supervised: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of other rows in place."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


class _OverlongError(DataError):
    """A conversation is longer than ``seq_len``, and ``overlong`` is fail."""


class Chunk(NamedTuple):
    """Consecutive rows of one source; ``source`` is its index in the config's sources.

    ``refused`` are the rows, by index, that exceed the limits of a process, with the reason.
    """

    source: int
    rows: list[UnreadRow]
    refused: Mapping[int, str] = {}


@dataclass(slots=True)
class SourceRows:
    """Rows of a source, and those that were skipped as invalid: the number of each kind, with the first as an example.

    A source's weight may leave readable rows out, which are not encoded; ``sampled`` are the others.
    """

    path: str
    rows: int = 0
    sampled: int = 0
    unreadable: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def invalid(self) -> int:
        """Number of invalid rows."""
        return sum(self.kinds.values())

    @property
    def invalid_share(self) -> float:
        """Share of invalid rows; that of rows that cannot be encoded is of the sampled rows."""
        usable = 1.0
        for failed, tried in ((self.unreadable, self.rows), (self.invalid - self.unreadable, self.sampled)):
            usable *= 1 - failed / max(1, tried)
        return 1 - usable

    def add(self, chunk: EncodedChunk) -> None:
        """Add the rows of a chunk in place."""
        self.rows += chunk.counts.rows
        self.sampled += chunk.num_sampled
        self.unreadable += chunk.num_unreadable
        for defect in chunk.defects:
            self.kinds[defect.kind] = self.kinds.get(defect.kind, 0) + 1
            self.examples.setdefault(defect.kind, str(defect))

    def describe_kinds(self) -> list[str]:
        """Return a line for each kind of invalid row, the most frequent first, with its example."""
        ordered = sorted(self.kinds.items(), key=lambda item: -item[1])
        return [f"{count:,} {kind}, such as {self.examples[kind]}" for kind, count in ordered]


@dataclass(slots=True)
class EncodedChunk:
    """The samples of the rows of a chunk that were kept, in order, and the defects of those that were not.

    Flat over t tokens: ``tokens`` ``[t]`` int32 and their loss ``weights`` ``[t]`` float32. By sample: ``lengths``
    ``[n]`` int64, the ``digests`` ``[n]`` uint64 of its conversation, and ``repeats`` ``[n]`` int64, its number per
    epoch.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]
    repeats: NDArray[np.int64]
    counts: Counts
    defects: list[Defect]
    source: int = 0  # index in the config's sources
    num_sampled: int = 0  # readable rows that the source's weight does not leave out
    num_unreadable: int = 0
    over_limit: tuple[Defect, ...] = ()  # the defects of rows whose rendering takes too much


@dataclass(slots=True)
class _Buffers:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    weights: array[float] = field(default_factory=lambda: array("d"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    repeats: array[int] = field(default_factory=lambda: array("q"))


class ChunkEncoder:
    """Reads and encodes rows under a data config; can be sent to another process, which then loads no tokenizer."""

    def __init__(self, config: DataConfig, encoder: ConversationEncoder):
        self.config = config
        self.encoder = encoder
        self._readers: list[RowReader | PairReader] = [
            PairReader(source.columns) if config.pairs else RowReader(source.format, source.columns)
            for source in config.sources
        ]
        self._keeps_reasoning = encoder.supervision.reasoning != "drop"

    def __reduce__(self) -> tuple[type[ChunkEncoder], tuple[DataConfig, ConversationEncoder]]:
        return ChunkEncoder, (self.config, self.encoder)  # readers stay in their process

    def encode(self, chunk: Chunk, on_row: Callable[[int], object] | None = None) -> EncodedChunk:
        """Encode the rows of a chunk.

        Args:
            chunk: Rows.
            on_row: Called with the index of each row before it is encoded.
        """
        reader, source_weight = self._readers[chunk.source], self.config.sources[chunk.source].weight
        buffers, counts, defects = _Buffers(), Counts(rows=len(chunk.rows)), []
        num_sampled, num_unreadable, over_limit = 0, 0, []
        for index, row in enumerate(chunk.rows):
            parsed = reader.read(row)
            if isinstance(parsed, Defect):
                defects.append(parsed)
                num_unreadable += 1
                continue
            item = parsed if isinstance(parsed, Pair) else parsed.conversation
            digest = item.digest()
            repeats = count_repeats(digest, source_weight)
            if not repeats:
                continue
            num_sampled += 1
            if on_row is not None:
                on_row(index)
            try:
                if index in chunk.refused:
                    raise make_limit_error(chunk.refused[index])
                samples = self._encode_within(item, counts)
            except PairError as error:
                defects.append(Defect(row.file, row.line, "", error.kind, str(error)))
                continue
            except DataError as error:
                kind = OVERLONG if isinstance(error, _OverlongError) else get_defect_kind(error)
                defects.append(Defect(row.file, row.line, "messages", kind, str(error)))
                over_limit += defects[-1:] if isinstance(error, TemplateLimitError) else []
                continue
            if samples is None:
                continue
            samples = [sample for sample in samples if sample.is_supervised]
            if not samples:
                counts.unsupervised += 1
                continue
            counts.conversations += 1
            counts.reasoning += self._keeps_reasoning and item.has_reasoning
            counts.benchmark += parsed.benchmark is not None
            for sample in samples:
                buffers.tokens.extend(sample.token_array)
                buffers.weights.extend(sample.weight_array)
                buffers.lengths.append(len(sample.token_array))
                buffers.digests.append(int(digest, 16))
                buffers.repeats.append(repeats)
        weights = np.frombuffer(buffers.weights, np.float64).astype(np.float32)
        counts.samples, counts.tokens = len(buffers.lengths), len(weights)
        counts.supervised, counts.invalid = int(np.count_nonzero(weights)), len(defects)
        return EncodedChunk(
            np.frombuffer(buffers.tokens, np.int32),
            weights,
            np.frombuffer(buffers.lengths, np.int64),
            np.frombuffer(buffers.digests, np.uint64),
            np.frombuffer(buffers.repeats, np.int64),
            counts,
            defects,
            chunk.source,
            num_sampled,
            num_unreadable,
            tuple(over_limit),
        )

    def _encode_within(self, item: Conversation | Pair, counts: Counts) -> list[Encoded] | None:
        """Encode a conversation or a pair to samples within seq_len tokens; None if it is dropped."""
        is_pair = isinstance(item, Pair)
        samples = encode_pair(item, self.encoder) if isinstance(item, Pair) else self.encoder.encode(item)
        lengths = [len(sample.token_array) for sample in samples]
        longest = sum(lengths) if is_pair else max(lengths)
        if longest <= self.config.seq_len:
            return samples
        if self.config.overlong == "fail":
            raise _OverlongError(
                f"{format_count(longest, 'token')}{' of both answers' if is_pair else ''}, over "
                f"data.seq_len={self.config.seq_len}; raise it, or set data.overlong to "
                f"{'drop' if is_pair else 'drop or cut'}"
            )
        is_cut = self.config.overlong == "cut" and not isinstance(item, Pair)
        shorter = self._cut(item) if is_cut else None  # type: ignore[arg-type]
        counts.cut += shorter is not None
        counts.overlong += shorter is None
        return shorter

    def _cut(self, conversation: Conversation) -> list[Encoded] | None:
        """Encode the longest beginning that fits and ends with an assistant turn; None if there is none."""
        messages = conversation.messages
        ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
        for end in reversed(ends[:-1]):
            shorter = self.encoder.encode(replace(conversation, messages=messages[:end]))
            if all(len(sample.token_array) <= self.config.seq_len for sample in shorter):
                return shorter
        return None


def count_repeats(digest: str, weight: float) -> int:
    """Return how often a row occurs per epoch: ``floor(weight)``, and once more for the fraction of rows, by hash."""
    integer = int(weight)
    return integer + (int(digest[8:16], 16) < (weight - integer) * 2**32)


def encode_sources(
    config: DataConfig,
    model_dir: Path,
    counts: Counts,
    num_processes: int | None = None,
    template_args: dict[str, Any] | None = None,
    chat_template: ChosenTemplate | None = None,
) -> Iterator[EncodedChunk]:
    """Yield the kept rows of all sources in order, a chunk at a time.

    Args:
        config: Data config with the sources.
        model_dir: Directory with the tokenizer and chat template.
        counts: Counts of the rows so far; updated in place.
        num_processes: Number of encoding processes, this one included. None is one per core, at most 16, and a single
            one for a small set.
        template_args: Switches of the chat template, ``model.template_args``.
        chat_template: Template in place of the model's own, if any.

    Raises:
        DataError: Rows are invalid and ``on_invalid`` is fail, conversations are too long and ``overlong`` is fail, or
            no row is left. Raised at the end, with all defects. Raised at once if several rows exceed the limits on
            rendering (``fctune.data.bounded_process``).
    """
    with _exempt_from_collection():
        yield from _encode_sources(config, model_dir, counts, num_processes, template_args, chat_template)


def _encode_sources(
    config: DataConfig,
    model_dir: Path,
    counts: Counts,
    num_processes: int | None,
    template_args: dict[str, Any] | None,
    chat_template: ChosenTemplate | None,
) -> Iterator[EncodedChunk]:
    chunks = _scan_chunks(config)
    if num_processes is None:
        first = list(itertools.islice(chunks, _MIN_PARALLEL))
        cores = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)
        num_processes = cores if len(first) == _MIN_PARALLEL else 1
        chunks = itertools.chain(first, chunks)
    if num_processes > 1:
        prepare_processes(__name__)
    loaded = ChatTemplate(model_dir, make_supervision(config), template_args, chat_template)
    loaded.resolve_thinking(lambda: _has_reasoning(config))
    encoder = ChunkEncoder(config, loaded.encoder)
    defects: list[Defect] = []
    over_limit: list[Defect] = []
    encodes_here = not loaded.encoder.template.is_remote
    num_workers = num_processes - encodes_here
    for part in (
        _encode_parallel(encoder, chunks, num_workers, encodes_here) if num_workers else map(encoder.encode, chunks)
    ):
        counts.add(part.counts)
        defects += part.defects
        over_limit += part.over_limit
        if len(over_limit) >= _MAX_OVER_LIMIT:
            raise DataError(
                f"{model_dir}: stopped after {len(over_limit)} rows, such as {over_limit[0]}. Shorten or remove these "
                "rows, or use another template with model.chat_template."
            )
        yield part
    skips = config.on_invalid == "skip"
    if skips and counts.conversations:
        defects = [defect for defect in defects if defect.kind == OVERLONG]
    if defects:
        raise DataError(describe_defects(defects, counts.rows, "" if skips else "set data.on_invalid=skip"))


@contextlib.contextmanager
def _exempt_from_collection() -> Iterator[None]:
    """Exempt existing objects from garbage collection in this context: with torch imported, a pass takes 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_supervision(config: DataConfig) -> SupervisionConfig:
    """Return the keys of the data config that select the supervised tokens."""
    return SupervisionConfig(**{key.name: getattr(config, key.name) for key in fields(SupervisionConfig)})


def _has_reasoning(config: DataConfig) -> bool:
    if not config.pairs:
        return any(
            has_reasoning_rows([(source.path, source.format)], config.max_samples, source.columns)
            for source in config.sources
        )
    readers = [PairReader(source.columns) for source in config.sources]
    pairs = (readers[chunk.source].read(row) for chunk in _scan_chunks(config) for row in chunk.rows)
    return any(isinstance(pair, Pair) and pair.has_reasoning for pair in pairs)


def _scan_chunks(config: DataConfig) -> Iterator[Chunk]:
    for index, source in enumerate(config.sources):
        row_format = PAIRS_FORMAT if config.pairs else source.format
        rows = itertools.islice(scan_source(source.path, row_format, source.columns), config.max_samples)
        while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
            yield Chunk(index, chunk)


def _encode_parallel(
    encoder: ChunkEncoder, chunks: Iterator[Chunk], num_workers: int, encodes_here: bool
) -> Iterator[EncodedChunk]:
    """Like ``map(encoder.encode, chunks)`` with other processes; this one may encode chunks while they are all busy."""
    # The encoder holds the tokenizer, of up to 35 MB, which the processes read side by side from a file.
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fctune-encoder-")))
        file = folder / _ENCODER_FILE
        try:
            file.write_bytes(pickle.dumps(encoder, pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise DataError(
                f"{file}: cannot be written ({error.strerror}). Free some space there, or set TMPDIR to another "
                "directory."
            ) from None
        workers = [_Worker(folder, number) for number in range(num_workers)]
        stack.callback(lambda: [worker.process.close() for worker in workers])
        done: dict[int, EncodedChunk] = {}
        num_yielded = num_chunks = 0
        for number, chunk in enumerate(chunks):
            num_chunks += 1
            free = min(workers, key=lambda worker: len(worker.pending))
            if encodes_here and len(free.pending) == _MAX_PENDING:
                done[number] = encoder.encode(chunk)
            else:
                while len(free.pending) == _MAX_PENDING:
                    _collect(workers, done, None)
                    free = min(workers, key=lambda worker: len(worker.pending))
                free.submit(number, chunk)
            _collect(workers, done, 0)
            while num_yielded in done:
                yield done.pop(num_yielded)
                num_yielded += 1
        while num_yielded < num_chunks:
            while num_yielded not in done:
                _collect(workers, done, None)
            yield done.pop(num_yielded)
            num_yielded += 1


class _Worker:
    """A bounded process that encodes chunks, and its successors if it is ended in a row that exceeds the limits.

    Args:
        folder: Folder with the encoder's file. The process records there which row it is at.
        number: Number of the worker.
    """

    def __init__(self, folder: Path, number: int):
        self._folder, self._progress = folder, folder / f"row-{number}"
        self.pending: dict[int, Chunk] = {}  # by number, in the order of submission
        self._start()

    def _start(self) -> None:
        self._progress.unlink(missing_ok=True)
        try:
            self.process = BoundedProcess()
        except ProcessDiedError as error:
            raise DataError(f"a process that encodes rows cannot be started: {error}.") from None
        self.process.submit(_load_encoder, self._folder / _ENCODER_FILE, self._progress)
        self._is_loaded = False
        for chunk in self.pending.values():
            self.process.submit(_encode, chunk)

    def submit(self, number: int, chunk: Chunk) -> None:
        """Send a chunk to the process."""
        self.pending[number] = chunk
        self.process.submit(_encode, chunk)

    def receive(self) -> dict[int, EncodedChunk]:
        """Return the encoded chunk that the process has sent, if any, by its number."""
        try:
            part = self.process.receive()
        except LimitError as error:
            if not self._is_loaded:
                raise make_limit_error(error) from None
            self._restart_without_row(str(error))
            return {}
        except ProcessDiedError:
            raise DataError(
                "a process that encodes rows was killed, most often because memory ran out. Free some memory, or "
                "prepare the set on another machine with `fctune data prepare`."
            ) from None
        if not self._is_loaded:
            self._is_loaded = True
            return {}
        number = next(iter(self.pending))
        del self.pending[number]
        return {number: part}

    def _restart_without_row(self, reason: str) -> None:
        number, chunk = next(iter(self.pending.items()))
        row = int.from_bytes(self._progress.read_bytes(), "little")
        self.pending[number] = chunk._replace(refused={**chunk.refused, row: reason})
        self._start()


def _collect(workers: list[_Worker], done: dict[int, EncodedChunk], timeout_s: float | None) -> None:
    """Receive from the workers that have sent something; None waits until there is one."""
    by_connection = {worker.process.connection: worker for worker in workers if worker.process.is_busy}
    for connection in wait(by_connection, timeout_s):
        done |= by_connection[connection].receive()  # type: ignore[index]


_worker: tuple[ChunkEncoder, int]  # in worker processes only: the encoder, and the file of the row it is at


def _load_encoder(file: Path, progress: Path) -> None:
    global _worker
    _worker = pickle.loads(file.read_bytes()), os.open(progress, os.O_WRONLY | os.O_CREAT)
    gc.freeze()  # see _exempt_from_collection


def _encode(chunk: Chunk) -> EncodedChunk:
    encoder, progress = _worker
    return encoder.encode(chunk, lambda row: os.pwrite(progress, row.to_bytes(4, "little"), 0))
