"""A home for SkyPilot that needs no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sky.skypilot import need_skypilot, write_catalog


@pytest.fixture(scope="session")
def skypilot_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a catalog of the one GPU that is named."""
    need_skypilot()
    home = tmp_path_factory.mktemp("home")
    write_catalog(home)
    return home
