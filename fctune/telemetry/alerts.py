"""What of a run's metrics asks for someone's attention: once when it begins, and again only after it was well."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 20  # steps that a verdict is over
_WARM_UP = 5  # first steps, whose compilation and first touches of memory are no measure
_LEAST_HISTORY = 50  # steps that a median of the run is worth something after

SLOWDOWN = 0.8  # of the run's own median of tokens a second
DATA_WAIT = 0.1  # share of a step
SKEW = 1.2  # slowest rank's time over the median of ranks
DISK_FREE = 0.05  # share of the disk
_IDLE_LEAST_S = 120.0
_IDLE_STEPS = 20.0  # times the median step
_IDLE_EARLY_S = 600.0  # least of the first steps, any of which may compile


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing that is wrong with a run."""

    name: str  # one of ``ALERTS``
    step: int
    value: float
    limit: float
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self)


ALERTS = {
    "throughput": f"tokens a second under {SLOWDOWN:.0%} of the run's own median, over {WINDOW} steps",
    "loss_spike": "a loss that stands out from those before it (`is_spike`)",
    "data_wait": f"over {DATA_WAIT:.0%} of the time of {WINDOW} steps spent waiting for data",
    "straggler": f"the same rank slowest, by {SKEW - 1:.0%} or more over the median, in each of {WINDOW} steps",
    "disk": f"under {DISK_FREE:.0%} of the disk of output_dir free",
    "no_progress": f"no step for {_IDLE_LEAST_S:.0f} s ({_IDLE_EARLY_S:.0f} s among the first {_WARM_UP}), "
    f"{_IDLE_STEPS:.0f} median steps and twice the longest pause",
}


class AlertRules:
    """Decides, from each step's metrics, what to alert to. Each alert is given once, and again after it was over.

    Args:
        hosts: the ranks' machines, in order, by which a straggler is named.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._active: set[str] = set()
        self._num_seen = 0
        self._step = 0
        self._speeds: list[float] = []  # sorted
        self._recent_speeds: deque[float] = deque(maxlen=WINDOW)
        self._times: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # of the step, and of it waited for data
        self._slowest: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # rank, skew
        self._durations: deque[float] = deque(maxlen=WINDOW)  # of steps, the first among them
        self._longest_pause_s = 0.0

    def observe(
        self, metrics: dict[str, Any], pause_s: float = 0.0, disk_free_share: float | None = None
    ) -> list[Alert]:
        """What one step gives reason to say.

        Args:
            metrics: of the step, as sinks take them.
            pause_s: seconds since the step before was written.
            disk_free_share: of the disk that the run writes to; None where it is not known.
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
        """What ``silent_s`` seconds without a step give reason to say."""
        if not self._durations:
            return []
        typical = statistics.median(self._durations)
        least = _IDLE_LEAST_S if self._num_seen > _WARM_UP else _IDLE_EARLY_S
        limit = max(least, _IDLE_STEPS * typical, 2 * self._longest_pause_s)
        text = (
            f"no step for {silent_s:.0f} s after step {self._step}, where one takes {typical:.1f} s. An evaluation or "
            "a save may be under way; else see the ranks' stacks (stacks/) and the network."
        )
        return list(self._raise("no_progress", silent_s > limit, silent_s <= limit, silent_s, limit, text))

    def _check_speed(self, metrics: dict[str, Any]) -> Alert | None:
        speed = metrics.get("tokens_per_s")
        if speed is None:
            return None
        bisect.insort(self._speeds, speed)
        self._recent_speeds.append(speed)
        if len(self._speeds) < _LEAST_HISTORY:
            return None
        usual = self._speeds[len(self._speeds) // 2]
        now, limit = statistics.median(self._recent_speeds), SLOWDOWN * usual
        text = (
            f"{now:,.0f} tokens/s over the last {WINDOW} steps, {1 - now / usual:.0%} under this run's median of "
            f"{usual:,.0f}. Look at data_time_s, compute_skew and the GPUs' clocks."
        )
        return next(self._raise("throughput", now < limit, now > 0.9 * usual, now, limit, text), None)

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
        return next(self._raise("data_wait", share > DATA_WAIT, share < DATA_WAIT / 2, share, DATA_WAIT, text), None)

    def _check_straggler(self, metrics: dict[str, Any]) -> Alert | None:
        rank, skew = metrics.get("slowest_rank"), metrics.get("compute_skew")
        if rank is None or skew is None:
            return None
        self._slowest.append((rank, skew))
        is_same = len(self._slowest) == WINDOW and len({rank for rank, _ in self._slowest}) == 1
        least = min(skew for _, skew in self._slowest)
        where = f" ({self._hosts[rank]})" if rank < len(self._hosts) else ""
        text = (
            f"rank {rank}{where} was the slowest of each of the last {WINDOW} steps, by {least - 1:.0%} or more over "
            "the median of ranks. Look at its GPU's temperature, clocks and errors."
        )
        return next(self._raise("straggler", is_same and least >= SKEW, least < SKEW, least, SKEW, text), None)

    def _check_spike(self, metrics: dict[str, Any]) -> Alert | None:
        is_spike, loss = bool(metrics.get("is_spike")), metrics.get("loss", 0.0)
        text = f"the loss of step {self._step}, {loss:.4f}, stands out from those before it."
        return next(self._raise("loss_spike", is_spike, not is_spike, loss, 0.0, text), None)

    def _check_disk(self, free: float | None) -> Alert | None:
        if free is None:
            return None
        text = f"{free:.1%} of the disk of output_dir is free, under {DISK_FREE:.0%}; saves will fail when it is full."
        return next(self._raise("disk", free < DISK_FREE, free > 1.2 * DISK_FREE, free, DISK_FREE, text), None)

    def _raise(
        self, name: str, is_wrong: bool, is_well: bool, value: float, limit: float, message: str
    ) -> Iterator[Alert]:
        if is_wrong and name not in self._active:
            self._active.add(name)
            yield Alert(name, self._step, value, limit, message)
        elif is_well:
            self._active.discard(name)
