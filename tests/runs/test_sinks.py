"""Sinks: the console's line, alerts, and a sink on its own thread that never holds training up."""

from __future__ import annotations

import io
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from fctune.base.terminal import LogHandler
from fctune.runs import sinks
from fctune.runs.alerts import Alert
from fctune.runs.record import read_run
from fctune.runs.sinks import AlertMonitor, BackgroundSink, ConsoleSink, JsonlSink, SinkGroup
from tests.runs.sample_runs import make_run
from tests.runs.terminal_screen import TerminalScreen

ALERT = Alert("disk", 3, 0.01, 0.05, "full")


class Recorder:
    def __init__(self, fails_at: int = 0, release: threading.Event | None = None):
        self.received: list[Any] = []
        self.is_closed = False
        self._fails_at, self._release = fails_at, release

    def write(self, metrics: dict[str, Any]) -> None:
        if self._release is not None:
            self._release.wait()
        if metrics["step"] == self._fails_at:
            raise ConnectionError("the network\nis gone")
        self.received.append(metrics["step"])

    def alert(self, alert: Alert) -> None:
        self.received.append(alert)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("fctune"), "propagate", True)
    caplog.set_level(logging.WARNING, "fctune")
    return caplog


def test_steps_and_alerts_arrive_in_order_before_the_sink_closes() -> None:
    recorder = Recorder()
    with SinkGroup(sink := BackgroundSink("one", lambda: recorder)) as sinks:
        for step in range(1, 501):
            sinks.write({"step": step})
        sink.alert(ALERT)
    assert recorder.received == [*range(1, 501), ALERT]
    assert recorder.is_closed


def test_a_failing_sink_is_reported_once_and_other_sinks_continue(warnings: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(fails_at=2), Recorder()
    with SinkGroup(BackgroundSink("bad", lambda: bad), BackgroundSink("good", lambda: good)) as sinks:
        for step in range(1, 51):
            sinks.write({"step": step})
    assert [record.message for record in warnings.records] == [
        "bad: ConnectionError: the network is gone; training continues without it"
    ]
    assert bad.received == [1]
    assert bad.is_closed
    assert good.received == list(range(1, 51))


def test_a_sink_that_cannot_be_opened_names_the_package_to_install(warnings: pytest.LogCaptureFixture) -> None:
    def open_sink() -> Recorder:
        import no_such_package  # type: ignore[import-not-found]

        return Recorder(no_such_package)

    with SinkGroup(BackgroundSink("service", open_sink)) as sinks:
        sinks.write({"step": 1})
    (record,) = warnings.records
    assert "no_such_package is not installed (pip install '.[telemetry]' in the clone of fctune)" in record.message


def test_a_hanging_sink_delays_neither_a_step_nor_the_end(warnings: pytest.LogCaptureFixture) -> None:
    never, started = threading.Event(), time.perf_counter()
    with SinkGroup(BackgroundSink("stuck", lambda: Recorder(release=never), capacity=5, close_s=0.2)) as sinks:
        for step in range(1, 1001):
            sinks.write({"step": step})
    assert time.perf_counter() - started < 5
    assert "stuck: did not finish writing within" in warnings.records[-1].message
    never.set()


def test_a_slow_sink_drops_steps_and_reports_how_many(warnings: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    recorder = Recorder(release=release)
    with SinkGroup(BackgroundSink("slow", lambda: recorder, capacity=5)) as sinks:
        for step in range(1, 101):
            sinks.write({"step": step})
        release.set()
    num_dropped = 100 - len(recorder.received)
    assert num_dropped >= 94  # five are queued and one is being written
    assert f"slow: could not keep up with the run; dropped {num_dropped} steps" in warnings.records[-1].message


def test_steps_during_a_rest_are_written_together_and_closing_does_not_wait_for_the_rest() -> None:
    recorder, started = Recorder(), time.perf_counter()
    with SinkGroup(BackgroundSink("rests", lambda: recorder, rest_s=60)) as sinks:
        for step in range(1, 4):
            sinks.write({"step": step})
        time.sleep(0.1)
        assert recorder.received == []
    assert recorder.received == [1, 2, 3]
    assert time.perf_counter() - started < 30


def test_a_full_disk_is_reported_once_and_does_not_stop_training(warnings: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    recorder = Recorder()
    with SinkGroup(JsonlSink(Path("/dev/full")), recorder) as sinks:
        for step in range(1, 4):
            sinks.write({"step": step})
    assert recorder.received == [1, 2, 3]
    assert len(warnings.records) == 1
    assert "JsonlSink: [Errno 28]" in warnings.records[0].message


def test_a_programming_error_in_a_sink_is_raised(tmp_path: Path) -> None:
    with SinkGroup(JsonlSink(tmp_path / "metrics.jsonl")) as sinks, pytest.raises(TypeError):
        sinks.write({"step": 1, "loss": object()})


WIDTHS = [60, 80, 100, 130, 200]


def metrics_of(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.2345, "lr": 3.7e-4, "grad_norm": 0.513, "tokens_per_s": 123_456.0}


@pytest.fixture
def open_screen(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], TerminalScreen]:
    def build(width: int) -> TerminalScreen:
        screen = TerminalScreen(width)
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm-256color")
        return screen

    return build


@pytest.fixture
def log(request: pytest.FixtureRequest) -> Callable[[str, bool], None]:
    def write(message: str, is_other_rank: bool = False) -> None:
        record = logging.LogRecord("fctune", logging.INFO, "", 0, message, None, None)
        LogHandler(erases_line=is_other_rank).handle(record)

    return write


@pytest.mark.parametrize("width", WIDTHS)
def test_step_loss_and_time_left_are_shown_at_every_width(
    width: int, open_screen: Callable[[int], TerminalScreen]
) -> None:
    screen = open_screen(width)
    sink = ConsoleSink(Console(width=width), 12_000, 50)
    for step in range(8_001, 8_010):
        sink.write(metrics_of(step))
    sink._progress.refresh()  # type: ignore[union-attr]
    (line,) = screen.lines
    assert "step 8009/12000  loss 1.2345  " in line
    assert " left" in line
    assert len(line) < width
    assert ("grad_norm 0.513" in line) == (width >= 130)
    sink.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_other_rank", [False, True])
def test_log_lines_stand_alone_and_nothing_of_the_progress_is_left_behind(
    width: int, is_other_rank: bool, open_screen: Callable[[int], TerminalScreen], log: Callable[[str, bool], None]
) -> None:
    screen = open_screen(width)
    own_stdout = sys.stdout
    sink = ConsoleSink(Console(width=width), 12_000, 50)
    redirected = sys.stdout
    for step in (1, 2, 3):
        sink.write(metrics_of(step))
        sink._progress.refresh()  # type: ignore[union-attr]
        sys.stdout = own_stdout if is_other_rank else redirected  # another process writes straight to the terminal
        log(f"alert {step}", is_other_rank)
        sys.stdout = redirected
        sink._progress.refresh()  # type: ignore[union-attr]
        assert len([line for line in screen.lines if " left" in line]) == 1
    sink.close()
    kept, last = screen.lines[:3], "".join(screen.lines[3:])
    assert [line[8:] for line in kept] == ["  alert 1", "  alert 2", "  alert 3"]
    assert last == "step 3/12000  loss 1.2345  lr 3.70e-04  grad_norm 0.513  123,456 tokens/s"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock of the console, which stands at ``now``."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(sinks, "time", clock)
    return clock


def test_a_pipe_gets_plain_lines_with_the_time_left(clock: SimpleNamespace) -> None:
    pipe = io.StringIO()
    sink = ConsoleSink(Console(file=pipe), 100, 50)
    for step in range(11, 101):  # resumed after step 10
        sink.write(metrics_of(step))
        clock.now += 90
    sink.close()
    figures = "loss 1.2345  lr 3.70e-04  grad_norm 0.513  123,456 tokens/s"
    assert pipe.getvalue() == f"step 50/100  {figures}  1:15:00 left\nstep 100/100  {figures}\n"


def test_slow_steps_have_a_time_left_on_a_terminal_too(
    open_screen: Callable[[int], TerminalScreen], clock: SimpleNamespace
) -> None:
    screen = open_screen(100)
    sink = ConsoleSink(Console(width=100), 12_000, 50)
    for step in (1, 2, 3):
        sink.write(metrics_of(step))
        clock.now += 120
    sink._progress.refresh()  # type: ignore[union-attr]
    (line,) = screen.lines
    assert "16 days, 15:54:00 left" in line
    sink.close()


def test_the_time_left_follows_the_pace_of_the_last_steps(clock: SimpleNamespace) -> None:
    pipe = io.StringIO()
    sink = ConsoleSink(Console(file=pipe, width=200), 1_000, 100)
    for step in range(1, 201):
        sink.write(metrics_of(step))
        clock.now += 1 if step < 100 else 10
    assert pipe.getvalue().splitlines()[-1].endswith("2:13:20 left")  # 800 steps of 10 s


def test_preference_and_reinforcement_runs_show_what_they_learn_from() -> None:
    pipe = io.StringIO()
    sink = ConsoleSink(Console(file=pipe), 100, 1)
    sink.write(metrics_of(1) | {"reward_accuracy": 0.75, "reward_margin": 0.1234})
    sink.write(metrics_of(2) | {"reward_mean": 0.5, "pass_rate": 0.25})
    sink.write(metrics_of(3) | {"reward_mean": None, "pass_rate": math.nan})
    pairs, rollouts, nothing = pipe.getvalue().splitlines()
    assert "loss 1.2345  accuracy 75.0%  margin 0.123  lr" in pairs
    assert "loss 1.2345  reward 0.500  pass_rate 25.0%  lr" in rollouts
    assert "loss 1.2345  lr" in nothing


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
