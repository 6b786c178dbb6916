"""Sinks for a run's metrics: ``metrics.jsonl``, the console, and a group that treats several sinks as one."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fctune.telemetry.alerts import Alert

logger = logging.getLogger("fctune")


class Sink(Protocol):
    """Receiver of the metrics of each step."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Receive the metrics of one step, including ``step``."""

    def close(self) -> None:
        """Flush and release resources."""


class EventSink(Sink, Protocol):
    """Receiver of metrics and alerts."""

    def alert(self, alert: Alert) -> None:
        """Receive one alert."""


class JsonlSink:
    """Writer of ``metrics.jsonl``: the authoritative record, one object per step, flushed after each."""

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line; non-finite numbers, which JSON lacks, become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; everything has been flushed already."""
        self._file.close()


class ConsoleSink:
    """Progress bar on a terminal; elsewhere a line every ``log_every_n_steps`` steps."""

    def __init__(self, console: Console, num_steps: int, log_every_n_steps: int):
        self._console = console
        self._num_steps = num_steps
        self._every = log_every_n_steps
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            # The default of ten refreshes a second makes the training thread wait for the interpreter's lock.
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=1)
            self._task = self._progress.add_task("", total=num_steps)
            self._progress.start()

    def write(self, metrics: dict[str, Any]) -> None:
        """Show the step's loss, learning rate, gradient norm and throughput."""
        step = metrics["step"]
        text = (
            f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  grad_norm {metrics['grad_norm']:.3f}  "
            f"{metrics['tokens_per_s']:,.0f} tokens/s"
        )
        if "validation_loss" in metrics:
            text += f"  validation_loss {metrics['validation_loss']:.4f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
        elif step % self._every == 0 or step == self._num_steps or "validation_loss" in metrics:
            self._console.print(f"step {step}/{self._num_steps}  {text}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stop the progress bar, leaving its last state on the screen."""
        if self._progress is not None:
            self._progress.stop()


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
