"""The terminal view of a run shows the figures of its files, and problems."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from fctune.apps.report.run_terminal import draw_sparkline, render_run
from fctune.config.sections.success import SuccessConfig
from fctune.runs.alerts import Alert
from fctune.runs.record import RunRecord, read_run
from fctune.runs.sinks import AlertMonitor
from fctune.runs.success import judge_run
from tests.runs.sample_runs import change_run, make_run, make_steps, tear, write_steps


def show(record: RunRecord, width: int = 100, **more: object) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_run(record, **more))  # type: ignore[arg-type]
    return console.export_text()


def test_the_figures_are_computed_from_the_files(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 200)
    text, last = show(read_run(tmp_path / "run")), list(make_steps(181, 200))
    assert "Completed after step 200 of 200." in text
    assert "200/200 100%" in text
    for due in (
        f"{sum(m['loss'] for m in last) / 20:.4f}",
        f"{last[-1]['validation_loss']:.4f}",
        f"{last[-1]['grad_norm']:.4g}",
        f"{sum(m['tokens_total'] for m in make_steps(1, 200)):,}",
        "2.00%",  # of recent step time waiting for data
        f"{last[-1]['peak_memory_max_gib']:.2f} GiB",
        f"{last[-1]['gpu_utilization']:.0%}, {last[-1]['gpu_temperature_c']:.0f} degrees C, ",
        f" degrees C, {last[-1]['gpu_power_w']:,.0f} W",
    ):
        assert due in text, due


def test_curves_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 200, code=None)
    directory.describe(num_steps=120_000)
    write_steps(directory, 201, 300, tokens_per_s=19_123.0, loss=0.0001234)
    lines = show(read_run(tmp_path / "run"), width=80).splitlines()
    for name, shown in (("loss", "0.0001234 to 6"), ("tokens/s", " to 19,123")):
        (line,) = (line for line in lines if line.startswith(f"{name} ") and "to" in line)
        assert "…" not in line
        assert shown in line
    (bar,) = (line for line in lines if "300/120,000" in line)
    assert bar.rstrip().endswith("left")


def test_the_slowest_rank_has_its_host_and_gpu_hours_their_cost(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 30, price_per_gpu_hour=3600.0)
    directory.describe(hosts=["node-a", "node-b"])
    change_run(directory, started_at="2026-01-01T00:00:00Z", finished_at="2026-01-01T00:00:10Z")
    text = show(read_run(tmp_path / "run"))
    assert "1 (node-b) in 15 of the last 30 steps, by 2.0% over the median" in text
    assert "0.005556, cost 20.00 USD" in text  # two ranks for ten seconds


def test_the_slowest_rank_is_the_most_frequent_one_and_a_single_rank_has_none(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 1, code=None)
    for step in range(2, 202):
        is_theirs = step % 4 != 0
        slow = {"slowest_rank": 3, "compute_skew": 1.5} if is_theirs else {"slowest_rank": 0, "compute_skew": 1.01}
        write_steps(directory, step, step, **slow)
    assert "3 in 75 of the last 100 steps, by 50.0% over the median" in show(read_run(tmp_path / "run"))
    change_run(directory, world_size=1)
    assert "slowest rank" not in show(read_run(tmp_path / "run"))


def test_a_multi_line_reason_is_shown_in_full(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 5, code=None)
    directory.finish(2, "2 rows cannot be trained on\n  a.jsonl:3: too long\nFix the rows.", 5)
    lines = [line.rstrip() for line in show(read_run(tmp_path / "run"), width=200).splitlines()]
    assert lines[1:3] == ["  a.jsonl:3: too long", "Fix the rows."]
    assert lines[0].endswith("Failed: invalid config or data: 2 rows cannot be trained on")


def test_a_running_run_shows_the_time_left_and_a_silent_one_that_it_may_have_died(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 50, code=None)
    directory.describe(num_steps=1050)
    record = read_run(tmp_path / "run")
    assert record.ended_at is not None
    text = show(record, now=record.ended_at + timedelta(seconds=3))
    assert "8.3 min left" in text or "8.4 min left" in text  # a thousand steps of half a second
    assert "last write 3 s ago" in text
    assert "may have died" not in text
    assert "the run may have died" in show(record, now=record.ended_at + timedelta(hours=1))


def test_alerts_incomplete_lines_and_criteria_are_shown(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 50)
    tear(directory)
    monitor = AlertMonitor(directory.path)
    for step in range(1, 8):
        monitor.alert(Alert("disk", step, 0.01, 0.05, f"[red]message {step}"))
    record = read_run(tmp_path / "run")
    text = show(record, criteria=judge_run(record, SuccessConfig(min_tokens_per_s_per_gpu=2000)))
    assert "alert at step 7: disk: [red]message 7" in text
    assert "message 2" not in text
    assert "and 2 earlier alerts" in text
    assert "the last line is incomplete" in text
    assert re.search(r"FAIL +tokens/s per GPU, median +> 2,000 ", text)


def test_runs_without_steps_or_with_older_metrics_are_shown(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert "2.5000" in show(read_run(tmp_path / "old"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    assert "contains no steps" in show(read_run(tmp_path / "new"))


def test_a_sparkline_spans_the_lowest_to_the_highest_value() -> None:
    assert draw_sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([7.0] * 3) == "▁▁▁"
    assert draw_sparkline([1.0, None, 3.0]) == "▁ █"
    assert draw_sparkline([1.0] * 100 + [2.0] * 100, width=4) == "▁▁██"
    assert draw_sparkline([None]) == draw_sparkline([]) == ""
