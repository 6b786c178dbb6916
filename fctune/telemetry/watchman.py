"""Looks at each step for what asks for attention, and tells: a line, ``alerts.jsonl``, and every sink that takes it."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fctune.telemetry.alerts import Alert, AlertRules
from fctune.telemetry.sinks import EventSink

logger = logging.getLogger("fctune")


class Watchman:
    """A sink that turns metrics into alerts. It asks the disk, which may hang: to be run in a ``Background``.

    Args:
        folder: the run's directory; ``alerts.jsonl`` is written there, an object an alert.
        listeners: what else is told.
        hosts: the ranks' machines, in order.
    """

    def __init__(self, folder: Path, listeners: Iterable[EventSink] = (), hosts: Sequence[str] = ()):
        self._folder, self._listeners = folder, tuple(listeners)
        self._rules = AlertRules(hosts)
        self._last = time.monotonic()

    def write(self, metrics: dict[str, Any]) -> None:
        """Judge one step."""
        now = time.monotonic()
        pause_s, self._last = now - self._last, now
        disk = shutil.disk_usage(self._folder)
        for alert in self._rules.observe(metrics, pause_s, disk.free / disk.total):
            self.alert(alert)

    def tick(self) -> None:
        """Judge that no step came."""
        for alert in self._rules.observe_silence(time.monotonic() - self._last):
            self.alert(alert)

    def alert(self, alert: Alert) -> None:
        """Tell everyone."""
        logger.warning("alert: %s: %s", alert.name, alert.message)
        for listener in self._listeners:
            listener.alert(alert)
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | alert.to_dict()
        with open(self._folder / "alerts.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Nothing is held."""
