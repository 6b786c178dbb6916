"""Verdicts compared with the leaderboard's own checker, and verdicts per second of both on one core, in one run.

    python -m benchmarks.scoring [--repeats 5] [--scale 1] [--out benchmarks/results/scoring.json]

Needs the bfcl-eval wheel, which `make setup` installs. Fails if a verdict differs. Predictions are made by the seeded
generators of the tests; those for speed are the leaderboard's 2,351 Python answers, unchanged and mutated, and in files
each occurs ten times. Times are CPU times of this
process on one core, the median of the repeats. The official checker only compares; a row of a file is read from disk,
parsed, judged by the leaderboard's rules and by the strict match, validated against its schema, counted and written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fctune.calls.formats.base import Parsed  # noqa: E402
from fctune.calls.formats.registry import FORMATS  # noqa: E402
from fctune.calls.tool_calls import read_tool_calls  # noqa: E402
from fctune.data.conversation import Call  # noqa: E402
from fctune.tasks.benchmarks.bfcl.answer_key import AnswerKey  # noqa: E402
from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN, RELEVANCE, read_bfcl  # noqa: E402
from fctune.tasks.benchmarks.bfcl.checker import CallChecker  # noqa: E402
from fctune.tasks.benchmarks.bfcl.multi_turn import check_multi_turn, load_simulators  # noqa: E402
from fctune.tasks.benchmarks.bfcl.suite import BfclSuite  # noqa: E402
from fctune.tasks.evaluation.score_file import score_file  # noqa: E402
from tests.calls.mutations import invented_case, mutate, mutate_source, odd_arguments  # noqa: E402
from tests.tasks.benchmarks.bfcl.bfcl_wheel import (  # noqa: E402
    PYTHON_CATEGORIES,
    SOURCE_CATEGORIES,
    Case,
    data_dir,
    gold_calls,
    load_cases,
    official_checker,
    official_multi_turn_checker,
    official_served_checker,
    python_cases,
)
from tests.tasks.benchmarks.bfcl.official_prompt import is_same_reading, odd_answer  # noqa: E402
from tests.tasks.benchmarks.bfcl.turn_mutations import gold_turns, mutate_turns  # noqa: E402

COPIES = 10
Predictions = Sequence[tuple[Case, list[Call]]]


def compare_verdicts(scale: float) -> dict[str, dict[str, int]]:
    """Compare verdicts with the wheel's; return the number of comparisons of each kind, and of those that differ."""
    kinds = {
        "mutated calls, Python": _compare_calls(mutate, list(python_cases()), int(250_000 * scale)),
        "mutated calls, Java and JavaScript": _compare_calls(
            mutate_source, [case for name in SOURCE_CATEGORIES for case in load_cases(name)], int(60_000 * scale)
        ),
        "invented cases": _compare_invented(int(100_000 * scale)),
        "arguments as odd JSON": _compare_served(int(60_000 * scale)),
        "mutated multi-turn conversations": _compare_turns(int(8_000 * scale)),
        "odd answers in Python's syntax, as read": _compare_readings(int(180_000 * scale)),
    }
    found = {}
    for kind, comparisons in kinds.items():
        # The wheel prints what it cannot convert.
        with contextlib.redirect_stdout(io.StringIO()):
            is_same = list(comparisons)
        found[kind] = {"compared": len(is_same), "differing": is_same.count(False)}
        print(f"{kind:42}{len(is_same):>10,} compared, {is_same.count(False):,} differ", flush=True)
    return found


def _compare_calls(
    mutation: Callable[[Case, random.Random], list[Call]], cases: Sequence[Case], count: int
) -> Iterator[bool]:
    rng, check = random.Random(1), official_checker()
    checkers = {case.id: CallChecker(case.category, case.functions, case.answers) for case in cases}
    for case in itertools.islice(itertools.cycle(cases), count):
        calls = mutation(case, rng)
        yield checkers[case.id].check(calls).valid == (check(case, calls) is True)


def _compare_invented(count: int) -> Iterator[bool]:
    rng, check = random.Random(2), official_checker()
    for _ in range(count):
        case, calls = invented_case(rng)
        ours = CallChecker(case.category, case.functions, case.answers).check(calls)
        yield ours.valid == (check(case, calls) is True)


def _compare_served(count: int) -> Iterator[bool]:
    rng, check = random.Random(3), official_served_checker()
    cases = [Case(one.id, one.category, [], []) for name in RELEVANCE for one in read_bfcl(data_dir(), name)]
    cases += [*load_cases("live_simple"), *load_cases("live_parallel"), *load_cases("parallel")]
    checkers = {case.id: CallChecker(case.category, case.functions, case.answers) for case in cases}
    for case in itertools.islice(itertools.cycle(cases), count):
        gold = gold_calls(case) or [Call("f", {"a": 1})] * rng.choice((1, 1, 2))
        sent = [
            {"name": rng.choice([call.name] * 8 + ["", None]), "arguments": odd_arguments(call.arguments, rng)}
            for call in gold
        ]
        decoded = read_tool_calls(sent).decoded
        ours = checkers[case.id].check(() if decoded.malformed else decoded.calls)
        yield ours.valid == check(case, sent)


def _compare_turns(count: int) -> Iterator[bool]:
    rng, check, simulators = random.Random(4), official_multi_turn_checker(), load_simulators()
    cases = [case for category in MULTI_TURN for case in read_bfcl(data_dir(), category)]
    for case in itertools.islice(itertools.cycle(cases), count):
        turns = mutate_turns(case, gold_turns(case), rng)
        yield check_multi_turn(case, turns, simulators).valid == (check(case, turns) is True)


def _compare_readings(count: int) -> Iterator[bool]:
    rng, cases = random.Random(5), list(python_cases())
    for _ in range(count):
        yield is_same_reading(odd_answer(rng.choice(cases), rng))


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
    parser.add_argument("--repeats", type=int, default=5, help="0: compare verdicts only, and keep the rates of --out")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the number of comparisons")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "scoring.json")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    agreement = compare_verdicts(arguments.scale)
    total = {key: sum(kind[key] for kind in agreement.values()) for key in ("compared", "differing")}
    print(f"{'all':42}{total['compared']:>10,} compared, {total['differing']:,} differ\n")
    rng = random.Random(0)
    cases = list(python_cases())
    kept = json.loads(arguments.out.read_text()).get("per_second", {}) if arguments.out.exists() else {}
    results = (
        kept
        if not arguments.repeats
        else {
            "judging gold": measure_judges([(case, gold_calls(case)) for case in cases], arguments.repeats),
            "judging mutated": measure_judges([(case, mutate(case, rng)) for case in cases], arguments.repeats),
            "multi-turn gold": measure_multi_turn(arguments.repeats),
            "files": measure_files(arguments.repeats),
        }
    )
    for what, rates in results.items():
        print(f"{what}, per second")
        for name, rate in rates.items():
            print(f"  {name:30}{rate:>10,.0f}")
    machine = {"processor": _processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    versions = {"python": platform.python_version(), "bfcl-eval": version("bfcl-eval")}
    record = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "versions": versions}
    record |= {"verdicts": agreement | {"all": total}, "per_second": results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    if total["differing"]:
        sys.exit(1)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
