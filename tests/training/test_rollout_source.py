"""The source of rollouts: how stale answers are, what a checkpoint holds of them, and what is freed before a step."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from fctune.base.distributed import World
from fctune.base.errors import ConfigError, DataError
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

    num_at_once: int | None = None

    def __init__(self, limit: int | None = None, name: str = "tasks"):
        self.asked: list[Request] = []
        self.lock = threading.Lock()  # of the list
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
            with self.lock:
                self.asked.append(request)
                is_over = self.limit is not None and len(self.asked) > self.limit
            if is_over:
                self.paused.set()
                assert self.released.wait(60)
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
        state = first.state_at(2)
        if is_ahead := config.grpo is not None and config.grpo.max_staleness > 0:
            assert paused.paused.wait(60)
            while len(list_kept(state := json.loads(json.dumps(first.state_at(2))))) < 2:
                time.sleep(0.01)
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
    logs = [
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("first", "second", "whole")
    ]
    again = [(one.case_id, one.sample) for one in resumed.asked]
    return {
        "staleness": staleness,
        "num_asked": len(tasks.asked),
        "rows": rows,
        "kept": list_kept(state),
        "again": again,
        "is_ahead": is_ahead,
        "trained": [identify(row) for row in (*logs[0], *logs[1])],
        "whole": [identify(row) for row in logs[2]],
        "digests": digests,
        "expected": expected,
        "refusal": refusal,
    }


def list_kept(state: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the answers of a state that are in no batch yet."""
    rows = [row for group in state["groups"] for row in group["rollouts"]]
    return [(row["case_id"], row["sample"]) for row in rows if row is not None]


def identify(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["case_id"], row["sample"], tuple(row["ids"]), row["reward"]


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


def take_steps_with_a_slow_dialogue(world: World, config: RunConfig, folder: Path) -> tuple[list[int], list[int]]:
    """Return the staleness of the steps that are taken while a dialogue runs, and the step and age of that dialogue."""
    tasks, slow = Tasks(), TaskOrder([f"case {number}" for number in range(9)], config.seed).draw((0,), [1])[0][0]
    play, released = tasks.play, threading.Event()

    def play_slowly(engine: PolicyEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        for rollout in play(engine, requests):
            if (rollout.case_id, rollout.sample) == (slow.case_id, 0):
                assert released.wait(60)
            yield rollout

    tasks.play = play_slowly  # type: ignore[method-assign]
    source, _ = open_source(config, world, tasks, folder / "log.jsonl", has_shares=False)
    with source:
        first = [int(source.take(step).metrics["staleness"]) for step in (1, 2)]
        timer = threading.Timer(0.3, released.set)
        timer.start()
        source.take(3)
        assert released.is_set()
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if (row["case_id"], row["sample"]) == (slow.case_id, 0)]
    return first, [row["step"], row["step"] - 1 - row["version"]]


def take_a_step_that_fails(world: World, config: RunConfig, folder: Path) -> str:
    tasks = Tasks()

    def fail(engine: PolicyEngine, requests: Sequence[Request]) -> Iterator[Rollout]:
        raise ConfigError("the shop is closed for today.")

    tasks.play = fail  # type: ignore[method-assign]
    source, _ = open_source(config, world, tasks, folder / "log.jsonl", has_shares=False)
    with source:
        try:
            source.take(1)
        except ConfigError as error:
            return str(error)
    return ""


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


@pytest.mark.parametrize("staleness", [0, 1])
def test_answers_that_a_checkpoint_holds_are_not_asked_again(
    staleness: int, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_server_config(make_model("llama"), tmp_path, staleness, {"odd": 0.25})
    found = run_ranks(run_steps, 1, config, tmp_path)[0]
    assert found["staleness"][0] == 0
    assert max(found["staleness"]) == staleness
    counts = Counter((row["batch"], row["case_id"], row["sample"]) for row in found["rows"])
    assert set(counts.values()) == {1}
    assert len(found["rows"]) == found["num_asked"] == NUM_STEPS * 6, "nothing is asked beyond the last step"
    assert found["is_ahead"] == (staleness > 0)
    assert len(found["kept"]) == 2 * staleness
    assert not {tuple(one) for one in found["kept"]} & {tuple(one) for one in found["again"]}
    assert sorted(found["trained"]) == sorted(found["whole"]), "all answers of an uninterrupted run, each once"
    if staleness == 0:
        assert found["digests"] == found["expected"], "and in the same steps"
    assert "cases: was tasks, is others, category_shares: was {'odd': 0.25}, is None" in found["refusal"]


def test_a_slow_dialogue_delays_no_step_before_it_would_be_too_old(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_server_config(make_model("llama"), tmp_path, 2)
    first, waited = run_ranks(take_steps_with_a_slow_dialogue, 1, config, tmp_path)[0]
    assert first == [0, 1], "of two steps, which did not wait"
    assert waited == [3, 2], "of the step that waited for it, and its age"


def test_the_error_of_a_thread_ends_the_step_that_waits(make_model: Callable[..., Path], tmp_path: Path) -> None:
    config = make_server_config(make_model("llama"), tmp_path, 1)
    assert "closed for today" in run_ranks(take_a_step_that_fails, 1, config, tmp_path)[0]
