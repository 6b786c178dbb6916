"""Detectors that distinguish a lasting fault from a shared machine's passing slow spells."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from dataclasses import dataclass

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
