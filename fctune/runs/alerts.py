"""Alert rules over a run's metrics; each alert is raised once and re-arms when its condition has cleared.

Detectors distinguish a lasting fault from a shared machine's passing slow spells.
"""

from __future__ import annotations

import bisect
import os
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 20  # steps that a condition is judged over
PERIOD_S = 180.0  # other programs disturb a shared machine for a minute or two
PERIOD_STEPS = 60.0  # median step times; uneven batches disturb a window or two
SLOWDOWN = 0.87  # of the run's own median tokens/s

_RECOVERED = 0.9  # of the median
_MIN_HISTORY = 50  # steps before the run's median is meaningful


class SpellTimer:
    """Times how long a condition has held, and decides whether it lasts longer than this run's own history explains.

    A spell is lasting once it exceeds ``PERIOD_S``, ``PERIOD_STEPS`` median step times and twice the longest spell so
    far. The last condition adapts to the machine: where other programs disturb the run for five minutes at a time,
    five minutes mean nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # of the current spell; time without the condition is subtracted
        self._peak_s = self._longest_s = 0.0
        self._step_times: deque[float] = deque(maxlen=WINDOW)

    def observe(self, is_disturbed: bool, step_time_s: float) -> float | None:
        """Add a step. Returns the spell's seconds once it is a lasting one, and starts anew."""
        self._step_times.append(step_time_s)
        self.seconds = max(0.0, self.seconds + (step_time_s if is_disturbed else -step_time_s))
        self._peak_s = max(self._peak_s, self.seconds)
        needed_s = max(PERIOD_S, PERIOD_STEPS * statistics.median(self._step_times), 2 * self._longest_s)
        lasting_s = self.seconds if self.seconds > needed_s else None
        if lasting_s is not None:
            self.seconds = 0.0
        if not self.seconds:
            self._longest_s, self._peak_s = max(self._longest_s, self._peak_s), 0.0
        return lasting_s


@dataclass(frozen=True, slots=True)
class Speed:
    """A run's speed after a step.

    Attributes:
        current: Median tokens/s of the last ``WINDOW`` steps.
        usual: Median tokens/s of the run outside slow spells.
        lasting_s: Duration of a slow spell that has become a lasting one in this step.
        is_recovered: The speed is back to usual.
    """

    current: float
    usual: float
    lasting_s: float | None
    is_recovered: bool


class SlowdownDetector:
    """Compares the recent speed with the run's own median and its slow spells."""

    def __init__(self) -> None:
        self._usual: list[float] = []  # sorted tokens/s, without slow steps
        self._usual_s = 0.0
        self._spell: list[tuple[float, bool]] = []  # tokens/s of the steps since a spell began, and whether it was slow
        self._timer = SpellTimer()
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def observe(self, tokens_per_s: float, step_time_s: float) -> Speed | None:
        """Add a step. Returns None while the run is too young to have a usual speed."""
        self._recent.append(tokens_per_s)
        if len(self._usual) < _MIN_HISTORY or self._usual_s < PERIOD_S:
            self._usual_s += step_time_s
            bisect.insort(self._usual, tokens_per_s)
            return None
        usual, current = self._usual[len(self._usual) // 2], statistics.median(self._recent)
        is_slow = current < SLOWDOWN * usual
        self._spell.append((tokens_per_s, is_slow))
        lasting_s = self._timer.observe(is_slow, step_time_s)
        if not self._timer.seconds:
            for speed, was_slow in self._spell:
                if lasting_s or not was_slow:  # a lasting low speed is the usual one from here on
                    bisect.insort(self._usual, speed)
            self._spell.clear()
        return Speed(current, usual, lasting_s, current > _RECOVERED * usual)


_WARM_UP = 5  # first steps, skewed by compilation and memory allocation

DATA_WAIT = 0.1  # share of step time
SKEW = 1.2  # slowest rank's time over the median rank's
_STRAGGLER_STEPS = 18  # of a window, in which a straggler is the slowest
DISK_FREE = 0.05  # share of the disk
RATIO_CAPPED = 0.05  # share of the generated tokens
# Nats per generated token. A tiny base that answered for its fine-tuned self was 2.3 apart; rounding is below 0.001.
ENGINE_GAP = 0.5
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


_LASTING = f"for {PERIOD_S:.0f} s, {PERIOD_STEPS:.0f} median step times and twice the longest such spell so far"
ALERTS = {
    "throughput": f"median tokens/s of {WINDOW} steps below {SLOWDOWN:.0%} of the run's own median, {_LASTING}",
    "loss_spike": f"a loss far above the preceding ones (`is_spike`), after {WINDOW} steps without",
    "data_wait": f"over {DATA_WAIT:.0%} of the time of {WINDOW} steps spent waiting for data, {_LASTING}",
    "straggler": f"the same rank slowest in {_STRAGGLER_STEPS} of {WINDOW} steps, and at least {SKEW - 1:.0%} over the "
    f"median, {_LASTING}",
    "engine_mismatch": f"over {RATIO_CAPPED:.0%} of a step's generated tokens far more likely in training than at "
    f"generation (`grpo.ratio_cap`), or log-probabilities over {ENGINE_GAP:g} nats apart on average",
    "disk": f"less than {DISK_FREE:.0%} of the disk of output_dir free",
    "no_progress": f"no step for {_IDLE_MIN_S:.0f} s ({_IDLE_WARM_UP_S:.0f} s during the first {_WARM_UP}), for "
    f"{_IDLE_STEPS:.0f} median step times and for twice the longest pause so far",
}


def _describe_processors() -> str:
    """Return what may slow down steps on processors, with the load if more processes want to run than there are."""
    num, load = os.cpu_count() or 1, os.getloadavg()[0]
    more = f" (load average {load:.1f} on {num} cores)" if load > num else ""
    return f"Other processes may be using the processors{more}."


class AlertRules:
    """Decides from each step's metrics which alerts to raise.

    Args:
        hosts: Host name of each rank, to name a straggler's machine.
        has_gpu: The ranks compute on GPUs, not on processors that they may share with other programs.
    """

    def __init__(self, hosts: Sequence[str] = (), has_gpu: bool = True) -> None:
        self._hosts, self._has_gpu = hosts, has_gpu
        self._active: set[str] = set()
        self._num_seen = 0
        self._step = 0
        self._slowdown = SlowdownDetector()
        self._times: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # step time, time waited for data
        self._waiting = SpellTimer()
        self._slowest: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # rank, skew
        self._straggling = SpellTimer()
        self._durations: deque[float] = deque(maxlen=WINDOW)  # step times, including the first steps
        self._longest_pause_s = 0.0
        self._last_spike = 0
        self._generates = False

    def observe(
        self, metrics: dict[str, Any], pause_s: float = 0.0, disk_free_share: float | None = None
    ) -> list[Alert]:
        """Check the metrics of one step and return the alerts to raise.

        Args:
            metrics: Metrics of the step, as sinks receive them.
            pause_s: Seconds since the previous step was written.
            disk_free_share: Free share of the disk that the run writes to; None if unknown.
        """
        self._step = metrics["step"]
        self._num_seen += 1
        self._active.discard("no_progress")
        if metrics.get("step_time_s") is not None:
            self._durations.append(metrics["step_time_s"])
        if self._num_seen > 1:
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
        found = [self._check_spike(metrics), self._check_disk(disk_free_share), self._check_engine(metrics)]
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
        state = self._slowdown.observe(speed, metrics.get("step_time_s") or 0.0)
        if state is None:
            return None
        text = (
            f"{state.current:,.0f} tokens/s, {1 - state.current / state.usual:.0%} below this run's median of "
            f"{state.usual:,.0f}, and slow for {state.lasting_s or 0:.0f} s. "
            + ("Check data_time_s, compute_skew and the GPUs' clocks." if self._has_gpu else _describe_processors())
        )
        is_lasting, limit = state.lasting_s is not None, SLOWDOWN * state.usual
        return self._update("throughput", is_lasting, state.is_recovered, state.current, limit, text)

    def _check_data(self, metrics: dict[str, Any]) -> Alert | None:
        step_s, data_s = metrics.get("step_time_s"), metrics.get("data_time_s")
        self._generates |= metrics.get("generation_time_s") is not None
        if step_s is None or data_s is None or self._generates:  # such a run waits for answers, as it should
            return None
        self._times.append((step_s, data_s))
        share = sum(data for _, data in self._times) / sum(step for step, _ in self._times)
        waiting_s = self._waiting.observe(share > DATA_WAIT, step_s)
        text = (
            f"{share:.0%} of the last {WINDOW} steps was spent waiting for data, and over {DATA_WAIT:.0%} for "
            f"{waiting_s or 0:.0f} s. Put data.prepared_dir on a faster disk."
        )
        return self._update("data_wait", waiting_s is not None, share < DATA_WAIT / 2, share, DATA_WAIT, text)

    def _check_engine(self, metrics: dict[str, Any]) -> Alert | None:
        share = metrics.get("ratio_capped_share")
        if share is None:
            return None
        gap = metrics.get("engine_gap", 0.0)
        text = (
            f"{share:.1%} of the step's tokens are far more likely in training than when they were generated, "
            f"and log-probabilities are {gap:.2g} nats apart on average. Check that the engine serves this base and "
            "adapter in the same precision, or lower grpo.max_staleness or optimizer.lr."
        )
        # Tokens that the policy would hardly choose have small ratios, so the share alone overlooks another model.
        value, limit = (gap, ENGINE_GAP) if gap > ENGINE_GAP else (share, RATIO_CAPPED)
        is_cleared = share < RATIO_CAPPED / 2 and gap < ENGINE_GAP / 2
        return self._update("engine_mismatch", value > limit, is_cleared, value, limit, text)

    def _check_straggler(self, metrics: dict[str, Any]) -> Alert | None:
        rank, skew, step_s = (metrics.get(name) for name in ("slowest_rank", "compute_skew", "step_time_s"))
        if rank is None or skew is None or step_s is None:
            return None
        self._slowest.append((rank, skew))
        straggler, num_slowest = Counter(rank for rank, _ in self._slowest).most_common(1)[0]
        usual_skew = statistics.median(skew for _, skew in self._slowest)
        is_slow = num_slowest >= _STRAGGLER_STEPS and usual_skew >= SKEW
        slow_s = self._straggling.observe(is_slow, step_s)
        where = f" ({self._hosts[straggler]})" if straggler < len(self._hosts) else ""
        text = (
            f"rank {straggler}{where} was the slowest in {num_slowest} of the last {WINDOW} steps, by "
            f"{usual_skew - 1:.0%}, and slow for {slow_s or 0:.0f} s. "
            + ("Check its GPU's temperature, clocks and errors." if self._has_gpu else _describe_processors())
        )
        return self._update("straggler", slow_s is not None, not is_slow, usual_skew, SKEW, text)

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
