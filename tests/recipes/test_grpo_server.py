"""Reinforcement with a server's answers, and in environments, as a user starts it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fctune.base.distributed import World
from fctune.checkpoint import fault_hooks
from tests.conftest import TINY_BASE
from tests.engines.vllm_stand_in import VllmStandIn
from tests.ranks import run_ranks
from tests.recipes.recipe_runs import CONFIGS, run_kind_on_rank

SMALL = (
    *("grpo.cases=synthetic:train:12:1", "grpo.prompts_per_step=2", "grpo.group_size=3", "grpo.max_new_tokens=8"),
    *("data.seq_len=1024", "grpo.mask_cut=false", "optimizer.lr=1e-3"),
)
# The base is hardly ever right, so that its verdicts alone would teach nothing.
REWARD = "grpo.reward={random: 1.0, brevity: 0.5}"


@pytest.fixture
def server() -> Iterator[VllmStandIn]:
    started = VllmStandIn(TINY_BASE, max_lora_rank=32)
    yield started
    started.stop()


def list_words(output: Path, server: VllmStandIn, *overrides: str) -> list[str]:
    words = ["--config", CONFIGS["grpo"], f"output_dir={output / 'run'}", *SMALL]
    return [*words, "grpo.engine=server", f"grpo.server.url={server.url}", REWARD, *overrides]


def train(output: Path, server: VllmStandIn, *overrides: str, num_ranks: int = 1) -> dict[str, Any]:
    words = list_words(output, server, *overrides)
    done: dict[str, Any] = run_ranks(run_kind_on_rank, num_ranks, words, "grpo")[0]
    return done


def read_lines(output: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "run" / name).read_text().splitlines()]


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_server_answers_with_each_update_and_its_probabilities_are_the_trainers(
    tmp_path: Path, server: VllmStandIn, staleness: int
) -> None:
    done = train(tmp_path, server, f"grpo.max_staleness={staleness}", "max_steps=3")
    assert done["code"] == 0, done
    metrics, rows = read_lines(tmp_path, "metrics.jsonl"), read_lines(tmp_path, "rollouts.jsonl")
    assert not [row["error"] for row in rows if row["error"]]
    for one in metrics:
        versions = {row["version"] for row in rows if row["step"] == one["step"]}
        assert min(versions) >= one["step"] - 1 - staleness, "at most so many updates old"
        assert one["staleness"] == one["step"] - 1 - min(versions)
    assert max(one["staleness"] for one in metrics) == staleness
    assert all(one["engine_gap"] < 1e-4 for one in metrics if one["staleness"] == 0)
    assert any(one["loss"] != 0 for one in metrics)
    loads = [body["lora_name"] for path, body in server.requests if path == "/v1/load_lora_adapter"]
    assert len(loads) == len(set(loads)) >= 3
    assert not server.adapters, "the run takes its adapters with it"


@pytest.mark.slow
def test_a_server_that_dies_during_a_run_is_waited_for(tmp_path: Path, server: VllmStandIn) -> None:
    server.delay_s = 0.05

    def restart_after_two_versions() -> None:
        while sum(path == "/v1/load_lora_adapter" for path, _ in server.requests) < 2:
            time.sleep(0.02)
        server.stop()
        time.sleep(1.0)
        server.start()

    threading.Thread(target=restart_after_two_versions, daemon=True).start()
    done = train(tmp_path, server, "max_steps=4")
    assert done["code"] == 0, done
    rows = read_lines(tmp_path, "rollouts.jsonl")
    assert len(read_lines(tmp_path, "metrics.jsonl")) == 4
    assert not [row["error"] for row in rows if row["error"]], "nothing is lost"


@pytest.mark.parametrize("num_loads", [pytest.param(1, id="before the first step"), pytest.param(2, id="later")])
@pytest.mark.slow
def test_a_run_that_waits_for_a_lost_server_stops_on_request_and_resumes(
    tmp_path: Path, server: VllmStandIn, num_loads: int
) -> None:
    server.delay_s = 0.05

    def stop_both() -> None:
        while sum(path == "/v1/load_lora_adapter" for path, _ in server.requests) < num_loads:
            time.sleep(0.02)
        server.stop()
        (tmp_path / "run" / "stop").touch()

    threading.Thread(target=stop_both, daemon=True).start()
    done = train(tmp_path, server, "max_steps=4")
    assert done["code"] == 75, done
    server.start()
    (tmp_path / "run" / "stop").unlink(missing_ok=True)
    assert train(tmp_path, server, "max_steps=4")["code"] == 0
    assert [one["step"] for one in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4]
    rows = read_lines(tmp_path, "rollouts.jsonl")
    assert len({(row["batch"], row["case_id"], row["sample"]) for row in rows}) == len(rows), "each answer counts once"


def die_in_the_second_update(world: World, argv: list[str]) -> None:
    def die(phase: str, name: str) -> None:
        if (phase, name) == ("update", "2"):
            os._exit(9)

    fault_hooks.listen(die)
    run_kind_on_rank(world, argv, "grpo")


ASLEEP = ("grpo.max_staleness=0", "grpo.server.sleeps_while_training=true")


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_server_on_the_trainers_gpu_is_asleep_during_each_step_and_awake_when_the_run_ends_or_resumes(
    tmp_path: Path, server: VllmStandIn, num_ranks: int
) -> None:
    options = (*ASLEEP, "max_steps=3", "checkpoint.every=1")
    with pytest.raises(RuntimeError, match=r"died \(9\)"):
        run_ranks(die_in_the_second_update, num_ranks, list_words(tmp_path, server, *options))
    assert not server.is_awake.is_set(), "a killed process wakes nothing up"
    assert train(tmp_path, server, *options, num_ranks=num_ranks)["code"] == 0
    assert server.is_awake.is_set()
    assert not server.adapters
    assert [one["step"] for one in read_lines(tmp_path, "metrics.jsonl")] == [1, 2, 3]
    assert not [row["error"] for row in read_lines(tmp_path, "rollouts.jsonl") if row["error"]]
    found = [path for path, _ in server.requests if path != "/tokenize"]
    before, *batches = " ".join(found).split("/v1/load_lora_adapter")
    assert len(batches) == 4, "two of the killed process"
    start = "/wake_up /sleep?level=1 /wake_up "
    assert before == start
    answers = r"( /v1/completions)+ /sleep\?level=1 /wake_up"
    unload = "( /v1/unload_lora_adapter)?"
    # The version before is unloaded once the next one is there, and those of the killed process when the run resumes.
    orders = [answers, f"{unload}{answers}( /v1/unload_lora_adapter)+ /sleep\\?level=1 /wake_up", answers]
    for order, batch in zip([*orders, f"{unload}{answers}{unload}"], batches, strict=True):
        assert re.fullmatch(order, batch.rstrip()), batch


@pytest.mark.thorough
def test_a_run_that_fails_leaves_its_server_awake(tmp_path: Path, server: VllmStandIn) -> None:
    server.choose_lie = lambda body: "NaN"
    assert train(tmp_path, server, *ASLEEP, "max_steps=1")["code"] == 2
    assert any(path == "/sleep?level=1" for path, _ in server.requests)
    assert server.is_awake.is_set()


def read_end(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "run" / "exit.json").read_text())
    return found


@pytest.mark.slow
def test_a_server_that_only_lies_ends_the_run_with_its_reason(tmp_path: Path, server: VllmStandIn) -> None:
    server.choose_lie = lambda body: "NaN"
    done = train(tmp_path, server, "max_steps=2")
    assert done["code"] == 2, done
    assert "Traceback" not in done["err"]
    end = read_end(tmp_path)
    assert end["code"] == 2
    assert "none of 6 answers arrived" in end["reason"]
    assert "a log-probability is nan, which is not finite" in end["reason"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_lines(tmp_path, "metrics.jsonl")


@pytest.mark.slow
def test_some_lies_are_counted_by_kind_and_a_run_that_learned_nothing_is_not_completed(
    tmp_path: Path, server: VllmStandIn
) -> None:
    asked = Counter[int]()

    def lie(body: dict[str, Any]) -> str | None:
        asked[body["seed"]] += 1
        if len(asked) == 2:  # the second request never gets a usable answer, the third one asks twice
            return "too long"
        return "beyond the vocabulary" if len(asked) == 3 and asked[body["seed"]] == 1 else None

    server.choose_lie = lie
    # Every answer has as many tokens, so all advantages are 0, and yet the groups are trained.
    flat = ("grpo.reward={names: 0.0, brevity: 1.0}", "grpo.drop_flat_groups=false", "max_steps=1")
    done = train(tmp_path, server, *flat, "grpo.max_new_tokens=1", "grpo.server.concurrency=1")
    (metrics,), rows = read_lines(tmp_path, "metrics.jsonl"), read_lines(tmp_path, "rollouts.jsonl")
    assert metrics["answers_failed"] == 1
    assert metrics["answers_rejected"] == metrics["answers_rejected/too_long"] + 1
    assert metrics["answers_rejected/unknown_token"] == 1
    failed = [row for row in rows if row["error"]]
    assert [(row["advantage"], row["ids"]) for row in failed] == [(None, [])]
    end = read_end(tmp_path)
    assert (done["code"], end["code"]) == (1, 1), "docs: 1, failed after training began"
    assert "nothing was learned in 1 step: the gradient was 0 in 1" in end["reason"]


def test_a_refused_adapter_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    server = VllmStandIn(TINY_BASE, max_lora_rank=8)
    try:
        done = train(tmp_path, server, "max_steps=1")
    finally:
        server.stop()
    assert done["code"] == 2, done
    assert "the adapter has rank 32, over the server's limit" in done["err"]
    assert "Traceback" not in done["err"]


def test_a_run_in_environments_asks_their_tasks_and_says_if_none_is_ever_solved(tmp_path: Path) -> None:
    words = ["--config", CONFIGS["grpo"], f"output_dir={tmp_path / 'run'}", *SMALL, "data.seq_len=2048"]
    words += ["grpo.cases=environment:shop:4", "grpo.max_refills=0"]
    done = run_ranks(run_kind_on_rank, 1, [*words, "grpo.max_flat_batches=1", "max_steps=1"], "grpo")[0]
    assert done["code"] == 2, done
    assert "equal" in done["err"], done["err"]
    assert "Traceback" not in done["err"]
