"""A run as its directory tells it: ``run.json``, ``metrics.jsonl``, ``alerts.jsonl``, ``exit.json``, checkpoints.

It is read while the run goes on, after it was killed, and by versions that wrote fewer metrics. torch is not imported.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from fctune.errors import DataError
from fctune.runs.metrics_file import MetricsFile

_CHECKPOINT = re.compile(r"(elastic-)?checkpoint-(\d+)")
_MARKS = {"sharded": "_SUCCESS", "elastic": "_ELASTIC_SUCCESS"}
_NUM_NAMED = 5

# What is read of these files; older versions have less, newer ones more.
_COUNT = {"type": "integer", "minimum": 0}
_BEFORE = {
    "type": ["object", "null"],
    "properties": {"world_size": {"type": ["integer", "null"]}, "exit": {"type": ["object", "null"]}},
}
_PART = {
    "type": "object",
    "required": ["step"],
    "properties": {
        "step": _COUNT,
        "world_size": _COUNT,
        "checkpoint": {"type": ["string", "null"]},
        "before": _BEFORE,
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
        "resumed": {"type": "array", "items": _PART},
        "closing": {"type": "object", "additionalProperties": {"type": "number"}},
        "data": {"type": "object", "properties": {"inputs": _INPUTS}},
        "hosts": {"type": "array"},
    },
}
_EXIT_SCHEMA = {"type": "object", "required": ["code"], "properties": {"code": {"type": "integer"}}}


@dataclass(frozen=True, slots=True)
class RunSegment:
    """A run from a start to its end or the next start: the first, or one after a restart."""

    at: datetime | None  # when it was started
    after_step: int  # the step that it went on from
    world_size: int | None
    checkpoint: str | None = None  # what it went on from
    until: datetime | None = None  # when it ended or wrote last, of a part that was gone on from
    end: dict[str, Any] | None = None  # its exit.json's code and reason; None: it was killed, or goes on


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is still there."""

    step: int
    kind: str  # sharded or elastic
    name: str


@dataclass(slots=True)
class RunRecord:
    """A run directory as it is now; ``update`` reads on."""

    path: Path
    metrics: MetricsFile
    run: dict[str, Any] = field(default_factory=dict)
    exit: dict[str, Any] | None = None  # None: it goes on, or it was killed
    alerts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The directory's name, with its parent's where that alone says little."""
        path = self.path.resolve()
        return f"{path.parent.name}/{path.name}" if path.name == "run" else path.name

    @property
    def config(self) -> dict[str, Any]:
        """The run's config, as nested plain values; empty without run.json."""
        config: dict[str, Any] = self.run.get("config", {})
        return config

    @property
    def num_steps(self) -> int | None:
        """Steps that the run is to take; None before it knows."""
        found: int | None = self.run.get("num_steps")
        return found

    @property
    def segments(self) -> list[RunSegment]:
        """Its starts, in order."""
        resumed = self.run.get("resumed", [])
        ends: list[dict[str, Any]] = [one.get("before") or {} for one in resumed] + [{}]
        first_size = ends[0].get("world_size") if resumed else self.run.get("world_size")
        starts: list[dict[str, Any]] = [
            {"at": self.run.get("started_at"), "step": 0, "world_size": first_size},
            *resumed,
        ]
        return [
            RunSegment(
                at=_read_time(start.get("at")),
                after_step=start["step"],
                world_size=start.get("world_size"),
                checkpoint=start.get("checkpoint"),
                until=_read_time(end.get("until")),
                end=end.get("exit"),
            )
            for start, end in zip(starts, ends, strict=True)
        ]

    def segment_indices(self) -> list[int]:
        """The part that took each step of the metrics, by its place in ``parts``.

        It is the last that went on from before that step: what the parts before it had taken beyond was forgotten.
        """
        earliest = list(itertools.accumulate((part.after_step for part in reversed(self.segments)), min))[::-1]
        return [max(0, bisect.bisect_left(earliest, step) - 1) for step in self.metrics.steps]

    def started_after(self, file: Path) -> bool:
        """Whether a file is older than the run, so that what it says of this place is of an earlier run in it."""
        begun = self.segments[0].at
        return begun is not None and file.stat().st_mtime < begun.timestamp()

    @property
    def ended_at(self) -> datetime | None:
        """When it ended, or wrote last."""
        if self.exit is not None and (said := _read_time(self.run.get("finished_at"))) is not None:
            return said
        for file in (self.path / "exit.json", self.metrics.path):
            if file.exists():
                return datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return None

    def update(self) -> bool:
        """Read on; whether steps were added.

        Raises:
            DataError: files that are not a run's.
        """
        self.run = _read_object(self.path / "run.json", _RUN_SCHEMA) or {}
        self.exit = _read_object(self.path / "exit.json", _EXIT_SCHEMA)
        self.alerts = _read_alerts(self.path / "alerts.jsonl")
        self.checkpoints = _find_checkpoints(self.path / "checkpoints")
        return self.metrics.update()

    def notes(self) -> list[str]:
        """What is odd about the files, a sentence each."""
        metrics, notes = self.metrics, []
        if not self.run:
            notes.append("run.json: not there; what was trained on what is not known.")
        if not metrics.steps:
            notes.append("metrics.jsonl: no step in it.")
        if metrics.is_torn:
            notes.append(
                "metrics.jsonl: its last line is cut in half and left out: the run was killed as it wrote, or is "
                "writing now."
            )
        if metrics.num_unreadable:
            lines = (
                "1 line is no step" if metrics.num_unreadable == 1 else f"{metrics.num_unreadable:,} lines are no steps"
            )
            notes.append(f"metrics.jsonl: {lines} and left out.")
        if metrics.num_repeated:
            notes.append(f"metrics.jsonl: {metrics.num_repeated:,} steps stand twice; the later lines count.")
        if gaps := metrics.missing():
            shown = ", ".join(str(a) if a == b else f"{a:,}-{b:,}" for a, b in gaps[:_NUM_NAMED])
            rest = f" and {len(gaps) - _NUM_NAMED:,} more gaps" if len(gaps) > _NUM_NAMED else ""
            is_one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
            notes.append(f"metrics.jsonl: {f'step {shown} is' if is_one else f'steps {shown}{rest} are'} missing.")
        return notes


def read_run(path: str | Path) -> RunRecord:
    """The run of a directory.

    Raises:
        DataError: there is none, or its files are not a run's.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"{path}: no such directory. Pass the output_dir of a run.")
    if not (path / "run.json").is_file() and not (path / "metrics.jsonl").is_file():
        below = sorted(str(file.parent) for file in path.glob("*/run.json"))
        hint = f" Runs below it: {', '.join(below[:_NUM_NAMED])}." if below else " Pass the output_dir of a run."
        raise DataError(f"{path}: holds neither run.json nor metrics.jsonl, so it is no run.{hint}")
    record = RunRecord(path, MetricsFile(path / "metrics.jsonl"))
    record.update()
    return record


def _read_object(path: Path, schema: dict[str, Any]) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}).") from None
    defect = best_match(Draft202012Validator(schema).iter_errors(value))
    if defect is not None:
        raise DataError(f"{path}: {defect.json_path}: {defect.message[:200]}; it is not the file of a run.")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _read_alerts(path: Path) -> list[dict[str, Any]]:
    """Alerts in order; a line that was cut in half is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            alert = json.loads(line)
            found.append({**alert, "name": str(alert["name"]), "step": int(alert["step"])})
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _find_checkpoints(root: Path) -> list[SavedCheckpoint]:
    """The marked checkpoints, by step; ``fctune.checkpoint.store`` says when one is whole."""
    found = []
    for entry in root.glob("*checkpoint-*") if root.is_dir() else ():
        if match := _CHECKPOINT.fullmatch(entry.name):
            kind = "elastic" if match[1] else "sharded"
            if (entry / _MARKS[kind]).is_file():
                found.append(SavedCheckpoint(int(match[2]), kind, entry.name))
    return sorted(found, key=lambda state: (state.step, state.kind))


def _read_time(text: Any) -> datetime | None:
    """A time of a record; one that names no zone is in UTC, as all that are written here."""
    try:
        read = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return read if read.tzinfo else read.replace(tzinfo=UTC)
