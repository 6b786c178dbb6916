"""Conversion of a source's rows to clean rows in OpenAI's format, with counts of what changed.

https://platform.openai.com/docs/guides/fine-tuning: arguments as a string of JSON, an id for every call, results that
name the id of their call, tools in their wrapper; reasoning in ``reasoning_content``. Converting converted rows changes
nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import DataError
from fctune.base.files import open_atomically
from fctune.base.json_reader import MAX_DEPTH, is_deeper_than
from fctune.config.intervals import format_count
from fctune.config.sections.data import Fold, RedactConfig
from fctune.data.call_ids import find_answered
from fctune.data.check.similarity import SimilarityIndex, WordHasher
from fctune.data.check.warnings import iter_warnings
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.data.fold import with_run
from fctune.data.redaction import SecretScreen
from fctune.data.secrets import Finding, SecretCounts, warn
from fctune.data.sources import (
    DEFAULT_SELECTION,
    LEFT_OUT_KINDS,
    NOTE_KINDS,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
    UnreadRow,
    scan_source,
)
from fctune.data.sources.columns import Columns
from fctune.data.sources.row_formats.registry import list_columns
from fctune.data.sources.unmatched import require_selected

CHANGE_KINDS: dict[str, str] = {
    "arguments_rewritten": "calls whose arguments were an object, or are spelled differently",
    "call_ids_added": "calls that got an id",
    "calls_from_text": "calls that were text, in a column of their own, or in the form of another API",
    "columns_dropped": "values in columns that rows of conversations do not have",
    "reasoning_moved": "messages whose reasoning was elsewhere than in reasoning_content",
    "result_ids_added": "results that got the id of their call",
    "tools_added": "rows without tools that got those given",
    "tools_normalised": "rows whose tools are spelled differently",
}
"""What a conversion changes in rows, beyond what reading them does (``NOTE_KINDS``)."""

MAX_SKIPPED = 10_000
_PROGRESS_ROWS = 500
_NUM_SHOWN = 10


@dataclass(slots=True)
class ConversionReport:
    """The result of a conversion; ``rows`` = ``converted`` + the numbers of skipped and dropped rows and duplicates.

    Attributes:
        rows: Rows read.
        converted: Rows written.
        unchanged: Rows written with the bytes that they had.
        row_formats: Rows written, by the format that they had.
        changes: Changes, by their kind in ``CHANGE_KINDS``.
        notes: Conversions made while reading, by their kind in ``NOTE_KINDS``.
        left_out: Records and parts of logs that are no rows, by their kind in ``LEFT_OUT_KINDS``.
        columns: Rows that had a column which was dropped, by its name.
        num_skipped: Rows that cannot be converted.
        skipped: The first of them, with the reasons.
        num_dropped: Rows left out because of a kind of warning.
        dropped: Rows left out, by each kind of warning that they were to be left out for.
        duplicates: Rows left out because they repeat an earlier one.
        near_duplicates: Rows written although they nearly repeat an earlier one; counted with ``is_distinct`` only.
        warnings: Rows written, by each kind of warning that they have.
        num_warned: Rows written with a warning.
        secrets: Secrets of the rows written.
        is_redacted: Placeholders replace them.
    """

    rows: int = 0
    converted: int = 0
    unchanged: int = 0
    row_formats: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    columns: Counter[str] = field(default_factory=Counter)
    num_skipped: int = 0
    skipped: list[Defect] = field(default_factory=list)
    num_dropped: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    near_duplicates: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    num_warned: int = 0
    secrets: SecretCounts = field(default_factory=SecretCounts)
    is_redacted: bool = False

    def describe(self, source: str, out: str | None) -> list[str]:
        """Return lines on what was read, changed and skipped; ``out`` is the file written, None if there is none."""
        num_records = self.rows + self.left_out.total()
        records = f"{format_count(num_records, 'record')}, " if self.left_out else ""
        head = f"{source}: {records}{format_count(self.rows, 'row')}, {self.converted:,} converted"
        if self.converted:
            head += f" ({', '.join(f'{count:,} {name}' for name, count in self.row_formats.most_common())})"
        lines = [f"{head}, {self.unchanged:,} of them unchanged, {self.num_skipped:,} skipped"]
        if self.left_out:
            kinds = self.left_out.most_common()
            lines += ["Left out", *(f"  {count:>9,}  {LEFT_OUT_KINDS[kind]}" for kind, count in kinds)]
        if self.num_dropped:
            lines.append(f"Dropped for their warnings: {format_count(self.num_dropped, 'row')} ({_list(self.dropped)})")
        if self.duplicates:
            lines.append(f"Dropped: {format_count(self.duplicates, 'duplicate')} of earlier rows")
        meanings = {**CHANGE_KINDS, **NOTE_KINDS}
        counts = self.changes + self.notes
        if counts:
            lines += ["Changes", *(f"  {count:>9,}  {meanings[kind]}" for kind, count in counts.most_common())]
        if self.columns:
            dropped = ", ".join(f"{name} ({count:,})" for name, count in self.columns.most_common(_NUM_SHOWN))
            lines.append(f"Columns that were dropped, and rows that had them: {dropped}")
        if self.num_skipped:
            lines += ["Skipped", *(f"  {defect}" for defect in self.skipped[:_NUM_SHOWN])]
            if self.num_skipped > _NUM_SHOWN:
                lines.append(f"  ... and {self.num_skipped - _NUM_SHOWN:,} more; --json FILE lists them")
        if self.near_duplicates:
            lines.append(f"Kept: {format_count(self.near_duplicates, 'near duplicate')} of earlier rows")
        if self.num_warned:
            lines.append(f"Kept with a warning: {format_count(self.num_warned, 'row')} ({_list(self.warnings)})")
            lines.append(
                "  `fctune data check` shows them; --drop KIND,... leaves rows with these kinds of warnings out"
            )
        if self.secrets.kinds or self.secrets.searched:
            lines.append(self.secrets.describe_with_option(self.is_redacted))
        lines.append("Nothing was written." if out is None else f"{format_count(self.converted, 'row')} in {out}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        names = ("row_formats", "changes", "notes", "left_out", "columns", "dropped", "warnings")
        counts = {name: dict(getattr(self, name)) for name in names}
        skipped = [
            {"file": d.file, "line": d.line, "pointer": d.pointer, "kind": d.kind, "reason": d.reason}
            for d in self.skipped
        ]
        totals = {"rows": self.rows, "converted": self.converted, "unchanged": self.unchanged}
        totals |= {name: getattr(self, name) for name in ("num_dropped", "duplicates", "near_duplicates", "num_warned")}
        secrets = self.secrets.to_json() | {"redacted": self.is_redacted}
        return {**totals, "secrets": secrets, **counts, "num_skipped": self.num_skipped, "skipped": skipped}


def _list(kinds: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())


def convert_source(
    path: str,
    out: Path,
    row_format: str = "auto",
    max_samples: int | None = None,
    is_strict: bool = False,
    on_progress: Callable[[ConversionReport], None] | None = None,
    tools: tuple[Tool, ...] = (),
    columns: Columns | None = None,
    drop: Collection[str] = (),
    is_distinct: bool = False,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    redact: RedactConfig | None = None,
) -> ConversionReport:
    """Write the rows of a source as JSON lines in OpenAI's format, in order; ``out`` is replaced when all are written.

    Args:
        path: A source in any form that ``read_source`` accepts.
        out: File to write.
        row_format: Format of the rows, or auto.
        max_samples: Maximum number of rows read.
        is_strict: Write nothing if a row cannot be converted.
        on_progress: Called every 500 rows with the counts so far.
        tools: Tools of the rows that have none.
        columns: The format's name for each column of another name, or ``ignore``.
        drop: Kinds of warnings whose rows are left out, keys of ``WARNING_KINDS``.
        is_distinct: Leave out rows that repeat an earlier one, and count those that nearly do.
        fold: Leave out records that others continue: always, never, or in logs (auto).
        selection: Which rows are read, and which of their turns are context.
        redact: Replace secrets by placeholders; None counts them.

    Raises:
        DataError: The source cannot be read, or not to its end; or no row meets the conditions.
        RowsSkippedError: No row can be converted, or with ``is_strict`` one cannot.
    """
    reader = RowReader(row_format, columns, tools, selection=selection)
    chooser = _Chooser(frozenset(drop), is_distinct)
    screen, report = SecretScreen(redact), ConversionReport(is_redacted=redact is not None)
    report.secrets.searched = list(screen.scanner.kinds)
    with contextlib.closing(chooser), open_atomically(out) as file:
        for row in islice(scan_source(path, row_format, columns, fold, selection, tools), max_samples):
            line = _convert(row, reader, report, tools, chooser, screen, fold)
            if line is not None:
                file.write(line)
            if on_progress is not None and report.rows % _PROGRESS_ROWS == 0:
                on_progress(report)
        if not report.rows:
            require_selected([path], report.left_out, row_format, columns, fold, selection)
        if not report.converted or (is_strict and report.num_skipped):
            raise RowsSkippedError(report)
        report.near_duplicates = chooser.count_near_duplicates()
    return report


class _Chooser:
    """Decides which rows are written: not those with kinds of warnings to drop, nor repeats of earlier rows."""

    def __init__(self, drop: frozenset[str], is_distinct: bool) -> None:
        self.drop = drop
        self._seen: set[str] | None = set() if is_distinct else None
        self._index = SimilarityIndex(WordHasher()) if is_distinct else None

    def keeps(self, parsed: ParsedRow, findings: Sequence[Finding], report: ConversionReport) -> bool:
        """Return True if a row, with these secrets, is to be written; adds to the report in place."""
        kinds = {warning.kind for warning in warn(findings, iter_warnings(parsed))}
        if unwanted := kinds & self.drop:
            report.num_dropped += 1
            report.dropped.update(unwanted)
            return False
        if self._seen is not None and self._index is not None:
            digest = parsed.conversation.digest()
            if digest in self._seen:
                report.duplicates += 1
                return False
            self._seen.add(digest)
            self._index.add(parsed.conversation, 0, report.rows, parsed.digest())
        report.num_warned += bool(kinds)
        report.warnings.update(kinds)
        return True

    def count_near_duplicates(self) -> int:
        """Return the number of written rows that nearly repeat an earlier one."""
        return 0 if self._index is None else self._index.find_repeats().num_near

    def close(self) -> None:
        """Delete the temporary file of the index."""
        if self._index is not None:
            self._index.close()


class RowsSkippedError(DataError):
    """Rows that cannot be converted kept a conversion from being written; ``report`` has them."""

    def __init__(self, report: ConversionReport) -> None:
        super().__init__(
            f"{report.num_skipped:,} of {format_count(report.rows, 'row')} cannot be converted; nothing was written"
        )
        self.report = report


def _convert(
    row: UnreadRow,
    reader: RowReader,
    report: ConversionReport,
    tools: tuple[Tool, ...],
    chooser: _Chooser,
    screen: SecretScreen,
    fold: Fold,
) -> str | None:
    """Return the line of a converted row, with its end, or None if it is left out; adds to the report in place."""
    report.left_out.update(row.left_out or {})
    parsed = reader.read(row)
    if isinstance(parsed, LeftOut):
        report.left_out[parsed.kind] += 1
        return None
    report.rows += 1
    if isinstance(parsed, ParsedRow):
        gets_tools = bool(tools) and parsed.conversation.tools is tools
        parsed, redaction = screen.screen(with_run(parsed, fold))
        converted = to_openai_row(parsed.conversation)
        if isinstance(parsed.raw.get("parallel_tool_calls"), bool):
            converted["parallel_tool_calls"] = parsed.raw["parallel_tool_calls"]
        if parsed.provenance:
            converted["metadata"] = parsed.provenance
        if is_deeper_than(converted, MAX_DEPTH):
            reason = f"nested deeper than {MAX_DEPTH} levels when its tools are in OpenAI's wrapper"
            parsed = Defect(row.file, row.line, parsed.tools_pointer, "too_deep", reason)
    if isinstance(parsed, Defect):
        report.num_skipped += 1
        if len(report.skipped) < MAX_SKIPPED:
            report.skipped.append(screen.scanner.hide(parsed, row.value))
        return None
    if not chooser.keeps(parsed, [] if report.is_redacted else redaction.findings, report):
        return None
    report.secrets.count(redaction.findings, redaction.num_turns)
    line = json.dumps(converted, ensure_ascii=False)
    report.converted += 1
    report.row_formats[parsed.row_format] += 1
    if isinstance(row.value, bytes) and row.value.strip() == line.encode():
        report.unchanged += 1
    else:
        report.notes.update(parsed.notes)
        report.changes.update(count_changes(parsed, converted))
        report.changes.update({"tools_added": 1} if gets_tools else {})
        report.columns.update(_find_dropped_columns(parsed))
    return line + "\n"


def to_openai_row(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as a row of OpenAI's format; calls without an id get one, and so do their results."""
    taken = {call.id for message in conversation.messages for call in message.calls}
    names = (name for number in range(1, 10**9) if (name := f"call_{number}") not in taken)
    pending: list[tuple[Call, str]] = []
    messages = []
    for message in conversation.messages:
        written: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            written["reasoning_content"] = message.reasoning
        if message.role == "tool":
            index = find_answered([call for call, _ in pending], message.call_id, message.name)
            assert index is not None, "the reader refuses a result without a call"
            written["tool_call_id"] = pending.pop(index)[1]
        elif message.calls:
            called = [(call, call.id if call.id is not None else next(names)) for call in message.calls]
            pending += called
            written["tool_calls"] = [_write_call(*one) for one in called]
        else:
            pending = []
        if message.name is not None:
            written["name"] = message.name
        if message.weight != 1.0:
            written["weight"] = message.weight
        messages.append(written)
    return {**conversation.to_openai(), "messages": messages}


def _find_dropped_columns(parsed: ParsedRow) -> list[str]:
    """Return the columns of a row whose values are not in its conversation."""
    read = {*list_columns("openai" if parsed.row_format == "synthetic" else parsed.row_format)}
    read |= parsed.conversation.template_args.keys()
    if parsed.provenance and parsed.raw["metadata"].keys() == parsed.provenance.keys():
        read.add("metadata")
    return [str(to_encodable(name)) for name in parsed.raw if name not in read]


def count_changes(parsed: ParsedRow, converted: dict[str, Any]) -> Counter[str]:
    """Count what differs between a row as it was read and as it is written, by the kinds of ``CHANGE_KINDS``."""
    raw, messages = parsed.raw, parsed.conversation.messages
    calls = [call for message in messages for call in message.calls]
    changes: Counter[str] = Counter()
    changes["call_ids_added"] = sum(call.id is None for call in calls)
    pairs = zip(messages, converted["messages"], strict=True)
    changes["result_ids_added"] = sum(m.role == "tool" and m.call_id != row["tool_call_id"] for m, row in pairs)
    changes["columns_dropped"] = len(_find_dropped_columns(parsed))
    if parsed.row_format in ("openai", "synthetic"):
        before, after = _list_arguments(raw.get("messages")), _list_arguments(converted["messages"])
        changes["arguments_rewritten"] = sum(a != b for a, b in zip(before, after, strict=False))
    else:
        changes["calls_from_text"] = len(calls)
    changes["reasoning_moved"] = _count_moved_reasoning(raw, messages)
    changes["tools_normalised"] = bool(raw and parsed.conversation.tools) and raw.get("tools") != converted["tools"]
    return +changes


def _write_call(call: Call, identity: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _list_arguments(messages: Any) -> list[Any]:
    """Return the arguments of each call in a row of OpenAI's format, as they stand there."""
    found = []
    for message in messages if isinstance(messages, list) else ():
        for call in message.get("tool_calls") or ():
            found.append((call.get("function") or call).get("arguments"))
    return found


def _count_moved_reasoning(raw: dict[str, Any], messages: tuple[Message, ...]) -> int:
    texts = [message.reasoning for message in messages if message.reasoning is not None]
    turns = raw.get("messages")
    listed = (
        [turn.get("reasoning_content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    )
    kept = {text for text in listed if isinstance(text, str)}
    return sum(text not in kept for text in texts)
