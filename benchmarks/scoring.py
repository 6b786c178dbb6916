"""Verdicts per second on one core: this project and the leaderboard's own checker, in one run.

    python benchmarks/scoring.py [--repeats 5] [--out benchmarks/results/scoring.json]

Needs the bfcl-eval wheel, which `make setup` installs. Predictions are the leaderboard's 2,351 Python answers,
unchanged and mutated by the seeded generator of the tests; in files each occurs ten times. Times are CPU times of this
process on one core, the median of the repeats. The official checker only compares; a row of a file is read from disk,
parsed, judged by the leaderboard's rules and by the strict match, validated against its schema, counted and written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fctune.calls.bfcl.answer_key import AnswerKey  # noqa: E402
from fctune.calls.bfcl.cases import MULTI_TURN, read_bfcl  # noqa: E402
from fctune.calls.bfcl.checker import CallChecker  # noqa: E402
from fctune.calls.bfcl.multi_turn import check_multi_turn, load_simulators  # noqa: E402
from fctune.calls.formats.base import Parsed  # noqa: E402
from fctune.calls.formats.registry import FORMATS  # noqa: E402
from fctune.data.conversation import Call  # noqa: E402
from fctune.evaluation.score_file import score_file  # noqa: E402
from fctune.evaluation.suites import BfclSuite  # noqa: E402
from tests.calls.bfcl_wheel import (  # noqa: E402
    PYTHON_CATEGORIES,
    Case,
    data_dir,
    gold_calls,
    official_checker,
    official_multi_turn_checker,
    python_cases,
)
from tests.calls.mutations import mutate  # noqa: E402
from tests.calls.turn_mutations import gold_turns  # noqa: E402

COPIES = 10
Predictions = Sequence[tuple[Case, list[Call]]]


def measure_judges(predictions: Predictions, repeats: int) -> dict[str, float]:
    """Measure the verdicts per second of each judge on calls in memory."""
    questions = {case.id: case for category in PYTHON_CATEGORIES for case in read_bfcl(data_dir(), category)}
    checkers = [CallChecker(case.category, case.functions, case.answers) for case, _ in predictions]
    keys = [AnswerKey(questions[case.id]) for case, _ in predictions]
    parsed = [Parsed(tuple(calls)) for _, calls in predictions]
    check = official_checker()

    def official() -> None:
        for case, calls in predictions:
            check(case, calls)

    def prepared() -> None:
        for checker, (_, calls) in zip(checkers, predictions, strict=True):
            checker.check(calls)

    def strict_match() -> None:
        for key, given in zip(keys, parsed, strict=True):
            key.judge(given)

    work = {
        "official ast_checker": official,
        "CallChecker": prepared,
        "AnswerKey": strict_match,
    }
    return measure(work, len(predictions), repeats)


def measure_files(repeats: int) -> dict[str, float]:
    """Measure the rows per second of complete files: read, parsed, judged, counted, written."""
    rng = random.Random(0)
    cases = list(python_cases())
    rows: dict[str, list[dict[str, Any]]] = {
        "calls, gold": [{"id": case.id, "calls": to_json(gold_calls(case))} for case in cases],
        "calls, mutated": [{"id": case.id, "calls": to_json(mutate(case, rng))} for case in cases],
    }
    for name, call_format in FORMATS.items():
        rows[f"text, {name}"] = [
            {"id": case.id, "text": call_format.render(gold_calls(case), case.tools), "format": name} for case in cases
        ]
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, given in rows.items():
            path = Path(folder) / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in given) * COPIES, encoding="utf-8")
            suite = BfclSuite(data_dir(), PYTHON_CATEGORIES)
            out = Path(folder) / "out.jsonl"
            score = functools.partial(score_file, suite, path, out)
            rates |= measure({name: score}, len(given) * COPIES, repeats)
    return rates


def measure_multi_turn(repeats: int) -> dict[str, float]:
    """Measure the cases per second of the 800 multi-turn answers."""
    replays = [(case, gold_turns(case)) for category in MULTI_TURN for case in read_bfcl(data_dir(), category)]
    simulators, check = load_simulators(), official_multi_turn_checker()

    def official() -> None:
        for case, turns in replays:
            check(case, turns)

    def ours() -> None:
        for case, turns in replays:
            check_multi_turn(case, turns, simulators)

    return measure({"official multi_turn_checker": official, "check_multi_turn": ours}, len(replays), repeats)


def measure(work: dict[str, Callable[[], Any]], count: int, repeats: int) -> dict[str, float]:
    """Return how many of ``count`` items each does per second; they take turns, after an uncounted warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, run in work.items():
            # The wheel prints what it cannot convert.
            with contextlib.redirect_stdout(io.StringIO()):
                begun = time.process_time()
                run()
                if turn:
                    seconds[name].append(time.process_time() - begun)
    return {name: count / statistics.median(times) for name, times in seconds.items()}


def to_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls as in a file of predictions."""
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def main() -> None:
    """Measure, print and write the results with the machine and versions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rng = random.Random(0)
    cases = list(python_cases())
    results = {
        "judging gold": measure_judges([(case, gold_calls(case)) for case in cases], arguments.repeats),
        "judging mutated": measure_judges([(case, mutate(case, rng)) for case in cases], arguments.repeats),
        "multi-turn gold": measure_multi_turn(arguments.repeats),
        "files": measure_files(arguments.repeats),
    }
    for what, rates in results.items():
        print(f"{what}, per second")
        for name, rate in rates.items():
            print(f"  {name:30}{rate:>10,.0f}")
    if arguments.out:
        machine = {"processor": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        versions = {"python": platform.python_version(), "bfcl-eval": version("bfcl-eval")}
        record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions, "per_second": results}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
