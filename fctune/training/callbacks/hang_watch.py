"""Hang detection: a step or a write that takes far too long is described, and ends the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fctune.base.exit_codes import NODE_FAULT, SAVE_FAILED
from fctune.base.files import run_within
from fctune.base.launcher_watch import kill_launcher_later, release_output
from fctune.training.callbacks.base import Callback

logger = logging.getLogger("fctune")

_MIN_SAMPLES = 5  # steps measured before the limit follows their median
_FACTOR = 20.0
_MIN_LIMIT_S = 120.0
_MIN_COMPILED_LIMIT_S = 600.0  # a block that must be compiled again, on a busy host
_FIRST_LIMIT_S = 1800.0  # compilation and first allocations
_REPORT_S = 8.0  # limit of each part of a report, whose disk or terminal may hang too

# Ranks start a step together and take the same time for it, so they reach its limit within this share of it. A network
# file system may show another node's file half a minute late.
_SPREAD, _MIN_SPREAD_S = 0.05, 30.0
_IN_COLLECTIVE, _ELSEWHERE = "main thread: waits for other ranks", "main thread: elsewhere"
# Where a rank waits for others, and where it reads its own data.
_COLLECTIVES = ("/torch/distributed/", "/fctune/base/distributed.py")
_OWN_WORK = ("/fctune/data/", "/fctune/training/prefetch.py")


@dataclass(frozen=True, slots=True)
class _Watched:
    """Work with a deadline, and what its end means."""

    what: str
    started: float
    limit_s: float
    code: int
    hint: str = ""


class HangWatch(Callback):
    """Ends this process when a step takes longer than ``timeout_s``, or far longer than the steps before it.

    Without a time-out the limit is 20 times the median of the last 50 steps, at least two minutes, or ten if blocks are
    compiled. ``guard`` gives saves and other writes a limit too, on any thread. The stack of every thread is written to
    ``stacks/rank-N.txt`` first; if that or another part of the report hangs, the process ends nevertheless. The next
    start keeps the file as ``rank-N.before.txt``.

    Args:
        folder: The run's directory.
        rank: Rank of this process.
        on_hang: Called before the process is ended, with the reason, the exit code, and the ranks that hold up the
            others, as far as they are known.
        timeout_s: Limit of a step; None derives it from earlier steps.
        is_compiled: Steps may compile blocks.
        write_timeout_s: Limit of a write in place of that which ``guard`` is given.
        num_ranks: Ranks of the run, which share ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        on_hang: Callable[[str, int, list[int]], None],
        timeout_s: float | None = None,
        is_compiled: bool = False,
        write_timeout_s: float | None = None,
        num_ranks: int = 1,
    ):
        self.file = folder / "stacks" / f"rank-{rank}.txt"
        with suppress(OSError):
            # Of an earlier start, from which the other ranks would conclude.
            self.file.replace(self.file.with_suffix(".before.txt"))
        self._rank, self._num_ranks, self._on_hang = rank, num_ranks, on_hang
        self._main_thread = threading.get_ident()
        self._timeout_s, self._write_timeout_s = timeout_s, write_timeout_s
        self._min_limit_s = _MIN_COMPILED_LIMIT_S if is_compiled else _MIN_LIMIT_S
        self._times: deque[float] = deque(maxlen=50)
        self._step: _Watched | None = None
        self._writes: dict[int, _Watched] = {}
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
        self._step = _Watched("a step", time.monotonic(), self.limit_s, NODE_FAULT)

    def after_optimizer_update(self, step: int) -> None:
        """Stop the clock and record how long the step took."""
        if self._step is not None:
            self._times.append(time.monotonic() - self._step.started)
            self._step = None

    @contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Limit a wait for the results of a step as the step itself, unless that is watched already."""
        if self._step is not None:
            yield
            return
        self.on_step_start(step)
        try:
            yield
        finally:
            self._step = None

    @contextmanager
    def guard(self, what: str, limit_s: float) -> Iterator[None]:
        """End the process if the block, such as ``saving checkpoint-10``, takes longer than a limit."""
        limit_s = self._write_timeout_s or limit_s
        write = _Watched(what, time.monotonic(), limit_s, SAVE_FAILED, "; its disk does not answer")
        self._writes[id(write)] = write
        try:
            yield
        finally:
            del self._writes[id(write)]

    def close(self) -> None:
        """Stop the watch thread and join it."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            now = time.monotonic()
            for watched in (self._step, *list(self._writes.values())):
                if watched is not None and now > watched.started + watched.limit_s:
                    self._end(watched)

    def _end(self, watched: _Watched) -> None:
        reason = f"{watched.what} took longer than {watched.limit_s:g} s{watched.hint}"
        try:
            run_within(_REPORT_S, lambda: logger.error("rank %d: %s", self._rank, reason))
            run_within(_REPORT_S, lambda: self._write_stacks(reason))
            late: list[int] = []
            if watched.code == NODE_FAULT and self._num_ranks > 1:
                wait_s = max(_MIN_SPREAD_S, _SPREAD * watched.limit_s)
                run_within(
                    _REPORT_S + wait_s, lambda: late.extend(find_late_ranks(self.file.parent, self._num_ranks, wait_s))
                )
            run_within(_REPORT_S, lambda: self._on_hang(f"rank {self._rank}: {reason}", watched.code, late))
        finally:
            run_within(_REPORT_S, release_output)
            run_within(_REPORT_S, kill_launcher_later)
            os._exit(watched.code)

    def _write_stacks(self, reason: str) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "w", encoding="utf-8") as file:
                file.write(f"{reason}; stacks of all threads:\n{self._describe_main_thread()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.error("%s: cannot be written (%s)", self.file, error.strerror)
        else:
            logger.error("rank %d: the stacks of all threads are in %s", self._rank, self.file)

    def _describe_main_thread(self) -> str:
        """Return one line that says whether the thread that trains waits for other ranks."""
        frame = sys._current_frames().get(self._main_thread)
        files = [summary.filename for summary in traceback.extract_stack(frame)] if frame is not None else []
        if any(part in file for file in files for part in _COLLECTIVES):
            return _IN_COLLECTIVE
        # On a GPU, a rank also waits for others where it reads a result, so only these places are its own.
        return _ELSEWHERE if any(part in file for file in files for part in _OWN_WORK) else _IN_COLLECTIVE


def find_late_ranks(folder: Path, num_ranks: int, wait_s: float) -> list[int]:
    """Return the ranks that hold up the others in a step, from the stacks that they write.

    These are the ranks that write none, as processes or machines that are frozen or lost, and else those that are not
    waiting for others. Empty if that is so of all ranks, or of none.

    Args:
        folder: The ranks' stacks.
        num_ranks: Ranks of the run.
        wait_s: Limit for the other ranks to write theirs.
    """
    deadline = time.monotonic() + wait_s
    while missing := [rank for rank in range(num_ranks) if not (folder / f"rank-{rank}.txt").exists()]:
        if time.monotonic() > deadline:
            return missing if len(missing) < num_ranks else []
        time.sleep(0.2)
    time.sleep(0.2)  # the last one may still be writing
    texts = [(folder / f"rank-{rank}.txt").read_text(encoding="utf-8", errors="replace") for rank in range(num_ranks)]
    late = [rank for rank, text in enumerate(texts) if _ELSEWHERE in text.splitlines()[:2]]
    return late if len(late) < num_ranks else []
