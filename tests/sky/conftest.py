"""A home for SkyPilot that needs no network."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def skypilot_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a catalog of the one GPU that is named: SkyPilot downloads the whole one otherwise."""
    pytest.importorskip("sky.task", reason="SkyPilot is not installed: pip install 'fctune[sky]'")
    home = tmp_path_factory.mktemp("home")
    catalog = home / ".sky" / "catalogs" / "v8" / "common"
    catalog.mkdir(parents=True)
    (catalog / "accelerators.csv").write_text("AcceleratorName,Clouds\nH100,\"['AWS', 'nebius']\"\n")
    (catalog / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\n")
    images = catalog.parent / "kubernetes"
    images.mkdir()
    tags = [f"skypilot:custom-{kind}-ubuntu-2204-v1,,ubuntu,22.04,image-{kind},20260101" for kind in ("cpu", "gpu")]
    (images / "images.csv").write_text("\n".join(["Tag,Region,OS,OSVersion,ImageId,CreationDate", *tags]) + "\n")
    return home
