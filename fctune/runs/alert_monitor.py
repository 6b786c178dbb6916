"""Sink that turns metrics into alerts: a log line, a line in ``alerts.jsonl``, and a message to other sinks."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fctune.runs.alerts import Alert, AlertRules
from fctune.runs.directory import RunFiles
from fctune.runs.sinks import EventSink

logger = logging.getLogger("fctune")


class AlertMonitor:
    """Sink that checks each step and raises alerts. It queries the disk, which may hang: run it in the background.

    Args:
        folder: Run directory, whose ``alerts.jsonl`` gets one object per alert.
        listeners: Sinks that receive the alerts too.
        hosts: Host name of each rank.
    """

    def __init__(self, folder: Path, listeners: Iterable[EventSink] = (), hosts: Sequence[str] = ()):
        self._folder, self._listeners = folder, tuple(listeners)
        self._rules = AlertRules(hosts)
        self._last = time.monotonic()
        self._has_failed = False

    def write(self, metrics: dict[str, Any]) -> None:
        """Check the metrics of one step."""
        now = time.monotonic()
        pause_s, self._last = now - self._last, now
        for alert in self._rules.observe(metrics, pause_s, _free_share(self._folder)):
            self.alert(alert)

    def tick(self) -> None:
        """Check how long no step has arrived."""
        for alert in self._rules.observe_silence(time.monotonic() - self._last):
            self.alert(alert)

    def alert(self, alert: Alert) -> None:
        """Log an alert, append it to ``alerts.jsonl`` and pass it to the listeners."""
        logger.warning("alert: %s: %s", alert.name, alert.message)
        for listener in self._listeners:
            listener.alert(alert)
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | alert.to_dict()
        try:
            _append_line(RunFiles(self._folder).alerts, json.dumps(line))
        except OSError as error:  # the disk may be full, which may be the alert; later alerts must still be logged
            if not self._has_failed:
                self._has_failed = True
                logger.warning("alerts.jsonl: %s; alerts are only logged from here on", error)

    def close(self) -> None:
        """Do nothing: no resource is held between alerts."""


def _append_line(path: Path, line: str) -> None:
    """Append a line, after ending an incomplete one that a full disk may have left."""
    with open(path, "ab+") as file:
        is_torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            is_torn = file.read(1) != b"\n"
        file.write(b"\n" * is_torn + line.encode() + b"\n")


def _free_share(folder: Path) -> float | None:
    """Return the free share of a folder's disk; None if it is unknown, as on mounts of object stores."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    return disk.free / disk.total if disk.total else None
