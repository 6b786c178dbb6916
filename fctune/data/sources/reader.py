"""Sources of rows: what a path names, read row by row into conversations and defects."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from fctune.data.conversation import Conversation
from fctune.data.sources.build import ParsedRow, ReadContext
from fctune.data.sources.defects import Defect, RowError
from fctune.data.sources.files import MAX_ROW_BYTES, open_rows
from fctune.data.sources.shapes import READERS, describe_shapes, detect_format, read_row
from fctune.errors import DataError

_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".ndjson", ".parquet")
_SYNTHETIC_SPLITS = ("pretrain", "train", "shuffled")
_NUM_SHOWN = 10
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_source(path: str, format: str = "auto", max_samples: int | None = None) -> Iterator[Conversation | Defect]:
    """One item a row, in order: the conversation read, or the defect that keeps it out.

    Args:
        path: A JSON, JSON lines, JSON lines in gzip or Parquet file; a directory of them; a dataset of the hub,
            ``hf:NAME[:config][:split][@revision]``; or ``synthetic:SPLIT:ROWS[:SEED]``.
        format: Shape of the rows (a key of ``READERS``), or auto: each row's own.
        max_samples: Stop after so many rows.

    Raises:
        DataError: For a path that does not exist, a source without rows, a first row of unknown shape, and a file that
            is binary or cut off.
    """
    for row in islice(parse_source(path, format), max_samples):
        yield row.conversation if isinstance(row, ParsedRow) else row


def parse_source(path: str, format: str = "auto") -> Iterator[ParsedRow | Defect]:
    """As ``read_source``, with where each message stood and what was read in another way than as it stood."""
    reader = RowReader(format)
    for row in scan_source(path, format):
        yield reader.read(row)


class UnreadRow(NamedTuple):
    """A row as its source holds it, and its place there.

    ``value`` is the row's bytes in a file, its value in a table, the conversation where it was made and not read, or
    the defect that is all there is of it.
    """

    file: str
    line: int
    value: Any


def scan_source(path: str, format: str = "auto") -> Iterator[UnreadRow]:
    """The rows of a source, in order, as cheaply as they can be told apart: ``RowReader`` reads them, where it will.

    Raises:
        DataError: As ``read_source``.
    """
    if format != "auto" and format not in READERS:
        raise DataError(f"{path}: format={format}: no such row shape. Expected auto, {', '.join(READERS)}.")
    rows = _scan_synthetic(path) if path.startswith("synthetic:") else _scan_files(path, format)
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise DataError(f"{path}: no rows. Expected at least one.")


class RowReader:
    """Reads the rows of one source, all of them or any part."""

    def __init__(self, format: str = "auto"):
        self.format = format
        self._context = ReadContext()

    def read(self, row: UnreadRow) -> ParsedRow | Defect:
        """The conversation of a row, or the defect that keeps it out."""
        file, line, value = row
        if isinstance(value, Defect):
            return value
        if isinstance(value, Conversation):
            pointers = [f"messages[{i}]" for i in range(len(value.messages))]
            return ParsedRow(value, pointers, "tools", ".function", row_format="synthetic")
        try:
            return read_row(_decode(value, self._context), self.format, self._context, f"{file}:{line}")
        except RowError as error:
            return Defect(file, line, error.pointer, error.kind, error.reason)


def read_conversations(paths: Iterable[str], on_invalid: str = "fail", format: str = "auto") -> list[Conversation]:
    """The conversations of all sources.

    Args:
        paths: Sources, as ``read_source`` takes them.
        on_invalid: fail: one error that lists the defects; skip: they are left out.
        format: Shape of the rows, or auto.

    Raises:
        DataError: With ``fail``, where any row has a defect; always where no row is left.
    """
    defects: list[Defect] = []
    conversations: list[Conversation] = []
    for path in paths:
        for item in read_source(path, format):
            if isinstance(item, Defect):
                defects.append(item)
            else:
                conversations.append(item)
    if defects and (on_invalid == "fail" or not conversations):
        raise DataError(describe_defects(defects, len(conversations) + len(defects)))
    return conversations


def describe_defects(defects: list[Defect], num_rows: int) -> str:
    """The first defects, a line each, then how many there are of each kind and what to do."""
    shown = "\n".join(f"  {defect}" for defect in defects[:_NUM_SHOWN])
    more = f"\n  ... and {len(defects) - _NUM_SHOWN:,} more" if len(defects) > _NUM_SHOWN else ""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(d.kind for d in defects).most_common())
    return (
        f"{len(defects):,} of {num_rows:,} rows cannot be trained on ({kinds})\n{shown}{more}\n"
        "Fix the rows, or pass --on-invalid skip (data.on_invalid: skip) to leave them out."
    )


def list_files(path: str) -> list[str]:
    """The file itself, or the data files of a directory, sorted by name.

    Raises:
        DataError: Where there is none.
    """
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIXES))
        if not names:
            raise DataError(f"{path}: no data file in this directory. Expected {', '.join(_SUFFIXES)}.")
        return [os.path.join(path, name) for name in names]
    if not os.path.exists(path):
        raise DataError(
            f"{path}: no such file or directory. Check the path; a dataset of the hub is hf:NAME[:config][:split]."
        )
    return [path]


def _scan_files(path: str, format: str) -> Iterator[UnreadRow]:
    context = ReadContext()
    for file in [path] if path.startswith("hf:") else list_files(path):
        is_known = format != "auto"
        for line, value in _scan_file(file, context):
            if not is_known:
                is_known = _is_of_known_shape(file, line, value, context)
            if isinstance(value, RowError):
                value = Defect(file, line, value.pointer, value.kind, value.reason)
            yield UnreadRow(file, line, value)


def _scan_file(file: str, context: ReadContext) -> Iterator[tuple[int, Any]]:
    """Line and value of each row; the value is a ``RowError`` where the row holds none."""
    if file.startswith("hf:") or _is_parquet(file):
        from fctune.data.sources.arrow import iter_hub, iter_parquet

        yield from (iter_hub if file.startswith("hf:") else iter_parquet)(file, context.json)
        return
    for raw in open_rows(file):
        if raw.data is None:
            yield raw.line, RowError("", "row_too_large", f"the row has more than {MAX_ROW_BYTES // 2**20} MiB")
        else:
            yield raw.line, raw.data


def _is_of_known_shape(file: str, line: int, value: Any, context: ReadContext) -> bool:
    """Whether the first object of a file has a shape that is known; False where the row holds no object."""
    try:
        row = value if isinstance(value, RowError) else _decode(value, context)
    except RowError:
        return False
    if not isinstance(row, dict):
        return False
    if detect_format(row) is None:
        raise DataError(f"{file}:{line}: rows of unknown shape. {describe_shapes(row)}. Convert them to one of these.")
    return True


def _is_parquet(file: str) -> bool:
    with open(file, "rb") as stream:
        return stream.read(4) == b"PAR1"


def _decode(value: Any, context: ReadContext) -> Any:
    """The JSON value of a row: of its bytes, or what a table held."""
    if not isinstance(value, bytes):
        context.has_escaped_surrogate = True  # maybe, in JSON inside a string; there are no bytes to look at
        return value
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = value[error.start]
        raise RowError(
            "", "invalid_utf8", f"not UTF-8 (byte 0x{byte:02x} at offset {error.start} of the row)"
        ) from None
    context.has_escaped_surrogate = _SURROGATE.search(value) is not None
    return context.json.decode(text)


def _scan_synthetic(path: str) -> Iterator[UnreadRow]:
    from fctune.data.synthetic import iter_conversations

    split, *numbers = path.split(":")[1:]
    if split not in _SYNTHETIC_SPLITS or len(numbers) not in (1, 2) or not all(n.isdecimal() for n in numbers):
        splits = ", ".join(_SYNTHETIC_SPLITS)
        raise DataError(f"{path}: expected synthetic:SPLIT:ROWS[:SEED] with SPLIT one of {splits}.")
    seed = int(numbers[1]) if len(numbers) == 2 else 0
    named = cast(Literal["pretrain", "train", "shuffled"], split)
    for i, conversation in enumerate(iter_conversations(named, int(numbers[0]), seed), start=1):
        yield UnreadRow(path, i, Conversation(conversation.messages, conversation.tools, f"{path}:{i}"))
