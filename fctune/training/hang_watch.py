"""A step that never ends: found, described, and ended, so that the launcher can start the run again."""

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

logger = logging.getLogger("fctune")

_NUM_LEARNT_FROM = 5
_FACTOR = 20.0
_LEAST_S = 120.0
_FIRST_S = 1800.0  # compilation and first touches of memory


class StepWatch:
    """Ends this process when a step takes longer than ``timeout_s``, or than the steps before it let expect.

    The learnt limit is 20 times the median of the last steps, and two minutes at least. Every thread's stack is written
    to ``stacks/rank-N.txt`` first.

    Args:
        folder: the run's directory.
        rank: of this process.
        leave: called before the process is ended, with the reason.
        timeout_s: of a step; None learns it.
    """

    def __init__(self, folder: Path, rank: int, leave: Callable[[str], None], timeout_s: float | None = None):
        self.file = folder / "stacks" / f"rank-{rank}.txt"
        self._rank, self._leave = rank, leave
        self._timeout_s = timeout_s
        self._times: deque[float] = deque(maxlen=50)
        self._deadline: float | None = None
        self._started = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    @property
    def limit_s(self) -> float:
        """How long a step may take now."""
        if self._timeout_s is not None:
            return self._timeout_s
        if len(self._times) < _NUM_LEARNT_FROM:
            return _FIRST_S
        return max(_LEAST_S, _FACTOR * statistics.median(self._times))

    def start_step(self) -> None:
        """The clock starts."""
        self._started = time.monotonic()
        self._deadline = self._started + self.limit_s

    def end_step(self) -> None:
        """The clock stops, and the step is learnt from."""
        self._deadline = None
        self._times.append(time.monotonic() - self._started)

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                try:
                    self._describe()
                finally:  # though the disk be full
                    os._exit(1)

    def _describe(self) -> None:
        took = f"a step took longer than {time.monotonic() - self._started:.0f} s"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "w", encoding="utf-8") as file:
            file.write(f"{took}; every thread:\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        logger.error("rank %d: %s; where every thread was stands in %s", self._rank, took, self.file)
        self._leave(f"rank {self._rank}: {took}")
