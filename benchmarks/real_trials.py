"""Try settings of benchmarks.real_model side by side, choose the best on the validation share, and test it once.

    python -m benchmarks.real_trials --settings FILE.jsonl --out DIR [--jobs N] [--test] -- OPTIONS [-- key=value ...]

Each line of the settings is ``{"name", "options": [...], "overrides": [...]}``: what that trial adds to OPTIONS of
benchmarks.real_model (--model, --seal, --glaive, ...) and to keys of the config. Results are appended to
DIR/trials.jsonl as they come, and trials that have one are not run again. The score of a trial is the harmonic mean of
its accuracies where a call is due and where none is, each a mean over the categories with at least 20 validation cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.real_measuring import answers_dir
from benchmarks.real_summary import PROMPTED, balance_accuracy, format_table, read_answers, summarise
from fctune.base.errors import ConfigError

_MIN_CASES = 20
_POLL_S = 0.5


class Job:
    """A running benchmark with its log and its time limit."""

    def __init__(self, name: str, out: Path, arguments: Sequence[str], limit_s: float):
        self.name, self.out, self.limit_s = name, out, limit_s
        self.started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        self._log = (out / "log.txt").open("ab")
        command = [sys.executable, "-m", "benchmarks.real_model", "--out", str(out), *arguments]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def poll(self) -> str | None:
        """Return None while the job runs, then an empty text or why it failed; ends a job over its limit."""
        seconds = time.monotonic() - self.started
        if (code := self._process.poll()) is None:
            if seconds < self.limit_s:
                return None
            self._process.terminate()  # the run saves and stops
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            return f"not done after {self.limit_s:.0f} s"
        self._log.close()
        if code:
            lines = (self.out / "log.txt").read_text(errors="replace").strip().splitlines()
            return f"exit code {code}: {lines[-1] if lines else ''}"
        return ""


def score(summary: dict[str, Any]) -> float:
    """Return the balanced strict accuracy over the categories that have enough cases."""
    rates = {name: one["after"]["strict"] for name, one in summary.items() if one["n"] >= _MIN_CASES}
    return balance_accuracy(rates) if rates else 0.0


def run_trials(settings: Sequence[dict[str, Any]], common: Sequence[str], arguments: argparse.Namespace) -> list[Any]:
    """Run the trials that have no result yet, ``--jobs`` at a time; returns the results of all."""
    results = arguments.out / "trials.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    known = {one["name"] for one in done if "score" in one}
    waiting = [one for one in settings if one["name"] not in known]
    if arguments.test and not (answers_dir(arguments.out / "base", "test") / "summary.json").is_file():
        waiting.insert(0, {"name": "base", "options": ["--only", "before", "--split", "test"]})
    running: list[tuple[Job, dict[str, Any]]] = []
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            one = waiting.pop(0)
            options = () if one["name"] == "base" else ("--only", "after", "--split", "validation")
            command = _join(common, one, *options)
            running.append((Job(one["name"], arguments.out / one["name"], command, arguments.limit_s), one))
        for job, one in list(running):
            if (problem := job.poll()) is None:
                continue
            running.remove((job, one))
            row = {**one, "seconds": round(time.monotonic() - job.started, 1)}
            if problem:
                row["error"] = problem
            elif one["name"] != "base":
                summary = json.loads((answers_dir(job.out, "validation") / "summary.json").read_text())
                row |= {"score": score(summary), "accuracy": {k: v["after"]["strict"] for k, v in summary.items()}}
            print(json.dumps(row), flush=True)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            done.append(row)
        time.sleep(_POLL_S)
    return done


def test_best(done: Sequence[dict[str, Any]], common: Sequence[str], arguments: argparse.Namespace) -> None:
    """Measure the trial with the best score on the test share, and print the comparison with the base."""
    best = max((one for one in done if "score" in one), key=lambda one: one["score"], default=None)
    if best is None:
        raise ConfigError(f"{arguments.out / 'trials.jsonl'}: no trial has completed, so there is nothing to test.")
    print(f"best on validation: {best['name']}, {best['score']:.3f}", flush=True)
    command = _join(common, best, "--only", "after", "--split", "test")
    job = Job(best["name"], arguments.out / best["name"], command, arguments.limit_s)
    while (problem := job.poll()) is None:
        time.sleep(_POLL_S)
    if problem:
        raise ConfigError(f"{job.out}: the test failed, {problem}")
    base = answers_dir(arguments.out / "base", "test")
    after = read_answers(answers_dir(job.out, "test") / "after")
    table = format_table(summarise(read_answers(base / "before"), after, read_answers(base / PROMPTED)))
    (arguments.out / "table.md").write_text(f"{best['name']}\n\n{table}\n")
    print(table)


def _join(common: Sequence[str], one: dict[str, Any], *options: str) -> list[str]:
    """Return the command line of a trial: options, then keys of the config."""
    shared, keys = list(common), []
    if "--" in shared:
        keys = shared[shared.index("--") + 1 :]
        shared = shared[: shared.index("--")]
    return [*shared, *options, *one.get("options", ()), "--", *keys, *one.get("overrides", ())]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials; 0 done, 2 wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_trials", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--settings", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trials at a time; default: %(default)s")
    parser.add_argument("--limit-s", type=float, default=7200, metavar="S", help="of each trial; default: %(default)s")
    parser.add_argument("--test", action="store_true", help="test the base, and the best trial")
    own, common = list(argv if argv is not None else sys.argv[1:]), []
    if "--" in own:
        common = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    arguments = parser.parse_args(own)
    try:
        settings = [json.loads(line) for line in arguments.settings.read_text().splitlines() if line.strip()]
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"--settings {arguments.settings}: cannot be read ({error})", file=sys.stderr)
        return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        done = run_trials(settings, common, arguments)
        if arguments.test:
            test_best(done, common, arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
