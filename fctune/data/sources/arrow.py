"""Rows of Parquet and Arrow files and of the Hugging Face hub, with Arrow structs marked.

Arrow gives every struct of a column the keys of all rows, with nulls for missing ones. Structs are marked
(``ArrowStruct``) so that readers can remove this filling; JSON in strings is unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fctune.base.errors import DataError
from fctune.data.sources.defects import RowError
from fctune.data.sources.filling import ArrowStruct
from fctune.data.sources.row_json import RowJsonReader

_BATCH_ROWS = 256

Convert = Callable[[Any], Any]
IsWanted = Callable[[pa.RecordBatch], bool]


def read_schema(path: str) -> list[str]:
    """Return the columns of a Parquet file or an Arrow stream; none if it cannot be read."""
    try:
        if not path.lower().endswith(".arrow"):
            return list(pq.read_schema(path).names)
        with pa.memory_map(path) as source:
            return list(pa.ipc.open_stream(source).schema.names)
    except (pa.ArrowException, OSError):
        return []


def iter_parquet(path: str, json: RowJsonReader, is_wanted: IsWanted | None = None) -> Iterator[tuple[int, Any]]:
    """Yield the number (from 1) and value of each row; the value is a ``RowError`` if a JSON column is not JSON.

    Args:
        path: Path of the file.
        json: Reader of JSON columns.
        is_wanted: Selects the batches of rows to decode; the value of a row of another is None.

    Raises:
        DataError: The file is not Parquet, or truncated.
    """
    try:
        yield from _iter_batches(pq.ParquetFile(path, memory_map=True).iter_batches(_BATCH_ROWS), json, is_wanted)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}). Download it again.") from None


def iter_arrow(path: str, json: RowJsonReader, is_wanted: IsWanted | None = None) -> Iterator[tuple[int, Any]]:
    """Yield rows as ``iter_parquet`` does from an Arrow stream, which ``save_to_disk`` of ``datasets`` writes.

    Raises:
        DataError: The file is not an Arrow stream, or truncated.
    """
    try:
        with pa.memory_map(path) as source:
            yield from _iter_batches(pa.ipc.open_stream(source), json, is_wanted)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Arrow stream ({error}). Save the dataset again.") from None


def iter_hub(path: str, json: RowJsonReader, is_wanted: IsWanted | None = None) -> Iterator[tuple[int, Any]]:
    """Stream the number (from 1) and value of each row of ``hf:NAME[:config][:split][@revision]``.

    NAME is a dataset of the hub, or a local directory that ``datasets`` can load. The default split is train.

    Raises:
        DataError: ``datasets`` cannot load it.
    """
    from datasets import load_dataset  # takes three seconds, which local files need not pay

    spec, _, revision = path.removeprefix("hf:").partition("@")
    name, config, split = (*spec.split(":"), "", "")[:3]
    if not name or spec.count(":") > 2:
        raise DataError(f"{path}: not a dataset of the hub. Expected hf:NAME[:config][:split][@revision].")
    try:
        rows = load_dataset(name, config or None, split=split or "train", revision=revision or None, streaming=True)
        yield from _iter_batches(rows.with_format("arrow").iter(_BATCH_ROWS), json, is_wanted)
    except DataError:
        raise
    except Exception as error:  # datasets and its loaders raise exceptions of many types
        raise DataError(
            f"{path}: the dataset could not be read ({type(error).__name__}: {str(error)[:300]}). Check its name, "
            "config, split and revision (hf:NAME[:config][:split][@revision]) and that the hub is reachable; a gated "
            "dataset needs a token in HF_TOKEN."
        ) from None


def holds_text(batch: Any, start: str, anywhere: str) -> bool:
    """Return True if a field's name, or a text in a batch or table, matches a pattern; case does not matter.

    Args:
        batch: Record batch or table.
        start: Pattern in RE2's syntax of the beginning of a name or text.
        anywhere: Pattern of any part of a text.
    """
    pattern = f"^(?:{start})|(?:{anywhere})"
    is_named = re.compile(start, re.IGNORECASE).match
    columns: list[pa.Array] = []
    for column in batch.columns:
        columns += column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return any(map(is_named, batch.schema.names)) or any(_holds_text(column, pattern, is_named) for column in columns)


def _holds_text(values: pa.Array, pattern: str, is_named: Callable[[str], Any]) -> bool:
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_text(values.storage, pattern, is_named)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return bool(pc.any(pc.match_substring_regex(values, pattern, ignore_case=True)).as_py())
    if pa.types.is_struct(kind):
        inner = values.flatten()
        return any(is_named(field.name) for field in kind) or any(_holds_text(v, pattern, is_named) for v in inner)
    if pa.types.is_map(kind):
        return any(_holds_text(part, pattern, is_named) for part in (values.keys, values.items))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _holds_text(values.flatten(), pattern, is_named)
    if pa.types.is_dictionary(kind):
        return _holds_text(values.dictionary, pattern, is_named)
    return not (pa.types.is_primitive(kind) or pa.types.is_null(kind))  # any other type may hold text


def _iter_batches(batches: Any, json: RowJsonReader, is_wanted: IsWanted | None) -> Iterator[tuple[int, Any]]:
    number = 0
    converters: list[tuple[str, Convert | None]] = []
    schema = None
    for batch in batches:
        if batch.schema != schema:
            schema = batch.schema
            converters = [(field.name, _make_converter(field.type, json)) for field in schema]
        if is_wanted is not None and not is_wanted(batch):
            for _ in range(batch.num_rows):
                number += 1
                yield number, None
            continue
        for row in batch.to_pylist():
            number += 1
            try:
                for name, convert in converters:
                    if convert is not None and row[name] is not None:
                        row[name] = convert(row[name])
            except RowError as error:
                yield number, error
            else:
                # A column that is empty in this row says nothing about its format.
                yield number, {name: value for name, value in row.items() if value is not None}


def _make_converter(kind: pa.DataType, json: RowJsonReader) -> Convert | None:
    """Return a function that converts values of this type to JSON's, or None if they are JSON's already."""
    if isinstance(kind, pa.JsonType):
        return lambda value: json.decode(value) if isinstance(value, str) else value
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _make_list_converter(_make_converter(kind.value_type, json))
    if pa.types.is_struct(kind):
        fields = [(field.name, _make_converter(field.type, json)) for field in kind]
        inner = [(name, convert) for name, convert in fields if convert is not None]

        def mark(value: dict[str, Any]) -> ArrowStruct:
            marked = ArrowStruct(value)
            for name, convert in inner:
                if marked[name] is not None:
                    marked[name] = convert(marked[name])
            return marked

        return mark
    if pa.types.is_map(kind):
        convert = _make_converter(kind.item_type, json)
        return lambda value: {key: convert(item) if convert and item is not None else item for key, item in value}
    return None


def _make_list_converter(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: [None if item is None else convert(item) for item in value]
