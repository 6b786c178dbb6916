"""The dataset check: reads sources completely and reports on their rows before training."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from fctune.base.errors import DataError
from fctune.config.sections.data import Fold
from fctune.data.chat_template import ChatTemplate
from fctune.data.check.overlap import OverlapIndex
from fctune.data.check.reasoning import ReasoningCount
from fctune.data.check.report import (
    NUM_EXAMPLES,
    AugmentedRows,
    Example,
    Lengths,
    OverlapExample,
    OverlapFinding,
    Repeat,
    Report,
    SecretsFound,
    SourceSummary,
    Tokens,
    ToolUse,
    make_findings,
)
from fctune.data.check.similarity import Location, SimilarityIndex, WordHasher
from fctune.data.check.warnings import BEGINS_ANOTHER, CLASSES, classify, iter_warnings
from fctune.data.conversation import Conversation, Tool
from fctune.data.conversation_encoder import get_defect_kind
from fctune.data.fold import BeginningIndex
from fctune.data.long_conversations import LongConversations, measure
from fctune.data.secrets import SecretCounts, SecretScanner, warn
from fctune.data.sources import DEFAULT_SELECTION, Defect, LeftOut, ParsedRow, RowReader, Selection, scan_source
from fctune.data.sources.columns import Columns
from fctune.data.sources.row_formats.registry import list_unread
from fctune.data.sources.unmatched import require_selected

Encode = Callable[[Conversation], tuple[int, int]]
"""Counts the tokens and the supervised tokens of a conversation; raises ``DataError`` if it cannot be rendered."""

_NUM_TOOLS_SHOWN = 50
_MAX_TOOL_NAMES = 100_000  # further names are not counted, which bounds memory
_PROGRESS_ROWS = 500
_MAX_LONG_TOKENS = 1_000_000  # of conversations that are measured, each some ten times


def check_sources(
    paths: Sequence[str],
    row_format: str = "auto",
    max_samples: int | None = None,
    encode: Encode | None = None,
    seq_len: int | None = None,
    validation: Iterable[str] = (),
    eval_suites: Iterable[str] = (),
    on_progress: Callable[[int], None] | None = None,
    template: ChatTemplate | None = None,
    columns: Columns | None = None,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    secrets: Sequence[str] = ("secrets",),
    tools: tuple[Tool, ...] = (),
) -> Report:
    """Check all rows of the sources.

    Args:
        paths: Sources in the forms that ``read_source`` accepts.
        row_format: Format of the rows, or auto.
        max_samples: Maximum number of rows read from each source.
        encode: Counts a conversation's tokens; without it the report has no token counts.
        seq_len: Length in tokens that conversations are compared with; requires ``encode``.
        validation: Sources held out for validation; their overlap with the rows is reported.
        eval_suites: Files or directories of eval questions (BFCL's, or rows with messages), likewise.
        on_progress: Called every 500 rows with the number of rows read so far.
        template: Template of the model, for tokens of reasoning and what they would teach it.
        columns: The format's name for each column of another name, or ``ignore``.
        fold: Leave out records that others continue: always, never, or in logs (auto).
        selection: Which rows are read, and which of their turns are context.
        secrets: Texts to warn about: ``secrets``, ``emails``, ``phones``, ``paths``.
        tools: Tools of the rows that have none.

    Raises:
        DataError: A path does not exist, rows have an unknown format, or none meets the conditions. Truncated files are
            part of the report.
    """
    check = _Check(encode, seq_len, validation, eval_suites, on_progress, template, secrets)
    try:
        for path in paths:
            check.read(path, row_format, max_samples, columns, fold, selection, tools)
        if not check.num_rows:
            require_selected(paths, check.left_out, row_format, columns, fold, selection)
        return check.report()
    finally:
        check.similarity.close()


class _Check:
    """The running totals of a check."""

    def __init__(
        self,
        encode: Encode | None,
        seq_len: int | None,
        validation: Iterable[str],
        eval_suites: Iterable[str],
        on_progress: Callable[[int], None] | None,
        template: ChatTemplate | None,
        secrets: Sequence[str],
    ) -> None:
        self.scanner = SecretScanner(secrets)
        self.secrets = SecretCounts()
        self.unread: Counter[str] = Counter()
        self.start = time.monotonic()
        self.encode = encode
        self.seq_len = seq_len
        self.on_progress = on_progress
        self.template, self.reasoning = template, ReasoningCount(template)
        self.long = LongConversations()
        self.num_long = self.num_long_tokens = 0
        hasher = WordHasher()
        self.similarity = SimilarityIndex(hasher)
        self.beginnings = BeginningIndex()
        self.places = array("q")  # file and line of each conversation
        self.overlaps = [OverlapIndex(path, "validation", hasher) for path in validation]
        self.overlaps += [OverlapIndex(path, "eval", hasher) for path in eval_suites]
        self.files: dict[str, int] = {}
        self.row_formats: Counter[str] = Counter()  # of the current source
        self.sources: list[SourceSummary] = []
        self.num_rows = self.num_calls = 0
        self.counts: Counter[str] = Counter()
        self.rows_of: Counter[str] = Counter()
        self.warning_counts: Counter[str] = Counter()
        self.examples: dict[str, list[Example]] = defaultdict(list)
        self.notes: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.augmented = AugmentedRows()
        self.classes: Counter[str] = Counter()
        self.declared: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.messages: Counter[int] = Counter()
        self.characters: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.num_supervised = self.num_unsupervised = self.num_not_renderable = 0

    def read(
        self,
        path: str,
        row_format: str,
        max_samples: int | None,
        columns: Columns | None,
        fold: Fold,
        selection: Selection,
        tools: tuple[Tool, ...],
    ) -> None:
        """Check the rows of a source."""
        source = SourceSummary(path, 0, 0, {}, None)
        self.sources.append(source)
        self.row_formats = Counter()
        for row in self._iter_rows(source, row_format, max_samples, columns, fold, selection, tools):
            self.num_rows += 1
            source.rows += 1
            if isinstance(row, Defect):
                self.add_defect(row)
            else:
                self.add_row(row)
            if self.on_progress is not None and self.num_rows % _PROGRESS_ROWS == 0:
                self.on_progress(self.num_rows)
        source.row_formats = dict(self.row_formats.most_common())
        source.conversations = self.row_formats.total()

    def _iter_rows(
        self,
        source: SourceSummary,
        row_format: str,
        max_samples: int | None,
        columns: Columns | None,
        fold: Fold,
        selection: Selection,
        tools: tuple[Tool, ...],
    ) -> Iterator[ParsedRow | Defect]:
        """Yield the rows of a source; if it fails after some, record the error in the source."""
        reader = RowReader(row_format, columns, tools, selection=selection)
        try:
            for row in islice(scan_source(source.path, row_format, columns, fold, selection, tools), max_samples):
                self.left_out.update(row.left_out or {})
                parsed = reader.read(row)
                if isinstance(parsed, LeftOut):
                    self.left_out[parsed.kind] += 1
                    self.failures.update([parsed.cause] if parsed.cause else [])
                else:
                    yield self.scanner.hide(parsed, row.value) if isinstance(parsed, Defect) else parsed
        except DataError as error:
            if source.rows == 0:
                raise
            source.error = str(error)

    def add_defect(self, defect: Defect) -> None:
        self.counts[defect.kind] += 1
        self.rows_of[defect.kind] += 1
        self.add_example(defect.kind, Example(defect.file, defect.line, defect.pointer, defect.reason))

    def add_example(self, kind: str, example: Example) -> None:
        if len(self.examples[kind]) < NUM_EXAMPLES:
            self.examples[kind].append(example)

    def add_row(self, row: ParsedRow) -> None:
        conversation = row.conversation
        file, _, line = conversation.source.rpartition(":")
        if self.encode is not None:
            try:
                num_tokens, num_supervised = self.encode(conversation)
            except DataError as error:
                self.num_not_renderable += 1
                reason = str(error).removeprefix(f"{file}:{line}: ")
                defect = Defect(file, int(line), "", get_defect_kind(error), reason)
                self.add_defect(self.scanner.hide(defect, conversation.to_json()))
                return
            self.tokens[num_tokens] += 1
            self.num_supervised += num_supervised
            if self.seq_len is not None and num_tokens > self.seq_len:
                self.add_long(conversation, num_tokens, num_supervised, self.seq_len)
            self.num_unsupervised += num_supervised == 0
        self.row_formats[row.row_format] += 1
        place = (self.files.setdefault(file, len(self.files)), int(line))
        self.similarity.add(conversation, *place, row.digest())
        self.beginnings.add(conversation)
        self.places.extend(place)
        for overlap in self.overlaps:
            overlap.add(conversation)
        kinds = set()
        findings = self.scanner.locate(row)
        self.secrets.count(findings)
        self.unread.update(list_unread(row))
        for warning in warn(findings, iter_warnings(row)):
            self.warning_counts[warning.kind] += 1
            kinds.add(warning.kind)
            self.add_example(warning.kind, Example(file, int(line), warning.pointer, warning.reason))
        self.rows_of.update(kinds)
        self.notes.update(row.notes)
        self.reasoning.add(conversation)
        self.classes[classify(conversation)] += 1
        if row.mark is not None:
            self.augmented.add(row.mark["kinds"])
        self.messages[len(conversation.messages)] += 1
        self.characters[sum(len(message.content or "") for message in conversation.messages)] += 1
        names = [call.name for message in conversation.messages for call in message.calls]
        self.num_calls += len(names)
        if len(self.declared) < _MAX_TOOL_NAMES:
            self.declared.update({tool.name for tool in conversation.tools})
            self.called.update(names)

    def add_long(self, conversation: Conversation, num_tokens: int, num_supervised: int, seq_len: int) -> None:
        """Count a conversation over ``seq_len`` tokens, and measure what shortening it would lose.

        That encodes it many times, so only the first conversations are measured.
        """
        if self.template is None:
            self.num_long += 1
            return
        if measure(self.template.encoder.encode(conversation)) <= seq_len:
            return  # its samples together are longer, and each fits
        self.num_long += 1
        self.num_long_tokens += num_tokens
        if self.num_long_tokens > _MAX_LONG_TOKENS and self.long.num_measured:
            return
        # Some conversations are rejected by the template once turns are left out.
        with contextlib.suppress(DataError):
            self.long.add(conversation, self.template.encoder, seq_len, num_supervised)

    def add_beginnings(self, names: list[str]) -> None:
        """Warn about conversations that others continue; training may have them on both sides of a split."""
        found = self.beginnings.find()
        if not found:
            return
        self.warning_counts[BEGINS_ANOTHER] = self.rows_of[BEGINS_ANOTHER] = len(found)
        reason = "another row continues this conversation, and the two may be on both sides of a split"
        for number in found[:NUM_EXAMPLES]:
            file, line = self.places[2 * number : 2 * number + 2]
            self.add_example(BEGINS_ANOTHER, Example(names[file], line, "", reason))

    def report(self) -> Report:
        names = list(self.files)
        self.add_beginnings(names)
        repeats = self.similarity.find_repeats()
        used = [ToolUse(name, self.declared[name], count) for name, count in self.called.most_common(_NUM_TOOLS_SHOWN)]
        num_conversations = self.similarity.num_rows
        assert self.num_rows == num_conversations + self.counts.total()
        return Report(
            sources=self.sources,
            rows=self.num_rows,
            conversations=num_conversations,
            calls=self.num_calls,
            tools=len(self.declared),
            duplicates=repeats.num_exact,
            near_duplicates=repeats.num_near,
            defects=self.counts.total(),
            warnings=self.warning_counts.total(),
            defect_kinds=make_findings(self.counts, self.rows_of, self.examples),
            warning_kinds=make_findings(self.warning_counts, self.rows_of, self.examples),
            notes=dict(self.notes.most_common()),
            left_out=dict(self.left_out.most_common()),
            failures=dict(self.failures.most_common()),
            augmented=self.augmented,
            secrets=SecretsFound(self.secrets.rows, dict(sorted(self.secrets.kinds.items())), list(self.scanner.kinds)),
            unread_columns=dict(self.unread.most_common()),
            classes={name: self.classes[name] for name in CLASSES},
            num_messages=Lengths.from_counts(self.messages),
            num_characters=Lengths.from_counts(self.characters),
            tokens=self.make_tokens(),
            reasoning=self.reasoning.report(),
            tool_use=used,
            duplicate_examples=[_describe_repeat(repeat, names) for repeat in repeats.exact],
            near_duplicate_examples=[_describe_repeat(repeat, names) for repeat in repeats.near],
            overlaps=[_describe_overlap(index) for index in self.overlaps],
            seconds=round(time.monotonic() - self.start, 3),
        )

    def make_tokens(self) -> Tokens | None:
        if self.encode is None:
            return None
        lengths = Lengths.from_counts(self.tokens)
        share = self.num_supervised / lengths.total if lengths.total else 0.0
        return Tokens(
            lengths.total,
            self.num_supervised,
            share,
            self.seq_len,
            self.num_long,
            self.num_unsupervised,
            self.num_not_renderable,
            lengths,
            self.long if self.long.num_measured else None,
        )


def _describe_repeat(repeat: tuple[Location, Location, float], names: list[str]) -> Repeat:
    (file, line), (earlier_file, earlier_line), similarity = repeat
    return Repeat(f"{names[file]}:{line}", f"{names[earlier_file]}:{earlier_line}", round(similarity, 3))


def _describe_overlap(index: OverlapIndex) -> OverlapFinding:
    found = index.overlap
    examples = [OverlapExample(row, item, round(share, 3)) for row, item, share in found.examples]
    return OverlapFinding(found.against, found.purpose, found.num_items, found.num_found, found.num_rows, examples)
