"""Sweeps of real runs of the tiny model."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.processes import wait_until
from tests.conftest import ROOT

FCTUNE = [sys.executable, "-m", "fctune.cli"]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FIXED = {
    "data.sources": [{"path": "synthetic:train:300:1"}],
    "data.seq_len": 512,
    "data.overlong": "drop",
    "lr_scheduler.warmup": 0,
    "parallel.mode": "ddp",
}


def write_sweep(folder: Path, overrides: dict[str, Any], **changes: Any) -> Path:
    sweep = {"config": "tiny_lora", "study_dir": "study", "overrides": FIXED | overrides}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep | changes, sort_keys=False))
    return path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*FCTUNE, *words], cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)


def read_metric(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def read_rows(study: Path) -> list[dict[str, str]]:
    with open(study / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_two_real_runs_are_compared_by_what_they_wrote(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, {"max_steps": 3}, space={"optimizer.lr": [1e-7, 4e-3]}, metric="loss", at_once=2)
    process = start(tmp_path, "sweep", str(sweep))
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    rows = read_rows(tmp_path / "study")
    assert [row["run"] for row in rows] == ["001", "000"], "a rate of nearly 0 learns nothing"
    for row in rows:
        losses = read_metric(tmp_path / "study" / "runs" / f"study-{row['run']}", "loss")
        assert len(losses) == 3
        assert float(row["loss"]) == pytest.approx(sum(losses) / 3)
    assert "best: fctune train" in shown


@pytest.mark.slow
def test_six_runs_survive_a_kill_and_the_best_config_repeats_the_best_run(tmp_path: Path) -> None:
    study = tmp_path / "study"
    sweep = write_sweep(
        tmp_path,
        {"max_steps": 24, "validation.every": 6, "checkpoint.every": 6},
        space={"optimizer.lr": [1e-6, 1e-3, 1e-2], "adapter.rank": [8, 32]},
        at_once=2,
        early_stop={"first_step": 6, "factor": 2},
    )
    process = start(tmp_path, "sweep", str(sweep))
    wait_until(lambda: len(list(study.glob("runs/*/metrics.jsonl"))) >= 3, process, 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start(tmp_path, "sweep", str(sweep))
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    rows = read_rows(study)
    assert len(rows) == 6
    assert {row["status"] for row in rows} <= {"completed", "stopped early"}
    for row in rows:
        steps = read_metric(study / "runs" / f"study-{row['run']}", "step")
        assert steps == list(range(1, int(row["steps"]) + 1)), "no step is lost or repeated"
    best = rows[0]
    assert best["status"] == "completed"
    assert best["optimizer.lr"] != "1e-06"
    again = start(tmp_path, "train", "study/best.yaml", "--nproc", "1", "output_dir=again")
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    original = study / "runs" / f"study-{best['run']}"
    assert read_metric(tmp_path / "again", "data_digest") == read_metric(original, "data_digest")
    assert read_metric(tmp_path / "again", "validation_loss")[-1] == pytest.approx(
        float(best["validation_loss"]), rel=1e-4
    )
