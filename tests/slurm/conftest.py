"""One Slurm cluster for all tests in this folder; its logs are kept if a test fails."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.sky.skypilot import need_skypilot
from tests.slurm.client import SkyPilot
from tests.slurm.cluster import UID, Cluster, copy_project, why_not

KEPT = ROOT / "runs" / "test-slurm"


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start a cluster with two idle nodes, and stop it afterwards."""
    if reason := why_not():
        pytest.skip(f"no Slurm cluster: {reason}")
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        if request.session.testsfailed:
            keep_logs(cluster)
        cluster.stop()


def keep_logs(cluster: Cluster) -> None:
    """Copy the logs of Slurm, SkyPilot and the runs out of the cluster's folder."""
    shutil.rmtree(KEPT, ignore_errors=True)
    for folder in ("log", "desk/sky_logs", "desk/.sky/api_server", "shared/logs"):
        if (cluster.root / folder).is_dir():
            shutil.copytree(cluster.root / folder, KEPT / folder, symlinks=True)
    for path in [
        *cluster.home.glob("fctune/train_*"),
        *cluster.shared.glob("runs/*/*.json*"),
        *cluster.shared.glob("sweeps/*/*.*"),
    ]:
        target = KEPT / path.relative_to(cluster.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    print(f"\nlogs of the cluster: {KEPT}")


@pytest.fixture(scope="session")
def sky(cluster: Cluster) -> SkyPilot:
    """Return SkyPilot on the desk."""
    need_skypilot()
    return SkyPilot(cluster)


@pytest.fixture(scope="session")
def clone(cluster: Cluster) -> Path:
    """Create a clone with a .venv in the home that all nodes see."""
    folder = copy_project(cluster.home / "fctune")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["chown", "--recursive", "--no-dereference", f"{UID}:{UID}", str(cluster.home)], check=True)
    return folder


@pytest.fixture(scope="session")
def trial(cluster: Cluster) -> str:
    """Write the demo's config with shorter packs and a checkpoint every 10 steps to the shared disk."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "tiny_lora.yaml").read_text())
    config["checkpoint"] = {"every": 10}
    config["data"]["seq_len"] = 512
    config["log_every_n_steps"] = 5
    config["validation"] = {"every": 0}
    path = cluster.shared / "trial.yaml"
    path.write_text(yaml.safe_dump(config))
    return "/mnt/shared/trial.yaml"
