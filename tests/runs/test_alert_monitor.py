"""The alert monitor keeps working when the disk fails."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from fctune.runs.alerts import Alert
from fctune.runs.record import read_run
from fctune.runs.sinks import AlertMonitor
from tests.runs.sample_runs import make_run


def steps(first: int, last: int, spikes: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    spike = {"is_spike": True, "spike_limit": 0.5}
    return [{"step": step, "loss": 1.0, **(spike if step in spikes else {})} for step in range(first, last)]


def test_alerts_are_still_logged_if_their_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monitor = AlertMonitor(folder)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING, "fctune"):
        for metrics in steps(1, 60, spikes=(20, 50)):
            monitor.write(metrics)
    messages = [record.getMessage() for record in caplog.records]
    assert [text.split(",")[0] for text in messages if "loss_spike" in text] == [
        "alert: loss_spike: the loss of step 20",
        "alert: loss_spike: the loss of step 50",
    ]
    assert len([text for text in messages if text.startswith("alerts.jsonl: ")]) == 1


def test_an_alert_after_an_incomplete_line_is_readable(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3)
    for step in (1, 2):
        AlertMonitor(tmp_path / "run").alert(Alert("disk", step, 0.01, 0.05, "nearly full"))
        with open(tmp_path / "run" / "alerts.jsonl", "a") as file:
            file.write('{"at": "2026-01-01T00:00:00Z", "na')
    AlertMonitor(tmp_path / "run").alert(Alert("disk", 3, 0.01, 0.05, "nearly full"))
    assert [alert["step"] for alert in read_run(tmp_path / "run").alerts] == [1, 2, 3]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, a file system without blocks")
def test_a_disk_of_unknown_size_raises_no_alert(caplog: pytest.LogCaptureFixture) -> None:
    assert shutil.disk_usage("/proc").total == 0
    with caplog.at_level(logging.WARNING, "fctune"):
        for metrics in steps(1, 5):
            AlertMonitor(Path("/proc")).write(metrics)
    assert not caplog.records
