"""A sink that fails, hangs or is slow costs training nothing but a warning."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fctune.telemetry.alerts import Alert
from fctune.telemetry.background import BackgroundSink
from fctune.telemetry.sinks import JsonlSink, SinkGroup

ALERT = Alert("disk", 3, 0.01, 0.05, "full")


class Recorder:
    def __init__(self, fails_at: int = 0, release: threading.Event | None = None):
        self.taken: list[Any] = []
        self.is_closed = False
        self._fails_at, self._release = fails_at, release

    def write(self, metrics: dict[str, Any]) -> None:
        if self._release is not None:
            self._release.wait()
        if metrics["step"] == self._fails_at:
            raise ConnectionError("the network\nis gone")
        self.taken.append(metrics["step"])

    def alert(self, alert: Alert) -> None:
        self.taken.append(alert)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("fctune"), "propagate", True)
    caplog.set_level(logging.WARNING, "fctune")
    return caplog


def test_steps_and_alerts_arrive_in_order_before_it_is_closed() -> None:
    recorder = Recorder()
    with SinkGroup(sink := BackgroundSink("one", lambda: recorder)) as sinks:
        for step in range(1, 501):
            sinks.write({"step": step})
        sink.alert(ALERT)
    assert recorder.taken == [*range(1, 501), ALERT]
    assert recorder.is_closed


def test_a_sink_that_fails_is_said_once_and_the_others_go_on(warnings: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(fails_at=2), Recorder()
    with SinkGroup(BackgroundSink("bad", lambda: bad), BackgroundSink("good", lambda: good)) as sinks:
        for step in range(1, 51):
            sinks.write({"step": step})
    assert [record.message for record in warnings.records] == [
        "bad: ConnectionError: the network is gone; training goes on without it"
    ]
    assert bad.taken == [1]
    assert bad.is_closed
    assert good.taken == list(range(1, 51))


def test_a_sink_that_cannot_be_opened_says_what_to_install(warnings: pytest.LogCaptureFixture) -> None:
    def open_sink() -> Recorder:
        import no_such_package  # type: ignore[import-not-found]

        return Recorder(no_such_package)

    with SinkGroup(BackgroundSink("service", open_sink)) as sinks:
        sinks.write({"step": 1})
    (record,) = warnings.records
    assert "no_such_package is not installed (pip install 'fctune[telemetry]')" in record.message


def test_a_sink_that_hangs_holds_neither_a_step_nor_the_end(warnings: pytest.LogCaptureFixture) -> None:
    never, started = threading.Event(), time.perf_counter()
    with SinkGroup(BackgroundSink("stuck", lambda: Recorder(release=never), capacity=5, close_s=0.2)) as sinks:
        for step in range(1, 1001):
            sinks.write({"step": step})
    assert time.perf_counter() - started < 5
    assert "stuck: did not take what was left" in warnings.records[-1].message
    never.set()


def test_a_sink_that_is_too_slow_leaves_steps_out_and_says_how_many(warnings: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    recorder = Recorder(release=release)
    with SinkGroup(BackgroundSink("slow", lambda: recorder, capacity=5)) as sinks:
        for step in range(1, 101):
            sinks.write({"step": step})
        release.set()
    num_lost = 100 - len(recorder.taken)
    assert num_lost >= 94  # five wait, and one is in hand
    assert f"slow: was too slow for the run; {num_lost} steps" in warnings.records[-1].message


def test_what_comes_while_a_sink_rests_is_written_together_and_the_end_does_not_wait_for_it() -> None:
    recorder, started = Recorder(), time.perf_counter()
    with SinkGroup(BackgroundSink("rests", lambda: recorder, rest_s=60)) as sinks:
        for step in range(1, 4):
            sinks.write({"step": step})
        time.sleep(0.1)
        assert recorder.taken == []
    assert recorder.taken == [1, 2, 3]
    assert time.perf_counter() - started < 30


def test_a_full_disk_is_said_once_and_does_not_stop_training(warnings: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    recorder = Recorder()
    with SinkGroup(JsonlSink(Path("/dev/full")), recorder) as sinks:
        for step in range(1, 4):
            sinks.write({"step": step})
    assert recorder.taken == [1, 2, 3]
    assert len(warnings.records) == 1
    assert "JsonlSink: [Errno 28]" in warnings.records[0].message


def test_what_a_sink_of_ours_gets_wrong_is_not_hidden(tmp_path: Path) -> None:
    with SinkGroup(JsonlSink(tmp_path / "metrics.jsonl")) as sinks, pytest.raises(TypeError):
        sinks.write({"step": 1, "loss": object()})
