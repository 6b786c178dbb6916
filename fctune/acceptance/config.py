"""What an acceptance run measures and what it holds the figures to: its own schema, in the dialect of every config.

``profiles`` maps a name to changes of the file (``a.b: value``); ``profile`` chooses one, and ``full`` is the file as
it stands. To add a key, add a field here; to add a figure that thresholds are set on, add it to ``metrics``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from fctune.acceptance.metrics import CHECKS, DTYPES, METRICS, OPERATIONS
from fctune.config.loading import format_problems
from fctune.config.parsing import apply_override, parse_dataclass, suggest
from fctune.errors import ConfigError

FaultKind = Literal[
    "slow_compute",
    "slow_collectives",
    "slow_disk",
    "corrupt_compute",
    "corrupt_send",
    "corrupt_receive",
    "die",
    "hang",
    "crash",
]


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """Seconds after which something that does not come is given up."""

    arrive_s: float = 120.0  # for every rank to be there
    silence_s: float = 15.0  # without a sign of life from a process
    step_s: float = 60.0  # for one measurement of a rank, waiting for the others included
    build_s: float = 300.0  # the same, for building a model and its first step
    total_s: float = 540.0  # for the run: what is measured then is cut short where it can be, and the rest skipped
    cut_s: float = 30.0  # over that, for a piece that has begun: then the run is ended where it is


@dataclass(kw_only=True, slots=True)
class ComputeConfig:
    """Products, copies and checksums on every device at once."""

    dtypes: list[str] = field(default_factory=lambda: ["bf16"])
    size: int = 8192  # of the square matrices
    sustain_s: float = 30.0  # for each dtype
    # What stands for a rank: the median of its rates, which shows throttling; or its best, which a machine shared with
    # others still reaches
    estimator: Literal["median", "best"] = "median"
    copy_mib: int = 1024
    copy_repetitions: int = 20
    checksum_size: int = 2048  # of the matrices, and tokens of the attention


@dataclass(kw_only=True, slots=True)
class PairsConfig:
    """Every pair of ranks sends both ways; as many pairs at a time as there are."""

    mib: float = 64.0
    repetitions: int = 10


@dataclass(kw_only=True, slots=True)
class CollectivesConfig:
    """Collectives over sizes, within each node and across."""

    operations: list[str] = field(default_factory=lambda: list(OPERATIONS))
    sizes_mib: list[float] = field(default_factory=lambda: [1.0, 16.0, 256.0, 1024.0, 8192.0])
    judged_mib: float = 1024.0  # the size that thresholds are of
    repetitions: int = 20
    warmup: int = 5
    max_s: float = 5.0  # of one operation at one size; repetitions are fewer where they would take longer


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """Files, written, flushed and read back, then removed."""

    shared_dir: str | None = None  # null: not measured
    node_dir: str | None = None
    mib: int = 1024  # a rank, sequential
    num_small_files: int = 200  # a rank
    small_kib: int = 64
    num_flushes: int = 20
    repetitions: int = 3
    max_share_of_free: float = 0.2  # of the space that is free; a test that needs more is skipped


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Steps of a run's own config with random weights and tokens."""

    config: str  # a run's YAML
    architecture: dict[str, Any] = field(default_factory=dict)  # as a config.json has it; empty: of the run's model
    overrides: list[str] = field(default_factory=list)  # of the run's config, key=value
    steps: int = 8
    warmup: int = 3
    peak_tflops: float | None = None  # of one device at the run's precision; null: no MFU
    checkpoint: bool = True  # time one, where the shared disk is measured


@dataclass(kw_only=True, slots=True)
class ThresholdConfig:
    """What a figure is held to; ``source`` says where the numbers come from."""

    fail: float
    warn: float | None = None
    source: str


@dataclass(kw_only=True, slots=True)
class FaultConfig:
    """Something done wrong on purpose, to see whether it is found; the result names it."""

    kind: FaultKind
    rank: int
    seconds: float = 0.05  # of each delay
    times: int | None = None  # that it is slow, and then no more; null: always
    at: str = "compute"  # the phase in which a rank dies, hangs or crashes


@dataclass(kw_only=True, slots=True)
class AcceptanceConfig:
    """An acceptance run, whole."""

    output_dir: str
    device: Literal["cuda", "cpu"]
    nodes: int | None = None  # that must be there; null: as many as are launched
    ranks_per_node: int | None = None
    distinct_hosts: bool = True  # nodes must have names of their own
    gpu: str | None = None  # text that every GPU's name must hold
    profile: str = "full"
    profiles: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    required: list[str] = field(default_factory=lambda: list(CHECKS))  # a verdict of PASS needs all of these
    # Times that a phase is measured again, by all ranks, where it would name someone for being slow; who is named is
    # so by all samples together
    rechecks: int = 1
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    training: TrainingConfig | None = None
    thresholds: dict[str, Any] = field(default_factory=dict)  # a figure's name -> ThresholdConfig
    faults: list[FaultConfig] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, as the YAML would say it."""
        return dataclasses.asdict(self)


def load_acceptance(path: str | Path, overrides: Sequence[str] = ()) -> AcceptanceConfig:
    """The acceptance run that a YAML file, the profile it names and ``key=value`` overrides describe.

    Overrides go over the profile's changes, and those over the file.

    Raises:
        ConfigError: with every problem found, each with its key and remedy.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Pass --config PATH.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {type(raw).__name__}.")
    problems: list[str] = []
    for override in (o for o in overrides if o.startswith("profile=")):
        apply_override(raw, override, problems)
    _apply_profile(raw, problems)
    for override in overrides:
        apply_override(raw, override, problems)
    config: AcceptanceConfig | None = parse_dataclass(AcceptanceConfig, raw, "", problems)
    if config is not None:
        config.thresholds = _parse_thresholds(config.thresholds, problems)
        if not problems:
            _find_problems(config, problems)
    if problems or config is None:
        raise ConfigError(format_problems(str(path), problems))
    return config


def _apply_profile(raw: dict[str, Any], problems: list[str]) -> None:
    name, profiles = raw.get("profile") or "full", raw.get("profiles") or {}
    if name == "full" and name not in (profiles if isinstance(profiles, dict) else {}):
        return
    changes = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(changes, dict):
        known = ", ".join(["full", *map(str, profiles)])
        problems.append(f"profile={name}: not among the file's profiles; known: {known}")
        return
    for key, value in changes.items():
        apply_override(raw, f"{key}={json.dumps(value)}", problems)  # JSON is YAML


def _parse_thresholds(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    found = {}
    for name, value in raw.items():
        where = f"thresholds.{name}"
        if name not in METRICS:
            problems.append(f"{where}: no such figure{suggest(str(name), METRICS, 'thresholds.')}")
            continue
        threshold: ThresholdConfig | None = parse_dataclass(ThresholdConfig, value, where, problems)
        if threshold is None:
            continue
        found[name] = threshold
        sign = 1 if METRICS[name].better == "higher" else -1
        if isinstance(threshold.warn, float) and sign * threshold.warn < sign * threshold.fail:
            problems.append(
                f"{where}: warn={threshold.warn:g} is worse than fail={threshold.fail:g}, so it would never be said"
            )
    return found


def _find_problems(config: AcceptanceConfig, problems: list[str]) -> None:
    positive: dict[str, tuple[Any, tuple[str, ...]]] = {
        "": (config, tuple(n for n in ("nodes", "ranks_per_node") if getattr(config, n) is not None)),
        "limits.": (config.limits, ("arrive_s", "silence_s", "step_s", "build_s", "total_s", "cut_s")),
        "compute.": (config.compute, ("size", "sustain_s", "copy_mib", "copy_repetitions", "checksum_size")),
        "pairs.": (config.pairs, ("mib", "repetitions")),
        "collectives.": (config.collectives, ("judged_mib", "repetitions", "max_s")),
        "storage.": (config.storage, ("mib", "num_small_files", "small_kib", "num_flushes", "repetitions")),
    }
    if config.training is not None:
        positive["training."] = (config.training, ("steps", "warmup"))
    for prefix, (section, names) in positive.items():
        for name in names:
            if not getattr(section, name) > 0:
                problems.append(f"{prefix}{name}={getattr(section, name)}: expected more than 0")
    if config.rechecks < 0:
        problems.append(f"rechecks={config.rechecks}: expected 0 or more")
    _check_names("required", config.required, CHECKS, problems)
    _check_names("compute.dtypes", config.compute.dtypes, DTYPES, problems)
    _check_names("collectives.operations", config.collectives.operations, OPERATIONS, problems)
    if config.compute.size % 16:
        problems.append(f"compute.size={config.compute.size}: expected a multiple of 16, which fp8 products need")
    if config.collectives.judged_mib not in config.collectives.sizes_mib:
        problems.append(
            f"collectives.judged_mib={config.collectives.judged_mib:g}: not among collectives.sizes_mib, so thresholds "
            "would be of a size that is not measured"
        )
    if not all(size > 0 for size in config.collectives.sizes_mib):
        problems.append(f"collectives.sizes_mib={config.collectives.sizes_mib}: expected sizes over 0")
    if not 0 < config.storage.max_share_of_free < 1:
        problems.append(f"storage.max_share_of_free={config.storage.max_share_of_free}: expected over 0 and under 1")
    for i, fault in enumerate(config.faults):
        if fault.rank < 0:
            problems.append(f"faults.{i}.rank={fault.rank}: expected 0 or more")
    if config.training is not None and not Path(config.training.config).is_file():
        problems.append(
            f"training.config={config.training.config}: no such file (relative paths start at {Path.cwd()})"
        )


def _check_names(key: str, names: Sequence[str], known: Any, problems: list[str]) -> None:
    for name in names:
        if name not in known:
            problems.append(f"{key}: no such name: {name}{suggest(name, known, '')}; known: {', '.join(known)}")
