"""Reinforcement with a real vLLM from start to end, while server and trainer are killed once each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import policy_server
from tests.conftest import TINY_BASE
from tests.ranks import find_port

pytestmark = [pytest.mark.serving, pytest.mark.timeout(1800)]


def test_a_run_outlives_its_server_and_itself_and_counts_each_answer_once(vllm_python: str, tmp_path: Path) -> None:
    del vllm_python  # the benchmark reads the same variable
    words = ["--model", str(TINY_BASE), "--cases", "synthetic:varied:40:1", "--out", str(tmp_path), "--steps", "6"]
    words += ["--outage", "3", "--port", str(find_port())]
    # The base is hardly ever right, so that its verdicts alone would teach nothing.
    words += ["grpo.reward={random: 1.0, brevity: 0.5}", "grpo.mask_cut=false", "optimizer.lr=1e-3"]
    words += ["grpo.prompts_per_step=4", "grpo.group_size=4", "grpo.max_new_tokens=24"]
    assert policy_server.main(words) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["are_steps_complete"]
    assert result["num_steps"] == 6
    assert (result["num_counted_twice"], result["num_lost"], result["num_failed"]) == (0, 0, 0)
    assert len(result["server_ready_s"]) == 2, "it was started again"
    assert "is unavailable" in result["said"][0]
    assert "is back after" in result["said"][1]
    steps = result["steps"]
    assert max(one["staleness"] for one in steps) == 1
    assert result["versions"][0] == 0
    assert result["versions"][-1] >= 4
    # Answers of the policy in training: the server's probabilities are the trainer's. Later ones are an update older.
    assert steps[0]["engine_gap"] < 1e-3
    assert all(one["ratio_mean"] == pytest.approx(1, abs=0.3) for one in steps)
