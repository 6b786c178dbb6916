"""The demo's accuracy comes from its data: training on shuffled calls does not reach it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.recipes.recipe_runs import tune_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def accuracy(model: Path, cases: Path) -> float:
    out = cases.with_name(f"{model.parent.name}-{model.name}.jsonl")
    command = [sys.executable, "-m", "eval.tool_calls", "--model", str(model), "--cases", str(cases), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    rate: float = summary["scores"]["all"]["rates"]["accuracy"]["rate"]
    return rate


@pytest.mark.parametrize(
    ("split", "low", "high"),
    [("train", 0.85, 1.0), ("shuffled", 0.0, 0.30)],
    ids=["matching calls", "shuffled calls"],
)
def test_lora_learns_calls_only_from_matching_questions(
    split: str, low: float, high: float, tmp_path: Path, tiny_base: Path
) -> None:
    cases = tmp_path / "cases.jsonl"
    make = [sys.executable, "-m", "fctune.cli", "data", "synthetic", "cases", "--rows", "200", "--seed", "5"]
    subprocess.run([*make, "--out", str(cases)], cwd=ROOT, check=True)
    overrides = [f"data.sources.0.path=synthetic:{split}:10000:5", "seed=5", f"output_dir={tmp_path / 'run'}"]
    config = ["--config", "configs/tiny_lora.yaml", *overrides]
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *config, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    assert accuracy(tiny_base, cases) <= 0.20
    assert low <= accuracy(tmp_path / "run" / "export" / "merged", cases) <= high
