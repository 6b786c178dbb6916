"""Record of a real run: start, end, time use and success criteria."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fctune.apps.report.run_page import make_run_page
from fctune.base.errors import ConfigError
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.sections.success import SuccessConfig
from fctune.runs.record import read_run
from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import arguments_for, run_on_rank

CONFIG = str(ROOT / "configs" / "tiny_lora.yaml")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run two steps with a threshold that they miss."""
    root = tmp_path_factory.mktemp("ended")
    overrides = ["success.max_final_loss=0.001", "success.min_tokens_per_s_per_gpu=1e9"]
    result: dict[str, Any] = run_ranks(run_on_rank, 1, arguments_for(root, *overrides))[0]
    return {**result, "path": root / "run"}


def test_a_run_that_misses_its_thresholds_completes_and_reports_them(
    ended: dict[str, Any],
) -> None:
    assert ended["code"] == 0  # a non-zero code would make launchers restart the run
    described = json.loads((ended["path"] / "run.json").read_text())
    statuses = {one["name"]: one["status"] for one in described["success"]}
    assert statuses["loss, mean of the last 20 steps"] == "FAIL"
    assert statuses["tokens/s per GPU, median"] == "not measured"  # on a CPU
    assert statuses["final checkpoint"] == "PASS"
    assert statuses["tool-call accuracy"] == "not measured"
    assert re.search(r"success: FAIL +loss, mean of the last 20 steps +< 0\.001 +\d", ended["out"])
    assert main(["report", str(ended["path"]), "--out", str(ended["path"].parent / "page.html")]) == 1


def test_the_command_and_the_device_are_recorded_and_on_the_page(ended: dict[str, Any]) -> None:
    record = read_run(ended["path"])
    assert record.run["command"][1:] == arguments_for(ended["path"].parent, *record.run["command"][-2:])
    assert record.run["device"].startswith("cpu, ")
    assert record.run["device_memory_gib"] is None
    text = make_run_page([record]).render()
    assert f"--config {CONFIG}" in text
    assert record.notes() == []


def test_the_times_of_a_real_run_add_up(ended: dict[str, Any]) -> None:
    from fctune.runs.figures import account_for_time

    record = read_run(ended["path"])
    time = account_for_time(record)
    begun = datetime.fromisoformat(record.run["started_at"])
    assert time.elapsed_s == max(1.0, (datetime.fromisoformat(record.run["finished_at"]) - begun).total_seconds())
    steps = sum(value or 0.0 for value in record.metrics.column("step_time_s"))
    waited = sum(value or 0.0 for value in record.metrics.column("save_wait_s"))
    named = sum(time.parts[name] for name in ("training", "data", "stalls", "first steps"))
    assert named + waited == pytest.approx(steps)
    closing = record.run["closing"]
    between = sum(value or 0.0 for value in record.metrics.column("save_time_s"))
    assert time.parts["saves"] == pytest.approx(waited + between + closing["save_s"])
    assert time.parts["export"] == closing["export_s"] > 0
    assert time.parts["validation"] == record.metrics.column("validation_time_s")[-1]
    assert sum(time.parts.values()) <= time.elapsed_s + 1  # recorded times have a resolution of one second


def test_a_config_without_thresholds_is_not_judged(tmp_path: Path) -> None:
    assert load_config(CONFIG, ["output_dir=x", "success=null"]).success is None
    assert load_config(CONFIG, ["success={}"]).success == SuccessConfig()
    assert load_config(CONFIG, ["success.min_accuracy=null"]).success == SuccessConfig(min_accuracy=None)


@pytest.mark.parametrize(
    ("override", "due"),
    [
        ("success.min_accuracy=85", "success.min_accuracy=85.0: expected 0 or more and at most 1"),
        ("success.min_acuracy=0.9", "unknown key; did you mean success.min_accuracy"),
    ],
)
def test_an_invalid_threshold_is_an_error(override: str, due: str) -> None:
    with pytest.raises(ConfigError, match=due):
        load_config(CONFIG, [override])
