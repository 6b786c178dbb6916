"""Where a run's metrics go: a JSON line a step, and a person's terminal."""

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
    """Takes the metrics of each step."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Take one step's metrics; ``step`` is among them."""

    def close(self) -> None:
        """Flush and let go."""


class EventSink(Sink, Protocol):
    """Takes alerts, too."""

    def alert(self, alert: Alert) -> None:
        """Take one alert."""


class JsonlSink:
    """``metrics.jsonl``: the record of truth, one object a step, flushed as it is written."""

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, metrics: dict[str, Any]) -> None:
        """Append one line; numbers that are not finite, which JSON lacks, become null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """A progress bar where the output is a terminal, else a line every n steps."""

    def __init__(self, console: Console, num_steps: int, log_every_n_steps: int):
        self._console = console
        self._num_steps = num_steps
        self._every = log_every_n_steps
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            # Ten times a second, as it is by default, keeps the training thread waiting for the interpreter's lock.
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=console, refresh_per_second=1)
            self._task = self._progress.add_task("", total=num_steps)
            self._progress.start()

    def write(self, metrics: dict[str, Any]) -> None:
        """Show the step's loss, rate and speed."""
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
        """Leave the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()


class SinkGroup:
    """Several sinks as one; with none, as on ranks that do not write, it takes metrics and drops them.

    A disk that is full or a terminal that is gone is said once, and does not stop training.
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
        """Hand one step's metrics to every sink."""
        for sink in self._sinks:
            self._try(sink, functools.partial(sink.write, metrics))

    def _try(self, sink: Sink, do: Callable[[], None]) -> None:
        try:
            do()
        except OSError as error:
            if id(sink) not in self._has_failed:
                self._has_failed.add(id(sink))
                logger.warning("%s: %s; training goes on", type(sink).__name__, error)
