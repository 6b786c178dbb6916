from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model directory with random weights, and a file of rows."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))
