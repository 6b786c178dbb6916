"""SkyPilot in its own virtual environment (``make sky``), with a home directory that needs no network."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

BIN = ROOT / ".venv-sky" / "bin"

# A catalog of the one GPU in use and of SkyPilot's images; SkyPilot would download the complete one.
CATALOG = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,\"['AWS', 'nebius']\"\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\n",
    "kubernetes/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate\n"
    "skypilot:custom-cpu-ubuntu-2204-v1,,ubuntu,22.04,image-cpu,20260101\n"
    "skypilot:custom-gpu-ubuntu-2204-v1,,ubuntu,22.04,image-gpu,20260101\n",
}


def need_skypilot() -> None:
    """Skip the test if SkyPilot is not installed."""
    if not (BIN / "sky").exists():
        pytest.skip("SkyPilot is not installed: make sky")


def write_catalog(home: Path) -> None:
    """Write the catalog that SkyPilot would download into a home directory."""
    for name, text in CATALOG.items():
        path = home / ".sky" / "catalogs" / "v8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_skypilot(
    home: Path, code: str, *arguments: str, timeout_s: float = 100, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python code that imports ``sky`` in the repository's root."""
    environment = os.environ | {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"} | more
    return subprocess.run(
        [str(BIN / "python"), "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
