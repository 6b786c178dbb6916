"""When saves and measurements are due: by steps, by a share of the run, or by rank 0's clock, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fctune.config.intervals import parse_interval


@dataclass(slots=True)
class RunTimers:
    """Training time of a run over its restarts, and the time at which each timed action was last due.

    Ranks decide alike because ``elapsed_s`` is that of rank 0, exchanged with the results of each step. A checkpoint
    holds the timers, so that restarts that come more often than an interval do not put it off for ever.
    """

    num_steps: int = 0  # of the run
    elapsed_s: float = 0.0  # when the newest step's results were exchanged
    last_s: dict[str, float] = field(default_factory=dict)  # elapsed_s at which an action was last due
    _origin_s: float = 0.0  # of rank 0's clock, where elapsed_s is 0

    def start(self, num_steps: int, clock_s: float) -> None:
        """Continue at ``clock_s``, the reading of rank 0's clock."""
        self.num_steps, self._origin_s = num_steps, clock_s - self.elapsed_s

    def advance(self, clock_s: float) -> None:
        """Set the time to a later reading of rank 0's clock."""
        self.elapsed_s = clock_s - self._origin_s

    def is_due(self, action: str, every: int | str, step: int) -> bool:
        """Return True if an action is due after ``step``; a timed one then waits for another interval."""
        interval = parse_interval(every)
        if interval.seconds is None:
            steps = interval.in_steps(self.num_steps)
            return bool(steps) and step % (steps or 1) == 0
        if self.elapsed_s - self.last_s.get(action, 0.0) < interval.seconds:
            return False
        self.last_s[action] = self.elapsed_s
        return True

    def describe(self) -> dict[str, Any]:
        """Return the state that a checkpoint records."""
        return {"elapsed_s": self.elapsed_s, "last_s": dict(self.last_s)}

    def restore_(self, recorded: dict[str, Any]) -> None:
        """Restore the state that a checkpoint recorded, in place."""
        self.elapsed_s, self.last_s = float(recorded["elapsed_s"]), dict(recorded["last_s"])
