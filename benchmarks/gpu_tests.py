"""Run the tests that need a GPU, and report each one as it ends.

``benchmarks.gpu`` runs pytest with this module as a plugin: a line of JSON for each test is in a file as soon as the
test has ended, so that a run which is cut off leaves the names and messages of the tests that failed until then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FILE = "FCTUNE_GPU_TESTS"  # names the file that the plugin writes
_LONGEST_MESSAGE = 300
_POLL_S = 5.0


def pytest_runtest_logreport(report: Any) -> None:
    """Append the outcome of a test, or of a fixture that failed, to the file (called by pytest)."""
    file = os.environ.get(_FILE)
    if file is None or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
    if report.failed:
        line["message"] = _shorten(report)
    with open(file, "a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def _shorten(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
    return " ".join(text.split())[:_LONGEST_MESSAGE]


def run_tests(
    arguments: Sequence[str],
    file: Path,
    limit: float,
    passed: Sequence[str] = (),
    progress: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Run pytest and return the names of the tests that passed, and name and message of those that failed.

    Args:
        arguments: Arguments of pytest: files and options.
        file: File to write, one line per test.
        limit: Seconds after which pytest is ended.
        passed: Tests that passed before, which are left out.
        progress: Called with the result so far whenever a test has failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu_tests", "-p", "no:cacheprovider"]
    command += [*arguments, *(f"--deselect={name}" for name in passed)]
    log = file.with_suffix(".log")
    ends, told = time.monotonic() + limit, 0
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | {_FILE: str(file)})
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(min(_POLL_S, max(0.0, ends - time.monotonic())))
            found = read_results(file, passed)
            if len(found["failed"]) > told:
                told = len(found["failed"])
                progress(found)
        is_late = process.poll() is None
        if is_late:
            process.terminate()
        code = process.wait()
    found = read_results(file, passed)
    if is_late:
        return found | {"ok": False, "error": f"timed out after {limit:.0f} s"}
    nothing_left = code == 5 and bool(passed)  # pytest's code for no tests
    found["ok"] = not found["failed"] and (code == 0 or nothing_left)
    if not found["ok"] and not found["failed"]:
        found["error"] = f"pytest ended with {code}"
        found["output"] = log.read_text(encoding="utf-8").splitlines()[-25:]
    return found


def read_results(file: Path, passed: Sequence[str] = ()) -> dict[str, Any]:
    """Return the result of the tests that have ended; ``ok`` is False, because others may follow."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    tests = [json.loads(line) for line in lines]
    good = [test["test"] for test in tests if test["outcome"] == "passed"]
    failed = [{"test": test["test"], "message": test["message"]} for test in tests if test["outcome"] == "failed"]
    bad = {test["test"] for test in failed}  # a test may pass, and its fixtures fail after it
    return {
        "ok": False,
        "passed": [*passed, *(name for name in good if name not in bad)],
        "failed": failed,
        "skipped": sum(test["outcome"] == "skipped" for test in tests),
    }
