"""Reinforcement with an agent's own program, as a user starts it: what the agent asked for is what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, run_kind_on_rank
from tests.tasks.environments.agent_files import AGENT, check_recorded_tokens, read_lines, write_agent_file

TASKS = [{"question": f"What is {number} and {number}?", "category": "sums"} for number in range(6)]
SMALL = (
    *("grpo.prompts_per_step=2", "grpo.group_size=2", "grpo.max_new_tokens=16", "grpo.mask_cut=false"),
    *("data.seq_len=1024", "optimizer.lr=1e-3", "checkpoint.every=1"),
)


def train(output: Path, file: Path, *overrides: str, num_ranks: int = 1) -> None:
    words = ["--config", CONFIGS["grpo"], f"output_dir={output / 'run'}", f"grpo.cases=agent:{file}", *SMALL]
    done = run_ranks(run_kind_on_rank, num_ranks, [*words, *overrides], "grpo")
    assert [one["code"] for one in done] == [0] * num_ranks, done


@pytest.mark.slow
def test_an_agents_run_in_process_is_resumed_exactly_and_trains_what_was_recorded(tmp_path: Path) -> None:
    """In batches of one answer: those of several depend on when agents ask, and rounding on the batch."""
    file = write_agent_file(tmp_path, TASKS, command=f"{AGENT} forgets")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder, steps in ((whole, 3), (halves, 1), (halves, 3)):
        train(folder, file, f"max_steps={steps}", "grpo.generation_batch_size=1")
    metrics = [read_lines(folder / "run" / "metrics.jsonl") for folder in (whole, halves)]
    assert [[one["loss"] for one in rows] for rows in metrics] == [[one["loss"] for one in metrics[0]]] * 2
    assert any(one["loss"] != 0 for one in metrics[0])
    assert all(one["engine_gap"] < 1e-4 for one in metrics[0])
    assert all(one["sequences_trained"] == 2 * one["answers_trained"] for one in metrics[0])
    logs = [[{**row, "judging_s": 0} for row in read_lines(f / "run" / "rollouts.jsonl")] for f in (whole, halves)]
    assert logs[0] == logs[1]
    adapters = [load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, halves)]
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
    check_recorded_tokens(whole / "run")
    check_recorded_tokens(halves / "run")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_agents_run_with_a_server_trains_what_was_recorded(num_ranks: int, tmp_path: Path) -> None:
    server = VllmStandIn(TINY_BASE, max_lora_rank=32)
    try:
        options = ("grpo.engine=server", f"grpo.server.url={server.url}", "max_steps=2")
        train(tmp_path, write_agent_file(tmp_path, TASKS), *options, num_ranks=num_ranks)
    finally:
        server.stop()
    assert not server.adapters
    check_recorded_tokens(tmp_path / "run")
    sent = [tuple(body["prompt"]) for path, body in server.requests if path == "/v1/completions"]
    recorded = [
        tuple(row["prompt_ids"])
        for row in read_lines(tmp_path / "run" / "agent_answers" / "rank00000.jsonl")
        if row["event"] == "answer"
    ]
    assert sorted(sent) == sorted(recorded)
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(one["engine_gap"] < 1e-4 for one in metrics if one["staleness"] == 0)


@pytest.mark.slow
def test_an_agents_run_on_two_ranks_shares_its_episodes(tmp_path: Path) -> None:
    train(tmp_path, write_agent_file(tmp_path, TASKS), "max_steps=1", num_ranks=2)
    files = sorted((tmp_path / "run" / "agent_answers").iterdir())
    assert [file.name for file in files] == ["rank00000.jsonl", "rank00001.jsonl"]
    check_recorded_tokens(tmp_path / "run")


def test_a_scorer_with_constant_scores_ends_the_run_with_that_reason(tmp_path: Path) -> None:
    file = write_agent_file(tmp_path, TASKS, habit="constant")
    words = ["--config", CONFIGS["grpo"], f"output_dir={tmp_path / 'run'}", f"grpo.cases=agent:{file}", *SMALL]
    words += ["grpo.max_refills=0", "grpo.max_flat_batches=1", "grpo.max_new_tokens=4"]
    (done,) = run_ranks(run_kind_on_rank, 1, words, "grpo")
    assert done["code"] == 2, done
    assert "all answers had equal rewards" in done["err"]
    assert "mean reward 0.5" in done["err"]
    assert "Traceback" not in done["err"]
