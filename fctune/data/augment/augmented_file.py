"""Files of augmented rows, which ``fctune data augment`` writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fctune.base.errors import DataError
from fctune.base.files import open_atomically
from fctune.config.intervals import format_count
from fctune.config.sections.data import AugmentConfig, Fold, RedactConfig
from fctune.data.augment.augmenter import (
    MAX_POOL_ROWS,
    AugmentCounts,
    Augmenter,
    Form,
    check_counts,
    is_held_out,
    make_augmenter,
)
from fctune.data.conversation import Conversation, Tool
from fctune.data.conversion import MAX_SKIPPED, to_openai_row
from fctune.data.fold import with_run
from fctune.data.redaction import SecretScreen
from fctune.data.secrets import SecretCounts
from fctune.data.sources import (
    DEFAULT_SELECTION,
    LEFT_OUT_KINDS,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    Selection,
    UnreadRow,
    scan_source,
)
from fctune.data.sources.columns import Columns
from fctune.data.sources.unmatched import require_selected

_PROGRESS_ROWS = 500
_NUM_SHOWN = 10


@dataclass(slots=True)
class AugmentReport:
    """The rows of a file of augmented rows: ``written`` = ``rows`` - ``num_skipped`` + ``added``.

    Attributes:
        rows: Rows read.
        written: Rows written.
        changed: Rows written that differ from the row that was read.
        added: Rows written in addition.
        num_skipped: Rows that cannot be read.
        skipped: The first of them, with the reasons.
        kinds: Counts of each kind.
        left_out: Records and parts of logs that are no rows, by their kind in ``LEFT_OUT_KINDS``.
        secrets: Secrets of the rows read.
        is_redacted: Placeholders replace them.
        shares: Share of each kind.
    """

    rows: int = 0
    written: int = 0
    changed: int = 0
    added: int = 0
    num_skipped: int = 0
    skipped: list[Defect] = field(default_factory=list)
    kinds: AugmentCounts = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    secrets: SecretCounts = field(default_factory=SecretCounts)
    is_redacted: bool = False
    shares: dict[str, float] = field(default_factory=dict)

    def describe(self, source: str, out: str) -> list[str]:
        """Return lines on what was read, made and skipped."""
        lines = [f"{source}: {format_count(self.rows, 'row')}, {self.changed:,} changed, {self.added:,} added"]
        lines += [f"  {counts.describe(kind, self.shares[kind])}" for kind, counts in self.kinds.items()]
        if self.left_out:
            lines += [
                "Left out",
                *(f"  {count:>9,}  {LEFT_OUT_KINDS[kind]}" for kind, count in self.left_out.most_common()),
            ]
        if self.num_skipped:
            lines += [f"Skipped: {format_count(self.num_skipped, 'row')}"]
            lines += [f"  {defect}" for defect in self.skipped[:_NUM_SHOWN]]
            if self.num_skipped > _NUM_SHOWN:
                lines.append(f"  ... and {self.num_skipped - _NUM_SHOWN:,} more; `fctune data check` lists them")
        if self.secrets.kinds or self.secrets.searched:
            lines.append(self.secrets.describe_with_option(self.is_redacted))
        return [*lines, f"{format_count(self.written, 'row')} in {out}"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        names = ("rows", "written", "changed", "added", "num_skipped")
        kinds = {kind: {"share": self.shares[kind], **counts.to_json()} for kind, counts in self.kinds.items()}
        secrets = self.secrets.to_json() | {"redacted": self.is_redacted}
        return {
            **{name: getattr(self, name) for name in names},
            "kinds": kinds,
            "left_out": dict(self.left_out),
            "secrets": secrets,
        }


def open_augmenter(
    path: str,
    config: AugmentConfig,
    row_format: str = "auto",
    columns: Columns | None = None,
    validation_share: float = 0.0,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    screen: SecretScreen | None = None,
    tools: tuple[Tool, ...] = (),
) -> Augmenter:
    """Return an augmenter that knows the tools of a source's first rows; arguments as for ``augment_source``.

    Rows that have no tools get ``tools``.
    """
    rows = islice(_iter_rows(path, row_format, columns, fold, selection, screen, tools=tools), MAX_POOL_ROWS)
    own = (row for row in rows if isinstance(row, ParsedRow) and not _is_held_out(row, validation_share))
    return make_augmenter(config, ((path, row) for row in own))


def _is_held_out(row: ParsedRow, share: float) -> bool:
    return is_held_out(int(row.run or row.digest(), 16), share)


def _iter_rows(
    path: str,
    row_format: str,
    columns: Columns | None,
    fold: Fold,
    selection: Selection,
    screen: SecretScreen | None = None,
    report: AugmentReport | None = None,
    tools: tuple[Tool, ...] = (),
) -> Iterator[ParsedRow | Defect]:
    """Yield the rows of a source as they are once they are written, since their digests decide on everything.

    Args:
        path: A source in any form that ``read_source`` accepts.
        row_format: Format of the rows, or auto.
        columns: The format's name for each column of another name, or ``ignore``.
        fold: Records that continue others are left out always, never, or in logs.
        selection: Which rows are read, and which of their turns are context.
        screen: Replaces secrets or finds them; None looks for none.
        report: Its counts of secrets and of what is left out are updated in place.
        tools: Tools of the rows that have none.
    """
    reader, own_reader = RowReader("openai"), RowReader(row_format, columns, tools, selection=selection)
    left_out = report.left_out if report is not None else Counter()
    for unread in scan_source(path, row_format, columns, fold, selection, tools):
        left_out.update(unread.left_out or {})
        row = own_reader.read(unread)
        if isinstance(row, LeftOut):
            left_out[row.kind] += 1
            continue
        row = with_run(row, fold) if isinstance(row, ParsedRow) else row
        if screen is not None and isinstance(row, ParsedRow):
            row, redaction = screen.screen(row)
            if report is not None:
                report.secrets.count(redaction.findings, redaction.num_turns)
        elif screen is not None and isinstance(row, Defect):
            row = screen.scanner.hide(row, unread.value)
        if isinstance(row, ParsedRow) and row.mark is None:
            read = reader.read(UnreadRow(path, 0, _write_row(Form(row.conversation), row, 0).encode()))
            if isinstance(read, ParsedRow):
                source = row.conversation.source if screen is None else screen.screen_text(row.conversation.source)
                conversation = replace(read.conversation, source=source)
                row = replace(read, conversation=conversation, raw=row.raw)
        yield row


def augment_source(
    path: str,
    out: Path,
    config: AugmentConfig,
    row_format: str = "auto",
    max_samples: int | None = None,
    columns: Columns | None = None,
    validation_share: float = 0.0,
    fold: Fold = "auto",
    on_progress: Callable[[AugmentReport], None] | None = None,
    selection: Selection = DEFAULT_SELECTION,
    redact: RedactConfig | None = None,
    tools: tuple[Tool, ...] = (),
) -> AugmentReport:
    """Write the rows of a source with changed and added ones as JSON lines in OpenAI's format; replaces ``out``.

    Each row is followed by those that were made of it. Changed and added rows have their kinds, their original and its
    digest in ``metadata``, so that they stay in the split of their original.

    Args:
        path: A source in any form that ``read_source`` accepts.
        out: File to write.
        config: Kinds, their shares and the seed.
        row_format: Format of the rows, or auto.
        max_samples: Maximum number of rows read.
        columns: The format's name for each column of another name, or ``ignore``.
        validation_share: Share of the rows that runs hold out, which stay as they are.
        fold: Records that continue others are left out always, never, or in logs.
        on_progress: Called every 500 rows with the counts so far.
        selection: Which rows are read, and which of their turns are context.
        redact: Replace secrets by placeholders; None counts them.
        tools: Tools of the rows that have none.

    Raises:
        DataError: The source cannot be read, no row can be used, or a kind was applied to none.
    """
    screen = SecretScreen(redact)
    pool_screen = screen if redact is not None else None
    augmenter = open_augmenter(path, config, row_format, columns, validation_share, fold, selection, pool_screen, tools)
    report = AugmentReport(shares=augmenter.shares, is_redacted=redact is not None)
    report.secrets.searched = list(screen.scanner.kinds)
    with open_atomically(out) as file:
        for row in islice(_iter_rows(path, row_format, columns, fold, selection, screen, report, tools), max_samples):
            report.rows += 1
            if isinstance(row, Defect):
                report.num_skipped += 1
                report.skipped += [row] if len(report.skipped) < MAX_SKIPPED else []
            else:
                forms = [Form(row.conversation)]
                if not _is_held_out(row, validation_share):
                    forms = augmenter.expand(row, path)
                for form, line in _write_forms(augmenter, row, forms):
                    file.write(line)
                    report.written += 1
                    report.added += form.is_added
                    report.changed += bool(form.kinds) and not form.is_added
            if on_progress is not None and report.rows % _PROGRESS_ROWS == 0:
                on_progress(report)
        report.kinds = augmenter.take_counts()
        if not report.rows:
            require_selected([path], report.left_out, row_format, columns, fold, selection)
        if not report.written:
            raise DataError(f"{path}: no usable row; `fctune data check {path}` lists why.")
        check_counts(report.kinds, report.shares, "--kinds ")
    return report


def _write_forms(augmenter: Augmenter, parsed: ParsedRow, forms: Sequence[Form]) -> Iterator[tuple[Form, str]]:
    """Yield the forms of a row with their lines; those that would not be read back as they are, are left out."""
    reader = RowReader("openai")
    for form in forms:
        line = _write_row(form, parsed, augmenter.config.seed)
        if form.kinds:
            read = reader.read(UnreadRow(parsed.conversation.source, 0, line.encode()))
            if not isinstance(read, ParsedRow) or _drop_ids(read.conversation) != _drop_ids(form.conversation):
                augmenter.leave_out(form, "not read back as they are")
                if form.is_added:
                    continue
                form = Form(parsed.conversation)
                line = _write_row(form, parsed, augmenter.config.seed)
        yield form, line


def _write_row(form: Form, parsed: ParsedRow, seed: int) -> str:
    row = to_openai_row(form.conversation)
    if isinstance(parsed.raw.get("parallel_tool_calls"), bool):
        row["parallel_tool_calls"] = parsed.raw["parallel_tool_calls"]
    made = {"kinds": list(form.kinds), "from": form.conversation.source, "digest": parsed.digest(), "seed": seed}
    mark = made if form.kinds else parsed.mark
    metadata: dict[str, Any] = parsed.provenance | ({} if mark is None else {"augmented": mark})
    if form.is_added and parsed.redacted is not None:  # its calls are others
        metadata["redacted"] = {**parsed.redacted, "calls": []}
    return json.dumps(row | ({"metadata": metadata} if metadata else {}), ensure_ascii=False) + "\n"


def _drop_ids(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation's messages, tools and switches without the ids of calls, which writing adds."""
    row = to_openai_row(conversation)
    for message in row["messages"]:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    return row
