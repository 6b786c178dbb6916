"""Agents in front of a real vLLM: what the proxy records is what the trainer's own model says of the same tokens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from fctune.config.yaml_text import dump_yaml
from tests.conftest import ROOT, TINY_BASE
from tests.engines.continuations import compute_logprobs
from tests.ranks import find_port, run_ranks
from tests.recipes.recipe_runs import CONFIGS, run_kind_on_rank
from tests.serving.servers import serve_vllm
from tests.tasks.environments.agent_files import AGENT, check_recorded_tokens, read_lines, write_agent_file

pytestmark = pytest.mark.serving

HERE = Path(__file__).parent
RANK = 8
SMALL = (
    *("grpo.prompts_per_step=2", "grpo.group_size=2", "grpo.max_new_tokens=24", "grpo.mask_cut=false"),
    *("data.seq_len=1024", "optimizer.lr=1e-3", f"adapter.rank={RANK}", "grpo.max_staleness=0", "max_steps=2"),
)


@pytest.fixture(scope="module")
def address(vllm_python: str) -> Iterator[str]:
    with serve_vllm(TINY_BASE, vllm_python, find_port(), adapters=RANK) as address:
        yield address


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_BASE).eval()


def count_requests(address: str) -> int:
    """Return the requests that vLLM has finished."""
    found = re.findall(r"^vllm:request_success_total\{.*\} ([0-9.]+)$", httpx.get(f"{address}/metrics").text, re.M)
    return int(sum(map(float, found)))


def train(output: Path, address: str, cases: str, *overrides: str) -> None:
    words = ["--config", CONFIGS["grpo"], f"output_dir={output / 'run'}", f"grpo.cases={cases}", *SMALL]
    words += ["grpo.engine=server", f"grpo.server.url={address}", *overrides]
    (done,) = run_ranks(run_kind_on_rank, 1, words, "grpo")
    assert done["code"] == 0, done


def check_first_policy(run_dir: Path, base: Any) -> None:
    """Check the log-probabilities of the base's answers, and that later ones are those of the policy in training."""
    gaps = []
    for row in read_lines(run_dir / "rollouts.jsonl"):
        assert row["error"] is None, row["error"]
    for row in [row for file in (run_dir / "agent_answers").glob("*") for row in read_lines(file)]:
        if row["event"] == "answer" and row["version"] == 0:
            own = compute_logprobs(base, row["prompt_ids"], row["ids"])
            gaps.append(max(abs(a - b) for a, b in zip(own.tolist(), row["logprobs"], strict=True)))
    assert gaps
    assert max(gaps) < 1e-3
    check_policy(run_dir)


def check_policy(run_dir: Path) -> None:
    """Check that every answer has the probabilities of the trainer's model, in which it was not older than that."""
    metrics = read_lines(run_dir / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert any(one["grad_norm"] > 0 for one in metrics)
    assert all(one["staleness"] == 0 and one["engine_gap"] < 1e-3 for one in metrics)
    assert {row["version"] for row in read_lines(run_dir / "rollouts.jsonl")} == {0, 1}


def test_the_proxy_records_what_the_model_says_of_the_tokens_of_a_streaming_and_retrying_client(
    vllm_python: str, address: str, base: Any, tmp_path: Path
) -> None:
    record, before = tmp_path / "answers.jsonl", count_requests(address)
    command = [sys.executable, "-u", "-m", "fctune.cli", "proxy", str(TINY_BASE), "--server", address]
    command += ["--served-model", "tiny_base", "--port", "0", "--out", str(record), "--max-new-tokens", "400"]
    command += ["--context", "2048"]
    proxy = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        (root,) = re.findall(r"ready: (http://\S+)/episode/ID/v1", proxy.stdout.readline())
        agents = []
        for name in ("one", "two"):
            own = {"OPENAI_BASE_URL": f"{root}/episode/{name}/v1", "OPENAI_API_KEY": "x", "OPENAI_MODEL": "policy"}
            agent = subprocess.Popen(
                [vllm_python, str(HERE / "openai_agent.py")],
                env=os.environ | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert agent.stdin is not None
            agent.stdin.write(json.dumps({"question": f"How is the weather in {name}?"}))
            agent.stdin.close()
            agents.append((name, agent))
        conversations = {}
        for name, agent in agents:
            assert agent.stdout is not None
            conversations[name] = json.loads(agent.stdout.read())
            assert agent.wait(60) == 0
    finally:
        proxy.send_signal(signal.SIGINT)
        proxy.wait(60)
    answers = defaultdict(list)
    events = read_lines(record)
    for row in events:
        if row["event"] == "answer":
            answers[row["episode"]].append(row)
    assert sorted(answers) == ["one", "two"]
    assert any(row["event"] == "lost" for row in events), "the client gave up waiting"
    assert count_requests(address) - before == 6, "and its second request was not asked again"
    for name, rows in answers.items():
        assert [row["continues"] for row in rows] == [None, 1, 2] or any(row["is_cut"] for row in rows[:2])
        said = [message for message in conversations[name] if message["role"] == "assistant"]
        assert [(row["message"]["content"] or "").strip() for row in rows] == [
            (message["content"] or "").strip() for message in said
        ]
        for row in rows:
            own = compute_logprobs(base, row["prompt_ids"], row["ids"])
            assert max(abs(a - b) for a, b in zip(own.tolist(), row["logprobs"], strict=True)) < 1e-3


@pytest.mark.parametrize("habit", ["converses", "parallel"])
def test_an_agents_run_trains_the_tokens_that_vllm_sampled(habit: str, address: str, base: Any, tmp_path: Path) -> None:
    tasks = [{"question": f"What is {number} and {number}?", "turns": 3} for number in range(6)]
    file = write_agent_file(tmp_path, tasks, command=f"{AGENT} {habit}")
    train(tmp_path, address, f"agent:{file}")
    check_recorded_tokens(tmp_path / "run")
    check_first_policy(tmp_path / "run", base)
    listed = httpx.get(f"{address}/v1/models").json()["data"]
    assert [row["parent"] for row in listed] == [None], "the run takes its adapters with it"


def test_a_verifiers_environment_is_played_with_vllm(address: str, tmp_path: Path) -> None:
    python = os.environ.get("FCTUNE_VERIFIERS_PYTHON", "")
    if not python:
        pytest.skip("FCTUNE_VERIFIERS_PYTHON names no Python with verifiers")
    (tmp_path / "counting_words.py").write_text(
        (ROOT / "tests" / "tasks" / "environments" / "counting_words.py").read_text()
    )
    file = tmp_path / "count.yaml"
    file.write_text(dump_yaml({"python": python, "env": {"taskset": {"id": "counting-words"}}, "test_share": 0.0}))
    patience = ("grpo.dialogue={call_timeout_s: 300, episode_timeout_s: 600, max_turns: 4}",)
    # The base never counts, so that the package's reward alone would teach nothing.
    train(tmp_path, address, f"verifiers:{file}", "grpo.reward={score: 1.0, random: 1.0}", *patience)
    rows = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert not [row["error"] for row in rows if row["error"]]
    assert all(0 <= row["parts"]["score"] <= 1 for row in rows)
    check_policy(tmp_path / "run")
