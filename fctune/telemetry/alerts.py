"""Alert rules over a run's metrics; each alert is raised once and re-arms when its condition has cleared."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 20  # steps that a condition must hold over
_WARM_UP = 5  # first steps, skewed by compilation and memory allocation
_SPEED_DEVIATIONS = 2.0  # a slowdown must exceed, in the median absolute deviations of the run's tokens/s
_MIN_HISTORY = 50  # steps before the run's median throughput is meaningful

SLOWDOWN = 0.8  # of the run's own median tokens/s
DATA_WAIT = 0.1  # share of step time
SKEW = 1.2  # slowest rank's time over the median rank's
DISK_FREE = 0.05  # share of the disk
_IDLE_MIN_S = 120.0
_IDLE_STEPS = 20.0  # times the median step time
_IDLE_WARM_UP_S = 600.0  # during the first steps, any of which may compile


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert with the measured value and the limit that it crossed, as a line of ``alerts.jsonl``."""

    name: str  # a key of ``ALERTS``
    step: int
    value: float
    limit: float
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for ``alerts.jsonl``."""
        return asdict(self)


ALERTS = {
    "throughput": f"median tokens/s of the last {WINDOW} steps below {SLOWDOWN:.0%} of the run's own median, "
    "and by more than their usual variation",
    "loss_spike": f"a loss far above the preceding ones (`is_spike`), after {WINDOW} steps without",
    "data_wait": f"over {DATA_WAIT:.0%} of the time of the last {WINDOW} steps spent waiting for data",
    "straggler": f"the same rank slowest in each of the last {WINDOW} steps, at least {SKEW - 1:.0%} over the median",
    "disk": f"less than {DISK_FREE:.0%} of the disk of output_dir free",
    "no_progress": f"no step for {_IDLE_MIN_S:.0f} s ({_IDLE_WARM_UP_S:.0f} s during the first {_WARM_UP}), for "
    f"{_IDLE_STEPS:.0f} median step times and for twice the longest pause so far",
}


class AlertRules:
    """Decides from each step's metrics which alerts to raise.

    Args:
        hosts: host name of each rank, to name a straggler's machine.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._active: set[str] = set()
        self._num_seen = 0
        self._step = 0
        self._speeds: list[float] = []  # sorted
        self._recent_speeds: deque[float] = deque(maxlen=WINDOW)
        self._times: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # step time, time waited for data
        self._slowest: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # rank, skew
        self._durations: deque[float] = deque(maxlen=WINDOW)  # step times, including the first steps
        self._longest_pause_s = 0.0
        self._last_spike = 0

    def observe(
        self, metrics: dict[str, Any], pause_s: float = 0.0, disk_free_share: float | None = None
    ) -> list[Alert]:
        """Check the metrics of one step and return the alerts to raise.

        Args:
            metrics: metrics of the step, as sinks receive them.
            pause_s: seconds since the previous step was written.
            disk_free_share: free share of the disk that the run writes to; None if unknown.
        """
        self._step = metrics["step"]
        self._num_seen += 1
        self._active.discard("no_progress")
        if metrics.get("step_time_s") is not None:
            self._durations.append(metrics["step_time_s"])
        if self._num_seen > 1:
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
        found = [self._check_spike(metrics), self._check_disk(disk_free_share)]
        if self._num_seen > _WARM_UP:
            found += [self._check_speed(metrics), self._check_data(metrics), self._check_straggler(metrics)]
        return [alert for alert in found if alert is not None]

    def observe_silence(self, silent_s: float) -> list[Alert]:
        """Check how long no step has arrived and return the alerts to raise."""
        if not self._durations:
            return []
        median_s = statistics.median(self._durations)
        minimum_s = _IDLE_MIN_S if self._num_seen > _WARM_UP else _IDLE_WARM_UP_S
        limit = max(minimum_s, _IDLE_STEPS * median_s, 2 * self._longest_pause_s)
        text = (
            f"no step for {silent_s:.0f} s after step {self._step}; a step takes {median_s:.1f} s. An evaluation or a "
            "save may be running; otherwise check the ranks' stack traces (stacks/) and the network."
        )
        alert = self._update("no_progress", silent_s > limit, silent_s <= limit, silent_s, limit, text)
        return [] if alert is None else [alert]

    def _check_speed(self, metrics: dict[str, Any]) -> Alert | None:
        speed = metrics.get("tokens_per_s")
        if speed is None:
            return None
        bisect.insort(self._speeds, speed)
        self._recent_speeds.append(speed)
        if len(self._speeds) < _MIN_HISTORY:
            return None
        usual = self._speeds[len(self._speeds) // 2]
        current, limit = statistics.median(self._recent_speeds), SLOWDOWN * usual
        if current < limit:  # the deviation of many thousand steps is computed only when it matters
            deviation = statistics.median(abs(speed - usual) for speed in self._speeds)
            limit = min(limit, usual - _SPEED_DEVIATIONS * deviation)
        text = (
            f"{current:,.0f} tokens/s over the last {WINDOW} steps, {1 - current / usual:.0%} below this run's median "
            f"of {usual:,.0f}. Check data_time_s, compute_skew and the GPUs' clocks."
        )
        return self._update("throughput", current < limit, current > 0.9 * usual, current, limit, text)

    def _check_data(self, metrics: dict[str, Any]) -> Alert | None:
        step_s, data_s = metrics.get("step_time_s"), metrics.get("data_time_s")
        if step_s is None or data_s is None:
            return None
        self._times.append((step_s, data_s))
        if len(self._times) < WINDOW:
            return None
        share = sum(data for _, data in self._times) / sum(step for step, _ in self._times)
        text = (
            f"{share:.0%} of the last {WINDOW} steps was spent waiting for data, over {DATA_WAIT:.0%}. Put "
            "data.prepared_dir on a faster disk."
        )
        return self._update("data_wait", share > DATA_WAIT, share < DATA_WAIT / 2, share, DATA_WAIT, text)

    def _check_straggler(self, metrics: dict[str, Any]) -> Alert | None:
        rank, skew = metrics.get("slowest_rank"), metrics.get("compute_skew")
        if rank is None or skew is None:
            return None
        self._slowest.append((rank, skew))
        is_same = len(self._slowest) == WINDOW and len({rank for rank, _ in self._slowest}) == 1
        lowest = min(skew for _, skew in self._slowest)
        where = f" ({self._hosts[rank]})" if rank < len(self._hosts) else ""
        text = (
            f"rank {rank}{where} was the slowest in each of the last {WINDOW} steps, at least {lowest - 1:.0%} over "
            "the median rank. Check its GPU's temperature, clocks and errors."
        )
        return self._update("straggler", is_same and lowest >= SKEW, lowest < SKEW, lowest, SKEW, text)

    def _check_spike(self, metrics: dict[str, Any]) -> Alert | None:
        if not metrics.get("is_spike"):
            is_cleared = self._num_seen - self._last_spike >= WINDOW
            return self._update("loss_spike", False, is_cleared, 0.0, 0.0, "")
        self._last_spike = self._num_seen
        loss, limit = metrics["loss"], metrics["spike_limit"]
        text = f"the loss of step {self._step}, {loss:.4f}, is far above the preceding losses (limit {limit:.4f})."
        return self._update("loss_spike", True, False, loss, limit, text)

    def _check_disk(self, free: float | None) -> Alert | None:
        if free is None:
            return None
        text = f"{free:.1%} of the disk of output_dir is free, below {DISK_FREE:.0%}; saves fail once it is full."
        return self._update("disk", free < DISK_FREE, free > 1.2 * DISK_FREE, free, DISK_FREE, text)

    def _update(
        self, name: str, is_raised: bool, is_cleared: bool, value: float, limit: float, message: str
    ) -> Alert | None:
        if is_raised and name not in self._active:
            self._active.add(name)
            return Alert(name, self._step, value, limit, message)
        if is_cleared and not is_raised:
            self._active.discard(name)
        return None
