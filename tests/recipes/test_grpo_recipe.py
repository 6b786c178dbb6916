"""The recipe of reinforcement learning as a user starts it."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, Kind, check_single_reports, run_kind_on_rank

COUNTER = ROOT / "tests" / "engines" / "faulty_stdio_server.py"
# The base is hardly ever right, so that its verdicts alone would teach nothing.
REWARD = ("grpo.reward={random: 1.0, brevity: 0.5}",)
SMALL = (
    *("grpo.cases=synthetic:train:12:1", "grpo.prompts_per_step=2", "grpo.group_size=3", "grpo.max_new_tokens=12"),
    *("data.seq_len=1024", "grpo.mask_cut=false", "optimizer.lr=1e-3"),
)


def arguments(output: Path, *overrides: str) -> list[str]:
    return ["--config", CONFIGS["grpo"], f"output_dir={output / 'run'}", *SMALL, *REWARD, *overrides]


def read_lines(output: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_that_is_resumed_equals_one_that_was_not(updates: int, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    options = ("checkpoint.every=1", f"grpo.updates_per_batch={updates}")
    done = run_ranks(run_kind_on_rank, 1, arguments(whole, *options, "max_steps=4"), "grpo")[0]
    assert done["code"] == 0, done
    assert (whole / "run" / "export" / "adapter" / "adapter_model.safetensors").is_file()
    for steps in (3, 4):  # with two updates a batch, the first run ends in the middle of one
        done = run_ranks(run_kind_on_rank, 1, arguments(halves, *options, f"max_steps={steps}"), "grpo")[0]
        assert done["code"] == 0, done
    one, two = (read_lines(folder, "metrics.jsonl") for folder in (whole, halves))
    assert [m["loss"] for m in one] == [m["loss"] for m in two]
    assert [m["data_digest"] for m in one] == [m["data_digest"] for m in two]
    assert any(m["loss"] != 0 for m in one)
    adapters = [load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, halves)]
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
    logs = [read_lines(folder, "rollouts.jsonl") for folder in (whole, halves)]
    for rows in logs:
        for row in rows:
            del row["judging_s"]
    assert logs[0] == logs[1]
    assert max(Counter((row["batch"], row["case_id"], row["sample"]) for row in logs[1]).values()) == 1
    assert {row["version"] for row in logs[1]} == set(range(0, 4, updates))
    assert all(m["engine_gap"] < 1e-4 for m in one[::updates])


def test_two_processes_share_the_answers_and_the_update(tmp_path: Path) -> None:
    results = run_ranks(run_kind_on_rank, 2, arguments(tmp_path, "max_steps=1"), "grpo")
    assert [one["code"] for one in results] == [0, 0], results
    (metrics,) = read_lines(tmp_path, "metrics.jsonl")
    rows = read_lines(tmp_path, "rollouts.jsonl")
    assert metrics["answers"] == len(rows) >= 6
    assert metrics["judging_time_s"] > 0
    groups = {row["case_id"] for row in rows if row["advantage"] is not None}
    for case_id in groups:
        assert abs(sum(row["advantage"] for row in rows if row["case_id"] == case_id)) < 1e-6
    for row in rows:  # the given parts alone: no default is added to them
        assert row["reward"] == row["parts"]["random"] + 0.5 * row["parts"]["brevity"]
    assert metrics["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))


@pytest.mark.thorough
def test_two_processes_keep_the_shares_of_categories_and_resume_exactly(tmp_path: Path) -> None:
    """Among answers of 4 tokens, many groups have equal rewards, so that cases of both categories are replaced."""
    shares = ("grpo.category_shares={no_call: 0.25}", "grpo.prompts_per_step=4", "grpo.group_size=4")
    options = (*shares, "grpo.max_new_tokens=4", "grpo.max_refills=9", "epochs=2", "checkpoint.every=1")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder, steps in ((whole, 4), (halves, 2), (halves, 4)):
        done = run_ranks(run_kind_on_rank, 2, arguments(folder, *options, f"max_steps={steps}"), "grpo")
        assert [one["code"] for one in done] == [0, 0], done
    metrics, rows = read_lines(whole, "metrics.jsonl"), read_lines(whole, "rollouts.jsonl")
    assert [(one["groups/call"], one["groups/no_call"]) for one in metrics] == [(3, 1)] * 4
    assert sum(one["groups_dropped"] for one in metrics) > 0
    answers = Counter((row["batch"], row["case_id"], row["sample"]) for row in rows)
    assert set(answers.values()) == {1}, "no rank answers what another one does"
    for stop in range(1, 5):  # at any time, the cases of a category have been asked equally often, or once more
        rounds: dict[str, Counter[str]] = {"call": Counter(), "no_call": Counter()}
        for row in rows:
            if row["batch"] <= stop and row["sample"] % 4 == 0:
                rounds[row["category"]][row["case_id"]] += 1
        for num_cases, counts in zip((9, 3), rounds.values(), strict=True):
            times = [*counts.values(), *[0] * (num_cases - len(counts))]
            assert max(times) - min(times) <= 1, rounds
    adapters = [load_file(f / "run" / "export" / "adapter" / "adapter_model.safetensors") for f in (whole, halves)]
    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
    again = read_lines(halves, "rollouts.jsonl")
    for row in (*rows, *again):
        del row["judging_s"]
    assert rows == again


@pytest.mark.slow
def test_a_run_with_an_mcp_server_is_replayed_without_it(tmp_path: Path) -> None:
    task = {"question": "Add 2.", "calls": [{"tool": "add", "arguments": {"by": 2}}]}
    file, command = tmp_path / "counter.yaml", f"{shlex.quote(sys.executable)} -S {shlex.quote(str(COUNTER))}"
    reports = []
    for name, server in (("live", f"stdio: {command}"), ("replayed", "stdio: no-such-program")):
        file.write_text(json.dumps({"server": server, "test_share": 0.0, "tasks": [task, {**task, "id": "again"}]}))
        replay = [f"grpo.dialogue.replay={tmp_path / 'live' / 'run' / 'mcp_calls'}"] if name == "replayed" else []
        options = (
            "grpo.max_new_tokens=40",
            f"grpo.cases=mcp:{file}",
            "grpo.reward={random: 1.0}",
            "grpo.dialogue.call_timeout_s=60",
            *replay,
        )
        done = run_ranks(run_kind_on_rank, 2, arguments(tmp_path / name, *options, "max_steps=2"), "grpo")
        assert [one["code"] for one in done] == [0, 0], done
        metrics, rows = (read_lines(tmp_path / name, one) for one in ("metrics.jsonl", "rollouts.jsonl"))
        reports.append(([one["loss"] for one in metrics], [{**one, "judging_s": 0} for one in rows]))
    assert reports[0] == reports[1]
    assert any(loss != 0 for loss in reports[0][0])
    recorded = [line for file in (tmp_path / "live").rglob("rank*.jsonl") for line in file.read_text().splitlines()]
    assert len(recorded) == 2 + len(reports[0][1]), "a line of tools for each rank, and one for each answer"


def test_bad_input_is_named_in_one_sentence(tmp_path: Path) -> None:
    wrong = [
        ("grpo.reward={strikt: 1.0}", "grpo.reward.strikt: no such part of a reward; did you mean strict?"),
        ("grpo.group_size=1", "grpo.group_size=1: expected 2 or more"),
        ("grpo.cases=no/cases.jsonl", "grpo.cases=no/cases.jsonl: no such file"),
        ("grpo.category_shares={no_cal: 0.5}", "grpo.category_shares.no_cal: no case has this category; did you mean"),
        ("data.seq_len=128", "cases leave no room for an answer"),
        ("adapter.dropout=0.1", "adapter.dropout=0.1: answers are generated without dropout"),
        ("~adapter", "grpo: trains adapters, but adapter is missing"),
        ("data.sources=[{path: synthetic:train:9}]", "data.sources: a run with grpo learns from its own answers"),
    ]
    # Cases of a benchmark, and without answers.
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": [{"role": "user", "content": "Call f."}], "tools": [tool]}
    for name, extra, words in (
        ("bfcl", {"id": "simple_python_1", "expected_calls": []}, "belongs to a benchmark"),
        ("unanswered", {"id": "one"}, "no expected_calls, and the last message is not the assistant's answer"),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(row | extra) + "\n")
        wrong.append((f"grpo.cases={path}", words))
    cases: list[tuple[list[str], str, Kind]] = [(arguments(tmp_path, one), words, "grpo") for one, words in wrong]
    kinds: tuple[Kind, ...] = ("lora", "dpo")
    for kind in kinds:
        cases.append((arguments(tmp_path), "and this one is with grpo. Run recipes/lora_grpo_distributed", kind))
    check_single_reports(cases, world_size=1)
