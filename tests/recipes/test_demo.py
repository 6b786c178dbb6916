"""The demo's accuracy comes from its data: training on shuffled calls does not reach it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.recipes.recipe_runs import tune_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def accuracy(model: Path, cases: Path) -> float:
    rate: float = evaluate(model, cases)["scores"]["all"]["rates"]["accuracy"]["rate"]
    return rate


def evaluate(model: Path, cases: Path, *options: str) -> dict[str, Any]:
    """Return the summary of an evaluation."""
    out = cases.with_name(f"{model.parent.name}-{model.name}{'-'.join(options)}.jsonl")
    command = [sys.executable, "-m", "eval.tool_calls", "--model", str(model), "--cases", str(cases), "--out", str(out)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)
    summary: dict[str, Any] = json.loads(out.with_suffix(".summary.json").read_text())
    return summary


def make_cases(path: Path) -> Path:
    make = [sys.executable, "-m", "fctune.cli", "data", "synthetic", "cases", "--rows", "200", "--seed", "5"]
    subprocess.run([*make, "--out", str(path)], cwd=ROOT, check=True)
    return path


@pytest.mark.parametrize(
    ("split", "low", "high"),
    [("train", 0.85, 1.0), ("shuffled", 0.0, 0.30)],
    ids=["matching calls", "shuffled calls"],
)
def test_lora_learns_calls_only_from_matching_questions(
    split: str, low: float, high: float, tmp_path: Path, tiny_base: Path
) -> None:
    cases = make_cases(tmp_path / "cases.jsonl")
    overrides = [f"data.sources.0.path=synthetic:{split}:10000:5", "seed=5", f"output_dir={tmp_path / 'run'}"]
    config = ["--config", "configs/tiny_lora.yaml", *overrides]
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *config, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    assert accuracy(tiny_base, cases) <= 0.20
    assert low <= accuracy(tmp_path / "run" / "export" / "merged", cases) <= high


def test_a_model_trained_on_mixed_rows_reasons_or_not_as_asked_and_calls_either_way(tmp_path: Path) -> None:
    cases = make_cases(tmp_path / "cases.jsonl")
    template = "model.chat_template=fctune/assets/tiny_reasoning_template.jinja"
    overrides = ["data.sources.0.path=synthetic:reasoned:10000:5", "seed=5", f"output_dir={tmp_path / 'run'}", template]
    config = ["--config", "configs/tiny_lora.yaml", *overrides]
    done = tune_run("--nproc_per_node", "2", "recipes/lora_fc_distributed", *config, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    export = tmp_path / "run" / "export" / "merged"
    found = {value: evaluate(export, cases, f"--template-args=enable_thinking={value}") for value in ("true", "false")}
    for summary in found.values():
        assert summary["scores"]["all"]["rates"]["accuracy"]["rate"] >= 0.85
        assert summary["num_cut"] <= 2  # it stops
    reasoning = found["true"]["reasoning"]["all"]
    assert reasoning["reasoned"]["rate"] > 0.95
    assert reasoning["unclosed"]["rate"] < 0.05
    assert reasoning["mean_tokens"] > 3
    assert not found["false"]["reasoning"] or found["false"]["reasoning"]["all"]["reasoned"]["rate"] < 0.05
