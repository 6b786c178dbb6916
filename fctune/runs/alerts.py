"""Alert rules over a run's metrics; each alert is raised once and re-arms when its condition has cleared."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fctune.runs.slowdown import PERIOD_S, PERIOD_STEPS, SLOWDOWN, WINDOW, SlowdownDetector, SpellTimer

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


class AlertRules:
    """Decides from each step's metrics which alerts to raise.

    Args:
        hosts: Host name of each rank, to name a straggler's machine.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
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
            f"{state.usual:,.0f}, and slow for {state.lasting_s or 0:.0f} s. Check data_time_s, compute_skew and the "
            "GPUs' clocks."
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
            f"{usual_skew - 1:.0%}, and slow for {slow_s or 0:.0f} s. Check its GPU's temperature, clocks and errors."
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
