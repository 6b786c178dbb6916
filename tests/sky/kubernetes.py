"""Launch of a task by SkyPilot's own code against a fake Kubernetes API server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT
from tests.ranks import find_port
from tests.sky.skypilot import run_skypilot

SECRET = "of-a-test-and-nowhere-else"
VOLUME = ROOT / "sky" / "volumes" / "shared.yaml"

# Creates the volume like `sky volumes apply` and the task like `sky launch`, in one process without SkyPilot's server.
LAUNCH = """
import sys, yaml
import sky
from sky import check, execution
from sky.volumes.server import core
from sky.volumes.volume import Volume

path, volume_path, secret = sys.argv[1:]
check.check(clouds=["kubernetes"], quiet=True)
try:
    volume = Volume.from_yaml_config(yaml.safe_load(open(volume_path)))
    volume.validate()
    core.volume_apply(name=volume.name, volume_type=volume.type, cloud=volume.cloud, region=volume.region,
                      zone=volume.zone, size=volume.size, config=volume.config, labels=volume.labels)
    config = yaml.safe_load(open(path))
    config.setdefault("config", {}).setdefault("kubernetes", {})["provision_timeout"] = 8
    config.pop("service", None)  # used only by `sky serve`, which launches the rest
    task = sky.Task.from_yaml_config(config)
    task.update_secrets([(name, secret) for name in ("HF_TOKEN", "VLLM_API_KEY")])
    execution.launch(task, cluster_name="fct", stream_logs=False)
except Exception as error:
    print(f"refused: {type(error).__name__}: {error}")
"""

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: fake
clusters: [{{name: fake, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: fake, context: {{cluster: fake, user: fake, namespace: default}}}}]
users: [{{name: fake, user: {{token: none}}}}]
"""


class Launched(NamedTuple):
    """Result of a launch: created objects by kind and name, why it ended (no pod ever runs), and its duration."""

    created: dict[str, dict[str, Any]]
    reason: str
    seconds: float

    def of_kind(self, plural: str) -> list[dict[str, Any]]:
        """Return the created objects of a kind, such as pods."""
        return [thing for key, thing in self.created.items() if key.startswith(f"{plural}-")]


def launch(task: Path, home: Path, volume: Path = VOLUME) -> Launched:
    """Launch a task and record the objects that SkyPilot creates."""
    created = home / "created"
    created.mkdir()
    port = find_port()
    start = time.monotonic()
    with serve(port, created):
        done = run_skypilot(
            home, LAUNCH, str(task), str(volume), SECRET, timeout_s=150, KUBECONFIG=point_to(port, home)
        )
    found = re.findall(r"^refused: (.*)", done.stdout, re.M | re.S)
    things = {path.stem: json.loads(path.read_text()) for path in sorted(created.glob("*.json"))}
    return Launched(things, found[0] if found else done.stdout + done.stderr, time.monotonic() - start)


def check(home: Path) -> str:
    """Return the output of `sky check` when nothing answers at the cluster's address."""
    code = "from sky import check; check.check(clouds=['kubernetes'])"
    return run_skypilot(home, code, KUBECONFIG=point_to(find_port(), home)).stdout


def point_to(port: int, home: Path) -> str:
    """Write a kubeconfig that points to a local port."""
    file = home / ".kube" / "config"
    file.parent.mkdir()
    file.write_text(KUBECONFIG.format(port=port))
    return str(file)


@contextmanager
def serve(port: int, created: Path) -> Iterator[None]:
    """Run the fake API server."""
    program = str(Path(__file__).with_name("kubernetes_server.py"))
    server = subprocess.Popen([sys.executable, program, str(port), str(created)], env=dict(os.environ))
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()
