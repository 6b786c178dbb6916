"""Launching an acceptance run: the node script with real processes, and the manifests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.apps.acceptance.config import load_acceptance
from tests.apps.acceptance.harness import SHORT, arguments
from tests.conftest import ROOT
from tests.ranks import find_port
from tests.warm_interpreter import warm_python

SCRIPT = ROOT / "sky" / "acceptance_node.sh"
JOB = ROOT / "sky" / "k8s" / "acceptance-job.yaml"
SKY = ROOT / "sky" / "acceptance.yaml"
H100 = ROOT / "configs" / "acceptance_2x8_h100.yaml"


def start_node(folder: Path, node: int, port: int, *overrides: str, out: str = "out") -> subprocess.Popen[str]:
    _, config, _, *rest = arguments(folder, *SHORT, *overrides)
    launch = {"NUM_NODES": "2", "NODE_RANK": str(node), "DEVICES": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | launch | {"MASTER_PORT": str(port), "PYTHON": warm_python(), "OMP_NUM_THREADS": "1"}
    command = [str(SCRIPT), config, str(folder / out), *rest]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_two_nodes_started_by_the_script_measure_together(tmp_path: Path) -> None:
    port = find_port()
    required = "required=[arrival, collectives_all, links, storage_shared]"
    nodes = [start_node(tmp_path, node, port, required, "nodes=2") for node in (0, 1)]
    for node in nodes:
        output, _ = node.communicate(timeout=90)
        assert node.returncode == 0, output[-3000:]
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text())["verdict"] == "PASS"
    assert "<h1>Cluster acceptance</h1>" in (tmp_path / "out" / "acceptance.html").read_text()


@pytest.mark.thorough
def test_a_node_that_never_starts_is_blamed_by_the_one_that_did(tmp_path: Path) -> None:
    node = start_node(tmp_path, 0, find_port(), "limits.arrive_s=4")
    output, _ = node.communicate(timeout=90)
    assert node.returncode == 1, output[-3000:]
    document = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert document["verdict"] == "FAIL"
    assert [culprit["ranks"] for culprit in document["checks"][0]["culprits"]] == [[1]]
    assert (tmp_path / "out" / "acceptance.html").is_file()


def test_the_script_prints_its_usage() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode
    assert "usage: NUM_NODES=N" in done.stderr


@pytest.mark.slow  # the recipe's own exit code is tested without the script, too
def test_the_script_exits_with_2_for_an_invalid_config(tmp_path: Path) -> None:
    node = start_node(tmp_path, 1, find_port(), "compute.sizze=1")
    node.communicate(timeout=60)
    assert node.returncode == 2


def load_job() -> dict[str, dict[str, Any]]:
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(JOB.read_text())}


def rdma_of_training() -> dict[str, str]:
    """Return the RDMA devices that a pod of sky/k8s/train-jobset.yaml requests."""
    (job,) = yaml.safe_load((JOB.parent / "train-jobset.yaml").read_text())["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    found = {name: number for name, number in container["resources"]["limits"].items() if name.startswith("rdma/")}
    assert found
    return found


def test_the_job_requests_what_the_config_requires_on_two_different_nodes() -> None:
    job, service = load_job()["Job"]["spec"], load_job()["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    config = load_acceptance(H100)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == config.nodes == 2
    assert job["backoffLimit"] == 0
    assert job["activeDeadlineSeconds"] > config.limits.arrive_s + config.limits.total_s + config.limits.build_s
    requested = {"nvidia.com/gpu": "8", "cpu": "64", "memory": "1400Gi"} | rdma_of_training()
    assert container["resources"] == {"requests": requested, "limits": requested}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    rule = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    name = load_job()["Job"]["metadata"]["name"]
    assert rule["labelSelector"]["matchLabels"] == service["spec"]["selector"] == {"job-name": name}
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["DEVICES"] == str(config.ranks_per_node)
    assert environment["NCCL_IB_HCA"] == "mlx5", "as the runs that follow"
    assert environment["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for directory in (config.storage.shared_dir, config.storage.node_dir, config.storage.network_dir):
        assert any(str(directory).startswith(mount) for mount in mounts), directory


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34"])
def test_the_manifests_are_valid_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in load_job().values():
        validate(manifest, version, strict=True)


@pytest.mark.parametrize("path", [SKY, JOB], ids=lambda path: path.name)
def test_the_manifests_run_the_node_script_with_variables_that_are_set(path: Path) -> None:
    if path == SKY:
        task = yaml.safe_load(path.read_text())
        script, variables = task["run"], task["envs"]
    else:
        (container,) = load_job()["Job"]["spec"]["template"]["spec"]["containers"]
        script, variables = container["args"][0], {variable["name"]: "" for variable in container["env"]}
    assert "sky/acceptance_node.sh" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    known = {*variables, *re.findall(r"\b([A-Z_]+)=", script), "JOB_COMPLETION_INDEX", "NCCL_IB_HCA"}
    read = {name for name in re.findall(r"\$\{?([A-Z_]+)", script) if not name.startswith("SKYPILOT_")}
    assert read <= known


def test_the_task_requests_the_nodes_and_gpus_of_its_config() -> None:
    task = yaml.safe_load(SKY.read_text())
    assert task["num_nodes"] == load_acceptance(H100).nodes
    assert task["resources"]["accelerators"] == f"H100:{load_acceptance(H100).ranks_per_node}"
    assert "memory" in task["resources"]
