"""The loop of a sweep: starts runs, watches them, stops the worst, retries failures, and writes what was found.

Everything that it needs to resume is in the study's directory, so that it may be killed at any time.
"""

from __future__ import annotations

import bisect
import math
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fctune.apps.sweep.launchers import Launcher
from fctune.apps.sweep.sampling import Observation, Settings, plan_settings, propose
from fctune.apps.sweep.spec import EarlyStopConfig, NumberRange, SweepConfig
from fctune.apps.sweep.study import Study, SweepRun
from fctune.base.errors import ConfigError, DataError
from fctune.base.exit_codes import STOPPED
from fctune.config.intervals import parse_interval
from fctune.config.schema import RunConfig
from fctune.runs.directory import STOP_FILES
from fctune.runs.figures import FINAL_STEPS
from fctune.runs.record import MetricsFile, RunRecord, read_run


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


_NUM_LOOKS = 3  # at a job that has ended, until its exit.json is taken to be missing: shared disks show files late


class SweepDriver:
    """Runs a study to its end.

    Args:
        study: Opened study.
        launcher: Starts runs.
        show: Receives messages for the user, one line each.
        write_outputs: Called whenever a run has ended, to write the page and the table.
    """

    def __init__(
        self, study: Study, launcher: Launcher, show: Callable[[str], None], write_outputs: Callable[[], object]
    ) -> None:
        self._study, self._launcher, self._show, self._write_outputs = study, launcher, show, write_outputs
        self._spec = study.sweep.spec
        self._poll_s = self._spec.launcher.poll_s or launcher.poll_s
        self._num_looks: dict[str, int] = {}
        self._is_metric_known = False

    def run(self) -> None:
        """Start and watch runs until all have ended.

        Raises:
            ConfigError: Runs cannot be started, or do not write the metric.
            KeyboardInterrupt: Ctrl-C or SIGTERM; local runs have saved and ended.
        """
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            while True:
                self._update()
                self._plan_more()
                waiting = self._study.list_with("waiting")
                if not waiting and not self._study.list_with("running"):
                    return
                self._submit(waiting)
                time.sleep(self._poll_s)
        finally:
            self._launcher.stop_all()
            self._conclude_ended(self._launcher.list_active())
            self._study.save()
            signal.signal(signal.SIGTERM, previous)

    def _update(self) -> None:
        active = self._launcher.list_active()  # before the files are read: what has ended by now has written them
        self._launcher.pull(self._study.list_with("running"))
        self._conclude_ended(active)
        self._stop_worst()

    def _plan_more(self) -> None:
        """Add the runs that can be planned by now."""
        study, spec = self._study, self._spec
        if spec.sampler != "optuna":
            return
        assert spec.num_runs is not None
        while len(study.runs) < spec.num_runs:
            number = len(study.runs)
            # A proposal sees the runs that must have ended before it can start, however many more have: so it does not
            # depend on which run happens to end first.
            known = max(0, number - spec.at_once + 1)
            if any(study.status(run) in ("waiting", "running") for run in study.runs[:known]):
                return
            planned = [run.settings for run in study.runs]
            study.add_runs([*planned, propose(spec, number, [observe(study, run, known) for run in study.runs])])

    def _submit(self, waiting: Sequence[SweepRun]) -> None:
        batch = waiting[: self._launcher.count_free()]
        if not batch:
            return
        jobs = [self._launcher.name_job(run) for run in batch]
        for run, job in zip(batch, jobs, strict=True):
            self._study.begin_attempt(run, job)
        self._study.save()
        try:
            self._launcher.submit(batch)
        except ConfigError:
            started = self._launcher.list_active() or set()
            for run in batch:
                if run.attempts[-1].job not in started:
                    run.attempts.pop()  # it never began
            raise
        for run, job in zip(batch, jobs, strict=True):
            number = len(run.attempts)
            verb = f"submitted as {job}" if self._launcher.is_remote else "started"
            self._show(f"{run.title}: {verb}{f', attempt {number}' if number > 1 else ''}")

    def _conclude_ended(self, active: set[str] | None) -> None:
        if active is None:
            return
        ended = [run for run in self._study.list_with("running") if run.attempts[-1].job not in active]
        concluded = [run for run in ended if self._conclude(run)]
        if not concluded:
            return
        self._study.save()
        for run in concluded:
            self._describe_end(run)
        self._write_outputs()
        self._check_metric()

    def _conclude(self, run: SweepRun) -> bool:
        """Record how a run's attempt ended; False if its files are still awaited."""
        attempt, found = run.attempts[-1], self._study.read_exit(run)
        code = self._launcher.exit_code(run)
        if code is None and found is None:
            if self._launcher.is_remote:
                self._num_looks[attempt.job] = self._num_looks.get(attempt.job, 0) + 1
                if self._num_looks[attempt.job] < _NUM_LOOKS:
                    return False
                if self._study.log_path(run).exists():
                    code = 1
            attempt.reason = "left no exit.json" if code == 1 else "ended together with the sweep"
        elif code == -signal.SIGTERM:  # asked to stop before it could listen
            attempt.reason, code = "ended together with the sweep", None
        elif code is not None and code < 0:
            attempt.reason, code = f"killed by {signal.Signals(-code).name}", 1
        else:
            code = found["code"] if code is None and found is not None else code
            is_told = found is not None and found["code"] == code
            attempt.reason = found["reason"] if found is not None and is_told else ""
        attempt.code, attempt.is_over = code, True
        if code not in (0, STOPPED) and code is not None and not attempt.reason:
            attempt.reason = _read_last_line(self._study.log_path(run))
        if code == STOPPED and run.stopped_at is None and (self._study.run_dir(run) / STOP_FILES[0]).exists():
            run.stopped_at = (found or {}).get("step") or 0  # the user's own decision
        return True

    def _describe_end(self, run: SweepRun) -> None:
        status, attempt = self._study.status(run), run.attempts[-1]
        value = measure(self._study.metrics(run), self._spec.metric)
        shown = f", {self._spec.metric} {value:.6g}" if value is not None else ""
        if status == "waiting":
            again = "will be resumed" if attempt.code in (None, STOPPED) else "will be tried again"
            self._show(f"{run.title}: {attempt.reason or 'ended'}; {again}")
        elif status == "failed":
            self._show(f"{run.title}: failed: {attempt.reason.splitlines()[0] if attempt.reason else 'no reason'}")
        else:
            self._show(f"{run.title}: {status}{shown}")

    def _check_metric(self) -> None:
        """Report that the metric is missing as soon as a run has completed without it.

        Raises:
            ConfigError: No run that completed has it.
        """
        completed = self._study.list_with("completed")
        if self._is_metric_known or not completed:
            return
        if not any(self._study.metrics(run).has(self._spec.metric) for run in completed):
            run = completed[0]
            written = ", ".join(sorted(name for name in self._study.metrics(run).columns if name != "step"))
            raise ConfigError(
                f"metric={self._spec.metric}: run {run.name} completed and did not write it; it wrote "
                f"{written or 'nothing'}."
            )
        self._is_metric_known = True

    def _stop_worst(self) -> None:
        if self._spec.early_stop is None:
            return
        progress = {}
        for run in self._study.runs:
            if run.attempts:
                is_running = self._study.status(run) == "running" and run.stopped_at is None
                progress[run.number] = Progress(
                    self._study.metrics(run), self._num_steps(run) if is_running else None, is_running
                )
        chosen = choose_worst(self._spec.early_stop, progress, self._spec.metric, self._spec.is_maximized)
        for number, rung in chosen.items():
            run = self._study.runs[number]
            run.stopped_at = rung
            self._study.save()
            self._launcher.request_stop(run)
            self._show(f"{run.title}: stopping; not among the best at step {rung}")

    def _num_steps(self, run: SweepRun) -> int | None:
        record = read_record(self._study, run)
        return record.num_steps if record is not None else None


def plan(study: Study) -> None:
    """Add the runs of a study that does not learn from finished ones.

    Raises:
        ConfigError: Two runs are equal, or the study has other runs.
    """
    if study.sweep.spec.sampler != "optuna":
        study.add_runs(plan_settings(study.sweep.spec))


def check_before_start(study: Study) -> None:
    """Check the config of every run, or of the corners of what Optuna may propose, and whether it writes the metric.

    Raises:
        ConfigError: Listing every problem.
    """
    spec = study.sweep.spec
    runs = study.runs
    if spec.sampler == "optuna":
        propose(spec, 0, [])
        runs = [SweepRun(number, settings) for number, settings in enumerate(_list_corners(spec))]
    config = study.check_configs(runs)
    if config is not None and (problem := _find_metric_problem(spec.metric, config)) is not None:
        raise ConfigError(
            f"{study.sweep.path}: metric={spec.metric}: no run would write it, since {problem}. Change one of them."
        )


def observe(study: Study, run: SweepRun, known: int) -> Observation:
    """Return what a proposal sees of a run: its result if its number is below ``known``, else that it runs."""
    status = study.status(run)
    if run.number >= known:
        return Observation(run.settings, is_over=False)
    is_stopped = status == "stopped early"
    value = None
    if status in ("completed", "stopped early"):
        value = measure(study.metrics(run), study.sweep.spec.metric, run.stopped_at if is_stopped else None)
    return Observation(run.settings, value, run.stopped_at if is_stopped else None)


def read_record(study: Study, run: SweepRun) -> RunRecord | None:
    """Read the record of a run; None if it has written nothing, or nothing that can be read."""
    try:
        return read_run(study.run_dir(run))
    except DataError:
        return None


def _list_corners(spec: SweepConfig) -> list[Settings]:
    """Return settings in which each value and each end of a range occurs."""
    values = {key: _list_ends(dimension) for key, dimension in spec.list_dimensions().items()}
    first = {key: ends[0] for key, ends in values.items()}
    return [first, *(first | {key: value} for key, ends in values.items() for value in ends[1:])]


def _list_ends(dimension: list[Any] | NumberRange) -> list[Any]:
    if isinstance(dimension, list):
        return dimension
    ends = [dimension.minimum, dimension.maximum]
    return [int(end) for end in ends] if dimension.is_integer else ends


def _find_metric_problem(metric: str, config: RunConfig) -> str | None:
    """Return why a run of this config does not write a metric; None if it may."""
    if metric.startswith("validation_"):
        if parse_interval(config.validation.every).is_never:
            return "validation.every=0"
        if not config.data.validation_share:
            return "data.validation_share=0"
    if metric.startswith("eval_") and parse_interval(config.eval.every).is_never:
        return "eval.every=0"
    return None


def _read_last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
