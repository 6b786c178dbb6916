"""Comparison of runs by a metric, and early stopping of the worst by asynchronous successive halving.

The rule is the stopping variant of ASHA (https://arxiv.org/abs/1810.05934): a run is compared when it reaches a rung,
with all runs that have reached it, so that none waits for another.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fctune.apps.sweep.spec import EarlyStopConfig
from fctune.runs.figures import FINAL_STEPS
from fctune.runs.record import MetricsFile


def measure(metrics: MetricsFile, name: str, at_step: int | None = None) -> float | None:
    """Return a run's latest value of a metric at or before a step; of ``loss``, the mean of the last 20 steps.

    None if no step so far has it.
    """
    end = len(metrics.steps) if at_step is None else bisect.bisect_right(metrics.steps, at_step)
    column = metrics.column(name)[:end]
    if name == "loss":
        values = [value for value in column[-FINAL_STEPS:] if value is not None]
        return statistics.fmean(values) if values else None
    return next((value for value in reversed(column) if value is not None), None)


@dataclass(frozen=True, slots=True)
class Progress:
    """A run as early stopping sees it."""

    metrics: MetricsFile
    num_steps: int | None  # of the complete run
    is_running: bool


def choose_worst(
    config: EarlyStopConfig, runs: Mapping[int, Progress], metric: str, is_maximized: bool
) -> dict[int, int]:
    """Return the running runs to stop, number -> rung (step) at which each was compared.

    A run is compared at the last rung that it has reached, and continues if it is among the best ``1 / factor`` of the
    runs that have reached that rung. The first run there has nothing to be compared with, and a run at its last step
    is left to end.
    """
    chosen: dict[int, int] = {}
    for number, run in runs.items():
        step = run.metrics.steps[-1] if run.metrics.steps else 0
        if not run.is_running or step < config.first_step or (run.num_steps is not None and step >= run.num_steps):
            continue
        rung = find_rung(config, step)
        values = {
            other: value
            for other, one in runs.items()
            if one.metrics.steps
            and one.metrics.steps[-1] >= rung
            and (value := measure(one.metrics, metric, rung)) is not None
        }
        if number not in values or len(values) < 2:
            continue
        order = sorted(values, key=lambda one: (-values[one] if is_maximized else values[one], one))
        if order.index(number) >= math.ceil(len(order) / config.factor):
            chosen[number] = rung
    return chosen


def find_rung(config: EarlyStopConfig, step: int) -> int:
    """Return the last rung at or before a step, which is not before the first."""
    rung = config.first_step
    while (following := max(rung + 1, math.floor(rung * config.factor))) <= step:
        rung = following
    return rung
