"""The reader of ``metrics.jsonl``: while it is written, after a kill cut its last line, and after restarts."""

from __future__ import annotations

import bisect
import json
import math
import os
from pathlib import Path

from fctune.errors import DataError

Column = list[float | None]


class MetricsFile:
    """``metrics.jsonl`` by columns; ``update`` reads what was written since.

    Attributes:
        steps: in rising order, each once.
        columns: a number, or None, for each step and metric; flags are 1.0.
        is_torn: the last line is cut in half.
        num_unreadable: lines before it that are no step.
        num_repeated: steps that were written again, by which the later lines count.
    """

    def __init__(self, path: Path):
        self.path = path
        self.num_unreadable = 0
        self._forget(None)

    def update(self) -> bool:
        """Read on; whether there was anything new. A file that was replaced, as restarts do, is read from its start.

        Where it is gone, as when the directory was moved to make room for a new run, nothing is left of it here either.

        Raises:
            DataError: it cannot be read, or holds lines and none is a step.
        """
        before = self._inode, self._offset
        try:
            with open(self.path, "rb") as file:
                now = os.fstat(file.fileno())
                if now.st_ino != self._inode or now.st_size < self._offset:
                    self._forget(now.st_ino)
                file.seek(self._offset)
                read = file.read()
        except FileNotFoundError:
            self._forget(None)
            return before != (None, 0)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}).") from None
        *lines, tail = read.split(b"\n")
        for line in lines:
            self._offset += len(line) + 1
            if line.strip() and not self._take(line):
                self.num_unreadable += 1
        # A line without its end may be whole all the same: a kill came between the two.
        self.is_torn = bool(tail.strip()) and not self._take(tail)
        if tail and not self.is_torn:
            self._offset += len(tail)
        if self.num_unreadable and not self.steps:
            raise DataError(
                f"{self.path}: none of its {self.num_unreadable:,} lines is a step of a run. "
                "Pass the output_dir of a run of this project."
            )
        return (self._inode, self._offset) != before

    def column(self, name: str) -> Column:
        """A metric over ``steps``; None throughout where the run has not measured it."""
        return self.columns.get(name) or [None] * len(self.steps)

    def has(self, name: str) -> bool:
        """Whether any step has this metric."""
        return any(value is not None for value in self.columns.get(name, ()))

    def last(self, name: str) -> tuple[int, float] | None:
        """The last step that has the metric, and its value."""
        column = self.columns.get(name, [])
        place = next((i for i in range(len(column) - 1, -1, -1) if column[i] is not None), None)
        if place is None:
            return None
        value = column[place]
        assert value is not None
        return self.steps[place], value

    def missing(self) -> list[tuple[int, int]]:
        """Steps between the first and the last that are not there, as (first, last) of each gap."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [(a + 1, b - 1) for a, b in pairs if b > a + 1]

    def _forget(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.steps: list[int] = []
        self.columns: dict[str, Column] = {}
        self.is_torn = False
        self.num_unreadable = self.num_repeated = 0

    def _take(self, line: bytes) -> bool:
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError):
            return False
        if not isinstance(step, int) or isinstance(step, bool):
            return False
        if self.steps and step <= self.steps[-1]:
            place = bisect.bisect_left(self.steps, step)
            self.num_repeated += len(self.steps) - place
            del self.steps[place:]
            for column in self.columns.values():
                del column[place:]
        for name in row.keys() - self.columns.keys():
            if isinstance(row[name], int | float):
                self.columns[name] = [None] * len(self.steps)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = row.get(name)
            column.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else None)
        return True
