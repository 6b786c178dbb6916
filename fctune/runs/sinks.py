"""Sinks for a run's metrics: ``metrics.jsonl``, the console, alerts, a group of sinks, and a sink's own thread."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import Progress, Task
from rich.text import Text

from fctune.runs.alerts import Alert, AlertRules
from fctune.runs.directory import RunFiles

logger = logging.getLogger("fctune")


class Sink(Protocol):
    """Receiver of the metrics of each step."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Receive the metrics of one step, including ``step``."""

    def close(self) -> None:
        """Write what is pending, then release files, threads and connections."""


class EventSink(Sink, Protocol):
    """Receiver of metrics and alerts."""

    def alert(self, alert: Alert) -> None:
        """Record or forward an alert."""


class JsonlSink:
    """Writer of ``metrics.jsonl``: the authoritative record, one object per step, flushed after each.

    Args:
        path: File to append to.
        guard: Returns a context for each write, which ends the process if the disk hangs.
    """

    def __init__(self, path: Path, guard: Callable[[], AbstractContextManager[None]] = nullcontext):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._guard = guard

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line; non-finite numbers, which JSON lacks, become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        with self._guard():
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file; everything has been flushed already, unless the disk was full."""
        with self._guard():
            self._file.close()


# Metrics of preference and reinforcement runs for the console, whose loss alone says little.
_FIGURES = (
    ("reward_mean", "reward", ".3f"),
    ("pass_rate", "pass_rate", ".1%"),
    ("reward_accuracy", "accuracy", ".1%"),
    ("reward_margin", "margin", ".3f"),
)


def _is_number(metrics: dict[str, Any], name: str) -> bool:
    value = metrics.get(name)
    return isinstance(value, int | float) and math.isfinite(value)


_RECENT_STEPS = 50  # whose pace the time left follows


class ConsoleSink:
    """Progress line on a terminal; elsewhere a line every ``log_every_n_steps`` steps."""

    def __init__(self, console: Console, num_steps: int, log_every_n_steps: int):
        self._console = console
        self._num_steps = num_steps
        self._every = log_every_n_steps
        self._progress: _ProgressLine | None = None
        self._last: str | None = None
        self._ended: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS + 1)  # last steps, and when each ended
        if console.is_terminal and not console.is_dumb_terminal:
            # The default of ten refreshes a second makes the training thread wait for the interpreter's lock.
            self._progress = _ProgressLine(console=console, refresh_per_second=1, transient=True)
            self._task = self._progress.add_task("", total=num_steps, figures=(), left=None)
            self._progress.start()

    def write(self, metrics: dict[str, Any]) -> None:
        """Show the step's loss, what its kind of training learns from, learning rate, throughput and the time left."""
        step = metrics["step"]
        learned = [f"{name} {metrics[metric]:{spec}}" for metric, name, spec in _FIGURES if _is_number(metrics, metric)]
        learned = [f"loss {metrics['loss']:.4f}", *learned]
        others = [f"lr {metrics['lr']:.2e}", f"grad_norm {metrics['grad_norm']:.3f}"]
        speed = f"{metrics['tokens_per_s']:,.0f} tokens/s"
        validation = [f"validation_loss {metrics['validation_loss']:.4f}"] if "validation_loss" in metrics else []
        left = self._estimate_left(step)
        ends = [f"{left} left"] if left is not None and step < self._num_steps else []
        line = "  ".join([f"step {step}/{self._num_steps}", *learned, *others, speed, *validation])
        if self._progress is not None:
            figures = (*learned, *validation, speed, *others)
            self._progress.update(self._task, completed=step, figures=figures, left=left)
            self._last = line
        elif step % self._every == 0 or step == self._num_steps or validation:
            self._print("  ".join([line, *ends]))

    def _estimate_left(self, step: int) -> timedelta | None:
        """Return the time that the remaining steps take at the pace of the last ones; None after the first."""
        now = time.monotonic()
        self._ended.append((step, now))
        first, began = self._ended[0]
        seconds = (now - began) / (step - first) * (self._num_steps - step) if step > first else None
        return None if seconds is None else timedelta(seconds=math.ceil(seconds))

    def close(self) -> None:
        """Replace the progress line by a plain line about the last step."""
        if self._progress is not None:
            self._progress.stop()
        if self._last is not None:
            self._print(self._last)

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


class _ProgressLine(Progress):
    """Progress display of exactly one line, so that redrawing it leaves nothing behind."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the line of the task, fitted to the console's width."""
        return [
            # A full line would make some terminals wrap.
            _fit_progress(task, self.console.width - 1, self.console.options.ascii_only)
            for task in self.tasks  # none while the display is created, before it has a console
        ]


_MIN_BAR, _MAX_BAR = 8, 40  # columns


def _fit_progress(task: Task, width: int, ascii_only: bool) -> Text:
    """Format step, loss and time left, then as much of a bar and of the other figures as fits."""
    left = task.fields["left"] or "?"
    loss, *others = task.fields["figures"] or ("loss ?",)
    text = "  ".join([f"step {task.completed:.0f}/{task.total:.0f}", loss, f"{left} left"])
    for figure in others:
        if len(text) + len(figure) + 2 * 2 + _MIN_BAR > width:
            break
        text += f"  {figure}"
    size = min(_MAX_BAR, width - len(text) - 2)
    if size < _MIN_BAR:
        return Text(text[:width], no_wrap=True)
    done, symbol = int(size * task.percentage / 100), "-" if ascii_only else "\u2501"
    bar = (symbol * done, "bar.complete"), (symbol * (size - done), "bar.back")
    return Text.assemble(*bar, "  ", text, no_wrap=True)


class SinkGroup:
    """Passes metrics to several sinks; with none, as on ranks that do not write, it discards them.

    An ``OSError`` from a sink, such as a full disk or a closed terminal, is logged once and does not stop training.
    """

    def __init__(self, *sinks: Sink):
        self._sinks = sinks
        self._has_failed: set[int] = set()

    def __enter__(self) -> SinkGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            self._try(sink, sink.close)

    def write(self, metrics: dict[str, Any]) -> None:
        """Pass the metrics of one step to every sink."""
        for sink in self._sinks:
            self._try(sink, functools.partial(sink.write, metrics))

    def _try(self, sink: Sink, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            if id(sink) not in self._has_failed:
                self._has_failed.add(id(sink))
                logger.warning("%s: %s; training continues", type(sink).__name__, error)


_CLOSE_S = 30.0
_TICK_S = 5.0  # how often a sink's ``tick``, if it has one, is called while nothing arrives


class BackgroundSink:
    """Passes metrics and alerts to a sink on a separate thread, which also opens the sink.

    If the sink fails, one warning is logged and the sink is dropped; training and other sinks continue.

    Args:
        name: Name of the sink in log messages.
        open_sink: Creates the sink; called on the thread.
        capacity: Maximum number of waiting steps and alerts; more are dropped.
        close_s: Longest time to wait for the remaining items at the end.
        rest_s: Pause between two checks of the queue, so that short steps are written in batches: each time the thread
            wakes, training waits for the interpreter's lock and finds its caches cold.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], EventSink],
        capacity: int = 10_000,
        close_s: float = _CLOSE_S,
        rest_s: float = 0.0,
    ):
        self.name = name
        self._open, self._close_s, self._rest_s = open_sink, close_s, rest_s
        self._queue: queue.Queue[dict[str, Any] | Alert | None] = queue.Queue(capacity)
        self._has_failed = False
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, metrics: dict[str, Any]) -> None:
        """Queue the metrics of one step."""
        self._put(dict(metrics))

    def alert(self, alert: Alert) -> None:
        """Queue an alert for the sink's thread; never blocks training."""
        self._put(alert)

    def close(self) -> None:
        """Wait until everything is written, at most ``close_s`` seconds."""
        deadline = time.monotonic() + self._close_s
        self._closing.set()
        with contextlib.suppress(queue.Full):  # a sink that hangs; its daemon thread ends with the process
            self._queue.put(None, timeout=self._close_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s: did not finish writing within %.0f s; abandoned", self.name, self._close_s)
        elif self._num_dropped:
            logger.warning("%s: could not keep up with the run; dropped %d steps", self.name, self._num_dropped)

    def _put(self, item: dict[str, Any] | Alert) -> None:
        if self._has_failed:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._num_dropped += 1

    def _run(self) -> None:
        sink: EventSink | None = None
        try:
            sink = self._open()
            while (item := self._next(sink)) is not None:
                if isinstance(item, Alert):
                    sink.alert(item)
                else:
                    sink.write(item)
        except Exception as error:
            self._fail(error)
        if sink is not None:
            try:
                sink.close()
            except Exception as error:
                self._fail(error)

    def _next(self, sink: EventSink) -> dict[str, Any] | Alert | None:
        if self._queue.empty():
            self._closing.wait(self._rest_s)
        while True:
            try:
                return self._queue.get(timeout=_TICK_S)
            except queue.Empty:
                if self._closing.is_set():
                    return None
                tick = getattr(sink, "tick", None)
                if tick is not None:
                    tick()

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s: %s; training continues without it", self.name, _describe(error))


def _describe(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed (pip install '.[telemetry]' in the clone of fctune)"
    return " ".join(f"{type(error).__name__}: {error}".split())


class AlertMonitor:
    """Sink that checks each step and raises alerts. It queries the disk, which may hang: run it in the background.

    Args:
        folder: Run directory, whose ``alerts.jsonl`` gets one object per alert.
        listeners: Sinks that receive the alerts too.
        hosts: Host name of each rank.
        has_gpu: The ranks compute on GPUs.
    """

    def __init__(
        self, folder: Path, listeners: Iterable[EventSink] = (), hosts: Sequence[str] = (), has_gpu: bool = True
    ):
        self._folder, self._listeners = folder, tuple(listeners)
        self._rules = AlertRules(hosts, has_gpu)
        self._last = time.monotonic()
        self._has_failed = False

    def write(self, metrics: dict[str, Any]) -> None:
        """Check the metrics of one step."""
        now = time.monotonic()
        pause_s, self._last = now - self._last, now
        for alert in self._rules.observe(metrics, pause_s, _free_share(self._folder)):
            self.alert(alert)

    def tick(self) -> None:
        """Check how long no step has arrived."""
        for alert in self._rules.observe_silence(time.monotonic() - self._last):
            self.alert(alert)

    def alert(self, alert: Alert) -> None:
        """Log an alert, append it to ``alerts.jsonl`` and pass it to the listeners."""
        logger.warning("alert: %s: %s", alert.name, alert.message)
        for listener in self._listeners:
            listener.alert(alert)
        line = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())} | alert.to_dict()
        try:
            _append_line(RunFiles(self._folder).alerts, json.dumps(line))
        except OSError as error:  # the disk may be full, which may be the alert; later alerts must still be logged
            if not self._has_failed:
                self._has_failed = True
                logger.warning("alerts.jsonl: %s; alerts are only logged from here on", error)

    def close(self) -> None:
        """Do nothing: no resource is held between alerts."""


def _append_line(path: Path, line: str) -> None:
    """Append a line, after ending an incomplete one that a full disk may have left."""
    with open(path, "ab+") as file:
        is_torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            is_torn = file.read(1) != b"\n"
        file.write(b"\n" * is_torn + line.encode() + b"\n")


def _free_share(folder: Path) -> float | None:
    """Return the free share of a folder's disk; None if it is unknown, as on mounts of object stores."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return None
    return disk.free / disk.total if disk.total else None
