"""Sinks for a run's metrics: ``metrics.jsonl``, the console, and a group that treats several sinks as one."""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import Progress, Task
from rich.text import Text

from fctune.runs.alerts import Alert

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


class ConsoleSink:
    """Progress line on a terminal; elsewhere a line every ``log_every_n_steps`` steps."""

    def __init__(self, console: Console, num_steps: int, log_every_n_steps: int):
        self._console = console
        self._num_steps = num_steps
        self._every = log_every_n_steps
        self._progress: _ProgressLine | None = None
        self._last: str | None = None
        self._first: tuple[int, float] | None = None  # step, and when it ended; a run may resume
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
        """Return the time that the remaining steps take at the pace since the first; None after the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        first, began = self._first
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
