"""Page of ``fctune data check``: defects, warnings, contents, tools, duplicates and overlaps of a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fctune.config.intervals import choose_noun, format_count
from fctune.data.check import CLASSES, Report
from fctune.data.check.report import Finding, Lengths, Repeat
from fctune.data.secrets import describe_kind
from fctune.data.sources import LEFT_OUT_KINDS, NOTE_KINDS
from fctune.pages.page import (
    Chart,
    Example,
    Fold,
    Group,
    Heading,
    Items,
    Num,
    Page,
    Part,
    Series,
    Table,
    Text,
    Tile,
    Tone,
    make_count_tile,
)

_NUM_TOOLS = 15


def write_data_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page of a data check."""
    page = Page("Data check", *_headline(report))
    _add_tiles(page, report)
    for error in report.errors:
        page.add_section("Read error", Text(error, "bad"))
    if report.reasoning.warning is not None:
        page.add_section("Reasoning", Text(f"{report.reasoning.warning}.", "warn"))
    if report.defect_kinds:
        lead = "Rows that cannot be used for training, each listed with its first defect."
        page.add_section("Defects", *map(_make_finding, report.defect_kinds), lead=lead)
    if report.warning_kinds:
        lead = "Rows that are kept although something may be wrong with them."
        page.add_section("Warnings", *map(_make_finding, report.warning_kinds), lead=lead)
    _add_contents(page, report)
    if report.tool_use:
        _add_tools(page, report)
    if report.duplicates or report.near_duplicates:
        _add_duplicates(page, report)
    for overlap in report.overlaps:
        name = "validation split" if overlap.purpose == "validation" else "eval suite"
        items, occur = format_count(overlap.num_items, "item"), choose_noun(overlap.num_found, "occurs", "occur")
        in_rows = f"{occur} in {format_count(overlap.num_rows, 'row')}"
        lead = f"{overlap.num_found:,} of {items} of {overlap.against} {in_rows}."
        examples = [[e.item, e.row, f"{e.share:.0%}"] for e in overlap.examples]
        table = Table(["Item", "First row that contains it", Num("Share")], examples)
        page.add_section(f"Overlap with the {name}", *([table] if examples else []), lead=lead)
    if report.augmented.kinds:
        lead = "Rows that fctune data augment made. An added row also has the kinds of the changes of its original."
        table = Table(["Kind", Num("Rows")], sorted([kind, count] for kind, count in report.augmented.kinds.items()))
        page.add_section("Augmentation", table, lead=lead)
    if report.secrets.kinds:
        rows = format_count(report.secrets.rows, "conversation")
        lead = f"Places in {rows} that look like credentials or personal data. Their texts are not shown anywhere."
        table = Table(
            ["Kind", "Meaning", Num("Places")], [[k, describe_kind(k), n] for k, n in report.secrets.kinds.items()]
        )
        page.add_section("Secrets", table, lead=lead)
    if report.notes:
        notes = [[count, NOTE_KINDS[kind]] for kind, count in report.notes.items()]
        page.add_section("Conversions while reading", Table([Num("Count"), "Conversion"], notes))
    if report.left_out:
        left_out = [[count, LEFT_OUT_KINDS[kind]] for kind, count in report.left_out.items()]
        tables = [Table([Num("Count"), "Records and parts of logs"], left_out)]
        if report.failures:
            tables.append(Table([Num("Count"), "What says that the answer failed"], _swap(report.failures)))
        page.add_section("Left out", *tables)
    if report.unread_columns:
        lead = "Columns that are in no conversation. They are not trained on, and not searched for secrets."
        columns = Table([Num("Rows"), "Column"], _swap(report.unread_columns))
        page.add_section("Columns that are not read", columns, lead=lead)
    sources = [[s.path, s.rows, s.conversations, ", ".join(s.row_formats)] for s in report.sources]
    page.add_section("Sources", Table(["Source", Num("Rows"), Num("Kept"), "Row format"], sources))
    page.write(path, f"fctune data check: {format_count(report.rows, 'row')} in {report.seconds:.1f} s")


def _swap(counts: Mapping[str, int]) -> list[list[object]]:
    return [[count, name] for name, count in counts.items()]


def _headline(report: Report) -> tuple[str, Tone]:
    if report.errors:
        sources = format_count(len(report.sources), "source")
        return f"{len(report.errors):,} of {sources} could not be read completely.", "bad"
    if report.defects:
        return f"{report.defects:,} of {format_count(report.rows, 'row')} cannot be used for training.", "bad"
    if any(overlap.num_found for overlap in report.overlaps):
        return "Every row can be used for training, but held-out items occur in the training rows.", "warn"
    if report.reasoning.warning is not None:
        return "Every row can be used for training, but the model would forget when to think.", "warn"
    if report.warnings:
        return f"Every row can be used for training. {format_count(report.warnings, 'warning')}.", "warn"
    return "Every row can be used for training.", "good"


def _add_tiles(page: Page, report: Report) -> None:
    tiles: list[Tile] = [
        make_count_tile(report.rows, "row"),
        make_count_tile(report.conversations, "conversation"),
        make_count_tile(report.calls, "call"),
        make_count_tile(report.tools, "tool"),
        make_count_tile(report.duplicates, "duplicate", "warn"),
        make_count_tile(report.near_duplicates, "near duplicate", "warn"),
        make_count_tile(report.defects, "defect", "bad"),
        make_count_tile(report.warnings, "warning", "warn"),
    ]
    if report.tokens is not None:
        tokens = report.tokens
        tiles.append(make_count_tile(tokens.total, "token"))
        tiles.append((f"{tokens.supervised_share:.1%}", "supervised tokens", "" if tokens.supervised else "bad"))
        if tokens.seq_len is not None:
            over = tokens.num_over_seq_len
            tiles.append((f"{over:,}", f"longer than seq_len {tokens.seq_len:,}", "warn" if over else "good"))
    if report.augmented.kinds:
        for count, verb in ((report.augmented.changed, "changed"), (report.augmented.added, "added")):
            tiles.append(make_count_tile(count, "row", more=f" {verb} by augmentation"))
    if report.secrets.kinds:
        tiles.append(make_count_tile(report.secrets.rows, "row", "warn", more=" with secrets"))
    if report.reasoning.rows:
        tiles.append((f"{report.reasoning.rows_share:.0%}", "rows with reasoning", ""))
        if report.reasoning.tokens is not None:
            tiles.append((f"{report.reasoning.tokens:,}", "tokens of reasoning", ""))
    page.add_tiles(tiles)


def _make_finding(finding: Finding) -> Fold:
    parts: list[Part] = [Items([Example(f"{e.file}:{e.line}", e.pointer, e.reason) for e in finding.examples])]
    if (more := finding.count - len(finding.examples)) > 0:
        parts.append(Text(f"and {more:,} more", "muted"))
    return Fold(finding.meaning, parts, is_open=True, count=finding.count, code=finding.kind)


def _add_contents(page: Page, report: Report) -> None:
    counts = [report.classes[name] for name in CLASSES]
    title = "Conversations by kind of call"
    charts = [Chart("bars", list(CLASSES.values()), [Series("conversations", counts)], title=title)]
    if report.tokens is not None and report.tokens.lengths.count:
        charts.append(_make_lengths(report.tokens.lengths, "tokens", report.tokens.describe_long()))
    charts.append(_make_lengths(report.num_characters, "characters"))
    charts.append(_make_lengths(report.num_messages, "messages"))
    page.add_section("Contents", Group(charts, "pair"))


def _make_lengths(lengths: Lengths, unit: str, note: str = "") -> Chart:
    labels = [str(a) if b == a + 1 else f"{a:,}–{b - 1:,}" for a, b, _ in lengths.bins]
    series = [Series("conversations", [n for *_, n in lengths.bins])]
    values = f"median {lengths.p50:,}, 90th percentile {lengths.p90:,}, 99th {lengths.p99:,}, longest {lengths.max:,}"
    note = f"{values}. Of those over seq_len, {note}" if note else values
    return Chart("histogram", labels, series, unit, title=f"{unit.capitalize()} per conversation", note=note)


def _add_tools(page: Page, report: Report) -> None:
    top = report.tool_use[:_NUM_TOOLS]
    series = [Series("calls", [tool.calls for tool in top]), Series("available", [tool.declared for tool in top])]
    num_tools = max(report.tools, len(report.tool_use))  # a call may name a tool that no conversation lists
    chosen = f"The {len(top):,} most called of {num_tools:,} tools" if len(top) < num_tools else "All tools"
    lead = f"{chosen}: calls, and conversations that list the tool."
    page.add_section("Tools", Chart("bars", [tool.name for tool in top], series, "tool"), lead=lead)


def _add_duplicates(page: Page, report: Report) -> None:
    parts: list[Part] = []
    for count, noun, examples in (
        (report.duplicates, "duplicate", report.duplicate_examples),
        (report.near_duplicates, "near duplicate", report.near_duplicate_examples),
    ):
        if count:
            rows = [[repeat.row, _shorten(repeat), f"{repeat.similarity:.0%}"] for repeat in examples]
            parts += [Heading(format_count(count, noun)), Table(["Row", "Earlier row", Num("Similarity")], rows)]
    lead = "Rows that repeat an earlier row. Similarity is estimated over sequences of three words."
    page.add_section("Duplicates", *parts, lead=lead)


def _shorten(repeat: Repeat) -> str:
    """Name the earlier row, by its line alone if it is in the same file."""
    file, _, line = repeat.earlier.rpartition(":")
    return f"line {line}" if repeat.row.rpartition(":")[0] == file else repeat.earlier
