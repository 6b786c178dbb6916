"""Fixtures for SkyPilot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sky.skypilot import need_skypilot, write_catalog


@pytest.fixture(scope="session")
def skypilot_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a home directory with a catalog of the one GPU in use, so that SkyPilot needs no network."""
    need_skypilot()
    home = tmp_path_factory.mktemp("home")
    write_catalog(home)
    return home
