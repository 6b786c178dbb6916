"""The page of GPU results shows what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import Results
from benchmarks.gpu_report import NOT_RUN, PAGE, RESULTS_FILE, SPEEDS, render
from benchmarks.gpu_tests import run_tests

TESTS = """
import time
import pytest

def test_passes(): pass

def test_fails(): assert 1 == 2, "one is not | two"

@pytest.fixture
def broken(): raise OSError("no `device`")

def test_has_a_broken_fixture(broken): pass

@pytest.mark.skip
def test_is_skipped(): pass

def test_hangs(): time.sleep(60)
"""


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == render(json.loads(RESULTS_FILE.read_text())), "run python -m benchmarks.gpu_report"


def test_rows_that_were_not_run_or_failed_say_so() -> None:
    page = render({"lora_8b": {"ok": False}})
    assert page.count(NOT_RUN) >= len(SPEEDS) - 1
    (line,) = [line for line in page.splitlines() if line.startswith("| `lora_8b` ")]
    assert "failed" in line


def test_a_row_that_lacks_a_package_says_so_and_runs_again(tmp_path: Path) -> None:
    row = {"ok": True, "not_run": "liger-kernel is not installed", "device": {}, "versions": {}, "date": "2026-11-22"}
    assert f"| `liger` | {NOT_RUN}: liger-kernel is not installed |" in render({"liger": row})
    results = Results(tmp_path / "gpu.json")
    results.add("liger", row)
    assert not results.is_current("liger")


def test_no_toy_or_failure_is_among_the_results() -> None:
    for name, row in json.loads(RESULTS_FILE.read_text()).items():
        assert row["ok"] or name == "tests", name
        assert not row["toy"], name
        assert "gpu" in row["device"], name


def test_a_failure_does_not_replace_a_success(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    Results(file).add("one", {"ok": True, "tokens_per_s": 3.0})
    again = Results(file)
    again.add("one", {"ok": False})
    again.add("two", {"ok": False})
    assert again.has("one")
    assert not again.has("two")
    assert json.loads(file.read_text())["one"]["tokens_per_s"] == 3.0


@pytest.mark.slow
def test_failing_tests_are_known_by_name_and_message_before_the_others_end(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    seen: list[dict[str, Any]] = []
    results = Results(tmp_path / "gpu.json", tmp_path / "page.md")

    def progress(found: dict[str, Any]) -> None:
        seen.append(found)
        results.add("tests", found | {"date": "2026-01-02 03:04"})

    found = run_tests([str(tmp_path)], tmp_path / "out.jsonl", 20, progress=progress)
    assert found == seen[-1] | {"error": "timed out after 20 s"}
    assert [name.rpartition("::")[2] for name in found["passed"]] == ["test_passes"]
    messages = {test["test"].rpartition("::")[2]: test["message"] for test in found["failed"]}
    assert messages.keys() == {"test_fails", "test_has_a_broken_fixture"}
    assert "one is not | two" in messages["test_fails"]
    assert "OSError: no `device`" in messages["test_has_a_broken_fixture"]
    page = (tmp_path / "page.md").read_text()
    assert "1 passed, 2 failed, 1 skipped" in page
    assert "one is not \\| two" in page

    arguments = [str(tmp_path), "-k", "passes or skipped"]
    rest = run_tests(arguments, tmp_path / "rest.jsonl", 60, passed=found["passed"])
    assert rest == {"ok": True, "passed": found["passed"], "failed": [], "skipped": 1}


def test_rows_with_a_note_are_measured_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json")
    results.add("one", {"ok": True, "note": "measured before a change"})
    results.add("two", {"ok": True})
    assert [name for name in ("one", "two", "three") if not results.is_current(name)] == ["one", "three"]
