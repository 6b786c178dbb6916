"""Configuration of an acceptance run: what it measures and the thresholds it applies.

``profiles`` maps a name to overrides of the file (``a.b: value``), and ``profile`` selects one; ``full`` is the file
without overrides. To add a key, add a field here; to add a metric, add it to ``metrics``.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fctune.apps.acceptance.fault_injection import FaultConfig
from fctune.apps.acceptance.metrics import CHECKS, DTYPES, METRICS, OPERATIONS
from fctune.base.errors import ConfigError
from fctune.config.loading import compose_config, find_config, format_problems
from fctune.config.parsing import apply_override, parse_dataclass, suggest


@dataclass(kw_only=True, slots=True)
class LimitsConfig:
    """Time limits of the acceptance test, in seconds."""

    arrive_s: float = 120.0  # until every rank has started
    silence_s: float = 15.0  # without a heartbeat of a process
    step_s: float = 60.0  # one measurement of a rank, including the wait for the others
    build_s: float = 300.0  # the same for building a model and its first step
    total_s: float = 540.0  # the run: afterwards a phase is cut short and the remaining ones are skipped
    grace_s: float = 30.0  # beyond total_s, for a measurement in progress: afterwards the run is ended


@dataclass(kw_only=True, slots=True)
class ComputeConfig:
    """Matrix products, copies and checksums on all devices at once."""

    dtypes: list[str] = field(default_factory=lambda: ["bf16"])
    size: int = 8192  # of the square matrices
    sustain_s: float = 30.0  # for each dtype
    # Statistic of a rank's rates: the median shows throttling; the best is what a machine shared with other jobs can
    # still reach
    estimator: Literal["median", "best"] = "median"
    copy_mib: int = 1024
    copy_repetitions: int = 20
    checksum_size: int = 2048  # of the matrices, and tokens of the attention


@dataclass(kw_only=True, slots=True)
class PairsConfig:
    """Messages in both directions between every pair of ranks, as many pairs at a time as possible."""

    mib: float = 64.0
    repetitions: int = 10


@dataclass(kw_only=True, slots=True)
class CollectivesConfig:
    """Collectives of several sizes, within each node and across nodes."""

    operations: list[str] = field(default_factory=lambda: list(OPERATIONS))
    sizes_mib: list[float] = field(default_factory=lambda: [1.0, 16.0, 256.0, 1024.0, 8192.0])
    judged_mib: float = 1024.0  # size that thresholds apply to
    repetitions: int = 20
    warmup: int = 5
    max_s: float = 5.0  # for one operation at one size; slow ones are repeated less often


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """Files that are written, flushed, read back and removed."""

    shared_dir: str | None = None  # null: not measured
    node_dir: str | None = None  # on each node's own disk
    network_dir: str | None = None  # on each node's network volume
    mib: int = 1024  # per rank, sequential
    num_small_files: int = 200  # per rank
    small_kib: int = 64
    num_flushes: int = 20
    repetitions: int = 3
    max_share_of_free: float = 0.2  # of the free space; a test that needs more is skipped


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """Training steps of a run's config, with random weights and tokens."""

    config: str  # path of the run's YAML
    architecture: dict[str, Any] = field(default_factory=dict)  # as in config.json; empty: the run's model
    overrides: list[str] = field(default_factory=list)  # key=value, of the run's config
    steps: int = 8
    warmup: int = 3
    peak_tflops: float | None = None  # of one device at the run's precision; null: no MFU
    checkpoint: bool = True  # also time one, if the shared disk is measured


@dataclass(kw_only=True, slots=True)
class ThresholdConfig:
    """Limits of a metric; ``source`` justifies the numbers."""

    fail: float
    warn: float | None = None
    source: str


@dataclass(kw_only=True, slots=True)
class AcceptanceConfig:
    """Configuration of an acceptance run."""

    output_dir: str
    device: Literal["cuda", "cpu"]
    nodes: int | None = None  # number required; null: any
    ranks_per_node: int | None = None
    distinct_hosts: bool = True  # nodes must have different host names
    gpu: str | None = None  # text that every GPU's name must contain
    profile: str = "full"
    profiles: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    required: list[str] = field(default_factory=lambda: list(CHECKS))  # checks that PASS depends on
    # How often all ranks repeat a phase that would blame someone for being slow; the samples of all attempts decide
    rechecks: int = 1
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    training: TrainingConfig | None = None
    thresholds: dict[str, Any] = field(default_factory=dict)  # metric -> ThresholdConfig
    faults: list[FaultConfig] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts, as in the YAML file."""
        return dataclasses.asdict(self)


def load_acceptance(path: str | Path, overrides: Sequence[str] = ()) -> AcceptanceConfig:
    """Load a YAML file and apply the selected profile, then ``key=value`` overrides.

    Raises:
        ConfigError: Listing every problem with its key and remedy.
    """
    raw = compose_config(find_config(path), AcceptanceConfig).values
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
    overrides = profiles.get(name) if isinstance(profiles, dict) else None
    if not isinstance(overrides, dict):
        known = ", ".join(["full", *map(str, profiles)])
        problems.append(f"profile={name}: not defined in the file's profiles; known: {known}")
        return
    for key, value in overrides.items():
        apply_override(raw, f"{key}={json.dumps(value)}", problems)  # JSON is a subset of YAML


def _parse_thresholds(raw: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    thresholds = {}
    for name, value in raw.items():
        where = f"thresholds.{name}"
        if name not in METRICS:
            problems.append(f"{where}: unknown metric{suggest(str(name), METRICS, 'thresholds.')}")
            continue
        threshold: ThresholdConfig | None = parse_dataclass(ThresholdConfig, value, where, problems)
        if threshold is None:
            continue
        thresholds[name] = threshold
        sign = 1 if METRICS[name].better == "higher" else -1
        if isinstance(threshold.warn, float) and sign * threshold.warn < sign * threshold.fail:
            problems.append(
                f"{where}: warn={threshold.warn:g} is worse than fail={threshold.fail:g}, so it would never apply"
            )
    return thresholds


def _find_problems(config: AcceptanceConfig, problems: list[str]) -> None:
    sections: dict[str, tuple[Any, tuple[str, ...]]] = {
        "": (config, tuple(n for n in ("nodes", "ranks_per_node") if getattr(config, n) is not None)),
        "limits.": (config.limits, tuple(f.name for f in dataclasses.fields(LimitsConfig))),
        "compute.": (config.compute, ("size", "sustain_s", "copy_mib", "copy_repetitions", "checksum_size")),
        "pairs.": (config.pairs, ("mib", "repetitions")),
        "collectives.": (config.collectives, ("judged_mib", "repetitions", "max_s")),
        "storage.": (config.storage, ("mib", "num_small_files", "small_kib", "num_flushes", "repetitions")),
        "training.": (config.training, ("steps", "warmup") if config.training is not None else ()),
    }
    for prefix, (section, names) in sections.items():
        for name in names:
            if not getattr(section, name) > 0:
                problems.append(f"{prefix}{name}={getattr(section, name)}: expected more than 0")
    for key, given, known in (
        ("required", config.required, tuple(CHECKS)),
        ("compute.dtypes", config.compute.dtypes, DTYPES),
        ("collectives.operations", config.collectives.operations, OPERATIONS),
    ):
        for name in given:
            if name not in known:
                hint = suggest(name, known, "")
                problems.append(f"{key}: unknown name {name}{hint}; known: {', '.join(known)}")
    if config.rechecks < 0:
        problems.append(f"rechecks={config.rechecks}: expected 0 or more")
    if config.compute.size % 16:
        problems.append(f"compute.size={config.compute.size}: expected a multiple of 16, which fp8 products require")
    if config.collectives.judged_mib not in config.collectives.sizes_mib:
        problems.append(
            f"collectives.judged_mib={config.collectives.judged_mib:g}: not listed in collectives.sizes_mib, so its "
            "thresholds would apply to a size that is not measured"
        )
    if not all(size > 0 for size in config.collectives.sizes_mib):
        problems.append(f"collectives.sizes_mib={config.collectives.sizes_mib}: expected sizes over 0")
    if not 0 < config.storage.max_share_of_free < 1:
        problems.append(f"storage.max_share_of_free={config.storage.max_share_of_free}: expected over 0 and under 1")
    for i, fault in enumerate(config.faults):
        if fault.rank < 0:
            problems.append(f"faults.{i}.rank={fault.rank}: expected 0 or more")
    if config.training is not None and not os.path.isfile(config.training.config):
        problems.append(
            f"training.config={config.training.config}: no such file (relative paths start at {Path.cwd()})"
        )
