"""Some steps operator by operator: a trace that a browser opens, and a table of the operators that took longest."""

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

from fctune.config.schema import ProfileConfig

logger = logging.getLogger("fctune")

_NUM_ROWS = 50  # of the table
_NUM_SAID = 3  # operators that the log names


class StepProfiler:
    """Records the steps that ``profile`` names, on the ranks it names.

    One step before the first is taken with the profiler on and thrown away, as its start is slow (torch.profiler's
    ``warmup``). What cannot be recorded or written is said once; training goes on.

    Args:
        config: which steps and ranks; None: nothing is recorded.
        folder: the run's directory; files are written to ``profile`` in it.
        rank: of this process.
        device: that the steps run on.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, rank: int, device: torch.device):
        self._config = config if config is not None and rank in config.ranks else None
        self._folder, self._rank, self._device = folder / "profile", rank, device
        self._profile: Any = None
        self._first = self._last = 0  # recorded
        self._is_written = False

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around step ``number``."""
        config = self._config
        if config is None or not config.first_step - 1 <= number <= config.last_step:
            return nullcontext()
        return self._record(config, number)

    def close(self) -> None:
        """End a recording that its last step has not ended; what it holds is written."""
        if self._profile is not None:
            profiler, self._profile = self._profile, None
            with contextlib.suppress(Exception):  # a run that ends by an error is to end by that one
                profiler.stop()
        if self._config is not None and not self._is_written:
            first, last = self._config.first_step, self._config.last_step
            logger.info("profile: nothing is recorded; this run took no step from %d to %d", first, last)

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
            warnings.simplefilter("ignore")  # of no warm-up, where the run has no step before the first
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
        if self._last < self._first:  # the run ended as the profiler warmed up
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
        said = ", ".join(f"{o.key} {getattr(o, key) / 1e3:,.1f} ms" for o in longest[:_NUM_SAID])
        logger.info("profile: %s (chrome://tracing, https://ui.perfetto.dev); most time in %s: %s", trace, said, table)

    def _give_up(self, error: Exception) -> None:
        self._config, self._profile = None, None
        reason = " ".join(str(error).split())
        logger.warning("profile: %s: %s; training goes on without it", type(error).__name__, reason)
