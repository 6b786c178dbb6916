"""Looks at each step for what asks for attention, and tells: a line, ``alerts.jsonl``, and every sink that takes it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fctune.telemetry.alerts import Alert, AlertRules
from fctune.telemetry.sinks import EventSink

logger = logging.getLogger("fctune")


class AlertMonitor:
    """A sink that turns metrics into alerts. It asks the disk, which may hang: to be run in a ``BackgroundSink``.

    Args:
        folder: the run's directory; ``alerts.jsonl`` is written there, an object an alert.
        listeners: what else is told.
        hosts: the ranks' machines, in order.
    """

    def __init__(self, folder: Path, listeners: Iterable[EventSink] = (), hosts: Sequence[str] = ()):
        self._folder, self._listeners = folder, tuple(listeners)
        self._rules = AlertRules(hosts)
        self._last = time.monotonic()
        self._has_failed = False

    def write(self, metrics: dict[str, Any]) -> None:
        """Judge one step."""
        now = time.monotonic()
        pause_s, self._last = now - self._last, now
        for alert in self._rules.observe(metrics, pause_s, _free_share(self._folder)):
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
        try:
            _append(self._folder / "alerts.jsonl", json.dumps(line))
        except OSError as error:  # as on the full disk that was alerted to; what is yet to come is said all the same
            if not self._has_failed:
                self._has_failed = True
                logger.warning("alerts.jsonl: %s; alerts stand in the log alone", error)

    def close(self) -> None:
        """Nothing is held."""


def _append(path: Path, line: str) -> None:
    """Add a line, on one of its own where a full disk cut the last in half."""
    with open(path, "ab+") as file:
        is_torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            is_torn = file.read(1) != b"\n"
        file.write(b"\n" * is_torn + line.encode() + b"\n")


def _free_share(folder: Path) -> float | None:
    """Of the disk; None where it does not say, as mounts of object stores that count no blocks."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    return disk.free / disk.total if disk.total else None
