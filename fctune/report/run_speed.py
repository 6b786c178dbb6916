"""How fast the model that a run left answers: what ``eval.throughput --json`` measured of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.report.run_data import RunRecord

_PLACES = ("*throughput*.json", "eval/*throughput*.json", "eval/*/*throughput*.json")


@dataclass(frozen=True, slots=True)
class AnswerSpeed:
    """New tokens a second of all prompts together, ``width`` prompts at a time."""

    tokens_per_s: float
    width: int
    path: Path


def find_speed(record: RunRecord) -> AnswerSpeed | None:
    """The greatest over the widths, in the newest file of it in the run's directory or beside it; None without one.

    Beside the run, rows count whose model lies in the run's directory; within it, those of a server, too. What is older
    than the run is of an earlier one in its place.
    """
    run = record.path.resolve()
    for path in sorted(_files(run), key=lambda path: path.stat().st_mtime, reverse=True):
        if record.began_after(path):
            continue
        is_within = path.resolve().is_relative_to(run)
        speeds = [
            AnswerSpeed(float(row["tokens_per_s"]), row["width"], path)
            for row in _read_rows(path)
            if _is_of(row["model"], run, is_within)
        ]
        if speeds:
            return max(speeds, key=lambda speed: speed.tokens_per_s)
    return None


def _files(run: Path) -> Iterator[Path]:
    for folder in (run, run.parent):
        for place in _PLACES:
            yield from folder.glob(place)


def _is_of(model: str, run: Path, is_within: bool) -> bool:
    if model.startswith(("http://", "https://")):
        return is_within
    return Path(model).resolve().is_relative_to(run)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of ``eval.throughput``; none of one that is something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    kinds = {"model": str, "width": int, "tokens_per_s": int | float}
    if not isinstance(rows, list):
        return []
    return [
        row
        for row in rows
        if isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in kinds.items())
    ]
