"""A sink that fails, hangs or is slow costs training only a warning."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fctune.runs.alerts import Alert
from fctune.runs.sinks import BackgroundSink, JsonlSink, SinkGroup

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
