"""Hang detection: a step that takes far too long is described and ended, so that the launcher can restart the run."""

from __future__ import annotations

import faulthandler
import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fctune.training.callbacks.base import Callback

logger = logging.getLogger("fctune")

_MIN_SAMPLES = 5  # steps measured before the limit follows their median
_FACTOR = 20.0
_MIN_LIMIT_S = 120.0
_MIN_COMPILED_LIMIT_S = 600.0  # a block that must be compiled again, on a busy host
_FIRST_LIMIT_S = 1800.0  # compilation and first allocations


class HangWatch(Callback):
    """Ends this process when a step takes longer than ``timeout_s``, or far longer than the steps before it.

    Without a time-out the limit is 20 times the median of the last 50 steps, at least two minutes, or ten if blocks are
    compiled. The stack of every thread is written to ``stacks/rank-N.txt`` first.

    Args:
        folder: The run's directory.
        rank: Rank of this process.
        on_hang: Called with the reason before the process is ended.
        timeout_s: Limit of a step; None derives it from earlier steps.
        is_compiled: Steps may compile blocks.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        on_hang: Callable[[str], None],
        timeout_s: float | None = None,
        is_compiled: bool = False,
    ):
        self.file = folder / "stacks" / f"rank-{rank}.txt"
        self._rank, self._on_hang = rank, on_hang
        self._timeout_s = timeout_s
        self._min_limit_s = _MIN_COMPILED_LIMIT_S if is_compiled else _MIN_LIMIT_S
        self._times: deque[float] = deque(maxlen=50)
        self._deadline: float | None = None
        self._started = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    @property
    def limit_s(self) -> float:
        """Seconds that the next step may take."""
        if self._timeout_s is not None:
            return self._timeout_s
        if len(self._times) < _MIN_SAMPLES:
            return _FIRST_LIMIT_S
        return max(self._min_limit_s, _FACTOR * statistics.median(self._times))

    def on_step_start(self, step: int) -> None:
        """Start the time limit of a step."""
        self._started = time.monotonic()
        self._deadline = self._started + self.limit_s

    def after_optimizer_update(self, step: int) -> None:
        """Stop the clock and record how long the step took."""
        self._deadline = None
        self._times.append(time.monotonic() - self._started)

    def close(self) -> None:
        """Stop the watch thread and join it."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                try:
                    self._report()
                finally:  # even if the disk is full
                    os._exit(1)

    def _report(self) -> None:
        reason = f"a step took longer than {time.monotonic() - self._started:.0f} s"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "w", encoding="utf-8") as file:
            file.write(f"{reason}; stacks of all threads:\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        logger.error("rank %d: %s; the stacks of all threads are in %s", self._rank, reason, self.file)
        self._on_hang(f"rank {self._rank}: {reason}")
