"""The source of rollouts: how stale answers are, what a checkpoint holds of them, and what is freed before a step."""

from __future__ import annotations

import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from fctune.base.distributed import World
from fctune.base.errors import DataError
from fctune.config.schema import RunConfig
from fctune.data.conversation import Conversation
from fctune.engines.engine import Answer, AnswerTokens, PolicyEngine, Prompt
from fctune.engines.local import LocalEngine
from fctune.models.attention import make_bounds
from fctune.tasks.rollouts import Request, Rollout
from fctune.tasks.sampling.collection import TaskOrder
from fctune.training.rollout_source import RolloutSource
from tests.ranks import run_ranks
from tests.training.training_runs import make_config

NUM_STEPS = 4


class Engine:
    """Engine whose answers say the version that was published when they were asked."""

    def __init__(self) -> None:
        self.version = 0

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        version = self.version
        for index, prompt in enumerate(prompts):
            assert prompt.seed is not None
            tokens = AnswerTokens((1, 5), (3 + prompt.seed % 50, 2), (-1.0, -0.5))
            yield Answer(index, tokens=tokens, version=version)

    def publish(self, policy: Any, version: int) -> None:
        self.version = version

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Tasks:
    """Tasks whose answers are rewarded by their sample; stops after ``limit`` answers until released."""

    def __init__(self, limit: int | None = None, name: str = "tasks"):
        self.asked: list[Request] = []
        self.name, self.limit = name, limit
        self.paused, self.released = threading.Event(), threading.Event()

    @property
    def ids(self) -> Sequence[str]:
        return [f"case {number}" for number in range(9)]

    def digest(self) -> str:
        return self.name

    def play(self, engine: PolicyEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        prompts = [Prompt(Conversation(()), 8, ids=(1, 5), seed=one.seed) for one in requests]
        for request, one in zip(requests, engine.answer(prompts), strict=True):
            assert one.tokens is not None
            if len(self.asked) == self.limit:
                self.paused.set()
                assert self.released.wait(60)
            self.asked.append(request)
            reward = float(request.sample)
            ids, logprobs = one.tokens.ids, one.tokens.logprobs
            yield Rollout(
                *(request.case_id, request.sample, "all", one.version, (1, 5), ids, (True,) * len(ids), logprobs),
                reward=reward,
                parts={"strict": reward},
            )


def open_source(
    config: RunConfig, world: World, tasks: Tasks, log: Path, has_shares: bool = True
) -> tuple[RolloutSource, Engine]:
    assert config.grpo is not None
    engine = Engine()

    def bounds(lengths: Sequence[Sequence[int]]) -> Any:
        return make_bounds(lengths, "sdpa")  # type: ignore[arg-type]

    def publish(version: int) -> None:
        engine.publish(None, version)

    categories = {one: "odd" if int(one[-1]) % 2 else "even" for one in tasks.ids}
    order = TaskOrder(tasks.ids, config.seed, categories, config.grpo.category_shares if has_shares else None)
    source = RolloutSource(
        *(config, tasks, order, engine, world, bounds, publish, log, NUM_STEPS),
        is_shared=True,
    )
    return source, engine


def run_steps(world: World, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Take four steps; then stop in the middle of the next batch, and continue from the state of that moment."""
    tasks = Tasks()
    source, _ = open_source(config, world, tasks, folder / "log.jsonl")
    with source:
        staleness = [source.take(step).metrics["staleness"] for step in (1, 2, 3, 4)]
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]

    paused = Tasks(limit=2 * 6 + 2)
    first, _ = open_source(config, world, paused, folder / "first.jsonl")
    with first:
        digests = [first.take(step).step.data_digest for step in (1, 2)]
        assert paused.paused.wait(60)
        state = json.loads(json.dumps(first.state_at(2)))
        paused.released.set()
    resumed = Tasks()
    second, _ = open_source(config, world, resumed, folder / "second.jsonl")
    second.resume_at(state)
    with second:
        digests += [second.take(step).step.data_digest for step in (3, 4)]
    other, _ = open_source(config, world, Tasks(name="others"), folder / "other.jsonl", has_shares=False)
    try:
        other.resume_at(state)
        refusal = ""
    except DataError as error:
        refusal = str(error)
    with other:
        pass
    whole, _ = open_source(config, world, Tasks(), folder / "whole.jsonl")
    with whole:
        expected = [whole.take(step).step.data_digest for step in (1, 2, 3, 4)]
    kept = [(row["case_id"], row["sample"]) for row in state["ahead"]["3"]]
    again = [(one.case_id, one.sample) for one in resumed.asked]
    return {
        "staleness": staleness,
        "num_asked": len(tasks.asked),
        "rows": rows,
        "kept": kept,
        "again": again[: 6 - len(kept)],
        "digests": digests,
        "expected": expected,
        "refusal": refusal,
    }


def run_four_steps(world: World, config: RunConfig, folder: Path) -> list[float]:
    source, _ = open_source(config, world, Tasks(), folder / "log.jsonl")
    with source:
        return [source.take(step).metrics["staleness"] for step in (1, 2, 3, 4)]


def take_steps_in_process(world: World, config: RunConfig, folder: Path) -> list[bool]:
    """Return for each step whether the copy of the policy that answered is still in memory when it is trained."""
    path, copies, tasks = Path(config.model.path), list[weakref.ref[Any]](), Tasks()
    engine = LocalEngine(path, device=world.device, loads_model=False, keeps_tokens=True)

    def publish(version: int) -> None:
        policy = AutoModelForCausalLM.from_pretrained(path)
        copies.append(weakref.ref(policy))
        engine.publish(policy, version)

    def bounds(lengths: Sequence[Sequence[int]]) -> Any:
        return make_bounds(lengths, "sdpa")  # type: ignore[arg-type]

    order = TaskOrder(tasks.ids, config.seed)
    log = folder / "log.jsonl"
    with RolloutSource(config, tasks, order, engine, world, bounds, publish, log, NUM_STEPS) as source:
        kept = []
        for step in (1, 2):
            assert source.take(step).inputs
            assert len(copies) == step
            kept.append(copies[-1]() is not None)
        return kept


def make_server_config(model: Path, folder: Path, staleness: int, shares: dict[str, float] | None = None) -> RunConfig:
    grpo = {"cases": "synthetic:train:9", "prompts_per_step": 3, "group_size": 2, "max_new_tokens": 8}
    return make_config(
        *(model, folder),
        adapter={"rank": 4, "alpha": 8, "dropout": 0.0, "modules": ["q_proj"]},
        grpo=grpo | {"max_staleness": staleness, "category_shares": shares},
        data={"sources": [], "packed": False, "seq_len": 64},
    )


def test_the_copy_of_the_policy_that_answered_is_freed_before_a_step(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_server_config(make_model("llama"), tmp_path, 0)
    assert run_ranks(take_steps_in_process, 1, config, tmp_path) == [[False, False]]


@pytest.mark.parametrize("staleness", [0, 2])
def test_answers_are_at_most_as_stale_as_allowed(
    staleness: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = run_ranks(run_four_steps, 1, make_server_config(make_model("llama"), tmp_path, staleness), tmp_path)[0]
    assert found[0] == 0
    assert max(found) <= staleness


def test_answers_that_a_checkpoint_holds_are_not_asked_again(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = make_server_config(make_model("llama"), tmp_path, 1, {"odd": 0.25})
    found = run_ranks(run_steps, 1, config, tmp_path)[0]
    assert found["staleness"] == [0, 1, 1, 1]
    counts = Counter((row["batch"], row["case_id"], row["sample"]) for row in found["rows"])
    assert set(counts.values()) == {1}
    assert len(found["rows"]) == found["num_asked"] == NUM_STEPS * 6, "nothing is asked beyond the last step"
    assert len(found["kept"]) == 2
    assert not {tuple(one) for one in found["kept"]} & {tuple(one) for one in found["again"]}
    assert found["digests"] == found["expected"]
    assert "cases: was tasks, is others, category_shares: was {'odd': 0.25}, is None" in found["refusal"]
