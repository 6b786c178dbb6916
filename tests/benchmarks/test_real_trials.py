"""Trials are chosen where they call and where they don't, a failed one says why, and none with a score runs again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_trials import main, score


def make_summary(**strict: float) -> dict[str, Any]:
    """Return a summary with 40 cases in each category."""
    return {name: {"n": 40, "after": {"strict": rate}} for name, rate in strict.items()}


def test_refusing_everything_or_calling_always_does_not_win() -> None:
    refuses = make_summary(simple_python=0.0, multiple=0.0, irrelevance=1.0, live_irrelevance=1.0, no_call=1.0)
    calls = make_summary(simple_python=0.9, multiple=0.9, irrelevance=0.0, live_irrelevance=0.0, no_call=0.0)
    does_both = make_summary(simple_python=0.4, multiple=0.2, irrelevance=0.5, live_irrelevance=0.7, no_call=0.6)
    assert score(refuses) == score(calls) == 0
    assert score(does_both) == pytest.approx(2 * 0.3 * 0.6 / (0.3 + 0.6))


def test_categories_with_few_cases_do_not_count() -> None:
    summary = make_summary(simple_python=0.5, irrelevance=0.5)
    few = {"live_parallel": {"n": 19, "after": {"strict": 0.0}}}
    assert score(summary | few) == score(summary) == pytest.approx(0.5)
    assert score(few) == 0  # nothing to choose by


def test_a_failed_trial_is_tried_again_and_one_with_a_score_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, results = tmp_path / "settings.jsonl", tmp_path / "trials.jsonl"
    settings.write_text('{"name": "done"}\n{"name": "failed"}\n')
    results.write_text('{"name": "done", "score": 0.25}\n{"name": "failed", "error": "exit code 1: no disk"}\n')
    options = ["--settings", str(settings), "--out", str(tmp_path), "--"]
    assert main([*options, "--model", str(tmp_path / "none")]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["done", "failed", "failed"]
    assert "exit code 2" in rows[-1]["error"]
    assert json.loads(capsys.readouterr().out) == rows[-1]


def test_settings_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--settings", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 2
    assert "none.jsonl: cannot be read" in capsys.readouterr().err
