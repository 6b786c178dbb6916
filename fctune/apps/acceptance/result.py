"""The result of a run, ``acceptance.json`` (schema: ``result.schema.json``), and the comparison of two results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from fctune.apps.acceptance.config import AcceptanceConfig
from fctune.apps.acceptance.devices import UNIFORM
from fctune.apps.acceptance.judge import Check, Samples, decide, list_bandwidths
from fctune.apps.acceptance.metrics import METRICS
from fctune.base.errors import ConfigError
from fctune.base.files import write_atomically
from fctune.runs.directory import RunFiles

VERSION = 2
RESULT_FILE = "acceptance.json"

Result = Mapping[str, Any]


def make_result(
    config: AcceptanceConfig,
    checks: Sequence[Check],
    samples: Samples,
    *,
    world_size: int,
    ranks_per_node: int,
    started_at: float,
    seconds: float,
) -> dict[str, Any]:
    """Assemble the result of a run; it does not depend on the order in which ranks published their samples."""
    verdict, reason = decide(checks)
    result = {
        "version": VERSION,
        "verdict": verdict,
        "reason": reason,
        "profile": config.profile,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_at)),
        "seconds": round(seconds, 3),
        "world_size": world_size,
        "ranks_per_node": ranks_per_node,
        "checks": [_describe_check(check) for check in checks],
        "bandwidths": list_bandwidths(samples, ranks_per_node, world_size),
        "config": config.to_dict(),
        "samples": {
            phase: {str(rank): by_rank[rank] for rank in sorted(by_rank)} for phase, by_rank in samples.items()
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))  # identical to what a reader parses
    return plain


def write_result(result: Result, folder: Path) -> Path:
    """Write ``acceptance.json`` atomically, and ``exit.json`` with the exit code; return the former's path.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RESULT_FILE, json.dumps(result, indent=1, allow_nan=False) + "\n")
    # Launch scripts read exit.json, as every run writes it.
    code = 0 if result["verdict"] == "PASS" else 1
    ended = {"code": code, "reason": result["reason"], "step": 0, "checkpoint": None}
    write_atomically(RunFiles(folder).exit, json.dumps(ended, indent=2) + "\n")
    return folder / RESULT_FILE


def read_result(path: str | Path) -> dict[str, Any]:
    """Read and validate the result in a file or in a run's output directory.

    Raises:
        ConfigError: The file does not exist, is not JSON, or does not match the schema.
    """
    path = Path(path)
    file = path / RESULT_FILE if path.is_dir() else path
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}). Pass acceptance.json or a run's output_dir."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}). Pass the acceptance.json of a run.") from None
    version = result.get("version") if isinstance(result, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise ConfigError(f"{file}: result version {version} is not supported; this fctune reads version {VERSION}.")
    problem = next(iter(jsonschema.Draft202012Validator(read_schema()).iter_errors(result)), None)
    if problem is not None:
        where = "/".join(map(str, problem.absolute_path)) or "top level"
        raise ConfigError(f"{file}: not the result of an acceptance run: {where}: {problem.message[:200]}.")
    return result


def read_schema() -> dict[str, Any]:
    """Read the JSON Schema of a result."""
    schema: dict[str, Any] = json.loads((files("fctune.apps.acceptance") / "result.schema.json").read_text("utf-8"))
    return schema


def _describe_check(check: Check) -> dict[str, Any]:
    figures = []
    for figure in check.figures:
        metric = METRICS[figure.name]
        described = {"unit": metric.unit, "better": metric.better, "description": metric.description}
        figures.append(asdict(figure) | described)
    return {
        "name": check.name,
        "status": check.status,
        "required": check.required,
        "reason": check.reason,
        "figures": figures,
        "culprits": [asdict(culprit) | {"text": str(culprit)} for culprit in check.culprits],
        "next_step": check.next_step,
    }


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results; ``worse`` is its relative degradation, negative for an improvement."""

    name: str
    unit: str
    old: float
    new: float
    worse: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Figures, checks and set-up that differ between an earlier result and a later one."""

    changes: list[Change]  # of all figures in both results, worst first
    slower: list[Change]  # those beyond the tolerance
    checks: list[str]  # checks that passed before and do not now
    missing: list[str]  # figures that were only measured before
    setup: list[str]  # differences in hardware, software or measurement settings


def compare_results(old: Result, new: Result, tolerance: float) -> Comparison:
    """Compare the figures and checks of two results of the same cluster or of two.

    Args:
        old: The earlier result.
        new: The later result.
        tolerance: Relative degradation up to which a figure is not reported as slower.
    """
    before, after = _list_figures(old), _list_figures(new)
    changes = []
    for name in before.keys() & after.keys():
        a, b = before[name]["value"], after[name]["value"]
        worse = (a - b if after[name]["better"] == "higher" else b - a) / abs(a) if a else float(b > 0)
        if before[name]["unit"] == "" and after[name]["better"] == "lower":
            worse = b - a  # slowdowns and shares are relative already, and may be near 0
        changes.append(Change(name, after[name]["unit"], a, b, worse))
    changes.sort(key=lambda change: (-change.worse, change.name))
    status = {check["name"]: check["status"] for check in old["checks"]}
    checks = [
        f"{check['name']}: {status[check['name']]} before, {check['status']} now"
        for check in new["checks"]
        if status.get(check["name"]) in ("PASS", "WARN") and check["status"] in ("FAIL", "SKIPPED")
    ]
    slower = [change for change in changes if change.worse > tolerance]
    return Comparison(changes, slower, checks, sorted(before.keys() - after.keys()), _list_differences(old, new))


def _list_figures(result: Result) -> dict[str, Any]:
    """Return figures by name, and the slowest node's bandwidth of collectives at sizes that are not judged."""
    figures = {figure["name"]: figure for check in result["checks"] for figure in check["figures"]}
    judged = int(result["config"]["collectives"]["judged_mib"] * 2**20)
    for row in result["bandwidths"]:
        if row["requested_bytes"] == judged:
            continue
        name = f"{row['operation']}_{row['scope']}_gb_s at {row['requested_bytes'] / 2**20:.4g} MiB"
        value = min(row["busbw_gb_s"], figures.get(name, {}).get("value", math.inf))
        figures[name] = {"value": value, "unit": "GB/s", "better": "higher"}
    return figures


def _list_differences(old: Result, new: Result) -> list[str]:
    differences = []
    for name in ("world_size", "ranks_per_node", "profile"):
        if old[name] != new[name]:
            differences.append(f"{name}: {old[name]} before, {new[name]} now")
    for name in ("compute", "pairs", "collectives", "storage", "training"):
        if old["config"].get(name) != new["config"].get(name):
            differences.append(f"the config's {name} section")
    identities = [result["samples"].get("identity", {}).get("0", {}) for result in (old, new)]
    for name in UNIFORM:
        a, b = (json.dumps(identity.get(name), sort_keys=True) for identity in identities)
        if a != b:
            differences.append(f"{name}: {a[:80]} before, {b[:80]} now")
    return differences
