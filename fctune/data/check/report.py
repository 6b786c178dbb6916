"""The report of ``fctune data check``, as versioned JSON and as text.

Adding a key keeps the version; removing a key or changing its meaning raises it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fctune.config.intervals import choose_noun, format_count
from fctune.config.sections.data import ADDITIONS
from fctune.data.check.reasoning import ReasoningUse
from fctune.data.check.warnings import CLASSES, PAIR_WARNING_KINDS, WARNING_KINDS
from fctune.data.long_conversations import LongConversations
from fctune.data.secrets import list_counts
from fctune.data.sources import DEFECT_KINDS, LEFT_OUT_KINDS, NOTE_KINDS
from fctune.data.sources.row_formats.registry import describe_unread

SCHEMA_VERSION = 2
NUM_EXAMPLES = 5
_BAR_WIDTH = 30  # of the longest bar of a histogram, in characters


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a finding: its location in a row and the reason."""

    file: str  # a file, hf: or synthetic: source
    line: int  # first line of the row, from 1; the number of the row in Parquet and on the hub
    pointer: str  # location in the row, such as messages[1].tool_calls[0].function.arguments; empty: the complete row
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.pointer}: {self.reason}" if self.pointer else f"{where}: {self.reason}"


@dataclass(slots=True)
class Finding:
    """A kind of defect or warning."""

    kind: str
    meaning: str
    count: int = 0
    rows: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class Lengths:
    """Distribution of a count (messages, characters or tokens) over conversations."""

    count: int
    total: int
    min: int
    p50: int
    p90: int
    p99: int
    max: int
    bins: list[tuple[int, int, int]]  # [from, to, count] of from <= value < to, in bins of equal ratio

    @classmethod
    def from_counts(cls, counts: Counter[int]) -> Lengths:
        """Compute the distribution of values from their counts."""
        values = sorted(counts)
        num = counts.total()
        if not num:
            return cls(0, 0, 0, 0, 0, 0, 0, [])
        total = sum(value * counts[value] for value in values)
        p50, p90, p99 = (_percentile(values, counts, num, share) for share in (0.5, 0.9, 0.99))
        return cls(num, total, values[0], p50, p90, p99, values[-1], _make_bins(counts))


@dataclass(slots=True)
class Tokens:
    """Token counts of the conversations; null without a tokenizer."""

    total: int
    supervised: int  # tokens in the loss
    supervised_share: float  # supervised / total
    seq_len: int | None  # length that conversations are compared with
    num_over_seq_len: int  # conversations longer than seq_len
    num_unsupervised: int  # conversations without supervised tokens
    num_not_renderable: int  # rows that the template or tokenizer rejects; they are defects
    lengths: Lengths
    long: LongConversations | None = None  # what shortening the conversations over seq_len would lose

    def describe_long(self) -> str:
        """Return what each value of ``data.overlong`` would do with the conversations over ``seq_len``."""
        if self.long is None:
            return ""
        long, of = self.long, max(1, self.long.num_supervised)
        sampled = f" (measured on the first {long.num_measured:,})" if long.num_measured < self.num_over_seq_len else ""
        fit = choose_noun(long.lost_turns, "fits", "fit")
        lost = f", and {format_count(long.lost_turns, 'turn')} {fit} in no part" if long.lost_turns else ""
        dropped = f", and drops {long.dropped_by_cut:,}" if long.dropped_by_cut else ""
        return (
            f"overlong=drop loses all of their supervised tokens, cut {1 - long.kept_by_cut / of:.1%}{dropped}, "
            f"split_turns {1 - long.kept_by_split / of:.1%}, in {format_count(long.num_parts, 'part')}{lost}{sampled}"
        )


@dataclass(slots=True)
class ToolUse:
    """The number of conversations that declare a tool, and of calls to it."""

    name: str
    declared: int
    calls: int


@dataclass(slots=True)
class Repeat:
    """A row that repeats an earlier one, exactly or nearly."""

    row: str  # file:line
    earlier: str  # file:line of the earlier row
    similarity: float  # 1 for an exact repeat, else the estimated Jaccard similarity


@dataclass(slots=True)
class OverlapExample:
    """An item of a held-out set and a row that contains it."""

    row: str  # file:line
    item: str  # file:line (id)
    share: float  # share of the item's runs that the row contains


@dataclass(slots=True)
class OverlapFinding:
    """Items of a held-out set that occur in the rows."""

    against: str
    purpose: Literal["validation", "eval"]
    num_items: int  # items with a user turn of six words or more
    num_found: int  # items whose runs of 8 words are at least half contained in one row's user turns
    num_rows: int  # rows that contain such an item
    examples: list[OverlapExample]


@dataclass(slots=True)
class SourceSummary:
    """Rows read and kept of one source, and the error that ended its reading, if any."""

    path: str
    rows: int  # rows read
    conversations: int  # rows kept
    row_formats: dict[str, int]
    error: str | None


@dataclass(slots=True)
class AugmentedRows:
    """Conversations that `data augment` made. A changed one may have several kinds, an added one those of its original.

    Others, in the same sources, are the rows that these were made of, or that were left as they are.
    """

    changed: int = 0  # rows that were changed
    added: int = 0  # rows that were added to the row that they are made of
    kinds: dict[str, int] = field(default_factory=dict)  # changed or added rows by kind

    def add(self, kinds: list[str]) -> None:
        """Count a row that was made by these kinds."""
        is_added = not set(ADDITIONS).isdisjoint(kinds)
        self.added += is_added
        self.changed += not is_added
        for kind in dict.fromkeys(kinds):
            self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def describe(self) -> str:
        """Return the numbers of rows and kinds."""
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.kinds.items()))
        return f"{self.changed:,} changed and {self.added:,} added by data augment ({kinds})"


@dataclass(slots=True)
class SecretsFound:
    """Secrets of the conversations, each counted in every place where it stands; the warnings list the places."""

    rows: int = 0  # conversations with a secret
    kinds: dict[str, int] = field(default_factory=dict)  # places by kind of secret
    searched: list[str] = field(default_factory=list)  # what was looked for: secrets, emails, phones, paths


@dataclass(slots=True)
class Report:
    """Output of `fctune data check --json`. rows = conversations + defects; left_out is of records that are no rows."""

    sources: list[SourceSummary]
    rows: int  # rows read
    conversations: int  # rows that can be trained on
    calls: int  # calls in the conversations
    tools: int  # distinct tool names in the conversations
    duplicates: int  # conversations that repeat an earlier one exactly
    near_duplicates: int  # others that nearly repeat one (estimated Jaccard similarity of 3-word runs >= 0.8)
    defects: int  # rows that cannot be trained on; each has one defect, its first
    warnings: int  # warnings about rows that are kept
    defect_kinds: list[Finding]  # defects by kind, the most frequent first
    warning_kinds: list[Finding]  # warnings by kind, the most frequent first
    notes: dict[str, int]  # number of conversions made while reading rows, by kind
    left_out: dict[str, int]  # number of records and parts of logs that were left out, by kind
    failures: dict[str, int]  # records with an answer that failed, by the field and value that say so
    augmented: AugmentedRows
    secrets: SecretsFound
    unread_columns: dict[str, int]  # rows with a column of which nothing is in the conversation, by column
    classes: dict[str, int]  # rows by key of CLASSES
    num_messages: Lengths
    num_characters: Lengths
    tokens: Tokens | None
    reasoning: ReasoningUse
    tool_use: list[ToolUse]  # the tools called most
    duplicate_examples: list[Repeat]
    near_duplicate_examples: list[Repeat]
    overlaps: list[OverlapFinding]
    seconds: float

    @property
    def errors(self) -> list[str]:
        """The errors that ended the reading of sources."""
        return [source.error for source in self.sources if source.error is not None]

    def is_usable(self, on_invalid: str = "fail") -> bool:
        """Return True if training could start: sources are readable and have conversations but no fatal defects."""
        return not self.errors and self.conversations > 0 and (on_invalid == "skip" or self.defects == 0)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def render_text(self) -> RenderableType:
        """Render the report for a terminal."""
        parts: list[RenderableType] = [self._render_counts()]
        for error in self.errors:
            parts.append(Text(error, style="bold red"))
        if self.reasoning.warning is not None:
            parts.append(Text(f"\nReasoning: {self.reasoning.warning}.", style="yellow"))
        if self.tokens is not None and self.tokens.lengths.bins:
            parts.append(_render_histogram(self.tokens.lengths, self.tokens.seq_len))
        if self.defect_kinds:
            parts.append(_render_findings("Defects: rows that cannot be trained on", "red", self.defect_kinds))
        if self.warning_kinds:
            parts.append(_render_findings("Warnings: rows that are kept", "yellow", self.warning_kinds))
        if self.notes:
            lines = [f"  {count:>9,}  {NOTE_KINDS[kind]}" for kind, count in self.notes.items()]
            parts.append(Text("\nConversions\n" + "\n".join(lines)))
        if self.left_out:
            lines = []
            for kind, count in self.left_out.items():
                lines.append(f"  {count:>9,}  {LEFT_OUT_KINDS[kind]}")
                causes = self.failures.items() if kind == "answer_failed" else ()
                lines += [f"             {number:,} with {cause}" for cause, number in islice(causes, NUM_EXAMPLES)]
            parts.append(Text("\nLeft out\n" + "\n".join(lines)))
        if self.duplicates or self.near_duplicates:
            parts.append(Text("\nRepeats", style="bold"))
        for repeat in self.duplicate_examples[:3]:
            parts.append(Text(f"  {repeat.row} repeats {repeat.earlier}", style="dim"))
        for repeat in self.near_duplicate_examples[:3]:
            share = f"{repeat.similarity:.0%}"
            parts.append(Text(f"  {repeat.row} nearly repeats {repeat.earlier} ({share})", style="dim"))
        for overlap in self.overlaps:
            parts.append(_render_overlap(overlap))
        return Group(*parts)

    def _render_counts(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(justify="right", style="bold")
        table.add_column()
        add = functools.partial(_add_count, table)
        if left_out := sum(self.left_out.values()):
            add(self.rows + left_out, "record", f", {left_out:,} of them left out")
        add(self.rows, "row", f" in {self.seconds:.1f} s")
        add(self.conversations, "conversation")
        add(self.calls, "call", f", {format_count(self.tools, 'tool')}")
        add(self.duplicates, "duplicate", f", and {format_count(self.near_duplicates, 'near duplicate')}")
        add(self.defects, "defect", style="red" if self.defects else None)
        add(self.warnings, "warning", style="yellow" if self.warnings else None)
        for name, count in self.classes.items():
            share = count / self.conversations if self.conversations else 0.0
            table.add_row(f"{count:,}", f"with {CLASSES[name]} ({share:.0%})", style="dim")
        if self.augmented.kinds:
            made = self.augmented.changed + self.augmented.added
            table.add_row(f"{made:,}", f"augmented: {self.augmented.describe()}", style="dim")
        kinds = list_counts(self.secrets.kinds, self.secrets.searched)
        unread = f"; {text}" if (text := describe_unread(self.unread_columns)) else ""
        style = "yellow" if self.secrets.kinds else "dim"
        table.add_row(f"{self.secrets.rows:,}", f"with secrets or personal data ({kinds}){unread}", style=style)
        lengths = self.num_characters
        text = f"characters in the median, {lengths.p99:,} at the 99th percentile"
        table.add_row(f"{lengths.p50:,}", text, style="dim")
        if self.tokens is not None:
            tokens = self.tokens
            add(tokens.total, "token", f", {tokens.supervised_share:.1%} of them supervised")
            if tokens.seq_len is not None:
                add(tokens.num_over_seq_len, "conversation", f" over seq_len {tokens.seq_len:,}")
                if text := tokens.describe_long():
                    table.add_row("", text, style="dim")
            if tokens.num_unsupervised:
                table.add_row(f"{tokens.num_unsupervised:,}", "without supervised tokens", style="yellow")
        if self.reasoning.rows:
            table.add_row(f"{self.reasoning.rows:,}", self.reasoning.describe())
        if self.reasoning.rows_switched:
            table.add_row(f"{self.reasoning.rows_switched:,}", "that set a switch of the chat template", style="dim")
        return table


def make_findings(counts: Counter[str], rows: Counter[str], examples: dict[str, list[Example]]) -> list[Finding]:
    """Return the findings, the most frequent kind first."""
    meanings = {**DEFECT_KINDS, **WARNING_KINDS, **PAIR_WARNING_KINDS}
    return [Finding(kind, meanings[kind], n, rows[kind], examples[kind]) for kind, n in counts.most_common()]


def _add_count(table: Table, number: int, noun: str, more: str = "", style: str | None = None) -> None:
    table.add_row(f"{number:,}", choose_noun(number, noun) + more, style=style)


def _render_findings(title: str, style: str, findings: list[Finding]) -> Group:
    parts: list[RenderableType] = [Text(f"\n{title}", style=f"bold {style}")]
    for finding in findings:
        head = f"  [bold]{finding.count:>7,}[/]  [{style}]{finding.kind}[/]  {escape(finding.meaning)}"
        parts.append(Text.from_markup(head))
        parts.extend(Text(f"           {example}", style="dim") for example in finding.examples[:3])
    return Group(*parts)


def _render_histogram(lengths: Lengths, seq_len: int | None) -> Text:
    """Show how many conversations have how many tokens, in at most one line for each doubling."""
    rows: Counter[int] = Counter()
    for start, _, count in lengths.bins:
        rows[max(start, 1).bit_length() - 1] += count
    most = max(rows.values())
    lines = []
    for power in range(min(rows), max(rows) + 1):
        start, stop = 2**power, 2 ** (power + 1)
        bar = "█" * math.ceil(_BAR_WIDTH * rows[power] / most)
        mark = "  <- seq_len" if seq_len is not None and start <= seq_len < stop else ""
        lines.append(f"  {f'{start:,}-{stop - 1:,}':>19}  {rows[power]:>9,}  {bar}{mark}")
    longest = f"median {lengths.p50:,}, 99th percentile {lengths.p99:,}, longest {lengths.max:,}"
    return Text(f"\nTokens of a conversation: {longest}\n" + "\n".join(lines))


def _render_overlap(overlap: OverlapFinding) -> Text:
    kind = "validation split" if overlap.purpose == "validation" else "eval suite"
    occur = choose_noun(overlap.num_found, "occurs", "occur")
    items, rows = format_count(overlap.num_items, "item"), format_count(overlap.num_rows, "row")
    found = f"{overlap.num_found:,} of {items} {occur} in {rows}"
    lines = [f"\n  {e.row} contains {e.share:.0%} of {e.item}" for e in overlap.examples[:3]]
    text = f"\nOverlap with the {kind} {overlap.against}: {found}" + "".join(lines)
    return Text(text, style="bold yellow" if overlap.num_found else "")


def _percentile(values: list[int], counts: Counter[int], num: int, share: float) -> int:
    remaining = math.ceil(share * num)
    for value in values:
        remaining -= counts[value]
        if remaining <= 0:
            return value
    return values[-1]


def _make_bins(counts: Counter[int]) -> list[tuple[int, int, int]]:
    """Return one bin per value if the range is narrow, else bins of equal ratio, four per doubling."""
    if max(counts) - min(counts) < 24:
        return [(value, value + 1, counts[value]) for value in range(min(counts), max(counts) + 1)]
    bins: Counter[int] = Counter()
    for value, count in counts.items():
        bins[math.floor(4 * math.log2(value)) if value > 0 else -1] += count
    edges = [math.ceil(2 ** (i / 4)) if i >= 0 else 0 for i in range(min(bins), max(bins) + 2)]
    return [
        (start, stop, bins[i])
        for i, start, stop in zip(range(min(bins), max(bins) + 1), edges[:-1], edges[1:], strict=True)
        if start < stop
    ]
