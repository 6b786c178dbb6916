"""Results of other benchmarks, read from the files that their own packages write: tau2-bench and ACEBench.

Nothing is asked or judged here. Formats as of tau2-bench 1.0 (``tau2 run``, github.com/sierra-research/tau2-bench,
which is called tau3 since then) and ACEBench (``eval_main.py``, github.com/ACEBench/ACEBench).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.config.intervals import format_count

_ACE_SCORES = "data_*_score.json"
# Endings of simulations that the package leaves out of its own metrics (NON_EVALUABLE_TERMINATION_REASONS in its
# data_model/simulation.py, commit 143a213). Earlier commits leave out only the first.
_NOT_RATED = {
    "infrastructure_error": "ended with an infrastructure error",
    "context_window_exceeded": "exceeded the context window",
}
# Of a reward: what the package takes for success.
_TOLERANCE = 1e-6


class Score(NamedTuple):
    """One number of a benchmark, from 0 to 1, and the number of cases behind it."""

    value: float
    num_cases: int


@dataclass(frozen=True)
class Published:
    """The numbers that another package reports for one model.

    Attributes:
        benchmark: The benchmark's name.
        model: The model's name in the file; empty if the file names none.
        scores: The numbers, by category.
        notes: What a reader must know to compare them: version, what is missing.
    """

    benchmark: str
    model: str
    scores: Mapping[str, Score]
    notes: tuple[str, ...] = ()


def is_published(path: str | Path) -> bool:
    """Return True if a path may be that of another package's results: a directory, or a file ending in ``.json``."""
    path = Path(path)
    return path.is_dir() or path.suffix == ".json"


def read_published(path: str | Path) -> Published:
    """Read results of tau2-bench or ACEBench.

    Args:
        path: A results file of ``tau2 run`` or the directory that holds its ``results.json``; or the directory of a
            model's scores in ACEBench's ``score_all/score_en`` or ``score_zh``.

    Raises:
        DataError: There are no such results, or they are incomplete or of another version.
    """
    path = Path(path)
    if path.is_dir() and (files := sorted(path.glob(_ACE_SCORES))):
        return _read_ace(path, files)
    return _read_tau2(path / "results.json" if path.is_dir() else path)


def _read_ace(directory: Path, files: Iterable[Path]) -> Published:
    scores: dict[str, Score] = {}
    for file in files:
        category = file.name.removeprefix("data_").removesuffix("_score.json")
        # The rows after the first are the wrong answers.
        header = _decode(file, _read(file).split("\n", 1)[0])
        try:
            accuracy = header["end_to_end_accuracy" if "end_to_end_accuracy" in header else "accuracy"]
            scores[category] = _to_score(accuracy, header["total_count"])
            if "process_accuracy" in header:
                scores[f"{category}, process"] = _to_score(header["process_accuracy"], header["total_count"])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"{file}: its first line does not have ACEBench's accuracy and total_count. "
                "Pass scores that ACEBench's eval_main.py wrote."
            ) from None
    language = directory.parent.name.removeprefix("score_")
    note = f"language {language}" if language in ("en", "zh") else "language unknown"
    return Published("ACEBench", directory.name, scores, (note, "its files name no version"))


def _read_tau2(file: Path) -> Published:
    found = _decode(file, _read(file))
    try:
        info = found["info"]
        domain, agent = str(info["environment_info"]["domain_name"]), info["agent_info"]
        num_trials, user = int(info["num_trials"]), info["user_info"]
        # A run stored as a directory has one line per simulation in its index.
        runs = found.get("simulations") or found.get("simulation_index") or []
        attempts: dict[str, list[bool]] = defaultdict(list)
        left_out: Counter[str] = Counter()
        for run in runs:
            if (ending := run["termination_reason"]) in _NOT_RATED:
                left_out[ending] += 1
                continue
            rewarded = run["reward"] if "reward" in run else (run["reward_info"] or {}).get("reward")
            attempts[str(run["task_id"])].append(rewarded is not None and abs(rewarded - 1) <= _TOLERANCE)
        num_expected = num_trials * len(found["tasks"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(
            f"{file}: not results of tau2-bench 1.0, nor a directory of ACEBench's scores. Pass the file that tau2 run "
            "wrote to data/simulations, or ACEBench's score_all/score_en/MODEL."
        ) from None
    if not attempts:
        raise DataError(f"{file}: contains no finished simulation. Let tau2 run finish, and pass its results again.")
    notes = [f"commit {str(info.get('git_commit', 'unknown'))[:12]}", f"user simulated by {user.get('llm')}"]
    for ending, count in left_out.items():
        notes.append(f"left out: {format_count(count, 'simulation')} that {_NOT_RATED[ending]}")
    if len(runs) < num_expected:
        notes.append(f"incomplete: {len(runs):,} of {format_count(num_expected, 'simulation')}")
    num_rated = sum(map(len, attempts.values()))
    passed = Score(fmean(fmean(solved) for solved in attempts.values()), num_rated)
    return Published("tau2-bench", str(agent.get("llm") or ""), {f"{domain}, pass^1": passed}, tuple(notes))


def _to_score(value: Any, count: Any) -> Score:
    score = Score(float(value), int(count))
    if not 0 <= score.value <= 1:
        raise ValueError(value)
    return score


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(
            f"{file}: cannot be read ({reason}). Pass results of tau2 run, or a directory of ACEBench's scores."
        ) from None


def _decode(file: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{file}: not complete JSON ({error}), as after a run that was killed. Let the benchmark's own command "
            "finish, and pass its results again."
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{file}: expected an object, got {type(value).__name__}. Pass results of tau2 run 1.0 (tau-bench before "
            "it wrote lists), or a directory of ACEBench's scores."
        )
    return value
