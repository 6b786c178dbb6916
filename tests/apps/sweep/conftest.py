"""A sweep of fake runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fctune.apps.sweep import launchers
from tests.conftest import ROOT

FAKE = (sys.executable, str(ROOT / "tests" / "apps" / "sweep" / "fake_trainer.py"))


@pytest.fixture
def write_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the file of a sweep of fake runs: ``write_sweep(at_once=3)``; None removes a key."""
    monkeypatch.setattr(launchers.LocalLauncher, "command", FAKE)
    monkeypatch.setattr(launchers, "list_gpus", list)
    monkeypatch.chdir(ROOT)

    def write(**changes: Any) -> Path:
        sweep: dict[str, Any] = {
            "config": "tiny_lora",
            "study_dir": str(tmp_path / "study"),
            "space": {"optimizer.lr": [1e-4, 1e-3, 1e-2], "adapter.rank": [8, 16]},
            "overrides": {"max_steps": 20},
            "at_once": 3,
            "launcher": {"poll_s": 0.02},
        }
        path = tmp_path / "sweep.yaml"
        given = {key: value for key, value in (sweep | changes).items() if value is not None}
        path.write_text(yaml.safe_dump(given, sort_keys=False))
        return path

    return write
