"""Reader of ``metrics.jsonl`` by columns; follows a file that is being written and survives kills and restarts."""

from __future__ import annotations

import bisect
import json
import math
import os
import statistics
from pathlib import Path

from fctune.base.errors import DataError
from fctune.config.intervals import format_count

Column = list[float | None]


class MetricsFile:
    """Columns of a ``metrics.jsonl``; ``update`` reads what was written since the last call.

    Attributes:
        steps: Step numbers in ascending order, each once.
        columns: Metric name -> value at each step, None where it was not recorded; flags are 1.0.
        is_torn: The last line is incomplete.
        num_unreadable: Complete lines that are not a step.
        num_repeated: Steps that were written again, of which the later line is used.
    """

    def __init__(self, path: Path):
        self.path = path
        self.num_unreadable = 0
        self._reset(None)

    def update(self) -> bool:
        """Read new lines; return True if there were any.

        A file that was replaced, as restarts do, is read from the start. A file that is gone, as when the directory was
        moved to make room for a new run, clears the columns.

        Raises:
            DataError: The file cannot be read, or has lines but none of them is a step.
        """
        before = self._inode, self._offset
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._reset(stat.st_ino)
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            self._reset(None)
            return before != (None, 0)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}).") from None
        *lines, tail = content.split(b"\n")
        for line in lines:
            self._offset += len(line) + 1
            if line.strip() and not self._add_line(line):
                self.num_unreadable += 1
        # A line without its newline may still be complete: the run was killed between the two.
        self.is_torn = bool(tail.strip()) and not self._add_line(tail)
        if tail and not self.is_torn:
            self._offset += len(tail)
        if self.num_unreadable and not self.steps:
            raise DataError(
                f"{self.path}: none of its {format_count(self.num_unreadable, 'line')} is a training step. "
                "Pass the output_dir of a run of this project."
            )
        return (self._inode, self._offset) != before

    def column(self, name: str) -> Column:
        """Return a metric's value at each of ``steps``; all None if the run did not record it."""
        return self.columns.get(name) or [None] * len(self.steps)

    def values(self, name: str, last: int | None = None) -> list[float]:
        """Return a metric's recorded values over the last steps, or over all of them."""
        return [value for value in self.column(name)[-last if last else 0 :] if value is not None]

    def has(self, name: str) -> bool:
        """Return True if any step recorded this metric."""
        return any(value is not None for value in self.columns.get(name, ()))

    def latest(self, name: str) -> tuple[int, float] | None:
        """Return the last step that recorded a metric and its value there; None if no step did."""
        pairs = zip(reversed(self.steps), reversed(self.columns.get(name, [])), strict=False)
        return next(((step, value) for step, value in pairs if value is not None), None)

    def mean(self, name: str, last: int | None = None) -> float | None:
        """Return a metric's mean over the last steps, or over all; None if it was not recorded."""
        values = self.values(name, last)
        return statistics.fmean(values) if values else None

    def median(self, name: str, last: int | None = None) -> float | None:
        """Return a metric's median over the last steps, or over all; None if it was not recorded."""
        values = self.values(name, last)
        return statistics.median(values) if values else None

    def quantile(self, name: str, share: float, last: int | None = None) -> float | None:
        """Return the smallest value that at least ``share`` of the steps do not exceed (nearest rank)."""
        values = sorted(self.values(name, last))
        return values[math.ceil(share * len(values)) - 1] if values else None

    def total(self, name: str) -> float | None:
        """Return a metric's sum over all steps; None if it was not recorded."""
        values = self.values(name)
        return sum(values) if values else None

    def gaps(self) -> list[tuple[int, int]]:
        """Return ranges of missing steps between the first and the last, as (first, last) of each."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [(a + 1, b - 1) for a, b in pairs if b > a + 1]

    def _reset(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.steps: list[int] = []
        self.columns: dict[str, Column] = {}
        self.is_torn = False
        self.num_unreadable = self.num_repeated = 0

    def _add_line(self, line: bytes) -> bool:
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError):
            return False
        if not isinstance(step, int) or isinstance(step, bool):
            return False
        if self.steps and step <= self.steps[-1]:
            index = bisect.bisect_left(self.steps, step)
            self.num_repeated += len(self.steps) - index
            del self.steps[index:]
            for column in self.columns.values():
                del column[index:]
        for name in row.keys() - self.columns.keys():
            if isinstance(row[name], int | float):
                self.columns[name] = [None] * len(self.steps)
        self.steps.append(step)
        for name, column in self.columns.items():
            value = row.get(name)
            column.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else None)
        return True
