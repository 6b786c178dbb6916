"""Rows of a chunk encoded to tokens, with what augmentation makes of them, and their counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.config.sections.data import AUGMENT_KINDS, DataConfig, SourceConfig
from fctune.data.augment.augmenter import (
    AugmentCounts,
    Augmenter,
    Form,
    is_held_out,
)
from fctune.data.conversation import Conversation
from fctune.data.conversation_encoder import (
    ConversationEncoder,
    Encoded,
    TemplateLimitError,
    get_defect_kind,
    make_limit_error,
)
from fctune.data.fold import find_run
from fctune.data.long_conversations import cut_conversation, measure, split_conversation
from fctune.data.pairs import Pair, PairError, PairReader, encode_pair
from fctune.data.redaction import Redaction, SecretScreen
from fctune.data.secrets import SecretCounts
from fctune.data.sources import (
    OVERLONG,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
    UnreadRow,
)
from fctune.data.sources.row_formats.registry import list_unread

KIND_BITS = {kind: 1 << number for number, kind in enumerate(AUGMENT_KINDS)}
"""Bits of a sample's kinds of augmentation; the highest bit is of replayed rows."""
_REPLAY_BIT = 1 << 15


@dataclass(slots=True)
class Counts:
    """Counts of the rows that were kept, cut, dropped and skipped."""

    rows: int = 0
    folded: int = 0  # records that a row continues or repeats; not among the rows
    left_out: int = 0  # other records and parts of logs that are no rows, or not selected; not among the rows
    left_out_kinds: dict[str, int] = field(default_factory=dict)  # both, by their kind in LEFT_OUT_KINDS
    unread_columns: dict[str, int] = field(default_factory=dict)  # rows with columns that nothing reads, by column
    conversations: int = 0  # kept, both splits
    samples: int = 0  # of the kept conversations; more than one where the chat template rewrites earlier turns
    invalid: int = 0  # defects, skipped
    overlong: int = 0  # over seq_len, dropped
    cut: int = 0  # over seq_len, cut after a turn
    split: int = 0  # over seq_len, divided into parts
    parts: int = 0  # of the divided conversations
    lost_turns: int = 0  # supervised turns of the divided conversations that no part has room for
    reasoning: int = 0  # kept and with reasoning that is not dropped
    unsupervised: int = 0  # without supervised tokens under train_on and weights, dropped
    benchmark: int = 0  # kept and marked as questions of a public benchmark
    changed: int = 0  # kept and changed by data.augment
    added: int = 0  # kept and added by data.augment
    replayed: int = 0  # kept, from the sources of data.replay
    tokens: int = 0
    supervised: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of other rows in place."""
        for count in fields(self):
            own, more = getattr(self, count.name), getattr(other, count.name)
            if isinstance(own, dict):
                own.update({name: own.get(name, 0) + number for name, number in more.items()})
            else:
                setattr(self, count.name, own + more)


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
    ``[n]`` int64, the ``digests`` ``[n]`` uint64 of its conversation, ``splits`` ``[n]`` uint64, of which those that
    are equal share a split, ``repeats`` ``[n]`` int64, its number per epoch, and ``kinds`` ``[n]`` uint16, how it was
    augmented (``KIND_BITS``). By conversation or pair: the number of its ``samples``.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    lengths: NDArray[np.int64]
    digests: NDArray[np.uint64]
    splits: NDArray[np.uint64]
    repeats: NDArray[np.int64]
    kinds: NDArray[np.uint16]
    samples: NDArray[np.int64]
    counts: Counts
    defects: list[Defect]
    source: int = 0  # index in the config's sources
    num_sampled: int = 0  # readable rows that the source's weight does not leave out
    num_unreadable: int = 0
    over_limit: tuple[Defect, ...] = ()  # the defects of rows whose rendering takes too much
    num_trained: int = 0  # conversations of an epoch: kept, not held out, and repeated by weight
    augmented: AugmentCounts = field(default_factory=dict)
    secrets: SecretCounts = field(default_factory=SecretCounts)


@dataclass(slots=True)
class _Buffers:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    weights: array[float] = field(default_factory=lambda: array("d"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    digests: array[int] = field(default_factory=lambda: array("Q"))
    splits: array[int] = field(default_factory=lambda: array("Q"))
    repeats: array[int] = field(default_factory=lambda: array("q"))
    kinds: array[int] = field(default_factory=lambda: array("H"))
    samples: array[int] = field(default_factory=lambda: array("q"))

    def add(self, samples: list[Encoded], digest: str, split: int, repeats: int, kinds: int) -> None:
        """Append the samples of a conversation."""
        self.samples.append(len(samples))
        for sample in samples:
            self.tokens.extend(sample.token_array)
            self.weights.extend(sample.weight_array)
            self.lengths.append(len(sample.token_array))
            self.digests.append(int(digest, 16))
            self.splits.append(split)
            self.repeats.append(repeats)
            self.kinds.append(kinds)


class ChunkEncoder:
    """Reads and encodes rows under a data config; can be sent to another process, which then loads no tokenizer.

    Args:
        config: The data config.
        encoder: Encodes conversations.
        augmenter: Makes further forms of the rows of ``data.sources``.
    """

    def __init__(self, config: DataConfig, encoder: ConversationEncoder, augmenter: Augmenter | None = None):
        self.config = config
        self.encoder = encoder
        self.augmenter = augmenter
        self._sources = list_sources(config)
        self._readers: list[RowReader | PairReader] = [
            PairReader(source.columns)
            if config.pairs
            else RowReader(source.format, source.columns, selection=Selection.from_config(source))
            for source in self._sources
        ]
        self._keeps_reasoning = encoder.supervision.reasoning != "drop"
        self._screen = make_screen(config)

    def __reduce__(self) -> tuple[type[ChunkEncoder], tuple[DataConfig, ConversationEncoder, Augmenter | None]]:
        return ChunkEncoder, (self.config, self.encoder, self.augmenter)  # readers stay in their process

    def encode(self, chunk: Chunk, on_row: Callable[[int], object] | None = None) -> EncodedChunk:
        """Encode the rows of a chunk.

        Args:
            chunk: Rows.
            on_row: Called with the index of each row before it is encoded.
        """
        reader, source = self._readers[chunk.source], self._sources[chunk.source]
        is_replay = chunk.source >= len(self.config.sources)
        left_out: Counter[str] = Counter()
        buffers, counts, defects = _Buffers(), Counts(), list[Defect]()
        secrets = SecretCounts(searched=[] if self._screen is None else list(self._screen.scanner.kinds))
        unread: Counter[str] = Counter()
        num_sampled, num_unreadable, num_trained, over_limit = 0, 0, 0, []
        for index, row in enumerate(chunk.rows):
            left_out.update(row.left_out or {})
            parsed = reader.read(row)
            if isinstance(parsed, LeftOut):
                left_out[parsed.kind] += 1
                continue
            counts.rows += 1
            if isinstance(parsed, Defect):
                defects.append(parsed)
                num_unreadable += 1
                continue
            unread.update(list_unread(parsed) if isinstance(parsed, ParsedRow) else ())
            digest, split = parsed.digest(), find_split(parsed, source)
            held_out = is_held_out(split, self.config.validation_share)
            repeats = not held_out if is_replay else count_repeats(digest, source.weight)
            if not repeats:
                continue
            num_sampled += 1
            if on_row is not None:
                on_row(index)
            if self._screen is not None:
                parsed, redaction = _screen_item(self._screen, parsed)
                secrets.count(redaction.findings, redaction.num_turns)
                if redaction.num_turns and isinstance(parsed, Pair):  # an answer may hold a placeholder
                    counts.unsupervised += 1
                    continue
            try:
                if index in chunk.refused:
                    raise make_limit_error(chunk.refused[index])
                for form, samples in self._encode_forms(parsed, source, counts, not (is_replay or held_out)):
                    kinds = _REPLAY_BIT if is_replay else _to_bits(form, parsed)
                    buffers.add(samples, digest, split, int(repeats), kinds)
                    counts.conversations += 1
                    item = parsed if isinstance(parsed, Pair) else form.conversation
                    counts.reasoning += self._keeps_reasoning and item.has_reasoning
                    counts.benchmark += parsed.benchmark is not None
                    counts.changed += bool(form.kinds) and not form.is_added
                    counts.added += form.is_added
                    counts.replayed += is_replay
                    num_trained += 0 if held_out else int(repeats)
            except PairError as error:
                defects.append(Defect(row.file, row.line, "", error.kind, str(error)))
            except DataError as error:
                kind = OVERLONG if isinstance(error, _OverlongError) else get_defect_kind(error)
                defects.append(Defect(row.file, row.line, "messages", kind, str(error)))
                over_limit += defects[-1:] if isinstance(error, TemplateLimitError) else []
        if self._screen is not None and defects:
            texts = {(row.file, row.line): row.value for row in chunk.rows}
            hide = self._screen.scanner.hide
            defects = [hide(defect, texts.get((defect.file, defect.line), "")) for defect in defects]
        counts.left_out_kinds, counts.unread_columns = dict(left_out), dict(unread)
        counts.folded = left_out.pop("folded_record", 0) + left_out.pop("repeated_record", 0)
        counts.left_out = left_out.total()
        weights = np.frombuffer(buffers.weights, np.float64).astype(np.float32)
        counts.samples, counts.tokens = len(buffers.lengths), len(weights)
        counts.supervised, counts.invalid = int(np.count_nonzero(weights)), len(defects)
        return EncodedChunk(
            np.frombuffer(buffers.tokens, np.int32),
            weights,
            np.frombuffer(buffers.lengths, np.int64),
            np.frombuffer(buffers.digests, np.uint64),
            np.frombuffer(buffers.splits, np.uint64),
            np.frombuffer(buffers.repeats, np.int64),
            np.frombuffer(buffers.kinds, np.uint16),
            np.frombuffer(buffers.samples, np.int64),
            counts,
            defects,
            chunk.source,
            num_sampled,
            num_unreadable,
            tuple(over_limit),
            num_trained,
            {} if self.augmenter is None or is_replay else self.augmenter.take_counts(),
            secrets,
        )

    def _encode_forms(
        self, parsed: ParsedRow | Pair, source: SourceConfig, counts: Counts, is_augmentable: bool
    ) -> Iterator[tuple[Form, list[Encoded]]]:
        """Yield the forms of a row that are kept, with their samples.

        A changed or added form that cannot be used is left out; in place of a changed one, the row is encoded.
        """
        if isinstance(parsed, Pair):
            forms = [Form(parsed.prompt)]
        elif self.augmenter is None or not is_augmentable:
            forms = [Form(parsed.conversation)]
        else:
            forms = self.augmenter.expand(parsed, source.path)
        plain = parsed if isinstance(parsed, Pair) else parsed.conversation
        for number, form in enumerate(forms):
            samples = None
            try:
                if form.kinds:
                    samples = self._encode_made(form)
                if samples is None and not form.is_added:
                    samples, form = self._encode_within(plain, counts), Form(form.conversation)
                    if samples is not None and not any(sample.is_supervised for sample in samples):
                        counts.unsupervised += 1
            except DataError:
                for lost in forms[number + 1 :]:
                    assert self.augmenter is not None
                    self.augmenter.leave_out(lost, "made of a row that cannot be encoded")
                raise
            if kept := [sample for sample in samples or () if sample.is_supervised]:
                yield form, kept

    def _encode_made(self, form: Form) -> list[Encoded] | None:
        """Encode a form that was made of a row; None, counted with the reason, if it is not to be used."""
        assert self.augmenter is not None
        try:
            samples = self.encoder.encode(form.conversation)
        except DataError:
            self.augmenter.leave_out(form, "not rendered by the chat template")
            return None
        if measure(samples) > self.config.row_tokens:
            self.augmenter.leave_out(form, "longer than data.seq_len")
        elif not any(sample.is_supervised for sample in samples):
            self.augmenter.leave_out(form, "no supervised tokens")
        else:
            return samples
        return None

    def _encode_within(self, item: Conversation | Pair, counts: Counts) -> list[Encoded] | None:
        """Encode a conversation or a pair to samples within seq_len tokens; None if it is dropped."""
        is_pair = isinstance(item, Pair)
        samples = encode_pair(item, self.encoder) if isinstance(item, Pair) else self.encoder.encode(item)
        longest = sum(len(sample.token_array) for sample in samples) if is_pair else measure(samples)
        if longest <= self.config.row_tokens:
            return samples
        if self.config.overlong == "fail":
            raise _OverlongError(
                f"{format_count(longest, 'token')}{' of both answers' if is_pair else ''}, over "
                f"data.seq_len={self.config.row_tokens}; raise it, or set data.overlong to "
                f"{'drop' if is_pair else 'split_turns, cut or drop'}"
            )
        shorter: list[Encoded] | None = None
        if isinstance(item, Conversation) and self.config.overlong == "cut":
            shorter = cut_conversation(item, self.encoder, self.config.row_tokens)
            counts.cut += shorter is not None
        elif isinstance(item, Conversation) and self.config.overlong == "split_turns":
            parts = split_conversation(item, self.encoder, self.config.row_tokens)
            shorter = parts.samples or None
            counts.split += shorter is not None
            counts.parts += len(parts.conversations)
            counts.lost_turns += parts.num_lost if shorter is not None else 0
        counts.overlong += shorter is None
        return shorter


def make_screen(config: DataConfig) -> SecretScreen | None:
    """Return what finds or replaces the secrets of rows under a data config; None if they are ignored."""
    return None if config.secrets == "ignore" else SecretScreen(config.redact if config.secrets == "redact" else None)


def _screen_item(screen: SecretScreen, item: ParsedRow | Pair) -> tuple[ParsedRow | Pair, Redaction]:
    """Return a row or a pair as it is to be used, and what was found in it; of a pair, the turns of its answers."""
    if isinstance(item, ParsedRow):
        return screen.screen(item)
    answers = [answer.messages for answer in item.answers]
    history = tuple(replace(message, weight=0.0) for message in item.prompt.messages)
    joined = replace(item.prompt, messages=(*history, *answers[0], *answers[1]))
    if screen.redactor is None:
        return item, Redaction(screen.scanner.locate(joined), {})
    joined, redaction = screen.redactor.redact_conversation(joined)
    start, middle = len(history), len(history) + len(answers[0])
    return (
        replace(
            item,
            prompt=replace(joined, messages=joined.messages[:start]),
            chosen=replace(item.chosen, messages=joined.messages[start:middle]),
            rejected=replace(item.rejected, messages=joined.messages[middle:]),
        ),
        redaction,
    )


def list_sources(config: DataConfig) -> list[SourceConfig]:
    """Return the sources of rows, followed by those of rows to replay."""
    return [*config.sources, *(config.replay.sources if config.replay is not None else ())]


def find_split(parsed: ParsedRow | Pair, source: SourceConfig) -> int:
    """Return the hash that decides a row's split.

    It is equal for the records of a run, for what is made of a row, and for the pairs of a prompt.
    """
    if isinstance(parsed, Pair):
        return int(parsed.prompt.digest(), 16)
    run = find_run(parsed, source.fold)
    return int(parsed.digest() if run is None else run, 16)


def _to_bits(form: Form, parsed: ParsedRow | Pair) -> int:
    """Return the bits of a form's kinds, and of those by which a file's row was made."""
    mark = parsed.mark if isinstance(parsed, ParsedRow) else None
    return sum(KIND_BITS.get(kind, 0) for kind in {*form.kinds, *(mark["kinds"] if mark is not None else ())})


def count_repeats(digest: str, weight: float) -> int:
    """Return how often a row occurs per epoch: ``floor(weight)``, and once more for the fraction of rows, by hash."""
    integer = int(weight)
    return integer + (int(digest[8:16], 16) < (weight - integer) * 2**32)
