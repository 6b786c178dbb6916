"""The YAML files and scripts in sky/, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT

SKY = ROOT / "sky"
TASKS = sorted(path for path in SKY.rglob("*.yaml") if path.parent.name not in ("volumes", "k8s", "monitoring"))
VOLUMES = sorted((SKY / "volumes").glob("*.yaml"))
SCRIPTS = sorted([*SKY.rglob("*.sh"), *SKY.rglob("*.sbatch")])
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))

# The keys in which sky/finetune.yaml and sky/slurm/finetune.yaml differ.
INFRASTRUCTURE = {"volumes", "config", "resources.infra", "resources.network_tier", "resources.job_recovery"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(path: Path) -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load(path.read_text())
    return task


def find_differing_keys(first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """List the top-level keys and those of ``resources`` in which two tasks differ."""

    def flatten(task: dict[str, Any]) -> dict[str, Any]:
        resources = {f"resources.{key}": value for key, value in task.get("resources", {}).items()}
        return {key: value for key, value in task.items() if key != "resources"} | resources

    one, other = flatten(first), flatten(second)
    return {key for key in one | other if one.get(key) != other.get(key)}
