"""Schema of a sweep's YAML file, with its checks."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fctune.base.errors import ConfigError
from fctune.config.fields import AT_LEAST_1, Null, Range, SectionProblems
from fctune.config.loading import find_config, format_problems, read_yaml_mapping
from fctune.config.parsing import parse_dataclass, shorten, suggest
from fctune.config.shipped import find_shipped_config
from fctune.runs.names import METRICS, find_metric

Sampler = Literal["grid", "list", "random", "optuna"]
Goal = Literal["minimize", "maximize"]

# Metrics of which more is better; of all others, less is.
_MORE_IS_BETTER = ("eval_", "tokens_per_s", "tflops", "hardware_tflops", "mfu", "gpu_utilization")
_LESS_IS_BETTER = ("eval_false_call", "eval_missed_call", "eval_time_s")


@dataclass(kw_only=True, slots=True)
class EarlyStopConfig:
    """Successive halving: at each of a growing series of steps, the worst runs that got there are stopped."""

    first_step: Annotated[int, AT_LEAST_1]
    """First step at which runs are compared; the next is `factor` times as far, and so on."""
    factor: Annotated[float, Range(gt=1)] = 2.0
    """At each comparison, the best 1/`factor` of the runs that reached it continue."""


# Neither can be an option of ssh or rsync, and no shell finds anything to replace in them.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
_REMOTE_DIR = re.compile(r"/[A-Za-z0-9./_~+@%=,-]*")


@dataclass(kw_only=True, slots=True)
class LauncherConfig:
    """Where runs are started."""

    kind: Literal["local", "slurm", "sky"] = "local"
    """`local`: processes of this machine, its GPUs divided among them; `slurm`: tasks of an array; `sky`: SkyPilot's
    managed jobs."""
    nproc: Annotated[int | None, AT_LEAST_1, Null("its share of the GPUs, or 1 without GPUs")] = None
    """With `local`: processes of each run."""
    script: str = "sky/slurm/finetune_venv.sbatch"
    """With `slurm`: batch script."""
    task: str = "sky/finetune.yaml"
    """With `sky`: task."""
    options: list[str] = field(default_factory=list)
    """Further options of `sbatch` or `sky jobs launch`."""
    host: Annotated[str | None, Null("`study_dir` is on a disk that jobs and this machine share")] = None
    """With `sky`: a host that `ssh` and `rsync` reach and that sees the disk of the jobs, such as a SkyPilot cluster
    with the same volume."""
    remote_dir: Annotated[str | None, Null("`study_dir`")] = None
    """With `host`: the study's directory on the jobs' disk."""
    poll_s: Annotated[float | None, Range(gt=0), Null("1 with `local`, 15 with `slurm`, 30 with `sky`")] = None
    """Seconds between looks at the runs."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that keys are used by this kind of launcher."""
        used = {"local": ("nproc",), "slurm": ("script", "options"), "sky": ("task", "options", "host", "remote_dir")}
        for spec in dataclasses.fields(self):
            default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
            value = getattr(self, spec.name)
            if spec.name not in ("kind", "poll_s", *used[self.kind]) and value != default:
                problems.add(
                    (spec.name, "kind"),
                    f"{where}.{spec.name}={value}: not used with {where}.kind={self.kind}; remove it",
                )
        if isinstance(self.host, str) and not _HOST.fullmatch(self.host):
            problems.add(
                ("host",), f"{where}.host={self.host}: not a host; expected e.g. desk, or user@desk.example.org"
            )
        if isinstance(self.remote_dir, str) and not _REMOTE_DIR.fullmatch(self.remote_dir):
            problems.add(
                ("remote_dir",),
                f"{where}.remote_dir={self.remote_dir}: is read by jobs and by a shell of the host; expected "
                "the whole path of a directory, /..., of letters, digits and ./_~+@%=,- only",
            )
        for name in ("script", "task"):
            if str(getattr(self, name)).startswith("-"):
                value = getattr(self, name)
                problems.add((name,), f"{where}.{name}={value}: would be read as an option; write ./{value}")
        if (self.host is None) != (self.remote_dir is None):
            problems.add(("host", "remote_dir"), f"{where}: host and remote_dir go together; give both or neither")


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Range of a number to draw from."""

    minimum: float
    maximum: float
    is_log: bool
    is_integer: bool


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """Settings to try, the metric that ranks the runs, and where and how many of them run at once."""

    config: str
    """Config of the runs: a file relative to this one, or the name of a shipped config."""
    study_dir: str
    """Directory of the sweep: its runs, state, logs, page, table and `best.yaml`."""
    sampler: Sampler = "grid"
    """`grid`: every combination of `space`; `list`: the `runs` as listed; `random`: `num_runs` draws from `space`;
    `optuna`: `num_runs` proposals that learn from finished runs."""
    space: dict[str, Any] = field(default_factory=dict)
    """Config key -> list of values, or with `random` and `optuna` a range `{min: 1e-5, max: 1e-3, scale: log}`."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """With `list`: the settings of each run."""
    num_runs: Annotated[int | None, AT_LEAST_1, Null("not for `grid` and `list`")] = None
    """With `random` and `optuna`: number of runs; a larger one extends a study."""
    seed: int = 42
    """Seed of the draws and proposals; the runs' own is the config's `seed`."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Config key -> value, for all runs."""
    metric: str = "validation_loss"
    """Metric that runs are compared by, at their last step that has it; `loss` is the mean of the last 20 steps."""
    goal: Annotated[Goal | None, Null("by the metric")] = None
    """Direction of improvement."""
    early_stop: Annotated[EarlyStopConfig | None, Null("every run ends by itself")] = None
    """Early stopping of the worst runs."""
    at_once: Annotated[int, AT_LEAST_1] = 1
    """Runs at the same time."""
    max_attempts: Annotated[int, AT_LEAST_1] = 2
    """Attempts of a run that fails; wrong configs and data are not tried again."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Where runs are started."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the space against the sampler, and the metric."""
        is_drawn = self.sampler in ("random", "optuna")
        if is_drawn and self.num_runs is None:
            problems.add(("num_runs", "sampler"), f"num_runs: missing; sampler={self.sampler} needs the number of runs")
        if not is_drawn and self.num_runs is not None:
            problems.add(
                ("num_runs", "sampler"), f"num_runs={self.num_runs}: not used with sampler={self.sampler}; remove it"
            )
        if self.sampler == "list":
            if not self.runs:
                problems.add(
                    ("runs", "sampler"), "runs: empty; list the settings of each run, e.g. [{optimizer.lr: 1e-4}]"
                )
            if self.space:
                problems.add(("space", "sampler"), "space: not used with sampler=list; use `runs`, or sampler=grid")
        else:
            if not self.space:
                problems.add(("space", "sampler"), "space: empty; write e.g. {optimizer.lr: [1e-4, 2e-4]}")
            if self.runs:
                problems.add(
                    ("runs", "sampler"), f"runs: not used with sampler={self.sampler}; use `space`, or sampler=list"
                )
            self._check_space(problems)
        for section, settings in (
            ("space", self.space),
            ("overrides", self.overrides),
            *(("runs", one) for one in self.runs),
        ):
            if "output_dir" in settings:
                problems.add((section,), f"{section}.output_dir: the sweep chooses it; remove it")
        metric = find_metric(self.metric)
        if metric is None or metric.kind == "text":
            numbers = [one.name for one in METRICS if one.kind != "text"]
            hint = suggest(self.metric, numbers) or "; docs/reference/metrics.md lists them"
            problems.add(("metric",), f"metric={self.metric}: no metric that is a number{hint}")

    def list_dimensions(self) -> dict[str, list[Any] | NumberRange]:
        """Return each swept key with its values or range; call it on a checked config."""
        return {key: _read_dimension(f"space.{key}", value, []) for key, value in flatten(self.space).items()}

    @property
    def is_maximized(self) -> bool:
        """True if more of the metric is better."""
        if self.goal is not None:
            return self.goal == "maximize"
        return self.metric.startswith(_MORE_IS_BETTER) and not self.metric.startswith(_LESS_IS_BETTER)

    def _check_space(self, problems: SectionProblems) -> None:
        for key, value in flatten(self.space).items():
            found: list[str] = []
            dimension = _read_dimension(f"space.{key}", value, found)
            for problem in found:
                problems.add(("space",), problem)
            if isinstance(dimension, NumberRange) and self.sampler == "grid":
                problems.add(
                    ("space", "sampler"),
                    f"space.{key}: a grid needs a list of values; write one, or use sampler=random",
                )


@dataclass(kw_only=True, slots=True)
class _RangeConfig:
    min: float
    max: float
    scale: Literal["linear", "log"] = "linear"
    type: Literal["number", "integer"] = "number"

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check the order of the ends."""
        if not (math.isfinite(self.min) and math.isfinite(self.max)):
            problems.add(("min", "max"), f"{where}: min={self.min:g} and max={self.max:g} must be finite")
        elif not self.min < self.max:
            problems.add(("min", "max"), f"{where}: min={self.min:g} is not less than max={self.max:g}; swap them")
        elif self.scale == "log" and self.min <= 0:
            problems.add(("min", "scale"), f"{where}.min={self.min:g}: a logarithmic scale needs more than 0")
        if self.type == "integer" and not (self.min.is_integer() and self.max.is_integer()):
            problems.add(
                ("type", "min", "max"),
                f"{where}: type=integer needs whole numbers, got min={self.min:g} and max={self.max:g}",
            )


def _read_dimension(where: str, value: Any, problems: list[str]) -> list[Any] | NumberRange:
    if isinstance(value, dict):
        parsed: _RangeConfig | None = parse_dataclass(_RangeConfig, value, where, problems)
        if parsed is None:
            return []
        return NumberRange(parsed.min, parsed.max, parsed.scale == "log", parsed.type == "integer")
    if not isinstance(value, list):
        problems.append(f"{where}={value!r}: expected a list of values, or a range {{min: ..., max: ...}}")
        return []
    if not value:
        problems.append(f"{where}=[]: empty; list the values to try, or remove the key")
    return value


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings with dotted keys: mappings within mappings are joined, ranges and empty mappings kept."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value and not {"min", "max"} & value.keys():
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep and the file of its runs' config."""

    path: Path
    spec: SweepConfig
    config: Path

    @property
    def study_dir(self) -> Path:
        """Absolute path of the study's directory."""
        return Path(self.spec.study_dir).resolve()


def load_sweep(path: str | Path) -> Sweep:
    """Read a sweep's file and check it.

    Raises:
        ConfigError: Listing every problem with its key and remedy.
    """
    path = Path(path)
    if not os.path.isfile(path):
        folder = path.parent
        near = suggest(path.name, [file.name for file in folder.glob("*.yaml")] if os.path.isdir(folder) else [])
        raise ConfigError(f"{shorten(str(path))}: no such sweep file{near}")
    problems: list[str] = []
    spec: SweepConfig | None = parse_dataclass(SweepConfig, read_yaml_mapping(path), "", problems)
    config = Path()
    if spec is not None and isinstance(spec.config, str):
        try:
            config = find_config(path.parent / spec.config)
        except ConfigError as error:
            config = find_shipped_config(spec.config) or config
            if not config.is_file():
                problems.append(f"config={spec.config}: {error}")
    if spec is not None and isinstance(spec.study_dir, str) and os.path.isfile(spec.study_dir):
        problems.append(f"study_dir={spec.study_dir}: is a file; choose a directory")
    if problems or spec is None:
        raise ConfigError(format_problems(str(path), problems))
    return Sweep(path, spec, config)
