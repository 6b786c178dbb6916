"""The report of a run that learns from its own answers shows its times and answers over time."""

from __future__ import annotations

import json
from pathlib import Path

from fctune.apps.report.run_sections import add_rollouts
from fctune.pages.page import Page
from fctune.pages.run_charts import find_metrics
from fctune.runs.record import read_run
from fctune.tasks.opinions import Opinion


def test_times_and_examples_are_shown(tmp_path: Path) -> None:
    steps = [
        {"step": step, "loss": 0.1, "step_time_s": 10.0, "data_time_s": 4.0, "answers": 4, "generation_time_s": 5.0}
        | {"judging_time_s": 0.05, "publish_time_s": 0.2}
        for step in range(1, 21)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    rows = [
        {"step": step, "case_id": case, "reward": reward, "is_cut": False, "text": f"{case} got {reward} at {step}"}
        | {"parts": {"strict": reward}, "error": None, "advantage": None if case == "flat" else reward - 0.5}
        for step in range(1, 21)
        for case, reward in (("flat", 1.0), ("one", 0.0), ("one", 1.0), ("two", 0.25))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rollouts.jsonl").write_text(text + '{"step": 20, "case_id": "tru')
    page = Page("run")
    add_rollouts(page, read_run(tmp_path))
    html = page.render()
    assert "40.00%" in html  # waiting: 4 of 10 s
    assert "0.50%" in html  # judging
    for words in ("one got 0.0 at 1", "one got 1.0 at 1", "one got 1.0 at 20"):
        assert words in html
    assert "flat got" not in html
    assert "two got" not in html
    assert html.count(" got 1.0 at ") == 6


def test_a_judge_is_compared_with_exact_verdicts_over_the_whole_run(tmp_path: Path) -> None:
    step = {"step": 1, "loss": 0.1, "step_time_s": 1.0, "data_time_s": 0.5, "answers": 10, "generation_time_s": 0.5}
    step |= {"judging_time_s": 0.05, "publish_time_s": 0.2, "judge_calls": 10}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    pairs = [(0.9, True)] * 5 + [(0.1, False)] * 3 + [(0.8, False), (0.2, True)]  # 8 of 10 agree
    rows = [{"opinion": Opinion(score, exact, num_tokens=100).to_json()} for score, exact in pairs]
    lines = [{"opinion": None}, {"case_id": "one"}, *rows]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines) + '{"opinion": {"sc')
    page = Page("run")
    add_rollouts(page, read_run(tmp_path))
    html = page.render()
    assert "80.0%" in html
    assert "0.58" in html  # (0.8 - 0.52) / (1 - 0.52)
    assert "1,000" in html


def test_other_runs_have_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.1, "step_time_s": 1.0}) + "\n")
    page = Page("run")
    add_rollouts(page, read_run(tmp_path))
    assert "Answers over time" not in page.render()


def test_categories_are_drawn_as_far_as_the_run_recorded_them(tmp_path: Path) -> None:
    step = {"step": 1, "loss": 0.1, "pass_rate": 0.5, "pass_rate/no_call": 0.75, "pass_rate/call": 0.25}
    many = {f"reward/{name}": 0.5 for name in "abcdefghij"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step | many) + "\n")
    record = read_run(tmp_path)
    assert find_metrics(record, {"pass_rate": "all", "pass_rate/*": "*"}) == [
        ("pass_rate", "all"),
        ("pass_rate/call", "call"),
        ("pass_rate/no_call", "no_call"),
    ]
    assert find_metrics(record, {"groups/*": "*"}) == []
    assert len(find_metrics(record, {"reward/*": "*"})) == 6
