"""Reader of a run directory: ``run.json``, ``metrics.jsonl``, ``alerts.jsonl``, ``exit.json`` and checkpoints.

Works while the run is still writing, after it was killed, and on runs that recorded fewer metrics.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from fctune.base.errors import DataError
from fctune.config.intervals import format_count
from fctune.runs.directory import RunFiles
from fctune.runs.tune_directory import find_run_dir

Column = list[float | None]

_CHECKPOINT = re.compile(r"(elastic-)?checkpoint-(\d+)")
_MARKERS = {"sharded": "_SUCCESS", "elastic": "_ELASTIC_SUCCESS"}
_NUM_NAMED = 5

# Schemas of the parts that are read; other versions of the library may write less or more.
_COUNT = {"type": "integer", "minimum": 0}
_PREVIOUS = {
    "type": ["object", "null"],
    "properties": {"world_size": {"type": ["integer", "null"]}, "exit": {"type": ["object", "null"]}},
}
_RESTART = {
    "type": "object",
    "required": ["step"],
    "properties": {
        "step": _COUNT,
        "world_size": _COUNT,
        "checkpoint": {"type": ["string", "null"]},
        "before": _PREVIOUS,
    },
}
_SOURCE = {"type": "object", "required": ["path"], "properties": {"weight": {"type": "number"}}}
_INPUTS = {"type": "object", "properties": {"sources": {"type": "array", "items": {"type": "object"}}}}
_CONFIG = {
    "type": "object",
    "properties": {
        "model": {"type": "object", "properties": {"path": {"type": "string"}}},
        "adapter": {
            "type": ["object", "null"],
            "required": ["rank", "alpha"],
            "properties": {"alpha": {"type": "number"}, "scaling": {"type": "string"}},
        },
        "data": {"type": "object", "properties": {"sources": {"type": "array", "items": _SOURCE}}},
        "success": {"type": ["object", "null"], "additionalProperties": {"type": ["number", "boolean", "null"]}},
        "price_per_gpu_hour": {"type": ["number", "null"]},
        "currency": {"type": "string"},
    },
}
_RUN_SCHEMA = {
    "type": "object",
    "properties": {
        "config": _CONFIG,
        "num_steps": _COUNT,
        "world_size": _COUNT,
        "device_memory_gib": {"type": ["number", "null"]},  # of one GPU
        "command": {"type": "array"},
        "versions": {"type": "object"},
        "resumed": {"type": "array", "items": _RESTART},
        "parameters": {
            "type": "object",
            "required": ["total", "trained", "token_rows"],
            "additionalProperties": _COUNT,
        },
        "closing": {"type": "object", "additionalProperties": {"type": "number"}},
        "data": {"type": "object", "properties": {"inputs": _INPUTS}},
        "hosts": {"type": "array"},
    },
}
_EXIT_SCHEMA = {"type": "object", "required": ["code"], "properties": {"code": {"type": "integer"}}}


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


@dataclass(frozen=True, slots=True)
class RunSegment:
    """One uninterrupted stretch of a run: from a start or restart to the next restart or the end."""

    started_at: datetime | None
    after_step: int  # step of the checkpoint it resumed from; 0 for the first segment
    world_size: int | None
    checkpoint: str | None = None  # checkpoint it resumed from
    ended_at: datetime | None = None  # last sign of life; only known for segments that a restart followed
    exit: dict[str, Any] | None = None  # code and reason; None if it was killed or is still running


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint in the run directory."""

    step: int
    kind: str  # "sharded" or "elastic"
    name: str


@dataclass(slots=True)
class RunRecord:
    """Contents of a run directory; ``update`` reads what was written since."""

    path: Path
    metrics: MetricsFile
    run: dict[str, Any] = field(default_factory=dict)
    exit: dict[str, Any] | None = None  # None while it runs, and after a kill
    alerts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Directory name, prefixed with the parent's if the directory is just called ``run``."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name == "run" else path.name

    @property
    def files(self) -> RunFiles:
        """The files of the run."""
        return RunFiles(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """Config of the run as nested plain values; empty without ``run.json``."""
        config: dict[str, Any] = self.run.get("config", {})
        return config

    @property
    def is_cpu(self) -> bool:
        """True if the run is known to have used CPUs."""
        return str(self.run.get("device", "")).startswith("cpu")

    @property
    def num_steps(self) -> int | None:
        """Total number of optimizer steps; None until the run has computed it."""
        num_steps: int | None = self.run.get("num_steps")
        return num_steps

    @property
    def segments(self) -> list[RunSegment]:
        """Segments in chronological order: the first start, then one for each restart."""
        restarts = self.run.get("resumed", [])
        ends: list[dict[str, Any]] = [restart.get("before") or {} for restart in restarts] + [{}]
        first_size = ends[0].get("world_size") if restarts else self.run.get("world_size")
        starts: list[dict[str, Any]] = [
            {"at": self.run.get("started_at"), "step": 0, "world_size": first_size},
            *restarts,
        ]
        return [
            RunSegment(
                started_at=_parse_time(start.get("at")),
                after_step=start["step"],
                world_size=start.get("world_size"),
                checkpoint=start.get("checkpoint"),
                ended_at=_parse_time(end.get("until")),
                exit=end.get("exit"),
            )
            for start, end in zip(starts, ends, strict=True)
        ]

    def segment_indices(self) -> list[int]:
        """Return, for each step of the metrics, the index into ``segments`` of the segment that took it.

        A restart discards the steps after its checkpoint, so a step belongs to the last segment that resumed before it.
        """
        earliest = list(itertools.accumulate((segment.after_step for segment in reversed(self.segments)), min))[::-1]
        return [max(0, bisect.bisect_left(earliest, step) - 1) for step in self.metrics.steps]

    def started_after(self, file: Path) -> bool:
        """Return True if ``file`` is older than this run, so that it describes an earlier run in this directory."""
        started_at = self.segments[0].started_at
        return started_at is not None and file.stat().st_mtime < started_at.timestamp()

    @property
    def ended_at(self) -> datetime | None:
        """Time at which the run ended; of a running or killed run, its last write."""
        if self.exit is not None and (finished_at := _parse_time(self.run.get("finished_at"))) is not None:
            return finished_at
        for file in (self.files.exit, self.files.metrics):
            if file.exists():
                return datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return None

    def update(self) -> bool:
        """Read what was written since the last call; return True if there were new metrics.

        Raises:
            DataError: A file is not one that a run writes.
        """
        files = self.files
        self.run = _read_object(files.run, _RUN_SCHEMA) or {}
        self.exit = _read_object(files.exit, _EXIT_SCHEMA)
        self.alerts = _read_alerts(files.alerts)
        self.checkpoints = _find_checkpoints(files.checkpoints)
        return self.metrics.update()

    def notes(self) -> list[str]:
        """Describe missing, incomplete or inconsistent files, one sentence each."""
        metrics, notes = self.metrics, []
        if not self.run:
            notes.append("run.json: missing, so the model, data and config of this run are unknown.")
        if not metrics.steps:
            notes.append("metrics.jsonl: contains no steps.")
        if metrics.is_torn:
            notes.append(
                "metrics.jsonl: the last line is incomplete and was ignored; the run was killed while writing it, or "
                "is writing it now."
            )
        if metrics.num_unreadable:
            lines = format_count(metrics.num_unreadable, "line that is", "lines that are")
            notes.append(f"metrics.jsonl: ignored {lines} not a training step.")
        if metrics.num_repeated:
            repeated = format_count(metrics.num_repeated, "step appears", "steps appear")
            notes.append(f"metrics.jsonl: {repeated} twice; the later lines are used.")
        if gaps := metrics.gaps():
            shown = ", ".join(str(a) if a == b else f"{a:,}-{b:,}" for a, b in gaps[:_NUM_NAMED])
            rest = f" and {format_count(len(gaps) - _NUM_NAMED, 'more gap')}" if len(gaps) > _NUM_NAMED else ""
            is_one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
            notes.append(f"metrics.jsonl: {f'step {shown} is' if is_one else f'steps {shown}{rest} are'} missing.")
        return notes


def read_run(path: str | Path) -> RunRecord:
    """Read the record of the run in a directory, or in that of a tune.

    Raises:
        DataError: The directory does not exist or is not a run's, or a file in it is not one that a run writes.
    """
    path = find_run_dir(path)
    if not path.is_dir():
        raise DataError(f"{path}: no such directory. Pass the output_dir of a run.")
    files = RunFiles(path)
    if not files.run.is_file() and not files.metrics.is_file():
        below = sorted(str(file.parent) for file in path.glob("*/run.json"))
        hint = f" Runs inside it: {', '.join(below[:_NUM_NAMED])}." if below else " Pass the output_dir of a run."
        raise DataError(f"{path}: not a run directory; it has neither run.json nor metrics.jsonl.{hint}")
    record = RunRecord(path, MetricsFile(files.metrics))
    record.update()
    return record


def find_files_of_run(run: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files in a run's directory and in its parent that match one of the patterns, oldest first."""
    found = (path for folder in (run, run.parent) for pattern in patterns for path in folder.glob(pattern))
    return sorted(found, key=lambda path: path.stat().st_mtime)


def _read_object(path: Path, schema: dict[str, Any]) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=_reject_constant)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}).") from None
    defect = best_match(Draft202012Validator(schema).iter_errors(value))
    if defect is not None:
        raise DataError(f"{path}: {defect.json_path}: {defect.message[:200]}; this file was not written by a run.")
    return value


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _read_alerts(path: Path) -> list[dict[str, Any]]:
    """Read the alerts in order, skipping lines that are incomplete."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    alerts = []
    for line in lines:
        try:
            alert = json.loads(line)
            alerts.append({**alert, "name": str(alert["name"]), "step": int(alert["step"])})
        except (ValueError, KeyError, TypeError):
            continue
    return alerts


def _find_checkpoints(root: Path) -> list[SavedCheckpoint]:
    """List the checkpoints that have a completion marker (see ``fctune.checkpoint.store``), sorted by step."""
    found = []
    for entry in root.glob("*checkpoint-*") if root.is_dir() else ():
        if match := _CHECKPOINT.fullmatch(entry.name):
            kind = "elastic" if match[1] else "sharded"
            if (entry / _MARKERS[kind]).is_file():
                found.append(SavedCheckpoint(int(match[2]), kind, entry.name))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.kind))


def _parse_time(text: Any) -> datetime | None:
    """Parse an ISO 8601 time, taken as UTC if it names no zone; None if it is not a time."""
    try:
        parsed = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
