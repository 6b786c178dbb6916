"""Sources of rows, read row by row into conversations and defects."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fctune.base.errors import DataError
from fctune.config.parsing import suggest_hub_name
from fctune.config.sections.data import DATA_SUFFIXES, Fold
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources.column_hints import guess_columns, suggest_columns
from fctune.data.sources.columns import Columns, check_columns, describe_missing, map_columns
from fctune.data.sources.defects import Defect, RowError, describe_value
from fctune.data.sources.files import MAX_ROW_BYTES, open_rows
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_builder import LEFT_OUT_KINDS, CallPointer, ParsedRow, RowWarning
from fctune.data.sources.row_formats.base import LeftOut
from fctune.data.sources.row_formats.registry import (
    ROW_FORMATS,
    describe_keys,
    describe_row_formats,
    detect_row_format,
    is_pair,
    list_columns,
    read_row,
)
from fctune.data.sources.row_reasoning import REASONING_KEYS
from fctune.data.sources.selection import DEFAULT_SELECTION, Selection

if TYPE_CHECKING:
    from fctune.data.sources.arrow import IsWanted

_SYNTHETIC_SPLITS = ("pretrain", "train", "varied", "reasoned", "shuffled", "pairs")
_NUM_SHOWN = 10
_TABLES = (".csv", ".parquet", ".arrow")  # files whose empty cells are no part of a row
_JSON_FILE = re.compile(r"\.json(?:\.gz|\.zst)?$", re.IGNORECASE)
_NUM_SAMPLED = 1_000  # rows that show the columns of a source that cannot be read
_NUM_PEEKED = 20  # rows that show whether a source is a log
# Every spelling of a row's reasoning has a key or a text that starts with one of these words, or a part of these in a
# text. JSON may escape the brackets of tags, but not their letters.
_REASONING_WORDS = "reasoning|think|thought|analysis"
_REASONING_PARTS = rf'"(?:{_REASONING_WORDS})|(?:think|thinking|thought)(?:[\]>]|\\u003e)|scratch_pad'
_REASONING = re.compile(_REASONING_PARTS.encode(), re.IGNORECASE)
# A null other than the content of a turn that only calls.
_NULL = re.compile(rb'null(?<!"content": null)(?<!"content":null)')
# The record in each directory that a tune, a run and a sweep write, with keys that tell it from another program's file.
_RECORDS = {"tune.json": ("inputs", "steps"), "run.json": ("config", "versions"), "study.json": ("sweep", "runs")}
_WORD = re.compile(r"(?:string )?'?([A-Za-z_]{1,24})'?: ")  # at the start of a reason
_SURROGATE = re.compile(rb"\\(?:u|U0000)[dD][89a-fA-F]")  # the longer one is Python's


def read_source(
    path: str,
    row_format: str = "auto",
    max_samples: int | None = None,
    columns: Columns | None = None,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
) -> Iterator[Conversation | Defect]:
    """Yield the conversation or the defect of each row, in order.

    Args:
        path: A JSON, JSON lines, gzipped JSON lines, Parquet or CSV file; a directory of them, or one written by
            ``save_to_disk`` of ``datasets``; a dataset of the hub, ``hf:NAME[:config][:split][@revision]``; or
            ``synthetic:SPLIT:ROWS[:SEED]``.
        row_format: Format of the rows (a key of ``ROW_FORMATS``), or auto to detect that of each row.
        max_samples: Maximum number of rows.
        columns: The format's name for each column of another name, or ``ignore``.
        fold: Leave out records that others continue: always, never, or in logs (auto).
        selection: Which rows are read, and which of their turns are context.

    Raises:
        DataError: The path does not exist, the source has no rows, its first row has an unknown format, a file is
            binary or truncated, or ``columns`` names a column that no row has or no format reads.
    """
    for row in islice(parse_source(path, row_format, columns, fold=fold, selection=selection), max_samples):
        yield row.conversation if isinstance(row, ParsedRow) else row


def parse_source(
    path: str,
    row_format: str = "auto",
    columns: Columns | None = None,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    left_out: Counter[str] | None = None,
    tools: tuple[Tool, ...] = (),
) -> Iterator[ParsedRow | Defect]:
    """Yield rows as ``read_source`` does, with the locations of messages, warnings and notes on conversions.

    Rows that are left out are not yielded; ``left_out`` counts them by kind, and is updated in place. Rows that have no
    tools get ``tools``.
    """
    reader = RowReader(row_format, columns, tools, selection=selection)
    left_out = Counter() if left_out is None else left_out
    for row in scan_source(path, row_format, columns, fold, selection, tools):
        left_out.update(row.left_out or {})
        if isinstance(parsed := reader.read(row), LeftOut):
            left_out[parsed.kind] += 1
        else:
            yield parsed


class UnreadRow(NamedTuple):
    """An undecoded row and its location.

    ``value`` is the row's bytes in a file, its value in a table, the conversation of a synthetic row (bytes for a
    pair), or the defect of a row that cannot be decoded.
    """

    file: str
    line: int
    value: Any
    left_out: Counter[str] | None = None
    """The number of records and parts of a log that are left out before this row, by kind in ``LEFT_OUT_KINDS``."""
    is_changed: bool = False
    """True for a record that another one continues with other tools."""
    reasoning: dict[int, str] | None = None
    """The reasoning of messages, by index, that only folded records have."""


def scan_source(
    path: str,
    row_format: str = "auto",
    columns: Columns | None = None,
    fold: Fold = "auto",
    selection: Selection = DEFAULT_SELECTION,
    tools: tuple[Tool, ...] = (),
) -> Iterator[UnreadRow]:
    """Yield the undecoded rows of a source, in order; a ``RowReader`` in any process can read them.

    With ``fold``, records whose messages are the beginning of another's are left out: always, never, or in logs (auto).
    Rows that are not selected replace no others; the reader leaves them out. ``tools``, which rows may call, help to
    tell what their columns are if that is unknown.

    Raises:
        DataError: For the same reasons as ``read_source``.
    """
    is_folded = fold != "never" and not path.startswith("synthetic:")
    rows = (
        _fold(path, row_format, columns or {}, fold, selection, tools)
        if is_folded
        else _scan(path, row_format, columns or {}, None, tools)
    )
    return _attach_left_out(rows, path)


def _scan(
    path: str, row_format: str, columns: Columns, is_wanted: IsWanted | None, tools: tuple[Tool, ...] = ()
) -> Iterator[UnreadRow]:
    """Yield rows as ``scan_source`` does; the value is None in batches of a table that are not wanted."""
    if row_format != "auto" and row_format not in ROW_FORMATS:
        raise DataError(f"{path}: format={row_format}: unknown row format. Expected auto, {', '.join(ROW_FORMATS)}.")
    pair_columns = ("prompt", "chosen", "rejected") if row_format == "openai" else ()  # the format of pairs' messages
    check_columns(columns, [*list_columns(row_format), *pair_columns], path)
    is_synthetic = path.startswith("synthetic:")
    scanned = _scan_synthetic(path) if is_synthetic else _scan_files(path, row_format, columns, is_wanted, tools)
    rows = _attach_left_out(scanned, path)
    is_empty = True
    missing = set(columns)
    for row in rows:
        is_empty = False
        if missing:
            missing -= {name for name in missing if _has_column(row.value, name)}
        yield row
    if is_empty:
        raise DataError(f"{path}: no rows. Expected at least one.")
    if missing:  # or their cells are all empty
        files = [path] if is_synthetic or path.startswith("hf:") else list_files(path)
        present = [] if is_synthetic else [_list_columns(file, _iter_first_rows(file)) for file in files]
        found = list(dict.fromkeys(chain.from_iterable(present)))
        if missing := missing - set(found):
            raise DataError(f"{path}: {describe_missing(sorted(missing), found)}")


def has_reasoning_rows(
    sources: Sequence[tuple[str, str]],
    max_samples: int | None = None,
    columns: Columns | None = None,
    selection: Selection = DEFAULT_SELECTION,
) -> bool:
    """Return True if any row has reasoning; stops at the first.

    Args:
        sources: Path and row format of each source.
        max_samples: Rows to read from each source; None reads all.
        columns: The format's name for each column of another name.
        selection: Which rows count.
    """
    is_renamed = any(name in REASONING_KEYS for name in (columns or {}).values())
    for path, row_format in sources:
        reader = RowReader(row_format, columns, selection=selection)
        scanned = _scan(path, row_format, columns or {}, None if is_renamed else _may_hold_reasoning)
        for row in islice(scanned, max_samples):
            # Nearly all rows without reasoning need no decoding.
            is_plain = isinstance(row.value, bytes) and not is_renamed and _REASONING.search(row.value) is None
            if row.value is None or is_plain:
                continue
            parsed = reader.read(row)
            if isinstance(parsed, ParsedRow) and any(message.reasoning for message in parsed.conversation.messages):
                return True
    return False


class RowReader:
    """Reads any of the rows of a source.

    Args:
        row_format: Format of the rows, or auto.
        columns: The format's name for each column of another name, or ``ignore``.
        tools: Tools of the rows that have none.
        keeps_questions: Keep rows whose right answer is no call, and that have no text of it; else they are defects.
        selection: Which rows are read, and which of their turns are context.
        keeps_requests: Keep requests without an answer, which are the beginning of others; else they are defects.
    """

    def __init__(
        self,
        row_format: str = "auto",
        columns: Columns | None = None,
        tools: tuple[Tool, ...] = (),
        keeps_questions: bool = False,
        selection: Selection = DEFAULT_SELECTION,
        keeps_requests: bool = False,
    ):
        self.row_format = row_format
        self._selection = selection
        keeps_failed, trains_wrong_turns = selection.failed == "keep", selection.wrong_turns == "train"
        self._context = ReadContext(
            columns, tools, keeps_questions, keeps_failed, trains_wrong_turns, keeps_requests=keeps_requests
        )

    def read(self, row: UnreadRow) -> ParsedRow | Defect | LeftOut:
        """Return the conversation of a row, its defect, or the reason why it is left out."""
        file, line, value, _, is_changed, reasoning = row
        if isinstance(value, Defect):
            return value
        if isinstance(value, Conversation):
            if kind := self._selection.find_reason({}, value):
                return LeftOut(kind)
            pointers = [f"messages[{i}]" for i in range(len(value.messages))]
            calls = [
                f"{pointer}.tool_calls[{j}].function"
                for message, pointer in zip(value.messages, pointers, strict=True)
                for j in range(len(message.calls))
            ]
            located = [CallPointer(call, f"{call}.arguments") for call in calls]
            return ParsedRow(value, pointers, "tools", ".function", row_format="synthetic", call_pointers=located)
        try:
            decoded = decode_row(value, self._context)
            parsed = read_row(decoded, self.row_format, self._context, f"{file}:{line}")
        except RowError as error:
            if error.kind in LEFT_OUT_KINDS:
                return LeftOut(error.kind, _describe_failure(error) if error.kind == "answer_failed" else "")
            reason = error.reason
            if error.kind == "unknown_row_format" and file.lower().endswith(_TABLES) and isinstance(decoded, dict):
                reason = self._describe_cells(decoded)
            return Defect(file, line, error.pointer, error.kind, reason)
        if kind := self._selection.find_reason(decoded, parsed.conversation):
            return LeftOut(kind)
        if reasoning:
            messages = list(parsed.conversation.messages)
            for i, text in reasoning.items():
                messages[i] = replace(messages[i], reasoning=text)
            parsed.conversation = replace(parsed.conversation, messages=tuple(messages))
            parsed.notes["reasoning_from_records"] += len(reasoning)
        if is_changed:
            reason = "another record continues this one with other tools, so that both are kept"
            parsed.warnings.append(RowWarning("", "tools_changed", reason))
        return parsed

    def _describe_cells(self, row: dict[str, Any]) -> str:
        """Say which cells a row of a table has, of those that would make a conversation, and what may be mapped."""
        columns = self._context.columns
        guess = guess_columns([*row, *(name for name in columns if name not in row)], [row], (), columns)
        hint = f". Perhaps: --columns {guess}" if guess else ""
        cells = ", ".join(row) or "no column"
        return f"values in {cells} only, which make no row; the cells of its other columns are empty{hint}"


def _describe_failure(error: RowError) -> str:
    """Return the field that says that an answer failed, and its value if it is a word, such as ``status: failure``."""
    field = re.sub(r"\[\d+\]", "", error.pointer)
    word = _WORD.match(error.reason)
    return f"{field}: {word[1]}" if word is not None else field


def describe_defects(defects: list[Defect], num_rows: int, alternative: str = "") -> str:
    """Describe the first defects, one per line, the number of each kind, and the remedy.

    Args:
        defects: All defects.
        num_rows: Rows read.
        alternative: What to do instead of fixing the rows, if anything.
    """
    shown = "\n".join(f"  {defect}" for defect in defects[:_NUM_SHOWN])
    more = f"\n  ... and {len(defects) - _NUM_SHOWN:,} more" if len(defects) > _NUM_SHOWN else ""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(d.kind for d in defects).most_common())
    return (
        f"{len(defects):,} of {num_rows:,} rows cannot be trained on ({kinds})\n{shown}{more}\n"
        f"Fix the rows{f', or {alternative} to train without them' if alternative else ''}."
    )


def list_files(path: str) -> list[str]:
    """Return the file itself, or the data files of a directory and of all below it, sorted by name.

    Directories of tunes, runs and sweeps below it are left out, so that these may be written where the rows are.

    A directory that ``save_to_disk`` of ``datasets`` wrote has the files of its only split, or of ``train`` if it has
    several.

    Raises:
        DataError: There is none.
    """
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = _read_saved_json(path, "dataset_dict.json", "splits")
        if splits and "train" not in splits:
            raise DataError(f"{path}: its splits are {', '.join(splits)}; name one: {os.path.join(path, splits[0])}.")
        path = os.path.join(path, "train") if splits else path
    if os.path.isfile(os.path.join(path, "state.json")):
        files = _read_saved_json(path, "state.json", "_data_files")
        if files:  # else a file of another program
            return [os.path.join(path, file) for file in files]
    if os.path.isdir(path):
        names = sorted(name for name in _walk(path) if _may_hold_rows(name))
        if not names:
            raise DataError(
                f"{path}: no data files in this directory; outputs of fctune in it are not read. Expected "
                f"{', '.join(DATA_SUFFIXES)}."
            )
        return [os.path.join(path, name) for name in names]
    if not os.path.exists(path):
        raise DataError(
            f"{path}: no such file or directory{suggest_hub_name(path, '.')} Check the path; datasets of the hub are "
            "hf:NAME[:config][:split]."
        )
    return [path]


def _walk(path: str) -> Iterator[str]:
    """Yield the files of a directory and of all below it, relative to it; links are followed, each directory once."""
    seen: set[str] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        visible = [name for name in folders if not name.startswith(".")]  # no cache of a download, for example
        folders[:] = sorted(name for name in visible if not _is_output(os.path.join(folder, name)))
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (os.path.relpath(os.path.join(folder, name), path) for name in sorted(names))


def _is_output(folder: str) -> bool:
    """Return True for the directory of a tune, a run or a sweep."""
    for name, keys in _RECORDS.items():
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name), encoding="utf-8") as file:
            record = json.load(file)
            if isinstance(record, dict) and all(key in record for key in keys):
                return True
    return False


def _may_hold_rows(file: str) -> bool:
    """Return True for the name of a data file, other than those in which Claude Code describes its sessions."""
    is_description = file.endswith(".meta.json") or os.path.basename(file) == "sessions-index.json"
    return file.lower().endswith(DATA_SUFFIXES) and not is_description


def _read_saved_json(path: str, name: str, key: str) -> list[str]:
    """Return the names in a list of a file that describes a dataset saved with ``save_to_disk``; empty without it."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            described = json.load(file)
        listed = described.get(key, []) if isinstance(described, dict) else []
        return [str(item["filename"] if isinstance(item, dict) else item) for item in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{os.path.join(path, name)}: cannot be read ({error}). Save the dataset again.") from None


def _scan_files(
    path: str, row_format: str, columns: Columns, is_wanted: IsWanted | None, tools: tuple[Tool, ...]
) -> Iterator[UnreadRow]:
    context = ReadContext(columns, tools)
    files = [path] if path.startswith("hf:") else list_files(path)
    first_foreign: tuple[str, int, Any] | None = None
    num_foreign = 0
    for file in files:
        is_known = row_format != "auto"
        rows = _scan_file(file, context, is_wanted)
        if len(files) > 1 and _JSON_FILE.search(file):
            head: list[tuple[int, Any]] = []
            error: DataError | None = None
            try:
                head.extend(islice(rows, 2))
            except DataError as raised:  # the rows before are still yielded
                error = raised
            if error is None and len(head) == 1 and _is_foreign(head[0][1], row_format, context):
                first_foreign = first_foreign or (file, *head[0])
                num_foreign += 1
                if num_foreign == len(files) and not is_known:
                    _has_known_format(*first_foreign, context)  # raises the error of the first file
                yield UnreadRow(file, head[0][0], LeftOut("file_left_out"))
                continue
            rows = chain(head, rows if error is None else _raise(error))
        for line, value in _expand_logs(rows, row_format, context):
            if not is_known and not isinstance(value, LeftOut):
                is_known = _has_known_format(file, line, value, context)
            if isinstance(value, RowError):
                value = Defect(file, line, value.pointer, value.kind, value.reason)
            yield UnreadRow(file, line, value)


def _raise(error: DataError) -> Iterator[tuple[int, Any]]:
    """Raise an error where the next row would be read."""
    raise error
    yield


def _is_foreign(value: Any, row_format: str, context: ReadContext) -> bool:
    """Return True for an object of no row format, as one that describes a run in a file beside those of its rows."""
    if (mapped := _map_object(value, context)) is None:
        return False
    is_known = is_pair(mapped) or (row_format != "auto" and ROW_FORMATS[row_format].matches(mapped))
    return not is_known and detect_row_format(mapped) is None


def _expand_logs(rows: Iterator[tuple[int, Any]], row_format: str, context: ReadContext) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, of which one may hold several conversations, or be a part of one."""
    before: list[tuple[int, Any]] = []
    for line, value in rows:
        if value is None:  # not wanted
            yield line, value
            continue
        before.append((line, value))
        row = _decode_object(value, context)
        if not isinstance(row, dict):
            continue
        name = detect_row_format(row) if row_format == "auto" else row_format
        expand = ROW_FORMATS[name].expand if name in ROW_FORMATS else None
        if expand is None:
            break
        wanted = ((at, item) for at, item in chain(before, rows) if item is not None)
        yield from expand((at, _decode_object(item, context)) for at, item in wanted)
        return
    yield from before
    yield from rows


def _map_object(value: Any, context: ReadContext) -> dict[str, Any] | None:
    """Return the object of an undecoded row under the names of its format's columns; None if it is none."""
    row = _decode_object(value, context)
    if not isinstance(row, dict):
        return None
    try:
        return map_columns(row, context.columns)
    except RowError:
        return None


def _decode_object(value: Any, context: ReadContext) -> dict[str, Any] | RowError:
    """Return the object of an undecoded row, or its defect."""
    try:
        row = value if isinstance(value, RowError) else decode_row(value, context)
    except RowError as error:
        return error
    if isinstance(row, dict | RowError):
        return row
    return RowError("", "unknown_row_format", f"expected an object, got {describe_value(row)}")


def _attach_left_out(rows: Iterator[UnreadRow], path: str) -> Iterator[UnreadRow]:
    """Yield rows, each with the counts of what was left out before it; the last also with those after it.

    Raises:
        DataError: Everything was left out.
    """
    left_out: Counter[str] = Counter()
    last: UnreadRow | None = None
    failure: DataError | None = None
    try:
        for row in rows:
            left_out.update(row.left_out or {})
            if isinstance(row.value, LeftOut):
                left_out[row.value.kind] += 1
                continue
            if last is not None:
                yield last
            last = row._replace(left_out=left_out) if left_out else row
            left_out = Counter()
    except DataError as error:
        failure = error
    if last is not None:
        yield last._replace(left_out=left_out + (last.left_out or Counter())) if left_out else last
    elif left_out:
        found = "; ".join(f"{LEFT_OUT_KINDS[kind]} ({count:,})" for kind, count in left_out.items())
        failure = failure or DataError(f"{path}: no conversations. Found only: {found}.")
    if failure is not None:
        raise failure


def _fold(
    path: str, row_format: str, columns: Columns, fold: Fold, selection: Selection, tools: tuple[Tool, ...]
) -> Iterator[UnreadRow]:
    """Yield rows as ``_scan`` does, with those that others continue as left out; reads a log twice.

    Rows of other formats beside a log's records are left out with ``fold: always`` only.
    """
    rows = _scan(path, row_format, columns, None, tools)
    head: list[UnreadRow] = []
    failure: DataError | None = None
    try:
        head += islice(rows, _NUM_PEEKED)
    except DataError as error:
        failure = error
    if fold == "auto" and not _holds_log(path, head, row_format, columns):
        yield from head
        if failure is not None:
            raise failure
        yield from rows
        return
    from fctune.data.fold import FoldIndex

    # Rows whose tools are given later are comparable, too. The record that ends with a call does not know its result.
    unweighted = replace(selection, wrong_turns="train")
    index, given = FoldIndex(), tools or (Tool({"name": ""}),)
    reader = RowReader(row_format, columns, given, selection=unweighted, keeps_requests=True)

    def read(row: UnreadRow) -> Conversation | None:
        parsed = reader.read(row)
        is_foldable = isinstance(parsed, ParsedRow) and (parsed.is_record or fold == "always")
        return parsed.conversation if isinstance(parsed, ParsedRow) and is_foldable else None

    try:
        for row in chain(head, rows):
            index.add(read(row))
    except DataError:
        pass  # raised again below, after the rows before
    masks = zip(*index.find_folded(), index.find_changed(), strict=True)
    del head
    rows = _scan(path, row_format, columns, None)
    for row, (begins, equals, is_changed) in zip(rows, chain(masks, repeat((False,) * 3)), strict=False):
        if begins or equals:
            yield row._replace(value=LeftOut("folded_record" if begins else "repeated_record"))
            continue
        kept = read(row) if index.has_reasoning else None
        reasoning = index.find_reasoning(kept) if kept is not None else None
        yield row._replace(is_changed=bool(is_changed), reasoning=reasoning) if is_changed or reasoning else row


def _holds_log(path: str, head: list[UnreadRow], row_format: str, columns: Columns) -> bool:
    """Return True if a source's first rows show a log, or the first of any of its files of JSON."""
    if any(_is_log(row, row_format, columns) for row in head):
        return True
    if row_format != "auto" or not os.path.isdir(path):
        return False
    seen, context = {row.file for row in head}, ReadContext(columns)
    for file in list_files(path):
        if file in seen or file.lower().endswith(_TABLES):  # tables of a directory are of one format
            continue
        with contextlib.suppress(DataError):
            for line, value in islice(_scan_file(file, context, None), _NUM_PEEKED):
                if isinstance(_decode_object(value, context), dict):
                    if _is_log(UnreadRow(file, line, value), row_format, columns):
                        return True
                    break
    return False


def _is_log(row: UnreadRow, row_format: str, columns: Columns) -> bool:
    value = _decode_object(row.value, ReadContext()) if not isinstance(row.value, Defect | Conversation) else None
    if not isinstance(value, dict):
        return False
    try:
        name = detect_row_format(map_columns(value, columns)) if row_format == "auto" else row_format
    except RowError:
        return False
    return name is not None and ROW_FORMATS[name].is_log


def _may_hold_reasoning(batch: Any) -> bool:
    from fctune.data.sources.arrow import holds_text

    return holds_text(batch, _REASONING_WORDS, _REASONING_PARTS)


def _scan_file(file: str, context: ReadContext, is_wanted: IsWanted | None) -> Iterator[tuple[int, Any]]:
    """Yield the line and value of each row; the value is a ``RowError`` for a row without one."""
    magic = b"" if file.startswith("hf:") else _read_magic(file)
    if file.lower().endswith(".tsv"):
        raise DataError(f"{file}: values separated by tabs are not read. Save the table as CSV, with commas.")
    if file.lower().endswith(".csv"):
        from fctune.data.sources.csv_rows import iter_csv

        yield from iter_csv(file, context.json)
        return
    if file.lower().endswith(".arrow"):
        from fctune.data.sources.arrow import iter_arrow

        yield from iter_arrow(file, context.json, is_wanted)
        return
    if file.startswith("hf:") or magic == b"PAR1":
        from fctune.data.sources.arrow import iter_hub, iter_parquet

        yield from (iter_hub if file.startswith("hf:") else iter_parquet)(file, context.json, is_wanted)
        return
    for raw in open_rows(file):
        if raw.data is None:
            yield (
                raw.line,
                RowError(
                    "",
                    "row_too_large",
                    f"the row is larger than {MAX_ROW_BYTES // 2**20} MiB; split it, or leave it out",
                ),
            )
        else:
            yield raw.line, raw.data


def _has_known_format(file: str, line: int, value: Any, context: ReadContext) -> bool:
    """Return True if the row is an object of a known format, or may be in a table; False if it is not an object.

    Raises:
        DataError: The format is unknown.
    """
    if (mapped := _map_object(value, context)) is None:
        return False
    if detect_row_format(mapped) is not None:
        return True
    rows = list(_iter_first_rows(file))
    found = _list_columns(file, rows)
    if missing := [name for name in context.columns if name not in found]:
        is_sample = len(rows) == _NUM_SAMPLED and not _list_header(file)
        where = f"none of the first {_NUM_SAMPLED:,} rows" if is_sample else "no row"
        raise DataError(f"{file}:{line}: {describe_missing(missing, found, where)}")
    header = map_columns(dict.fromkeys(_list_header(file), ""), context.columns)
    if detect_row_format({**header, **mapped}) is not None:  # only this row has no values there
        return True
    hints = suggest_columns(found, rows, {tool.name for tool in context.default_tools}, context.columns)
    if hints and (header or file.startswith("hf:")):
        listed = describe_keys("Columns", found, mapped)
        raise DataError(f"{file}:{line}: no row format has these columns. {listed}. {hints.rstrip()}")
    raise DataError(
        f"{file}:{line}: rows of unknown format. {hints}{describe_row_formats(mapped)}. Convert them to one of these, "
        "or map columns of other names: --columns question=query, or columns: {question: query} in the source."
    )


def _list_header(file: str) -> list[str]:
    """Return the columns that a table's header or schema names; none for other files."""
    if file.lower().endswith(".csv"):
        from fctune.data.sources.csv_rows import read_header

        return read_header(file)
    if not file.startswith("hf:") and (file.lower().endswith(".arrow") or _read_magic(file) == b"PAR1"):
        from fctune.data.sources.arrow import read_schema

        return read_schema(file)
    return []


def _iter_first_rows(file: str) -> Iterator[dict[str, Any]]:
    """Yield the objects among the first rows of a file that can be read."""
    context = ReadContext()
    with contextlib.suppress(DataError):
        for _, value in islice(_scan_file(file, context, None), _NUM_SAMPLED):
            row = _decode_object(value, context)
            if isinstance(row, dict):
                yield row


def _list_columns(file: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the columns of a table, or the keys of the first rows of another file."""
    return _list_header(file) or list(dict.fromkeys(name for row in rows for name in row))


def _has_column(value: Any, name: str) -> bool:
    """Return True if an undecoded row may have a column."""
    if isinstance(value, bytes):
        return json.dumps(name).encode() in value or json.dumps(name, ensure_ascii=False).encode() in value
    return value is None or (isinstance(value, dict) and name in value)


def _read_magic(file: str) -> bytes:
    """Return the first four bytes of a file.

    Raises:
        DataError: It cannot be opened, such as a link to a file that was removed.
    """
    try:
        with open(file, "rb") as stream:
            return stream.read(4)
    except OSError as error:
        raise DataError(f"{file}: cannot be opened ({error.strerror}). Check the file, or remove it.") from None


def decode_row(value: Any, context: ReadContext) -> Any:
    """Return the JSON value of a row, decoded from its bytes or as it is in a table."""
    if not isinstance(value, bytes):
        context.has_escaped_surrogate = context.may_have_null = True  # unknown for JSON inside a string of a table
        return value
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = value[error.start]
        raise RowError(
            "", "invalid_utf8", f"not UTF-8 (byte 0x{byte:02x} at offset {error.start} of the row)"
        ) from None
    context.has_escaped_surrogate = _SURROGATE.search(value) is not None
    context.may_have_null = _NULL.search(value) is not None
    return context.json.decode(text)


def _scan_synthetic(path: str) -> Iterator[UnreadRow]:
    from fctune.data.synthetic import Split, iter_conversations
    from fctune.data.synthetic.pairs import make_pairs

    split, *numbers = path.split(":")[1:]
    if split not in _SYNTHETIC_SPLITS or len(numbers) not in (1, 2) or not all(n.isdecimal() for n in numbers):
        splits = ", ".join(_SYNTHETIC_SPLITS)
        raise DataError(f"{path}: expected synthetic:SPLIT:ROWS[:SEED] with SPLIT one of {splits}.")
    seed = int(numbers[1]) if len(numbers) == 2 else 0
    if split == "pairs":
        pairs = make_pairs(iter_conversations("train", int(numbers[0]), seed), seed)
        for i, pair in enumerate(pairs, start=1):
            yield UnreadRow(path, i, json.dumps(pair).encode())
        return
    named = cast(Split, split)
    for i, conversation in enumerate(iter_conversations(named, int(numbers[0]), seed), start=1):
        yield UnreadRow(path, i, replace(conversation, source=f"{path}:{i}"))
