"""Environments of the verifiers package: its rollout, tools and reward, with the policy's answers; and faults of it.

The tests with the package need a Python that has it, which FCTUNE_VERIFIERS_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError
from fctune.calls.formats.registry import detect_format
from fctune.config.sections.rollouts import DialogueConfig
from fctune.config.yaml_text import dump_yaml
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call
from fctune.tasks.environments.verifiers.tasks import VerifiersTasks
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.rollouts import Request, Rollout, RolloutSettings
from fctune.tasks.sampling.task_sets import open_dialogue_tasks
from tests.conftest import TINY_BASE
from tests.engines.fault_server import Handler, serve
from tests.tasks.environments import faulty_worker
from tests.tasks.environments.faulty_worker import write_python
from tests.tasks.token_engine import ScriptedEngine

HERE = Path(faulty_worker.__file__).parent
PYTHON = os.environ.get("FCTUNE_VERIFIERS_PYTHON") or (sys.executable if importlib.util.find_spec("verifiers") else "")
needs_package = pytest.mark.skipif(not PYTHON, reason="FCTUNE_VERIFIERS_PYTHON names no Python with verifiers")

Open = Callable[..., VerifiersTasks]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture
def open_tasks(template: ChatTemplate, tmp_path: Path) -> Iterator[Open]:
    opened: list[VerifiersTasks] = []

    def start(
        python: str, config: DialogueConfig | None = None, split: str = "train", max_new_tokens: int = 100, **file: Any
    ) -> VerifiersTasks:
        path = tmp_path / "count.yaml"
        (tmp_path / "counting_words.py").write_text((HERE / "counting_words.py").read_text())
        written = {"python": python, "env": {"taskset": {"id": "counting-words"}}, "test_share": 0.0, **file}
        path.write_text(dump_yaml(written))
        settings = RolloutSettings(template, EpisodeLimits(max_new_tokens, max_tokens=3000))
        options: dict[str, Any] = {"split": split}
        made = open_dialogue_tasks(f"verifiers:{path}", config or DialogueConfig(), settings, **options)
        assert isinstance(made, VerifiersTasks)
        opened.append(made)
        return made

    yield start
    for tasks in opened:
        tasks.close()


def play(
    tasks: VerifiersTasks, template: ChatTemplate, answer: Callable[[str], str], num_tasks: int, num_samples: int = 1
) -> list[Rollout]:
    requests = [Request(name, sample, sample) for name in tasks.ids[:num_tasks] for sample in range(num_samples)]
    played = tasks.play(ScriptedEngine(template, answer), requests)
    return sorted(played, key=lambda one: (tasks.ids.index(one.case_id), one.sample))


def count(template: ChatTemplate, step: int = 1, words: str = "It is {}.") -> Callable[[str], str]:
    """Return a policy that adds ``step`` until the last result is the goal, and then says so."""
    call_format = detect_format(template.source)

    def answer(text: str) -> str:
        goal = text.partition("Count to ")[2].partition(".")[0] or "1"
        num_results = text.count("<|start_header_id|>tool")
        if step * num_results >= int(goal):
            return words.format(goal)
        return call_format.render([Call("add", {"by": step})])

    return answer


@needs_package
@pytest.mark.slow
def test_the_package_plays_its_tools_and_rewards_the_policy(open_tasks: Open, template: ChatTemplate) -> None:
    config = DialogueConfig(call_timeout_s=300.0, episode_timeout_s=600.0, max_turns=4)
    tasks = open_tasks(PYTHON, config, num_tasks=5, concurrency=2)  # fewer at a time than are asked for
    rollouts = play(tasks, template, count(template), 5, num_samples=2)
    assert [one.error for one in rollouts] == [None] * 10
    # Counting to 4 and 5 takes more than four answers: the state may be right, but nothing was said.
    assert [one.parts["score"] for one in rollouts] == pytest.approx([1.0] * 6 + [0.8, 0.8, 0.0, 0.0])
    assert [one.parts["solved"] for one in rollouts] == [1.0] * 6 + [0.0] * 4
    first = template.decode(list(rollouts[2].prompt_ids) + list(rollouts[2].ids))
    assert "Use the tool." in first
    assert '"by"' in first
    assert first.count("<|start_header_id|>tool") == 2
    generated = [one for one, own in zip(rollouts[2].ids, rollouts[2].is_generated, strict=True) if own]
    assert "It is 2." in template.decode(generated)
    assert "Count" not in template.decode(generated)
    for rollout in play(tasks, template, count(template, words="Done."), 2):
        assert rollout.parts["score"] == pytest.approx(0.8)
    wrong = detect_format(template.source).render([Call("subtract", {"by": 1})])
    unknown = play(tasks, template, lambda text: wrong if "unknown tool" not in text else "1", 1)
    assert unknown[0].parts["score"] == pytest.approx(0.2)
    # An answer that the token limit cut off is no turn of the package's; what there is is scored.
    (cut,) = play(tasks, template, lambda text: "one " * 300, 1)
    assert (cut.is_cut, cut.parts["score"]) == (True, 0.0)
    single = open_tasks(PYTHON, config, env={"taskset": {"id": "counting-words", "has_tools": False}}, num_tasks=2)
    assert [one.reward for one in play(single, template, lambda text: "2", 2)] == pytest.approx([0.0, 0.2])


@needs_package
@pytest.mark.slow
def test_a_resource_server_of_nemo_gym_answers_calls_and_judges(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        """Be such a server: a session, one tool, and a verdict on the calls of a response."""
        reply: dict[str, Any] = {"result": f"sunny in {body.get('city')}"}
        if handler.path == "/seed_session":
            reply = {}
        elif handler.path == "/verify":
            made = [
                json.loads(one["arguments"]) for one in body["response"]["output"] if one["type"] == "function_call"
            ]
            reply = {**body, "reward": float({"city": "Paris"} in made)}
        handler.send(200, json.dumps(reply), {"Content-Type": "application/json", "Set-Cookie": "session=1"})

    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "Weather", "parameters": schema}
    row = {"responses_create_params": {"input": "Weather in Paris?", "tools": [tool]}, "ground_truth": []}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    call_format, config = detect_format(template.source), DialogueConfig(call_timeout_s=300.0, episode_timeout_s=600.0)

    def ask(city: str) -> Callable[[str], str]:
        call = call_format.render([Call("get_weather", {"city": city})])
        return lambda text: "It is sunny." if "sunny in" in text else call

    with serve(behave) as log:
        taskset = {"id": "nemo-gym", "dataset": str(tmp_path / "rows.jsonl"), "task": {"resources_url": log.url}}
        tasks = open_tasks(PYTHON, config, env={"taskset": taskset})
        assert [play(tasks, template, ask(city), 1)[0].reward for city in ("Paris", "Rome")] == [1.0, 0.0]
        assert {headers.get("Cookie") for headers in log.headers} == {None, "session=1"}


@needs_package
@pytest.mark.slow
def test_environments_that_cannot_be_loaded_are_reported(open_tasks: Open) -> None:
    with pytest.raises(ConfigError, match="taskset 'no-such' not found"):
        open_tasks(PYTHON, env={"taskset": {"id": "no-such"}})


def test_tasks_are_split_by_their_prompts_and_constant_rewards_pass(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    python = write_python(tmp_path, "constant")
    train = open_tasks(python, test_share=0.4)
    held_out = open_tasks(python, split="test", test_share=0.4)
    numbers = [int(name.rpartition("/")[2]) for tasks in (train, held_out) for name in tasks.ids]
    assert sorted(numbers) == list(range(30))
    assert 3 < len(held_out.ids) < 27
    assert [message.content for message in train.open(train.ids[0]).questions] == [f"Count to {numbers[0]}."]
    assert train.digest() != held_out.digest()
    assert {one.reward for one in play(train, template, count(template), 3, 2)} == {0.5}


def test_results_and_calls_are_passed_on(open_tasks: Open, template: ChatTemplate, tmp_path: Path) -> None:
    tasks = open_tasks(write_python(tmp_path, "none"))
    (rollout,) = play(tasks, template, count(template), 1)
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert rollout.text.splitlines()[-2:] == ["[tool] 1", "It is 1."]
    (malformed,) = play(tasks, template, lambda text: '<tool_call>{"name": add', 1)
    assert malformed.error is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rewrites", "rewrote earlier messages"),
        ("tools", "rewrote earlier messages or the tools"),
        ("hangs", "no reply within 0.5 s"),
        ("garbage", "which is no reply"),
        ("dies", "exited with code 1 \\(killed by the environment\\)"),
        ("error", "TaskError: setup failed"),
        ("early", "ended before the first answer"),
        ("nan", "nan, not a finite number"),
        ("text", "'good', not a finite number"),
        ("long", "over 2,000 bytes"),
    ],
)
def test_faults_end_the_dialogue_with_their_reason_and_then_the_run(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path, fault: str, said: str
) -> None:
    config = DialogueConfig(call_timeout_s=0.5, max_result_bytes=2000)
    tasks = open_tasks(write_python(tmp_path, fault), config)
    rollouts = play(tasks, template, count(template), 2)
    assert all(one.error is not None for one in rollouts)
    assert all(one.ids == () and one.reward == 0.0 for one in rollouts)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(rollouts[0].error)
    if fault == "error":
        with pytest.raises(ConfigError, match="all dialogues of 20 tasks in a row failed"):
            play(tasks, template, count(template), 30)


def test_files_and_environments_that_cannot_be_used_are_reported(open_tasks: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no module named counting"):
        open_tasks(write_python(tmp_path, "silent"))
    with pytest.raises(ConfigError, match="cannot be started"):
        open_tasks(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"env.taskset.id: missing"):
        open_tasks(write_python(tmp_path, "none"), env={})
    with pytest.raises(ConfigError, match=r"no task is in test"):
        open_tasks(write_python(tmp_path, "none"), split="test")
