"""The pods and claims that SkyPilot's own code asks Kubernetes for, task by task; what it refuses, and how."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from kubernetes_validate import validate

from tests.sky.kubernetes import SECRET, VOLUME, check, launch
from tests.sky.test_tasks import SKY, load

pytestmark = pytest.mark.slow

VERSIONS = ("1.36", "1.37")


class Asked(NamedTuple):
    """What a task's pods must ask for."""

    num_pods: int
    num_gpus: int
    num_cpus: int
    memory_gb: int
    is_fast: bool = False  # on the fast network
    has_disk: bool = False  # with one of each pod's own


TASKS = {
    "finetune": Asked(2, 8, 100, 1000, is_fast=True, has_disk=True),
    "acceptance": Asked(2, 8, 64, 1400, is_fast=True),
    "eval": Asked(1, 1, 8, 64),
    "serve": Asked(1, 1, 8, 64),
}


@pytest.fixture
def home(tmp_path: Path, skypilot_home: Path) -> Path:
    for tool in ("socat", "nc", "rsync"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and SkyPilot wants it: apt install socat netcat-openbsd rsync")
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky" / "catalogs").symlink_to(skypilot_home / ".sky" / "catalogs")
    (tmp_path / ".sky" / "config.yaml").write_text("allowed_clouds: [kubernetes]\n")
    return tmp_path


def test_every_task_of_kubernetes_is_here() -> None:
    assert {path.stem for path in SKY.glob("*.yaml")} == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_becomes_the_pods_it_describes(name: str, home: Path) -> None:
    asked = TASKS[name]
    launched = launch(SKY / f"{name}.yaml", home)
    (claim,) = launched.of_kind("persistentvolumeclaims")
    for version in VERSIONS:
        validate({"apiVersion": "v1", "kind": "PersistentVolumeClaim"} | claim, version, strict=True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["storageClassName"] == load(VOLUME)["config"]["storage_class_name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2000Gi"
    pods = launched.of_kind("pods")
    assert len(pods) == asked.num_pods, launched.reason
    for pod in pods:
        for version in VERSIONS:
            validate({"apiVersion": "v1", "kind": "Pod"} | pod, version, strict=True)
        check_pod(pod["spec"], asked, claim["metadata"]["name"])
    kept = "".join(path.read_text(errors="replace") for path in (home / ".sky" / "generated").rglob("*.yml*"))
    assert kept
    assert SECRET not in json.dumps(launched.created) + kept


def check_pod(spec: dict[str, Any], asked: Asked, claim: str) -> None:
    container = spec["containers"][0]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == asked.num_gpus
    assert float(requests["cpu"]) >= asked.num_cpus
    assert float(str(requests["memory"]).rstrip("Gi")) >= asked.memory_gb
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/mnt/shared"]]["persistentVolumeClaim"]["claimName"] == claim
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert ("/mnt/network" in mounts) == asked.has_disk
    if asked.has_disk:
        disk = volumes[mounts["/mnt/network"]]["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert disk["accessModes"] == ["ReadWriteOnce"]
        assert disk["resources"]["requests"]["storage"] == "2000Gi"
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    added = container.get("securityContext", {}).get("capabilities", {}).get("add", [])
    assert variables.get("NCCL_IB_HCA") == ("mlx5" if asked.is_fast else None)
    assert ("IPC_LOCK" in added) == asked.is_fast
    assert not container.get("securityContext", {}).get("privileged")
    assert not spec.get("hostNetwork")


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy with other values; ``a__b`` is b of a."""
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


def test_gpus_that_no_node_has_are_refused(home: Path) -> None:
    refused = launch(changed(SKY / "finetune.yaml", home, resources__accelerators="A100:8"), home)
    assert "A100" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")
    assert refused.seconds < 120


def test_a_volume_that_is_not_there_is_refused(home: Path) -> None:
    refused = launch(changed(SKY / "finetune.yaml", home, volumes={"/mnt/shared": "fctune-sharred"}), home)
    assert "fctune-sharred" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")


def test_a_volume_of_one_node_is_refused_for_two(home: Path) -> None:
    volume = changed(VOLUME, home, config__access_mode="ReadWriteOnce")
    refused = launch(SKY / "finetune.yaml", home, volume)
    assert "ReadWriteOnce is not supported for multi-node tasks" in refused.reason.splitlines()[0]
    assert not refused.of_kind("pods")


def test_a_cluster_that_is_not_there_is_said(home: Path) -> None:
    start = time.monotonic()
    shown = check(home)
    assert "Failed to communicate with the cluster" in shown
    assert time.monotonic() - start < 60
