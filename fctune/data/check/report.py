"""The report of ``fctune data check``, as JSON with a versioned schema and as text."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fctune.data.check.warnings import CLASSES, WARNING_KINDS
from fctune.data.sources import DEFECT_KINDS, NOTE_KINDS

SCHEMA_VERSION = 2
NUM_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Example:
    """An example of a finding: its location in a row and the reason."""

    file: str
    line: int
    pointer: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.pointer}: {self.reason}" if self.pointer else f"{where}: {self.reason}"


@dataclass(slots=True)
class Finding:
    """A kind of defect or warning: its count, the number of rows that have it, and the first examples."""

    kind: str
    meaning: str
    count: int = 0
    rows: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass(slots=True)
class Lengths:
    """A distribution: count, total, extremes, percentiles and a histogram whose bins have equal ratios."""

    count: int
    total: int
    min: int
    p50: int
    p90: int
    p99: int
    max: int
    bins: list[tuple[int, int, int]]
    """(from, to, count) of the values with from <= value < to."""

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
    """Token counts of the conversations."""

    total: int
    supervised: int
    supervised_share: float
    seq_len: int | None
    num_over_seq_len: int
    num_unsupervised: int
    """Conversations without supervised tokens."""
    num_not_renderable: int
    lengths: Lengths


@dataclass(slots=True)
class ToolUse:
    """The number of conversations that declare a tool, and of calls to it."""

    name: str
    declared: int
    calls: int


@dataclass(slots=True)
class Repeat:
    """A row that repeats an earlier one, exactly (similarity 1) or nearly."""

    row: str
    earlier: str
    similarity: float


@dataclass(slots=True)
class OverlapFinding:
    """Items of a held-out set (purpose: validation or eval) that occur in the rows."""

    against: str
    purpose: str
    num_items: int
    num_found: int
    num_rows: int
    examples: list[dict[str, Any]]


@dataclass(slots=True)
class SourceSummary:
    """A source: its rows by row format, and the error that ended its reading, if any."""

    path: str
    rows: int
    conversations: int
    row_formats: dict[str, int]
    error: str | None


@dataclass(slots=True)
class Report:
    """The complete result of a check; ``rows`` is ``conversations`` plus ``defects``."""

    sources: list[SourceSummary]
    rows: int
    conversations: int
    calls: int
    tools: int
    duplicates: int
    near_duplicates: int
    defects: int
    warnings: int
    defect_kinds: list[Finding]
    warning_kinds: list[Finding]
    notes: dict[str, int]
    classes: dict[str, int]
    num_messages: Lengths
    num_characters: Lengths
    tokens: Tokens | None
    tool_use: list[ToolUse]
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
        """Return the report as JSON that obeys ``REPORT_SCHEMA``."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    def render_text(self) -> RenderableType:
        """Render the report for a terminal."""
        parts: list[RenderableType] = [self._render_counts()]
        for error in self.errors:
            parts.append(Text(error, style="bold red"))
        if self.defect_kinds:
            parts.append(_render_findings("Defects: rows that cannot be trained on", "red", self.defect_kinds))
        if self.warning_kinds:
            parts.append(_render_findings("Warnings: rows that are kept", "yellow", self.warning_kinds))
        if self.notes:
            lines = [f"  {count:>9,}  {NOTE_KINDS[kind]}" for kind, count in self.notes.items()]
            parts.append(Text("\nConversions\n" + "\n".join(lines)))
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
        table.add_row(f"{self.rows:,}", f"rows in {self.seconds:.1f} s")
        table.add_row(f"{self.conversations:,}", "conversations")
        table.add_row(f"{self.calls:,}", f"calls, {self.tools:,} tools")
        table.add_row(f"{self.duplicates:,}", f"duplicates, and {self.near_duplicates:,} near duplicates")
        table.add_row(f"{self.defects:,}", "defects", style="red" if self.defects else None)
        table.add_row(f"{self.warnings:,}", "warnings", style="yellow" if self.warnings else None)
        for name, count in self.classes.items():
            share = count / self.conversations if self.conversations else 0.0
            table.add_row(f"{count:,}", f"with {CLASSES[name]} ({share:.0%})", style="dim")
        lengths = self.num_characters
        text = f"characters in the median, {lengths.p99:,} at the 99th percentile"
        table.add_row(f"{lengths.p50:,}", text, style="dim")
        if self.tokens is not None:
            tokens = self.tokens
            table.add_row(f"{tokens.total:,}", f"tokens, {tokens.supervised_share:.1%} of them supervised")
            if tokens.seq_len is not None:
                table.add_row(f"{tokens.num_over_seq_len:,}", f"conversations over seq_len {tokens.seq_len:,}")
            if tokens.num_unsupervised:
                table.add_row(f"{tokens.num_unsupervised:,}", "without supervised tokens", style="yellow")
        return table


def make_findings(counts: Counter[str], rows: Counter[str], examples: dict[str, list[Example]]) -> list[Finding]:
    """Return the findings, the most frequent kind first."""
    meanings = {**DEFECT_KINDS, **WARNING_KINDS}
    return [Finding(kind, meanings[kind], n, rows[kind], examples[kind]) for kind, n in counts.most_common()]


def _render_findings(title: str, style: str, findings: list[Finding]) -> Group:
    parts: list[RenderableType] = [Text(f"\n{title}", style=f"bold {style}")]
    for finding in findings:
        head = f"  [bold]{finding.count:>7,}[/]  [{style}]{finding.kind}[/]  {escape(finding.meaning)}"
        parts.append(Text.from_markup(head))
        parts.extend(Text(f"           {example}", style="dim") for example in finding.examples[:3])
    return Group(*parts)


def _render_overlap(overlap: OverlapFinding) -> Text:
    kind = "validation split" if overlap.purpose == "validation" else "eval suite"
    found = f"{overlap.num_found:,} of {overlap.num_items:,} items occur in {overlap.num_rows:,} rows"
    lines = [f"\n  {e['row']} contains {e['share']:.0%} of {e['item']}" for e in overlap.examples[:3]]
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
