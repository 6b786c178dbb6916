"""Pods and volume claims that SkyPilot creates for each task, and the launches that it refuses."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from kubernetes_validate import validate

from tests.sky.kubernetes import SECRET, VOLUME, check, launch
from tests.sky.task_files import SKY, load

pytestmark = pytest.mark.slow

VERSIONS = ("1.36", "1.37")


class PodRequest(NamedTuple):
    """Resources that a task's pods must request."""

    num_pods: int
    num_gpus: int
    num_cpus: int
    memory_gb: int
    is_fast: bool = False  # uses the fast network
    disk: str = ""  # size of a separate one for each pod
    grace_s: int | None = None  # for saving before a preemption


TASKS = {
    "finetune": PodRequest(2, 8, 100, 1000, is_fast=True, disk="2000Gi", grace_s=300),
    "acceptance": PodRequest(2, 8, 64, 1400, is_fast=True, disk="200Gi"),
    "eval": PodRequest(1, 1, 8, 64),
    "prepare": PodRequest(1, 0, 4, 16),
    "grpo": PodRequest(2, 8, 100, 1000, is_fast=True, disk="2000Gi", grace_s=300),
    "serve": PodRequest(1, 1, 8, 64),
}


@pytest.fixture
def home(tmp_path: Path, skypilot_home: Path) -> Path:
    for tool in ("socat", "nc", "rsync"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and SkyPilot requires it: apt install socat netcat-openbsd rsync")
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky" / "catalogs").symlink_to(skypilot_home / ".sky" / "catalogs")
    (tmp_path / ".sky" / "config.yaml").write_text("allowed_clouds: [kubernetes]\n")
    return tmp_path


def test_every_kubernetes_task_is_covered() -> None:
    assert {path.stem for path in SKY.glob("*.yaml")} == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_creates_the_pods_it_describes(name: str, home: Path) -> None:
    expected = TASKS[name]
    launched = launch(SKY / f"{name}.yaml", home)
    (claim,) = launched.of_kind("persistentvolumeclaims")
    for version in VERSIONS:
        validate({"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim, version, strict=True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"] == load(VOLUME)["config"]["storage_class_name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2000Gi"
    pods = launched.of_kind("pods")
    assert len(pods) == expected.num_pods, launched.reason
    for pod in pods:
        for version in VERSIONS:
            validate({"apiVersion": "v1", "kind": "Pod"} | pod, version, strict=True)
        check_pod(pod["spec"], expected, claim["metadata"]["name"])
    kept = "".join(path.read_text(errors="replace") for path in (home / ".sky" / "generated").rglob("*.yml*"))
    assert kept
    assert SECRET not in json.dumps(launched.created) + kept


def check_pod(spec: dict[str, Any], expected: PodRequest, claim: str) -> None:
    container = spec["containers"][0]
    requests, limits = container["resources"]["requests"], container["resources"].get("limits", {})
    assert int(limits.get("nvidia.com/gpu", 0)) == expected.num_gpus
    assert float(requests["cpu"]) >= expected.num_cpus
    assert float(str(requests["memory"]).rstrip("Gi")) >= expected.memory_gb
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/mnt/shared"]]["persistentVolumeClaim"]["claimName"] == claim
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert ("/mnt/network" in mounts) == bool(expected.disk)
    if expected.disk:
        disk = volumes[mounts["/mnt/network"]]["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert disk["accessModes"] == ["ReadWriteOnce"]
        assert disk["resources"]["requests"]["storage"] == expected.disk
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    added = container.get("securityContext", {}).get("capabilities", {}).get("add", [])
    assert variables.get("NCCL_IB_HCA") == ("mlx5" if expected.is_fast else None)
    assert ("IPC_LOCK" in added) == expected.is_fast
    assert not container.get("securityContext", {}).get("privileged")
    assert not spec.get("hostNetwork")
    assert spec.get("terminationGracePeriodSeconds") == expected.grace_s
    if expected.grace_s is not None:
        *_, script = container["lifecycle"]["preStop"]["exec"]["command"]
        # It signals SkyPilot's daemon, or the process that stands in for it where there is none, and waits.
        (pattern,) = re.findall(r"pgrep -of '(.*)'", script)
        assert re.search(pattern, "bash sky/preempt.sh --on-signal sky.skylet.skylet")
        assert 'kill -TERM "$PID"' in script
        assert f"-lt {expected.grace_s} ]" in script


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    """Write a copy with other values; ``a__b`` stands for the key a.b."""
    value = load(path)
    for name, new in changes.items():
        *parents, last = name.split("__")
        inner = value
        for parent in parents:
            inner = inner[parent]
        inner[last] = new
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(value))
    return copy


def test_unavailable_gpus_are_refused(home: Path) -> None:
    refused = launch(changed(SKY / "finetune.yaml", home, resources__accelerators="A100:8"), home)
    assert "A100" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")
    assert refused.seconds < 120


def test_a_missing_volume_is_refused(home: Path) -> None:
    refused = launch(changed(SKY / "finetune.yaml", home, volumes={"/mnt/shared": "fctune-sharred"}), home)
    assert "fctune-sharred" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")


def test_a_single_node_volume_is_refused_for_two_nodes(home: Path) -> None:
    volume = changed(VOLUME, home, config__access_mode="ReadWriteOnce")
    refused = launch(SKY / "finetune.yaml", home, volume)
    assert "ReadWriteOnce is not supported for multi-node tasks" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")


def test_an_unreachable_cluster_is_reported(home: Path) -> None:
    start = time.monotonic()
    shown = check(home)
    assert "Failed to communicate with the cluster" in shown
    assert time.monotonic() - start < 60
