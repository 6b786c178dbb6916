"""Parallel encoding of the configured sources' rows to tokens, in order."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from fctune.base.errors import DataError
from fctune.config.intervals import format_count, format_share, parse_share
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.augment.augmenter import (
    MAX_POOL_ROWS,
    Augmenter,
    check_counts,
    is_held_out,
    make_augmenter,
    new_counts,
)
from fctune.data.bounded_process import BoundedProcess, LimitError, ProcessDiedError, prepare_processes
from fctune.data.chat_template import ChatTemplate
from fctune.data.chosen_template import ChosenTemplate
from fctune.data.chunk_encoder import Chunk, ChunkEncoder, Counts, EncodedChunk, find_split, list_sources, make_screen
from fctune.data.conversation_encoder import (
    make_limit_error,
)
from fctune.data.pairs import PAIRS_FORMAT, Pair, PairReader
from fctune.data.sources import (
    OVERLONG,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
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
    augmenter = _make_augmenter(config)
    encoder = ChunkEncoder(config, loaded.encoder, augmenter)
    augmented = {} if augmenter is None else new_counts(augmenter.shares)
    defects: list[Defect] = []
    over_limit: list[Defect] = []
    encodes_here = not loaded.encoder.template.is_remote
    with _open_workers(encoder, num_processes - encodes_here) as workers:
        encode = functools.partial(_encode_parallel, encoder, workers, encodes_here)
        for part in _chain_replayed(config, chunks, encode):
            counts.add(part.counts)
            for kind, count in part.augmented.items():
                augmented[kind].add(count)
            defects += part.defects
            over_limit += part.over_limit
            if len(over_limit) >= _MAX_OVER_LIMIT:
                raise DataError(
                    f"{model_dir}: stopped after {len(over_limit)} rows, such as {over_limit[0]}. Shorten or remove "
                    "these rows, or use another template with model.chat_template."
                )
            yield part
    skips = config.on_invalid == "skip"
    if skips and counts.conversations:
        defects = [defect for defect in defects if defect.kind == OVERLONG]
    if defects:
        raise DataError(describe_defects(defects, counts.rows, "" if skips else "set data.on_invalid=skip"))
    if augmenter is not None:
        check_counts(augmented, augmenter.shares)


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
            has_reasoning_rows(
                [(source.path, source.format)], config.max_samples, source.columns, Selection.from_config(source)
            )
            for source in list_sources(config)
        )
    readers = [PairReader(source.columns) for source in config.sources]
    pairs = (readers[chunk.source].read(row) for chunk in _scan_chunks(config) for row in chunk.rows)
    return any(isinstance(pair, Pair) and pair.has_reasoning for pair in pairs)


def _scan_rows(config: DataConfig, source: SourceConfig) -> Iterator[UnreadRow]:
    row_format = PAIRS_FORMAT if config.pairs else source.format
    fold = "never" if config.pairs else source.fold
    scanned = scan_source(source.path, row_format, source.columns, fold, Selection.from_config(source))
    return itertools.islice(scanned, config.max_samples)


def _scan_chunks(config: DataConfig) -> Iterator[Chunk]:
    for index, source in enumerate(config.sources):
        yield from _divide(index, _scan_rows(config, source))


def _divide(source: int, rows: Iterator[UnreadRow]) -> Iterator[Chunk]:
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        yield Chunk(source, chunk)


def _make_augmenter(config: DataConfig) -> Augmenter | None:
    """Return the augmenter of the config, which knows the tools of the first rows of each source; None without one."""
    if config.augment is None:
        return None

    screen = make_screen(config) if config.secrets == "redact" else None

    def iter_rows() -> Iterator[tuple[str, ParsedRow]]:
        for source in config.sources:
            reader = RowReader(source.format, source.columns, selection=Selection.from_config(source))
            for row in itertools.islice(_scan_rows(config, source), MAX_POOL_ROWS):
                parsed = reader.read(row)
                if isinstance(parsed, Defect | LeftOut):
                    continue
                if not is_held_out(find_split(parsed, source), config.validation_share):
                    yield source.path, parsed if screen is None else screen.screen(parsed)[0]

    return make_augmenter(config.augment, iter_rows())


def _chain_replayed(
    config: DataConfig, chunks: Iterator[Chunk], encode: Callable[[Iterator[Chunk]], Iterator[EncodedChunk]]
) -> Iterator[EncodedChunk]:
    """Yield the encoded chunks, then rows of ``data.replay`` until they have their share.

    Raises:
        DataError: The sources to replay have too few usable rows.
    """
    num_trained = 0
    for part in encode(chunks):
        num_trained += part.num_trained
        yield part
    replay = config.replay
    if replay is None:
        return
    wanted = count_replayed(num_trained, parse_share(replay.share))
    quotas = divide_by_weight(wanted, [source.weight for source in replay.sources])
    for number, (source, quota) in enumerate(zip(replay.sources, quotas, strict=True)):
        rows, missing = RowDraw(functools.partial(_scan_rows, config, source), seed=number), quota
        while missing > 0:
            if rows.is_exhausted:
                raise DataError(
                    f"{source.path}: data.replay.share={format_share(parse_share(replay.share))} needs "
                    f"{format_count(quota, 'conversation')} of it, and {quota - missing:,} of its "
                    f"{format_count(rows.num_rows, 'row')} can be used. Lower the share, or add sources to data.replay."
                )
            for part in encode(_divide(len(config.sources) + number, rows.draw(missing))):
                missing -= part.counts.conversations
                yield part


def count_replayed(num_trained: int, share: float) -> int:
    """Return the number of conversations that are a share of all, if the others are ``num_trained``."""
    return max(1, round(num_trained * share / (1 - share))) if num_trained else 0


def divide_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Divide a number of rows between sources in proportion to their weights; the parts add up to it."""
    ends = [round(total * sum(weights[: number + 1]) / sum(weights)) for number in range(len(weights))]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class RowDraw:
    """Draws the rows of a source in random order, each once, and scans the source for each draw.

    Args:
        scan: Yields the rows of the source, in the same order each time.
        seed: Seed of the order.
    """

    def __init__(self, scan: Callable[[], Iterator[UnreadRow]], seed: int):
        self._scan = scan
        self.num_rows = sum(1 for _ in scan())
        self._order = np.random.default_rng(seed).permutation(self.num_rows)
        self._num_drawn = 0

    def draw(self, count: int) -> Iterator[UnreadRow]:
        """Yield the next ``count`` rows, or those that are left, in the order of the source."""
        drawn = set(self._order[self._num_drawn : self._num_drawn + count].tolist())
        self._num_drawn += len(drawn)
        for number, row in enumerate(self._scan()):
            if number in drawn:
                drawn.remove(number)
                yield row
            if not drawn:
                return

    @property
    def is_exhausted(self) -> bool:
        """True if every row was drawn."""
        return self._num_drawn >= self.num_rows


@contextlib.contextmanager
def _open_workers(encoder: ChunkEncoder, num_workers: int) -> Iterator[list[_Worker]]:
    """Start processes that encode chunks, and end them with the context."""
    if num_workers <= 0:
        yield []
        return
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
        yield workers


def _encode_parallel(
    encoder: ChunkEncoder, workers: list[_Worker], encodes_here: bool, chunks: Iterator[Chunk]
) -> Iterator[EncodedChunk]:
    """Like ``map(encoder.encode, chunks)`` with other processes; this one may encode chunks while they are all busy."""
    if not workers:
        yield from map(encoder.encode, chunks)
        return
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
