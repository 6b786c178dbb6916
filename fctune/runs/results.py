"""Tool-call accuracy of a run: results of its base and of what it left, found by the model they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.calls.metrics import rate
from fctune.errors import DataError
from fctune.evaluation.paired import Comparison, compare_rows
from fctune.evaluation.results import Row, read_rows, read_settings
from fctune.runs.record import RunRecord

_PLACES = ("*.summary.json", "eval/*.summary.json", "eval/*/*.summary.json")
_SPEED_PLACES = ("*throughput*.json", "eval/*throughput*.json", "eval/*/*throughput*.json")


@dataclass(frozen=True, slots=True)
class Results:
    """One evaluation on disk."""

    path: Path  # results.jsonl
    suite: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A suite under what the run left, and under its base where that was measured on the same cases."""

    suite: str
    after: Results
    before: Results | None

    @property
    def has_total(self) -> bool:
        """Whether categories may be taken together; a benchmark's may not."""
        return not any("bfcl" in row for row in self.after.rows)

    def rates(self) -> list[tuple[str, dict[str, Any]]]:
        """The strict rate of each category after the run, with its interval."""
        categories = sorted({row["category"] for row in self.after.rows} - {"all"})
        found = []
        for name in [*categories, *(["all"] if self.has_total or not categories else [])]:
            held = [row["verdict"] == "correct" for row in self.after.rows if name in ("all", row["category"])]
            found.append((name, rate(sum(held), len(held))))
        return found

    def compare(self) -> list[Comparison]:
        """The categories before and after; none without results of the base."""
        return compare_rows(self.before.rows, self.after.rows, self.has_total) if self.before else []


def read_results(path: str | Path) -> Results:
    """The results of a file that ``eval.tool_calls`` wrote.

    Raises:
        DataError: it is none, or holds none.
    """
    path = Path(path)
    rows = read_rows(path, is_partial=False)
    if not rows:
        raise DataError(f"{path}: holds no results.")
    return Results(path, str((read_settings(path) or {}).get("suite", path.stem)), rows)


def find_accuracies(record: RunRecord) -> list[Accuracy]:
    """Results in the run's directory, beside it, and in ``eval/`` of both, of its exports and of its base.

    Of a suite that was run more than once the newest counts; the base must have been asked the same cases. Results that
    are older than the run are of an earlier one, which was moved to make room.
    """
    after: dict[str, Path] = {}
    before: list[Path] = []
    base = record.config.get("model", {}).get("path")
    for summary_path in sorted(_summaries(record.path), key=lambda path: path.stat().st_mtime):
        try:
            summary = json.loads(summary_path.read_text(encoding="utf-8"))
            model, adapter, suite = Path(summary["model"]), summary.get("adapter"), str(summary["suite"])
            places = [model, Path(adapter)] if adapter else [model]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        rows = summary_path.with_name(summary_path.name.removesuffix(".summary.json") + ".jsonl")
        if not rows.is_file():
            continue
        if any(_is_inside(place, record.path) for place in places):
            if not record.started_after(summary_path):
                after[suite] = rows
        elif adapter is None and base is not None and _is_same(model, base):
            before.append(rows)
    found = []
    for _, rows in sorted(after.items()):
        base_rows = next((path for path in reversed(before) if _same_cases(path, rows)), None)
        found.append(pair_results(rows, base_rows))
    return found


def pair_results(after: str | Path, before: str | Path | None) -> Accuracy:
    """Two results files as one accuracy."""
    results = read_results(after)
    return Accuracy(results.suite, results, read_results(before) if before else None)


def _summaries(run: Path) -> Iterator[Path]:
    for folder in (run, run.resolve().parent):
        for place in _PLACES:
            yield from folder.glob(place)


def _is_inside(place: Path, run: Path) -> bool:
    return place.resolve().is_relative_to(run.resolve())


def _is_same(model: Path, base: str) -> bool:
    return model.resolve() == Path(base).resolve()


def _same_cases(before: Path, after: Path) -> bool:
    first, second = read_settings(before) or {}, read_settings(after) or {}
    keys: Sequence[str] = ("suite", "cases_digest", "max_new_tokens")
    if not first and not second:  # results without settings are compared by their cases alone
        return {row["id"] for row in read_rows(before)} == {row["id"] for row in read_rows(after)}
    return all(first.get(key) == second.get(key) for key in keys)


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
    for path in sorted(_speed_files(run), key=lambda path: path.stat().st_mtime, reverse=True):
        if record.started_after(path):
            continue
        is_within = path.resolve().is_relative_to(run)
        speeds = [
            AnswerSpeed(float(row["tokens_per_s"]), row["width"], path)
            for row in _read_speed_rows(path)
            if _is_of(row["model"], run, is_within)
        ]
        if speeds:
            return max(speeds, key=lambda speed: speed.tokens_per_s)
    return None


def _speed_files(run: Path) -> Iterator[Path]:
    for folder in (run, run.parent):
        for place in _SPEED_PLACES:
            yield from folder.glob(place)


def _is_of(model: str, run: Path, is_within: bool) -> bool:
    if model.startswith(("http://", "https://")):
        return is_within
    return Path(model).resolve().is_relative_to(run)


def _read_speed_rows(path: Path) -> list[dict[str, Any]]:
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
