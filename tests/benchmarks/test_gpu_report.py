"""The page of GPU results shows what was measured, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu import Results
from benchmarks.gpu_report import NOT_RUN, PAGE, RESULTS_FILE, SPEEDS, render


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == render(json.loads(RESULTS_FILE.read_text())), "run python -m benchmarks.gpu_report"


def test_rows_that_were_not_run_or_failed_say_so() -> None:
    page = render({"lora_8b": {"ok": False}})
    assert page.count(NOT_RUN) >= len(SPEEDS) - 1
    (line,) = [line for line in page.splitlines() if line.startswith("| `lora_8b` ")]
    assert "failed" in line


def test_no_toy_or_failure_is_among_the_results() -> None:
    for name, row in json.loads(RESULTS_FILE.read_text()).items():
        assert row["ok"], name
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
