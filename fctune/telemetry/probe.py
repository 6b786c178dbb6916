"""What a rank's GPU does between two steps that are told: read on a thread of its own, for which no step waits."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fctune.telemetry.device import DeviceReading

_EVERY_S = 1.0  # NVML's own sample period is between 1/6 s and 1 s


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One GPU over a stretch of time; None where its driver does not say."""

    utilization: float | None  # mean share of the time in which a kernel ran
    temperature_c: float | None  # highest
    power_w: float | None  # mean


class DeviceProbe:
    """Reads a device again and again until it is closed.

    Args:
        read: asks the device; where the first answer is None there is nothing to ask, and it is not asked again.
        every_s: seconds between readings.
    """

    def __init__(self, read: Callable[[], DeviceReading | None], every_s: float = _EVERY_S):
        self._read, self._every_s = read, every_s
        self._readings: list[DeviceReading] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-probe", daemon=True)
        self._thread.start()

    def take(self) -> DeviceUse | None:
        """What was read since it was last taken; None where nothing was."""
        with self._lock:
            readings, self._readings = self._readings, []
        if not readings:
            return None
        busy = [r.utilization for r in readings if r.utilization is not None]
        heat = [r.temperature_c for r in readings if r.temperature_c is not None]
        power = [r.power_w for r in readings if r.power_w is not None]
        return DeviceUse(
            statistics.fmean(busy) if busy else None,
            max(heat, default=None),
            statistics.fmean(power) if power else None,
        )

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while (reading := self._read()) is not None:
            with self._lock:
                self._readings.append(reading)
            if self._stop.wait(self._every_s):
                return
