"""Profiler of selected steps: a trace for the browser and a table of the slowest operators."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fctune.base.errors import one_line
from fctune.config.sections.telemetry import ProfileConfig

logger = logging.getLogger("fctune")

_NUM_ROWS = 50  # rows of the table
_NUM_LOGGED = 3  # slowest operators named in the log


class StepProfiler:
    """Profiles the steps and ranks that the config's ``profile`` selects.

    The step before the first is profiled and discarded, because the profiler starts slowly (torch.profiler's
    ``warmup``). A failure to record or write is logged once; training continues.

    Args:
        config: Steps and ranks to profile; None profiles nothing.
        folder: Run directory, whose ``profile/`` receives the files.
        rank: Global rank of this process.
        device: Device that the steps run on.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, rank: int, device: torch.device):
        self._config = config if config is not None and rank in config.ranks else None
        self._folder, self._rank, self._device = folder / "profile", rank, device
        self._profile: Any = None
        self._first = self._last = 0  # first and last recorded step
        self._is_written = False

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context manager to run step ``number`` in."""
        config = self._config
        if config is None or not config.first_step - 1 <= number <= config.last_step:
            return nullcontext()
        return self._record(config, number)

    def close(self) -> None:
        """Stop a recording that is still in progress, and write the steps recorded so far."""
        if self._profile is not None:
            profiler, self._profile = self._profile, None
            with contextlib.suppress(Exception):  # must not hide the error that ends the run
                profiler.stop()
        if self._config is not None and not self._is_written:
            first, last = self._config.first_step, self._config.last_step
            logger.info("profile: nothing recorded; this run took no step from %d to %d", first, last)

    @contextmanager
    def _record(self, config: ProfileConfig, number: int) -> Iterator[None]:
        try:
            if self._profile is None:
                self._start(config, number)
        except Exception as error:
            self._give_up(error)
        with record_function(f"step {number}"):
            yield
        try:
            if self._profile is not None:
                self._last = number
                self._profile.step()
                if number == config.last_step:
                    profiler, self._profile = self._profile, None
                    profiler.stop()
        except Exception as error:
            self._give_up(error)

    def _start(self, config: ProfileConfig, number: int) -> None:
        self._first = max(number, config.first_step)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        num_warmup, num_recorded = self._first - number, config.last_step - self._first + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a missing warm-up, if the run has no earlier step
            steps = schedule(wait=0, warmup=num_warmup, active=num_recorded, repeat=1)
        self._profile = profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=self._write,
            record_shapes=config.shapes,
            with_stack=config.stacks,
        )
        self._profile.start()

    def _write(self, profiler: Any) -> None:
        if self._last < self._first:  # the run ended during the warm-up
            return
        self._is_written = True
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}.steps-{self._first}-{self._last}"
        trace, table = self._folder / f"{name}.trace.json.gz", self._folder / f"{name}.operators.txt"
        profiler.export_chrome_trace(str(trace))
        key = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        operators = profiler.key_averages()
        text = operators.table(sort_by=key, row_limit=_NUM_ROWS, max_name_column_width=70)
        table.write_text(text + "\n", encoding="utf-8")
        longest = sorted((o for o in operators if "::" in o.key), key=lambda o: getattr(o, key), reverse=True)
        slowest = ", ".join(f"{o.key} {getattr(o, key) / 1e3:,.1f} ms" for o in longest[:_NUM_LOGGED])
        logger.info(
            "profile: %s (chrome://tracing, https://ui.perfetto.dev); slowest operators: %s; all: %s",
            trace,
            slowest,
            table,
        )

    def _give_up(self, error: Exception) -> None:
        self._config, self._profile = None, None
        reason = one_line(error)
        logger.warning("profile: %s: %s; training continues without it", type(error).__name__, reason)
