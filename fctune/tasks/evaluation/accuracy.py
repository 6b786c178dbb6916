"""Accuracy of a run's exports, and of its base, from the evaluations that measured them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.base.errors import DataError
from fctune.calls.metrics import rate
from fctune.runs.record import RunRecord, find_files_of_run
from fctune.tasks.benchmarks import find_benchmark_of_rows
from fctune.tasks.evaluation.paired import Comparison, compare_rows
from fctune.tasks.evaluation.results import read_rows, read_settings
from fctune.tasks.judge import Row, is_measured, is_valid

_EVALUATIONS = ("*.summary.json", "eval/*.summary.json", "eval/*/*.summary.json")


@dataclass(frozen=True, slots=True)
class Results:
    """Results of one evaluation, read from its results file."""

    path: Path
    suite: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Results on one suite after training, and those of the base model on the same cases if there are any."""

    suite: str
    after: Results
    before: Results | None

    @property
    def has_total(self) -> bool:
        """True if the categories may be averaged; a benchmark's may not."""
        return find_benchmark_of_rows(self.after.rows) is None

    def rates(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the strict accuracy of each category after training, with its interval; the total comes last."""
        rows = [row for row in self.after.rows if is_measured(row)]
        categories = sorted({row["category"] for row in rows} - {"all"})
        found = []
        for name in [*categories, *(["all"] if self.has_total or not categories else [])]:
            valid = [is_valid(row) for row in rows if name in ("all", row["category"])]
            found.append((name, rate(sum(valid), len(valid))))
        return found

    def total(self) -> dict[str, Any] | None:
        """Return the accuracy over all categories with its interval; None if they may not be averaged."""
        return self.rates()[-1][1] if self.has_total else None

    def compare(self) -> list[Comparison]:
        """Compare each category before and after training; empty without results of the base."""
        return compare_rows(self.before.rows, self.after.rows, self.has_total) if self.before else []


def read_results(path: str | Path) -> Results:
    """Read a results file of ``fctune eval``.

    Raises:
        DataError: The file is not a results file or contains no results.
    """
    path = Path(path)
    rows = read_rows(path, is_partial=False)
    if not rows:
        raise DataError(f"{path}: contains no results. Pass a file written by fctune eval.")
    return Results(path, str((read_settings(path) or {}).get("suite", path.stem)), rows)


def pair_results(after: str | Path, before: str | Path | None) -> Accuracy:
    """Pair the results file of a trained model with that of its base."""
    results = read_results(after)
    return Accuracy(results.suite, results, read_results(before) if before else None)


def list_totals(accuracies: Iterable[Accuracy]) -> dict[str, float]:
    """Return the accuracy over all categories by suite, of suites whose categories may be averaged."""
    return {accuracy.suite: total["rate"] for accuracy in accuracies if (total := accuracy.total()) is not None}


def find_accuracies(record: RunRecord) -> list[Accuracy]:
    """Find evaluation results of the run's exports and of its base model, one ``Accuracy`` for each suite.

    Searches the run's directory and its parent, and ``eval/`` in both. The newest results of a suite are used; results
    of the base must be on the same cases. Results older than the run belong to an earlier run in the same directory.
    Results inside the directory of a run that was copied or moved name its models at their old place.
    """
    after: dict[str, Path] = {}
    before: list[Path] = []
    base = record.config.get("model", {}).get("path")
    run = record.path.resolve()
    written_to = Path(record.config.get("output_dir", run))
    for summary_path in find_files_of_run(run, _EVALUATIONS):
        try:
            summary = json.loads(summary_path.read_text(encoding="utf-8"))
            model, adapter, suite = Path(summary["model"]), summary.get("adapter"), str(summary["suite"])
            evaluated = [model, Path(adapter)] if adapter else [model]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        stem = summary_path.name.removesuffix(".summary.json")
        candidates = (summary_path.with_name(f"{stem}.jsonl"), summary_path.with_name(stem))
        if (rows := next(filter(Path.is_file, candidates), None)) is None:
            continue
        is_inside = summary_path.resolve().is_relative_to(run)
        if any(p.resolve().is_relative_to(run) or (is_inside and p.is_relative_to(written_to)) for p in evaluated):
            if not record.started_after(summary_path):
                after[suite] = rows
        elif (
            adapter is None
            and base is not None
            and (model.resolve() == Path(base).resolve() or (is_inside and model == Path(base)))
        ):
            before.append(rows)
    found = []
    for _, rows in sorted(after.items()):
        base_rows = next((path for path in reversed(before) if _has_same_cases(path, rows)), None)
        found.append(pair_results(rows, base_rows))
    return found


def _has_same_cases(before: Path, after: Path) -> bool:
    first, second = read_settings(before) or {}, read_settings(after) or {}
    if not first and not second:  # results without settings are compared by their case ids
        return {row["id"] for row in read_rows(before)} == {row["id"] for row in read_rows(after)}
    return all(first.get(key) == second.get(key) for key in ("suite", "cases_digest", "max_new_tokens"))
