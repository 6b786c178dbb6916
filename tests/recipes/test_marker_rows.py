"""Markers that look untrained in the base: adapters on the linears alone fail, trained rows cure it.

python -m pytest -m slow tests/recipes/test_marker_rows.py
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.recipes.recipe_runs import tune_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LINEARS = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
OPEN, CLOSE = 1404, 1405  # <tool_call> and </tool_call>


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    """The tiny base with identical rows for both markers."""
    path = tmp_path / "base"
    shutil.copytree(tiny_base, path)
    weights = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][CLOSE] = weights[name][OPEN]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def accuracy(model: Path, cases: Path, out: Path) -> float:
    command = [sys.executable, "-m", "eval.tool_calls", "--model", str(model), "--cases", str(cases), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    summary = json.loads(out.with_suffix(".summary.json").read_text())
    rate: float = summary["scores"]["all"]["rates"]["accuracy"]["rate"]
    return rate


@pytest.mark.parametrize(("choice", "low", "high"), [("off", 0.0, 0.30), ("auto", 0.85, 1.0)])
def test_identical_markers_are_learned_only_with_their_rows(
    choice: str, low: float, high: float, tmp_path: Path, base: Path
) -> None:
    cases = tmp_path / "cases.jsonl"
    make = [sys.executable, "-m", "fctune.cli", "data", "synthetic", "cases", "--rows", "200", "--seed", "5"]
    subprocess.run([*make, "--out", str(cases)], cwd=ROOT, check=True)
    overrides = ["data.sources.0.path=synthetic:train:10000:5", "seed=5", f"output_dir={tmp_path / 'run'}"]
    overrides += [f"model.path={base}", f"adapter.modules={LINEARS}", f"adapter.train_tokens={choice}"]
    arguments = ["--config", "configs/tiny_lora.yaml", *overrides]
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *arguments, timeout_s=1800)
    assert done.returncode == 0, done.stderr
    measured = accuracy(tmp_path / "run" / "export" / "merged", cases, tmp_path / "answers.jsonl")
    print(f"adapter.train_tokens={choice}: accuracy {measured}")
    assert low <= measured <= high, (choice, measured)
