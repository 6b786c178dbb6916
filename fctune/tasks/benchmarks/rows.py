"""The rows of a public benchmark: a JSONL file, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.config.parsing import describe_no_file
from fctune.data.sources.arrow import iter_hub
from fctune.data.sources.row_json import RowJsonReader

T = TypeVar("T")

_NUM_SHOWN = 5


def read_benchmark(path: str, title: str, read: Callable[[Any], T]) -> list[T]:
    """Return what ``read`` makes of each row of a benchmark.

    Args:
        path: A JSONL file, or ``hf:NAME[:config][:split][@revision]``.
        title: Name of the benchmark, for messages.
        read: Reads a decoded row; ``ValueError`` says what is wrong with it.

    Raises:
        DataError: There is no such file or data set, it holds no rows, or some of another form; the first are listed.
    """
    found: list[T] = []
    problems: list[str] = []
    for number, row in iter_hub(path, RowJsonReader()) if path.startswith("hf:") else _iter_lines(path, title):
        try:
            found.append(read(row))
        except ConfigError:  # about this machine, not the row
            raise
        except ValueError as error:
            problems.append(f"  {path}:{number}: {error}")
    if problems:
        shown = "\n".join([*problems[:_NUM_SHOWN], *(["  ..."] if len(problems) > _NUM_SHOWN else [])])
        rows = format_count(len(problems), "row is", "rows are")
        raise DataError(f"{path}: {rows} not of {title}\n{shown}\nPass the benchmark's own file.")
    if not found:
        raise DataError(f"{path}: contains no rows. Pass the file of {title}.")
    return found


def require(row: Any, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    """Check the types of a row's fields; others may be present.

    Raises:
        ValueError: The row is not an object, or a field is missing or of another type.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    for name, kind in fields.items():
        if name not in row:
            raise ValueError(f"no {name}; it has {', '.join(map(str, row)) or 'no fields'}")
        if not isinstance(row[name], kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(one.__name__ for one in kinds)
            raise ValueError(f"{name}: expected {expected}, got {type(row[name]).__name__}")


def find_release(path: str) -> str:
    """Return the data set and revision that the rows come from, or the name of the file."""
    return path.removeprefix("hf:") if path.startswith("hf:") else Path(path).name


def _iter_lines(path: str, title: str) -> Iterator[tuple[int, Any]]:
    file = Path(path)
    if not file.is_file():
        raise DataError(
            f"{path}: {describe_no_file(file)}. Pass the file of {title}, or hf:NAME[:config][:split][@revision]."
        )
    with open(file, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not JSON ({error}). Pass the file of {title}.") from None
