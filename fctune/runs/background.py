"""Sink that writes to another sink from its own thread, so that training never waits for it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from fctune.runs.alerts import Alert
from fctune.runs.sinks import EventSink

logger = logging.getLogger("fctune")

_CLOSE_S = 30.0


class BackgroundSink:
    """Passes metrics and alerts to a sink on a separate thread, which also opens the sink.

    If the sink fails, one warning is logged and the sink is dropped; training and other sinks continue.

    Args:
        name: Name of the sink in log messages.
        open_sink: Creates the sink; called on the thread.
        capacity: Maximum number of waiting steps and alerts; more are dropped.
        tick_s: How often the sink's ``tick``, if it has one, is called while nothing arrives.
        close_s: Longest time to wait for the remaining items at the end.
        rest_s: Pause between two checks of the queue, so that short steps are written in batches: each time the thread
            wakes, training waits for the interpreter's lock and finds its caches cold.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], EventSink],
        capacity: int = 10_000,
        tick_s: float = 5.0,
        close_s: float = _CLOSE_S,
        rest_s: float = 0.0,
    ):
        self.name = name
        self._open, self._tick_s, self._close_s, self._rest_s = open_sink, tick_s, close_s, rest_s
        self._queue: queue.Queue[dict[str, Any] | Alert | None] = queue.Queue(capacity)
        self._has_failed = False
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, metrics: dict[str, Any]) -> None:
        """Queue the metrics of one step."""
        self._put(dict(metrics))

    def alert(self, alert: Alert) -> None:
        """Queue an alert for the sink's thread; never blocks training."""
        self._put(alert)

    def close(self) -> None:
        """Wait until everything is written, at most ``close_s`` seconds."""
        deadline = time.monotonic() + self._close_s
        self._closing.set()
        with contextlib.suppress(queue.Full):  # a sink that hangs; its daemon thread ends with the process
            self._queue.put(None, timeout=self._close_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s: did not finish writing within %.0f s; abandoned", self.name, self._close_s)
        elif self._num_dropped:
            logger.warning("%s: could not keep up with the run; dropped %d steps", self.name, self._num_dropped)

    def _put(self, item: dict[str, Any] | Alert) -> None:
        if self._has_failed:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._num_dropped += 1

    def _run(self) -> None:
        sink: EventSink | None = None
        try:
            sink = self._open()
            while (item := self._next(sink)) is not None:
                if isinstance(item, Alert):
                    sink.alert(item)
                else:
                    sink.write(item)
        except Exception as error:
            self._fail(error)
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                self._fail(error)

    def _next(self, sink: EventSink) -> dict[str, Any] | Alert | None:
        if self._queue.empty():
            self._closing.wait(self._rest_s)
        while True:
            try:
                return self._queue.get(timeout=self._tick_s)
            except queue.Empty:
                if self._closing.is_set():
                    return None
                tick = getattr(sink, "tick", None)
                if tick is not None:
                    tick()

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s: %s; training continues without it", self.name, _describe(error))


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install '.[telemetry]' in the clone of fctune)"
    return " ".join(f"{type(error).__name__}: {error}".split())
