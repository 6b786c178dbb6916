"""A run in a terminal: its figures are the files', and what is wrong is said."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from fctune.report.run_data import RunRecord, read_run
from fctune.report.run_success import judge_run
from fctune.report.run_terminal import draw_sparkline, render_run
from fctune.telemetry.alerts import Alert
from fctune.telemetry.watchman import Watchman
from tests.report.run_samples import change_run, make_run, make_steps, tear


def show(record: RunRecord, **more: object) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_run(record, **more))  # type: ignore[arg-type]
    return console.export_text()


def test_the_figures_are_the_files(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 200)
    text, last = show(read_run(tmp_path / "run")), list(make_steps(181, 200))
    assert "Completed after step 200 of 200." in text
    assert "200/200 100%" in text
    for due in (
        f"{sum(m['loss'] for m in last) / 20:.4f}",
        f"{last[-1]['validation_loss']:.4f}",
        f"{last[-1]['grad_norm']:.4g}",
        f"{sum(m['tokens_total'] for m in make_steps(1, 200)):,}",
        "2.00%",  # of the last steps waited for data
        f"{last[-1]['peak_memory_max_gib']:.2f} GiB",
        f"{last[-1]['gpu_utilization']:.0%}, {last[-1]['gpu_temperature_c']:.0f} degrees C, ",
        f" degrees C, {last[-1]['gpu_power_w']:,.0f} W",
    ):
        assert due in text, due


def test_the_slowest_rank_is_named_with_its_machine_and_the_hours_with_their_cost(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 30, price_per_gpu_hour=3600.0)
    directory.describe(hosts=["node-a", "node-b"])
    change_run(directory, started_at="2026-01-01T00:00:00Z", finished_at="2026-01-01T00:00:10Z")
    text = show(read_run(tmp_path / "run"))
    assert "0 (node-a), by 2.0% over the median" in text
    assert "0.005556, cost 20.00" in text  # two ranks for ten seconds


def test_a_run_that_goes_on_says_what_is_left_and_one_that_is_silent_that_it_may_be_gone(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 50, code=None)
    directory.describe(num_steps=1050)
    record = read_run(tmp_path / "run")
    assert record.ended_at is not None
    text = show(record, now=record.ended_at + timedelta(seconds=3))
    assert "8.3 min left" in text or "8.4 min left" in text  # a thousand steps of half a second
    assert "last written 3 s ago" in text
    assert "may be gone" not in text
    assert "the run may be gone" in show(record, now=record.ended_at + timedelta(hours=1))


def test_alerts_torn_lines_and_verdicts_are_shown(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", 50)
    tear(directory)
    watchman = Watchman(directory.path)
    for step in range(1, 8):
        watchman.alert(Alert("disk", step, 0.01, 0.05, f"[red]message {step}"))
    record = read_run(tmp_path / "run")
    text = show(record, judged=judge_run(record))
    assert "alert at step 7: disk: [red]message 7" in text
    assert "message 2" not in text
    assert "and 2 alerts before" in text
    assert "its last line is cut in half" in text
    assert re.search(r"FAIL +tokens/s a GPU, median +> 2,000 ", text)


def test_a_run_without_a_step_or_with_older_metrics_is_shown(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert "2.5000" in show(read_run(tmp_path / "old"))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text("{}")
    assert "no step in it" in show(read_run(tmp_path / "new"))


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert draw_sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([7.0] * 3) == "▁▁▁"
    assert draw_sparkline([1.0, None, 3.0]) == "▁ █"
    assert draw_sparkline([1.0] * 100 + [2.0] * 100, width=4) == "▁▁██"
    assert draw_sparkline([None]) == draw_sparkline([]) == ""
