"""The pods and claims that SkyPilot's own code asks Kubernetes for, task by task."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sky.test_tasks import ROOT, SKY

pytestmark = pytest.mark.slow

SECRET = "of-a-test-and-nowhere-else"

# The volume as `sky volumes apply` makes it, then the task as `sky launch` does, in one process without its server.
LAUNCH = """
import sys, yaml
import sky
from sky import check, execution
from sky.volumes.server import core
from sky.volumes.volume import Volume

path, secret = sys.argv[1:]
check.check(clouds=["kubernetes"], quiet=True)
volume = Volume.from_yaml_config(yaml.safe_load(open("sky/volumes/shared.yaml")))
volume.validate()
core.volume_apply(name=volume.name, volume_type=volume.type, cloud=volume.cloud, region=volume.region, zone=volume.zone,
                  size=volume.size, config=volume.config, labels=volume.labels)
config = yaml.safe_load(open(path))
config.setdefault("config", {}).setdefault("kubernetes", {})["provision_timeout"] = 8
config.pop("service", None)
config.get("resources", {}).pop("ports", None)
task = sky.Task.from_yaml_config(config)
task.update_secrets([(name, secret) for name in config.get("secrets", {})])
try:
    execution.launch(task, cluster_name="fct", stream_logs=False)
except Exception as error:
    print(type(error).__name__, error)
"""

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: stand-in
clusters: [{{name: stand-in, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: stand-in, context: {{cluster: stand-in, user: stand-in, namespace: default}}}}]
users: [{{name: stand-in, user: {{token: none}}}}]
"""


def post(task: Path, home: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """What the launch of a task creates, by kind and name, and what it printed."""
    created = home / "created"
    created.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (home / ".kube").mkdir()
    (home / ".kube" / "config").write_text(KUBECONFIG.format(port=port))
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "sky" / "kubernetes_server.py"), str(port), str(created)]
    )
    environment = os.environ | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment |= {"KUBECONFIG": str(home / ".kube" / "config")}
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, str(task), SECRET],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
        )
    finally:
        server.kill()
        server.wait()
    return {path.stem: json.loads(path.read_text()) for path in sorted(created.glob("*.json"))}, (
        done.stdout + done.stderr
    )


@pytest.fixture
def home(tmp_path: Path, skypilot_home: Path) -> Path:
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky" / "catalogs").symlink_to(skypilot_home / ".sky" / "catalogs")
    (tmp_path / ".sky" / "config.yaml").write_text("allowed_clouds: [kubernetes]\n")
    return tmp_path


@pytest.mark.parametrize("name", ["finetune", "eval", "serve"])
def test_a_task_becomes_the_pods_it_describes(name: str, home: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for tool in ("socat", "nc", "rsync"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and SkyPilot wants it: apt install socat netcat-openbsd rsync")
    created, shown = post(SKY / f"{name}.yaml", home)
    pods = [thing for key, thing in created.items() if key.startswith("pods-")]
    (claim,) = [thing for key, thing in created.items() if key.startswith("persistentvolumeclaims-")]
    assert len(pods) == (2 if name == "finetune" else 1), shown[-3000:]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2000Gi"
    for pod in pods:
        for version in ("1.32", "1.34"):
            validate({"apiVersion": "v1", "kind": "Pod"} | pod, version, strict=True)
        spec = pod["spec"]
        container = spec["containers"][0]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        shared = volumes[mounts["/mnt/shared"]]["persistentVolumeClaim"]["claimName"]
        assert shared == claim["metadata"]["name"]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        gpus = container["resources"]["limits"]["nvidia.com/gpu"]
        assert int(gpus) == (8 if name == "finetune" else 1)
        if name != "finetune":
            continue
        requests = container["resources"]["requests"]
        assert float(requests["cpu"]) >= 100
        assert float(str(requests["memory"]).rstrip("Gi")) >= 1000
        disk = volumes[mounts["/mnt/network"]]["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert disk["accessModes"] == ["ReadWriteOnce"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["NCCL_IB_HCA"] == "mlx5"
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert SECRET not in json.dumps(created)
    generated = "".join(path.read_text(errors="replace") for path in (home / ".sky" / "generated").rglob("*.yml*"))
    assert SECRET not in generated
