"""Sources of rows, read row by row into conversations and defects."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fctune.base.errors import DataError
from fctune.config.parsing import suggest_hub_name
from fctune.config.sections.data import DATA_SUFFIXES
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources.columns import Columns, check_columns, describe_missing, map_columns
from fctune.data.sources.defects import Defect, RowError
from fctune.data.sources.files import MAX_ROW_BYTES, open_rows
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.sources.row_formats.registry import (
    ROW_FORMATS,
    describe_row_formats,
    detect_row_format,
    list_columns,
    read_row,
)
from fctune.data.sources.row_reasoning import REASONING_KEYS

if TYPE_CHECKING:
    from fctune.data.sources.arrow import IsWanted

_SYNTHETIC_SPLITS = ("pretrain", "train", "varied", "reasoned", "shuffled", "pairs")
_NUM_SHOWN = 10
# Every spelling of a row's reasoning has a key or a text that starts with one of these words, or a part of these in a
# text. JSON may escape the brackets of tags, but not their letters.
_REASONING_WORDS = "reasoning|think|thought|analysis"
_REASONING_PARTS = rf'"(?:{_REASONING_WORDS})|(?:think|thinking|thought)(?:[\]>]|\\u003e)|scratch_pad'
_REASONING = re.compile(_REASONING_PARTS.encode(), re.IGNORECASE)
# A null other than the content of a turn that only calls.
_NULL = re.compile(rb'null(?<!"content": null)(?<!"content":null)')
_SURROGATE = re.compile(rb"\\(?:u|U0000)[dD][89a-fA-F]")  # the longer one is Python's


def read_source(
    path: str, row_format: str = "auto", max_samples: int | None = None, columns: Columns | None = None
) -> Iterator[Conversation | Defect]:
    """Yield the conversation or the defect of each row, in order.

    Args:
        path: A JSON, JSON lines, gzipped JSON lines, Parquet or CSV file; a directory of them, or one written by
            ``save_to_disk`` of ``datasets``; a dataset of the hub, ``hf:NAME[:config][:split][@revision]``; or
            ``synthetic:SPLIT:ROWS[:SEED]``.
        row_format: Format of the rows (a key of ``ROW_FORMATS``), or auto to detect that of each row.
        max_samples: Maximum number of rows.
        columns: The format's name for each column of another name, or ``ignore``.

    Raises:
        DataError: The path does not exist, the source has no rows, its first row has an unknown format, a file is
            binary or truncated, or ``columns`` names a column that no row has or no format reads.
    """
    for row in islice(parse_source(path, row_format, columns), max_samples):
        yield row.conversation if isinstance(row, ParsedRow) else row


def parse_source(
    path: str, row_format: str = "auto", columns: Columns | None = None, keeps_questions: bool = False
) -> Iterator[ParsedRow | Defect]:
    """Yield rows as ``read_source`` does, with the locations of messages, warnings and notes on conversions.

    With ``keeps_questions``, rows whose right answer is no call, and that have no text of it, are not defects.
    """
    reader = RowReader(row_format, columns, keeps_questions=keeps_questions)
    for row in scan_source(path, row_format, columns):
        yield reader.read(row)


class UnreadRow(NamedTuple):
    """An undecoded row and its location.

    ``value`` is the row's bytes in a file, its value in a table, the conversation of a synthetic row (bytes for a
    pair), or the defect of a row that cannot be decoded.
    """

    file: str
    line: int
    value: Any


def scan_source(path: str, row_format: str = "auto", columns: Columns | None = None) -> Iterator[UnreadRow]:
    """Yield the undecoded rows of a source, in order; a ``RowReader`` in any process can read them.

    Raises:
        DataError: For the same reasons as ``read_source``.
    """
    return _scan(path, row_format, columns or {}, None)


def _scan(path: str, row_format: str, columns: Columns, is_wanted: IsWanted | None) -> Iterator[UnreadRow]:
    """Yield rows as ``scan_source`` does; the value is None in batches of a table that are not wanted."""
    if row_format != "auto" and row_format not in ROW_FORMATS:
        raise DataError(f"{path}: format={row_format}: unknown row format. Expected auto, {', '.join(ROW_FORMATS)}.")
    pair_columns = ("prompt", "chosen", "rejected") if row_format == "openai" else ()  # the format of pairs' messages
    check_columns(columns, [*list_columns(row_format), *pair_columns], path)
    is_synthetic = path.startswith("synthetic:")
    rows = _scan_synthetic(path) if is_synthetic else _scan_files(path, row_format, columns, is_wanted)
    is_empty = True
    missing = set(columns)
    first: UnreadRow | None = None
    for row in rows:
        is_empty = False
        if missing:
            first = first or row
            missing -= {name for name in missing if _has_column(row.value, name)}
        yield row
    if is_empty:
        raise DataError(f"{path}: no rows. Expected at least one.")
    if missing:
        raise DataError(f"{path}: {describe_missing(sorted(missing), _list_keys(first))}")


def has_reasoning_rows(
    sources: Sequence[tuple[str, str]], max_samples: int | None = None, columns: Columns | None = None
) -> bool:
    """Return True if any row has reasoning; stops at the first.

    Args:
        sources: Path and row format of each source.
        max_samples: Rows to read from each source; None reads all.
        columns: The format's name for each column of another name.
    """
    is_renamed = any(name in REASONING_KEYS for name in (columns or {}).values())
    for path, row_format in sources:
        reader = RowReader(row_format, columns)
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
    """

    def __init__(
        self,
        row_format: str = "auto",
        columns: Columns | None = None,
        tools: tuple[Tool, ...] = (),
        keeps_questions: bool = False,
    ):
        self.row_format = row_format
        self._context = ReadContext(columns, tools, keeps_questions)

    def read(self, row: UnreadRow) -> ParsedRow | Defect:
        """Return the conversation of a row, or its defect."""
        file, line, value = row
        if isinstance(value, Defect):
            return value
        if isinstance(value, Conversation):
            pointers = [f"messages[{i}]" for i in range(len(value.messages))]
            return ParsedRow(value, pointers, "tools", ".function", row_format="synthetic")
        try:
            return read_row(decode_row(value, self._context), self.row_format, self._context, f"{file}:{line}")
        except RowError as error:
            return Defect(file, line, error.pointer, error.kind, error.reason)


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
    """Return the file itself, or the data files of a directory, sorted by name.

    A directory that ``save_to_disk`` of ``datasets`` wrote has the files of its only split, or of ``train`` if it has
    several.

    Raises:
        DataError: There is none.
    """
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        splits = _read_saved_json(path, "dataset_dict.json")["splits"]
        if "train" not in splits:
            raise DataError(f"{path}: its splits are {', '.join(splits)}; name one: {os.path.join(path, splits[0])}.")
        path = os.path.join(path, "train")
    if os.path.isfile(os.path.join(path, "state.json")):
        files = _read_saved_json(path, "state.json")["_data_files"]
        return [os.path.join(path, file["filename"]) for file in files]
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(DATA_SUFFIXES))
        if not names:
            raise DataError(f"{path}: no data files in this directory. Expected {', '.join(DATA_SUFFIXES)}.")
        return [os.path.join(path, name) for name in names]
    if not os.path.exists(path):
        raise DataError(
            f"{path}: no such file or directory{suggest_hub_name(path, '.')} Check the path; datasets of the hub are "
            "hf:NAME[:config][:split]."
        )
    return [path]


def _read_saved_json(path: str, name: str) -> Any:
    """Read a file that describes a dataset saved with ``save_to_disk``."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{os.path.join(path, name)}: cannot be read ({error}). Save the dataset again.") from None


def _scan_files(path: str, row_format: str, columns: Columns, is_wanted: IsWanted | None) -> Iterator[UnreadRow]:
    context = ReadContext(columns)
    for file in [path] if path.startswith("hf:") else list_files(path):
        is_known = row_format != "auto"
        for line, value in _scan_file(file, context, is_wanted):
            if not is_known:
                is_known = _has_known_format(file, line, value, context)
            if isinstance(value, RowError):
                value = Defect(file, line, value.pointer, value.kind, value.reason)
            yield UnreadRow(file, line, value)


def _may_hold_reasoning(batch: Any) -> bool:
    from fctune.data.sources.arrow import holds_text

    return holds_text(batch, _REASONING_WORDS, _REASONING_PARTS)


def _scan_file(file: str, context: ReadContext, is_wanted: IsWanted | None) -> Iterator[tuple[int, Any]]:
    """Yield the line and value of each row; the value is a ``RowError`` for a row without one."""
    if file.endswith(".csv"):
        from fctune.data.sources.csv_rows import iter_csv

        yield from iter_csv(file, context.json)
        return
    if file.endswith(".arrow"):
        from fctune.data.sources.arrow import iter_arrow

        yield from iter_arrow(file, context.json, is_wanted)
        return
    if file.startswith("hf:") or _is_parquet(file):
        from fctune.data.sources.arrow import iter_hub, iter_parquet

        yield from (iter_hub if file.startswith("hf:") else iter_parquet)(file, context.json, is_wanted)
        return
    for raw in open_rows(file):
        if raw.data is None:
            yield raw.line, RowError("", "row_too_large", f"the row is larger than {MAX_ROW_BYTES // 2**20} MiB")
        else:
            yield raw.line, raw.data


def _has_known_format(file: str, line: int, value: Any, context: ReadContext) -> bool:
    """Return True if the row is an object of a known format, False if it is not an object.

    Raises:
        DataError: The format is unknown.
    """
    try:
        row = value if isinstance(value, RowError) else decode_row(value, context)
    except RowError:
        return False
    if not isinstance(row, dict):
        return False
    try:
        mapped = map_columns(row, context.columns)
    except RowError:
        return False
    if detect_row_format(mapped) is None:
        missing = [name for name in context.columns if name not in row]
        if missing:
            raise DataError(f"{file}:{line}: {describe_missing(missing, row)}")
        raise DataError(
            f"{file}:{line}: rows of unknown format. {describe_row_formats(mapped)}. Convert them to one of these, or "
            "map columns of other names: --columns question=query, or columns: {question: query} in the source."
        )
    return True


def _has_column(value: Any, name: str) -> bool:
    """Return True if an undecoded row may have a column."""
    if isinstance(value, bytes):
        return json.dumps(name).encode() in value or json.dumps(name, ensure_ascii=False).encode() in value
    return value is None or (isinstance(value, dict) and name in value)


def _list_keys(row: UnreadRow | None) -> list[str]:
    """Return the columns of an undecoded row."""
    try:
        value = decode_row(row.value, ReadContext()) if row is not None else None
    except RowError:
        return []
    return list(value) if isinstance(value, dict) else []


def _is_parquet(file: str) -> bool:
    with open(file, "rb") as stream:
        return stream.read(4) == b"PAR1"


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
