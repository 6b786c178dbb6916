"""What launches an acceptance run: the node script for real, the manifests against their schemas."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.acceptance.config import load_acceptance
from tests.acceptance.harness import SHORT, arguments
from tests.conftest import ROOT

SCRIPT = ROOT / "sky" / "acceptance_node.sh"
JOB = ROOT / "sky" / "k8s" / "acceptance-job.yaml"
SKY = ROOT / "sky" / "acceptance.yaml"
H100 = ROOT / "configs" / "acceptance_2x8_h100.yaml"


def start_node(folder: Path, node: int, port: int, *overrides: str, out: str = "out") -> subprocess.Popen[str]:
    _, config, _, *rest = arguments(folder, *SHORT, *overrides)
    launch = {"NUM_NODES": "2", "NODE_RANK": str(node), "DEVICES": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | launch | {"MASTER_PORT": str(port), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(SCRIPT), config, str(folder / out), *rest]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_started_by_the_script_measure_together(tmp_path: Path) -> None:
    port = free_port()
    required = "required=[arrival, collectives_all, links, storage_shared]"
    nodes = [start_node(tmp_path, node, port, required, "nodes=2") for node in (0, 1)]
    for node in nodes:
        output, _ = node.communicate(timeout=90)
        assert node.returncode == 0, output[-3000:]
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text())["verdict"] == "PASS"
    assert "<h1>Cluster acceptance</h1>" in (tmp_path / "out" / "acceptance.html").read_text()


def test_a_node_that_never_comes_is_named_by_the_one_that_did(tmp_path: Path) -> None:
    node = start_node(tmp_path, 0, free_port(), "limits.arrive_s=4")
    output, _ = node.communicate(timeout=90)
    assert node.returncode == 1, output[-3000:]
    document = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert document["verdict"] == "FAIL"
    assert [culprit["ranks"] for culprit in document["checks"][0]["culprits"]] == [[1]]
    assert (tmp_path / "out" / "acceptance.html").is_file()


def test_a_script_without_what_it_needs_says_its_usage_and_a_bad_config_exits_with_2(tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode
    assert "usage: NUM_NODES=N" in done.stderr
    node = start_node(tmp_path, 1, free_port(), "compute.sizze=1")
    node.communicate(timeout=60)
    assert node.returncode == 2


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(JOB.read_text())}


def test_the_job_asks_for_what_the_config_wants_on_two_different_nodes() -> None:
    job, service = documents()["Job"]["spec"], documents()["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    config = load_acceptance(H100)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == config.nodes == 2
    assert job["backoffLimit"] == 0
    assert job["activeDeadlineSeconds"] > config.limits.arrive_s + config.limits.total_s + config.limits.build_s
    wanted = {"nvidia.com/gpu": "8", "cpu": "64", "memory": "1400Gi"}
    assert container["resources"] == {"requests": wanted, "limits": wanted}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    rule = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    name = documents()["Job"]["metadata"]["name"]
    assert rule["labelSelector"]["matchLabels"] == service["spec"]["selector"] == {"job-name": name}
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["DEVICES"] == str(config.ranks_per_node)
    assert environment["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for directory in (config.storage.shared_dir, config.storage.node_dir):
        assert any(str(directory).startswith(mount) for mount in mounts), directory


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34"])
def test_the_manifests_are_valid_kubernetes(version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in documents().values():
        validate(document, version, strict=True)


@pytest.mark.parametrize("path", [SKY, JOB], ids=lambda path: path.name)
def test_the_commands_of_the_manifests_are_bash_that_starts_the_script(path: Path) -> None:
    text = path.read_text()
    assert "sky/acceptance_node.sh" in text
    assert "configs/acceptance_2x8_h100.yaml" in text
    scripts = [
        yaml.safe_load(text)["run"]
        if path == SKY
        else documents()["Job"]["spec"]["template"]["spec"]["containers"][0]["args"][0],
        SCRIPT.read_text(),
    ]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    # Only what the launcher sets, or the file itself, is read.
    set_here = {*re.findall(r"\b([A-Z_]+)=", text), *re.findall(r"^  ([A-Z_]+):", text, re.M)}
    set_here |= set(re.findall(r"name: ([A-Z_]+)\b", text)) | {"JOB_COMPLETION_INDEX", "NCCL_IB_HCA"}
    read = {name for name in re.findall(r"\$\{?([A-Z_]+)", scripts[0]) if not name.startswith("SKYPILOT_")}
    assert read <= set_here


def test_the_task_is_two_nodes_of_eight_h100() -> None:
    task = yaml.safe_load(SKY.read_text())
    assert task["num_nodes"] == load_acceptance(H100).nodes
    assert task["resources"]["accelerators"] == f"H100:{load_acceptance(H100).ranks_per_node}"
    assert "memory" in task["resources"]
    if importlib.util.find_spec("sky") is not None and shutil.which("sky"):
        import sky

        sky.Task.from_yaml_config(task)
