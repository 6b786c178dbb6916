"""The directory of a sweep: its runs, what was attempted, and the configs that jobs start from.

study.json          the sweep's identity, and each run's settings and attempts
configs/NNN.yaml    complete config of a run
runs/STUDY-NNN/     output directory of a run; its name is also that of its logs on a cluster
logs/NNN.log        what the run printed, all attempts one after another
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fctune.apps.sweep.sampling import Settings, describe_settings, identify
from fctune.apps.sweep.spec import Sweep, flatten
from fctune.base.errors import ConfigError
from fctune.base.exit_codes import INVALID, STOPPED
from fctune.base.files import write_atomically
from fctune.config.composition import render_with_origins
from fctune.config.loading import compose_config, format_problems
from fctune.config.schema import RunConfig
from fctune.config.yaml_text import dump_yaml
from fctune.models.run_config import load_run_config
from fctune.runs.directory import DirectoryLock, RunFiles
from fctune.runs.record import MetricsFile

Status = Literal["waiting", "running", "completed", "stopped early", "failed"]

# Keys that a re-run of the same sweep may change.
_FREE_KEYS = ("num_runs", "at_once", "max_attempts", "launcher", "study_dir", "early_stop", "goal")


@dataclass(slots=True)
class Attempt:
    """One start of a run."""

    job: str  # process, array task or managed job
    started_at: str
    is_over: bool = False
    code: int | None = None  # None while it runs, and if it was interrupted together with the sweep
    reason: str = ""


@dataclass(slots=True)
class SweepRun:
    """One run of a sweep."""

    number: int
    settings: Settings
    attempts: list[Attempt] = field(default_factory=list)
    stopped_at: int | None = None  # step at which early stopping chose it
    num_forgiven: int = 0  # failures that do not count any more

    @property
    def name(self) -> str:
        """Name of the run: its number."""
        return f"{self.number:03d}"

    @property
    def title(self) -> str:
        """Name and settings of the run, as logs and tables show them."""
        return f"{self.name} {describe_settings(self.settings)}".strip()

    @property
    def num_failures(self) -> int:
        """Number of attempts that failed and count; interrupted and stopped ones did not fail."""
        return sum(attempt.code not in (None, 0, STOPPED) for attempt in self.attempts) - self.num_forgiven

    def status(self, max_attempts: int) -> Status:
        """Return where the run stands."""
        if not self.attempts:
            return "waiting"
        last = self.attempts[-1]
        if not last.is_over:
            return "running"
        if last.code == 0:
            return "completed"
        if self.stopped_at is not None:
            return "stopped early"
        limit = 1 if last.code == INVALID else max_attempts
        return "failed" if self.num_failures >= limit else "waiting"


class Study:
    """The runs of a sweep and their files.

    Args:
        sweep: The sweep.
        run_root: Directory in which jobs see the study; None: ``study_dir``.
    """

    def __init__(self, sweep: Sweep, run_root: str | None = None) -> None:
        self.sweep, self.path = sweep, sweep.study_dir
        self.run_root = Path(run_root) if run_root is not None else self.path
        self.runs: list[SweepRun] = []
        self._metrics: dict[int, MetricsFile] = {}

    def status(self, run: SweepRun) -> Status:
        """Return where a run stands."""
        return run.status(self.sweep.spec.max_attempts)

    def list_with(self, *statuses: Status) -> list[SweepRun]:
        """Return the runs with one of these statuses, by number."""
        return [run for run in self.runs if self.status(run) in statuses]

    def run_dir(self, run: SweepRun) -> Path:
        """Return the output directory of a run, or its copy on this machine."""
        return self.path / "runs" / self.output_dir(run).name

    def output_dir(self, run: SweepRun) -> Path:
        """Return the output directory of a run as its job sees it."""
        return self.run_root / "runs" / f"{self.path.name}-{run.name}"

    @property
    def job_prefix(self) -> str:
        """Prefix of the names of the study's jobs: its directory's name, and a digest of the whole path.

        So jobs of ``llama/sweep`` and ``qwen/sweep`` differ. Schedulers take letters, digits, dots, hyphens and
        underscores, and SkyPilot a letter first.
        """
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", self.path.name).strip("-_.")
        name = name if name[:1].isalpha() else f"sweep-{name}".rstrip("-")
        return f"{name}-{hashlib.sha256(str(self.path).encode()).hexdigest()[:6]}"

    def config_path(self, run: SweepRun) -> Path:
        """Return the config of a run."""
        return self.path / "configs" / f"{run.name}.yaml"

    def log_path(self, run: SweepRun) -> Path:
        """Return the log of a run's processes."""
        return self.path / "logs" / f"{run.name}.log"

    def metrics(self, run: SweepRun) -> MetricsFile:
        """Return the metrics of a run up to now."""
        file = self._metrics.setdefault(run.number, MetricsFile(RunFiles(self.run_dir(run)).metrics))
        file.update()
        return file

    def read_exit(self, run: SweepRun) -> dict[str, Any] | None:
        """Return exit.json of a run, or why the last attempt did not start; None if it wrote neither."""
        found = RunFiles(self.run_dir(run)).read_end()
        if found is None:
            return None
        return {"code": found["code"], "reason": str(found.get("reason", "")), "step": found.get("step")}

    def read(self) -> None:
        """Read what an earlier start of the same sweep left, if there was one.

        Raises:
            ConfigError: The directory holds another sweep or something else, or cannot be read.
        """
        file = self.path / "study.json"
        try:
            if file.exists():
                self._read(file, self._identity())
            elif self.path.exists() and any(entry.name != ".lock" for entry in self.path.iterdir()):
                raise ConfigError(
                    f"study_dir={self.path}: is not empty and contains no sweep; choose another directory."
                )
        except OSError as error:
            raise self._cannot_use(error) from None

    def lock(self) -> DirectoryLock:
        """Create the directory, and keep other sweeps out of it until the lock is released.

        Raises:
            ConfigError: A sweep is running in it, or it cannot be written.
        """
        try:
            for name in ("configs", "runs", "logs"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            return DirectoryLock(self.path, wait_s=0)
        except ConfigError:
            raise ConfigError(f"study_dir={self.path}: a sweep is running in it; wait for it, or stop it.") from None
        except OSError as error:
            raise self._cannot_use(error) from None

    def save(self) -> None:
        """Write the state of all runs to study.json, from which a restarted sweep continues."""
        state = {"sweep": self._identity(), "runs": [dataclasses.asdict(run) for run in self.runs]}
        write_atomically(self.path / "study.json", json.dumps(state, indent=2) + "\n", is_durable=True)

    def add_runs(self, planned: Sequence[Settings]) -> None:
        """Add the runs that are not yet part of the study.

        Raises:
            ConfigError: The study has runs of other settings.
        """
        for number, settings in enumerate(planned):
            if number < len(self.runs) and identify(self.runs[number].settings) != identify(settings):
                raise self._is_other(f"run {number:03d} was {describe_settings(self.runs[number].settings)}")
        self.runs += [SweepRun(number, planned[number]) for number in range(len(self.runs), len(planned))]

    def forgive_failures(self) -> None:
        """Give runs that have failed all attempts as many attempts again."""
        for run in self.list_with("failed"):
            run.num_forgiven += run.num_failures

    def begin_attempt(self, run: SweepRun, job: str) -> None:
        """Record that a run is about to be started as ``job``, and write its config."""
        RunFiles(self.run_dir(run)).clear_ends()
        write_atomically(self.config_path(run), self.render_config(run))
        run.attempts.append(Attempt(job, datetime.now(UTC).isoformat("T", "seconds")))

    def render_config(self, run: SweepRun, output_dir: Path | None = None) -> str:
        """Return the complete config of a run as YAML, with the origin of each value."""
        spec = self.sweep.spec
        composition = compose_config(self.sweep.config, RunConfig)
        composition.apply_overrides(to_overrides(flatten(spec.overrides)), [], "sweep")
        composition.apply_overrides(to_overrides(run.settings), [], f"run {run.name}")
        output_dir = output_dir or self.output_dir(run)
        composition.apply_overrides([f"output_dir={output_dir}"], [], "sweep")
        return render_with_origins(composition.values, composition)

    def check_configs(self, runs: Sequence[SweepRun]) -> RunConfig | None:
        """Check the configs of runs before any starts; returns that of the first.

        Raises:
            ConfigError: Listing every problem once, with the first run that has it.
        """
        problems: dict[str, list[str]] = {}
        config = None
        fixed = to_overrides(flatten(self.sweep.spec.overrides))
        for run in runs:
            settings = [*fixed, *to_overrides(run.settings)]
            try:
                checked = load_run_config(self.sweep.config, [*settings, f"output_dir={self.output_dir(run)}"])
                config = config or checked
            except ConfigError as error:
                lines = str(error).split("\n")
                for line in lines[1:] or lines:
                    problems.setdefault(line.strip(), []).append(run.name)
        if problems:
            several = len(runs) > 1
            lines = [
                f"{line} (run {names[0]}{', and others' * (len(names) > 1)})" if several else line
                for line, names in problems.items()
            ]
            raise ConfigError(format_problems(str(self.sweep.path), lines))
        return config

    def _identity(self) -> dict[str, Any]:
        spec = dataclasses.asdict(self.sweep.spec)
        identity = {key: value for key, value in spec.items() if key not in _FREE_KEYS}
        identity["config"] = compose_config(self.sweep.config, RunConfig).values
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    def _read(self, file: Path, identity: dict[str, Any]) -> None:
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            before = state["sweep"]
            self.runs = [
                SweepRun(**{**run, "attempts": [Attempt(**attempt) for attempt in run["attempts"]]})
                for run in state["runs"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: was not written by a sweep ({error!r}); choose another study_dir.") from None
        if changed := [key for key in identity.keys() | before.keys() if identity.get(key) != before.get(key)]:
            raise self._is_other(f"{', '.join(sorted(changed))} {'differs' if len(changed) == 1 else 'differ'}")

    def _cannot_use(self, error: OSError) -> ConfigError:
        return ConfigError(f"study_dir={self.path}: cannot be used ({error.strerror}).")

    def _is_other(self, how: str) -> ConfigError:
        return ConfigError(f"study_dir={self.path}: holds another sweep ({how}); choose another directory.")


def to_overrides(settings: Settings) -> list[str]:
    """Return settings as ``key=value`` overrides."""
    return [f"{key}={dump_yaml(value)}" for key, value in settings.items()]
