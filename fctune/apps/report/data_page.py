"""Page of ``fctune data check``: defects, warnings, contents, tools, duplicates and overlaps of a dataset."""

from __future__ import annotations

import os

from fctune.config.intervals import choose_noun, format_count
from fctune.data.check import CLASSES, Report
from fctune.data.check.report import Finding, Lengths, Repeat
from fctune.data.sources import NOTE_KINDS
from fctune.pages.page import Chart, Page, Series, Tone, escape, make_count_tile, make_table

_NUM_TOOLS = 15


def write_data_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page of a data check."""
    footer = f"fctune data check: {format_count(report.rows, 'row')} in {report.seconds:.1f} s"
    make_data_page(report).write(path, footer)


def make_data_page(report: Report) -> Page:
    """Make the page of a data check."""
    page = Page("Data check", *_headline(report))
    _add_tiles(page, report)
    for error in report.errors:
        page.add_section("Read error", f'<p class="bad">{escape(error)}</p>')
    if report.reasoning.warning is not None:
        page.add_section("Reasoning", f'<p class="warn">{escape(report.reasoning.warning)}.</p>')
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
        rows: list[list[object]] = [[e.item, e.row, f"{e.share:.0%}"] for e in overlap.examples]
        table = make_table([("Item", False), ("First row that contains it", False), ("Share", True)], rows)
        page.add_section(f"Overlap with the {name}", table if rows else "", lead=lead)
    if report.notes:
        rows = [[count, NOTE_KINDS[kind]] for kind, count in report.notes.items()]
        page.add_section("Conversions while reading", make_table([("Count", True), ("Conversion", False)], rows))
    columns = [("Source", False), ("Rows", True), ("Kept", True), ("Row format", False)]
    rows = [[s.path, s.rows, s.conversations, ", ".join(s.row_formats)] for s in report.sources]
    page.add_section("Sources", make_table(columns, rows))
    return page


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
    tiles: list[tuple[str, str, Tone]] = [
        make_count_tile(report.rows, "row"),
        make_count_tile(report.conversations, "conversation"),
        make_count_tile(report.calls, "call"),
        make_count_tile(report.tools, "tool"),
        make_count_tile(report.duplicates, "duplicate", "warn" if report.duplicates else ""),
        make_count_tile(report.near_duplicates, "near duplicate", "warn" if report.near_duplicates else ""),
        make_count_tile(report.defects, "defect", "bad" if report.defects else ""),
        make_count_tile(report.warnings, "warning", "warn" if report.warnings else ""),
    ]
    if report.tokens is not None:
        tokens = report.tokens
        tiles.append(make_count_tile(tokens.total, "token"))
        tiles.append((f"{tokens.supervised_share:.1%}", "supervised tokens", "" if tokens.supervised else "bad"))
        if tokens.seq_len is not None:
            over = tokens.num_over_seq_len
            tiles.append((f"{over:,}", f"longer than seq_len {tokens.seq_len:,}", "warn" if over else "good"))
    if report.reasoning.rows:
        tiles.append((f"{report.reasoning.rows_share:.0%}", "rows with reasoning", ""))
        if report.reasoning.tokens is not None:
            tiles.append((f"{report.reasoning.tokens:,}", "tokens of reasoning", ""))
    page.add_tiles(tiles)


def _make_finding(finding: Finding) -> str:
    examples = "".join(
        f'<li><span class="where">{escape(f"{e.file}:{e.line}")}</span>'
        f"{f'<code>{escape(e.pointer)}</code> ' if e.pointer else ''}{escape(e.reason)}</li>"
        for e in finding.examples
    )
    more = finding.count - len(finding.examples)
    rest = f'<p class="muted">and {more:,} more</p>' if more > 0 else ""
    return (
        f'<details open><summary><span class="count">{finding.count:,}</span><code>{escape(finding.kind)}</code> '
        f'{escape(finding.meaning)}</summary><ul class="examples">{examples}</ul>{rest}</details>'
    )


def _add_contents(page: Page, report: Report) -> None:
    names = list(CLASSES)
    counts = [report.classes[name] for name in names]
    bars = Chart("bars", [CLASSES[name] for name in names], [Series("conversations", counts)])
    parts = [page.make_chart(bars, "Conversations by kind of call")]
    if report.tokens is not None and report.tokens.lengths.count:
        parts.append(_make_lengths(page, report.tokens.lengths, "Tokens per conversation", "tokens"))
    parts.append(_make_lengths(page, report.num_characters, "Characters per conversation", "characters"))
    parts.append(_make_lengths(page, report.num_messages, "Messages per conversation", "messages"))
    page.add_section("Contents", f'<div class="pair">{"".join(parts)}</div>')


def _make_lengths(page: Page, lengths: Lengths, title: str, unit: str) -> str:
    labels = [str(a) if b == a + 1 else f"{a:,}–{b - 1:,}" for a, b, _ in lengths.bins]
    chart = Chart("histogram", labels, [Series("conversations", [n for *_, n in lengths.bins])], unit, "")
    values = f"median {lengths.p50:,}, 90th percentile {lengths.p90:,}, 99th {lengths.p99:,}, longest {lengths.max:,}"
    return page.make_chart(chart, title, values)


def _add_tools(page: Page, report: Report) -> None:
    top = report.tool_use[:_NUM_TOOLS]
    series = [Series("calls", [tool.calls for tool in top]), Series("available", [tool.declared for tool in top])]
    chart = page.make_chart(Chart("bars", [tool.name for tool in top], series, "tool"))
    num_tools = max(report.tools, len(report.tool_use))  # a call may name a tool that no conversation lists
    chosen = f"The {len(top):,} most called of {num_tools:,} tools" if len(top) < num_tools else "All tools"
    lead = f"{chosen}: calls, and conversations that list the tool."
    page.add_section("Tools", chart, lead=lead)


def _add_duplicates(page: Page, report: Report) -> None:
    def rows(repeats: list[Repeat]) -> list[list[object]]:
        return [[repeat.row, _shorten(repeat), f"{repeat.similarity:.0%}"] for repeat in repeats]

    columns = [("Row", False), ("Earlier row", False), ("Similarity", True)]
    parts = []
    if report.duplicates:
        same = make_table(columns, rows(report.duplicate_examples))
        parts.append(f"<h3>{format_count(report.duplicates, 'duplicate')}</h3>{same}")
    if report.near_duplicates:
        near = make_table(columns, rows(report.near_duplicate_examples))
        parts.append(f"<h3>{format_count(report.near_duplicates, 'near duplicate')}</h3>{near}")
    lead = "Rows that repeat an earlier row. Similarity is estimated over sequences of three words."
    page.add_section("Duplicates", *parts, lead=lead)


def _shorten(repeat: Repeat) -> str:
    """Name the earlier row, by its line alone if it is in the same file."""
    file, _, line = repeat.earlier.rpartition(":")
    return f"line {line}" if repeat.row.rpartition(":")[0] == file else repeat.earlier
