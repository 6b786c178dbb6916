"""SkyPilot's command line, called from the desk: the machine of a cluster's user."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT
from tests.ranks import find_port
from tests.sky.kubernetes import SECRET
from tests.sky.skypilot import BIN, write_catalog
from tests.slurm.cluster import LOGIN_ADDRESS, UID, USER, Cluster, copy_project

CONFIG = {
    "allowed_clouds": ["slurm"],
    "aws": {"remote_identity": "NO_UPLOAD"},
    "gcp": {"remote_identity": "NO_UPLOAD"},
    "jobs": {"controller": {"consolidation_mode": True}},
}

# Before it checks a job, the controller of managed jobs waits indefinitely until https://8.8.8.8 or https://1.1.1.1
# responds. For machines that can reach neither, this makes it query SkyPilot's own server instead.
PROBE = """
import importlib.abc, importlib.util, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sky.backends.backend_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            port = os.environ["SKYPILOT_API_SERVER_LOCAL_PORT"]
            module._TEST_IP_LIST = [f"http://127.0.0.1:{port}/api/health"]

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

# SkyPilot installs itself on a cluster: uv with its online installer, then Python 3.10 and packages with uv. Nodes get
# replacements for what is not on a package index: uv from its wheel, and this machine's Python.
CURL = """#!/bin/bash
for word in "$@"; do
  if [ "$word" = https://astral.sh/uv/install.sh ]; then
    echo 'mkdir -p "$UV_INSTALL_DIR" && cp {home}/bin/uv "$UV_INSTALL_DIR/uv"'
    exit 0
  fi
done
exec /usr/bin/curl "$@"
"""
UV = """#!/bin/bash
words=()
for word in "$@"; do [ "$word" != 3.10 ] || word={python}; words+=("$word"); done
export SSL_CERT_FILE=${{SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}} UV_CACHE_DIR={home}/.cache/uv
# Both nodes share /tmp here, unlike real nodes, so one waits for the other's environment.
[ "$1" != venv ] || exec flock {home}/.uv.lock {home}/bin/uv-of-the-wheel "${{words[@]}}"
flock {home}/.uv.lock true
exec {home}/bin/uv-of-the-wheel "${{words[@]}}"
"""


class SkyPilot:
    """Runs ``sky`` from a home directory and a copy of the project on the desk."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.home = cluster.root / "desk"
        self.project = copy_project(self.home / "fctune")
        self._write_home()
        self._write_replacements()

    def run(
        self, *words: str, timeout_s: float = 240, check: bool = True, program: Sequence[str] = ("sky",)
    ) -> subprocess.CompletedProcess[str]:
        """Run ``sky``, or another program on the desk, to completion."""
        done = subprocess.run(
            self._command(words, program),
            cwd=self.project,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        shown = f"$ {' '.join([*program, *words])}\n{done.stdout}{done.stderr}[{done.returncode}]\n\n"
        with open(self.cluster.log / "sky.out", "a") as log:
            log.write(shown)
        assert not check or done.returncode == 0, shown
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``sky`` in the background, with its output in a pipe."""
        return subprocess.Popen(
            self._command(words),
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def write_task(self, name: str, task: dict[str, Any]) -> str:
        """Write a task to the desk's copy of the project, and return its name."""
        (self.project / name).write_text(yaml.safe_dump(task, sort_keys=False))
        return name

    def _command(self, words: Sequence[str], program: Sequence[str] = ("sky",)) -> list[str]:
        environment = {
            "HOME": str(self.home),
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(self.home / "probe"),
            "LANG": "C.UTF-8",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.port),
            # SkyPilot starts a controller of managed jobs for every 0.8 GB of memory: 12 on a machine with 23 GB.
            "SKYPILOT_POD_MEMORY_GB_LIMIT": "7",
            "HF_TOKEN": SECRET,
        }
        cleared = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        return self.cluster.at_desk(
            ["bash", "-c", 'cd "$0" && exec "$@"', str(self.project), *cleared, *program, *words]
        )

    def _write_home(self) -> None:
        self.port = find_port()
        write_catalog(self.home)
        (self.home / ".sky" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        (self.home / ".slurm").mkdir()
        key = self.cluster.root / "etc" / "client_key"
        lines = ["Host lab", f"HostName {LOGIN_ADDRESS}", f"Port {self.cluster.ssh_port}", f"User {USER}"]
        (self.home / ".slurm" / "config").write_text("\n    ".join([*lines, f"IdentityFile {key}"]) + "\n")
        (self.home / "probe").mkdir()
        (self.home / "probe" / "sitecustomize.py").write_text(PROBE)

    def _write_replacements(self) -> None:
        home = self.cluster.home
        tools = home / "bin"
        tools.mkdir()
        python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        for name, text in {"curl": CURL, "uv": UV}.items():
            (tools / name).write_text(text.format(home=home, python=python))
            (tools / name).chmod(0o755)
        (tools / "uv-of-the-wheel").symlink_to(ROOT / ".venv-sky" / "bin" / "uv")
        subprocess.run(["chown", "--recursive", "--no-dereference", f"{UID}:{UID}", str(home)], check=True)
