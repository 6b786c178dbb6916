"""Agents as rollouts: real programs in processes of their own, scored by a command or an endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.config.sections.rollouts import DialogueConfig
from fctune.data.chat_template import ChatTemplate
from fctune.engines.engine import Answer, Prompt
from fctune.tasks.environments.agent.task_file import fill_command, read_agent_file
from fctune.tasks.environments.agent.tasks import AgentTasks
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.rollouts import Request, Rollout, RolloutSettings
from fctune.tasks.sampling.task_sets import open_dialogue_tasks
from tests.conftest import TINY_BASE
from tests.engines.fault_server import Handler
from tests.engines.fault_server import serve as serve_faults
from tests.tasks.environments.agent_files import AGENT, SCORER, write_agent_file
from tests.tasks.token_engine import ScriptedEngine

TASKS = [{"question": f"What is {number}?", "category": "odd" if number % 2 else "even"} for number in range(2)]

Open = Callable[..., AgentTasks]


class ServerLikeEngine(ScriptedEngine):
    """A scripted engine that may be asked on several threads, as a server's."""

    is_concurrent = True


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture
def open_tasks(template: ChatTemplate, tmp_path: Path) -> Iterator[Open]:
    opened: list[AgentTasks] = []

    def start(tasks: Sequence[dict[str, Any]] = TASKS, log: Callable[[str], None] = print, **values: Any) -> AgentTasks:
        path = write_agent_file(tmp_path, tasks, **values)
        settings = RolloutSettings(template, EpisodeLimits(60, max_tokens=2000))
        record = tmp_path / "agent_answers" / "rank00000.jsonl"
        made = open_dialogue_tasks(f"agent:{path}", DialogueConfig(), settings, record=record, log=log)
        assert isinstance(made, AgentTasks)
        opened.append(made)
        return made

    yield start
    for tasks in opened:
        tasks.close()


def play(tasks: AgentTasks, engine: ScriptedEngine, num_samples: int = 2) -> list[Rollout]:
    requests = [Request(task_id, sample, 7 + sample) for task_id in tasks.ids for sample in range(num_samples)]
    played = list(tasks.play(engine, requests))
    assert len(played) == len(requests)
    return sorted(played, key=lambda one: (one.case_id, one.sample))


def talk(text: str) -> str:
    return f"Answer to {len(text)} characters."


def read_record(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "agent_answers" / "rank00000.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [ScriptedEngine, ServerLikeEngine], ids=["in process", "server"])
def test_an_agents_episodes_are_scored_and_have_the_tokens_that_were_recorded(
    kind: type[ScriptedEngine], open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    lines: list[str] = []
    tasks = open_tasks(log=lines.append)
    rollouts = play(tasks, kind(template, talk))
    assert [one.error for one in rollouts] == [None] * 4
    assert [one.category for one in rollouts] == ["even", "even", "odd", "odd"]
    assert all(one.version == 7 and not one.is_cut and not one.further for one in rollouts)
    assert all(one.versions == (7, 7) for one in rollouts), "one of each answer"
    assert all(one.reward == one.parts["score"] > 0 for one in rollouts)
    record = read_record(tmp_path)
    for rollout in rollouts:
        (end,) = (
            row
            for row in record
            if row["event"] == "end" and (row["task"], row["sample"]) == (rollout.case_id, rollout.sample)
        )
        answers = [row for row in record if row["event"] == "answer" and row["episode"] == end["episode"]]
        assert len(answers) == 2
        assert (*answers[1]["prompt_ids"], *answers[1]["ids"]) == (*rollout.prompt_ids, *rollout.ids)
        generated = [i for i, is_new in zip(rollout.ids, rollout.is_generated, strict=True) if is_new]
        assert generated == [token for row in answers for token in row["ids"]]
        assert end["reward"] == rollout.reward
    assert len(lines) == 1, "said once"
    assert "the agent sets temperature, which has no effect on the policy" in lines[0]
    assert [one.id for one in map(tasks.open, tasks.ids)] == ["agent/1", "agent/2"]
    again = play(open_tasks(), kind(template, talk))
    assert again == rollouts


def test_no_agent_is_started_after_the_tasks_were_closed(open_tasks: Open, template: ChatTemplate) -> None:
    tasks = open_tasks()
    tasks.close()
    with pytest.raises(ConfigError, match="the run has ended"):
        play(tasks, ServerLikeEngine(template, talk))


def test_parallel_and_forgetful_agents_have_several_sequences_in_one_episode(
    open_tasks: Open, template: ChatTemplate
) -> None:
    for habit, count in (("forgets", 3), ("parallel", 4)):
        tasks = open_tasks([{"question": "What?", "turns": 3}], command=f"{AGENT} {habit}")
        (rollout,) = play(tasks, ServerLikeEngine(template, talk), 1)
        sequences = rollout.sequences
        assert len(sequences) == count, habit
        assert sum(one.num_generated for one in sequences) == rollout.num_generated
        assert all(one.reward == rollout.reward and not one.further for one in sequences)
        assert Rollout.from_json(json.loads(json.dumps(rollout.to_json()))) == rollout


@pytest.mark.thorough
def test_an_agent_that_never_ends_is_killed_with_what_it_started_and_scored_as_cut_off(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    task = {"question": "What?", "pids": str(pids)}
    lines: list[str] = []
    tasks = open_tasks([task], command=f"{AGENT} endless", time_limit_s=4, log=lines.append)
    (rollout,) = play(tasks, ServerLikeEngine(template, talk), 1)
    assert rollout.error is None
    assert rollout.is_cut
    assert rollout.num_generated > 0
    assert any("the agent was killed after 4 s" in line for line in lines)
    assert not [pid for pid in map(int, pids.read_text().split()) if is_running(pid)]


def test_agents_end_with_the_run(open_tasks: Open, template: ChatTemplate, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tasks = open_tasks([{"question": "What?", "pids": str(pids)}], command=f"{AGENT} endless", time_limit_s=300)
    played = tasks.play(Stopping(template, lambda: len(read_pids(pids)) == 2), [Request("agent/1", 0, 1)])
    with pytest.raises(KeyboardInterrupt):
        list(played)
    deadline = time.monotonic() + 30
    while any(map(is_running, read_pids(pids))):
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Stopping(ScriptedEngine):
    """Answers until the agent has started a process of its own; then it is as if the user pressed Ctrl-C."""

    def __init__(self, template: ChatTemplate, is_due: Callable[[], bool]):
        super().__init__(template, talk)
        self._is_due = is_due

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        if len(self.prompts) < 1:
            yield from super().answer(prompts)
            return
        yield from super().answer(prompts)
        deadline = time.monotonic() + 60
        while not self._is_due():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise KeyboardInterrupt


def read_pids(path: Path) -> list[int]:
    return list(map(int, path.read_text().split())) if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("silent", "the agent got no answer from the model; it ended with code 0"),
        ("other_model", "the agent got no answer from the model; it ended with code 1: urllib.error.HTTPError"),
    ],
)
def test_an_agent_without_an_answer_of_the_model_is_counted_and_not_trained(
    habit: str, reason: str, open_tasks: Open, template: ChatTemplate
) -> None:
    engine = ServerLikeEngine(template, talk)
    rollouts = play(open_tasks(command=f"{AGENT} {habit}"), engine)
    assert all(one.error is not None and one.error.startswith(reason) for one in rollouts), rollouts[0].error
    assert all(one.ids == () and one.reward == 0 for one in rollouts)
    assert engine.prompts == []


def test_an_agent_that_crashes_after_its_answers_is_scored_and_reported(
    open_tasks: Open, template: ChatTemplate
) -> None:
    lines: list[str] = []
    rollouts = play(open_tasks(command=f"{AGENT} crashes", log=lines.append), ServerLikeEngine(template, talk))
    assert [one.error for one in rollouts] == [None] * 4
    assert sum("the agent ended with code 1: KeyError: 'tool'" in line for line in lines) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("crashes", "the scorer ended with code 1: no such table: orders"),
        ("hangs", "the scorer took longer than 2 s"),
        ("nothing", "the scorer said a line before the score; expected a number from 0 to 1"),
        ("1.5", "the scorer said 1.5; expected a number from 0 to 1"),
        ("-0.1", "the scorer said -0.1"),
        ("NaN", "the scorer said NaN"),
        ("true", "the scorer said true"),
        ("'[0.5]'", "the scorer said [0.5]"),
        ("'{\"points\": 1}'", 'the scorer said {"points": 1}'),
    ],
)
def test_a_scorer_without_a_score_is_reported_and_its_episode_is_not_trained(
    habit: str, reason: str, open_tasks: Open, template: ChatTemplate
) -> None:
    tasks = open_tasks(TASKS[:1], scorer={"command": f"{SCORER} {habit}", "timeout_s": 2})
    (rollout,) = play(tasks, ServerLikeEngine(template, talk), 1)
    assert rollout.error is not None
    assert rollout.error.startswith(reason)
    assert rollout.ids == ()


@pytest.mark.thorough
def test_a_scorer_may_answer_with_an_object_or_be_an_endpoint(open_tasks: Open, template: ChatTemplate) -> None:
    tasks = open_tasks(scorer={"command": f"{SCORER} object"})
    assert [one.parts["solved"] for one in play(tasks, ServerLikeEngine(template, talk), 1)] == [1.0, 1.0]

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        assert body["messages"][-1]["role"] == "assistant"
        assert body["agent"]["output"] == "done\n"
        if number == 0:
            handler.send(503, "busy")
        else:
            handler.send(200, json.dumps({"score": 0.25} if "0?" in body["task"]["question"] else "fine"))

    with serve_faults(behave) as log:
        tasks = open_tasks(scorer={"endpoint": f"{log.url}/score"}, concurrency=1)
        first, second = play(tasks, ServerLikeEngine(template, talk), 1)
    assert first.parts["score"] == 0.25
    assert second.error is not None
    assert "fine; expected a number from 0 to 1" in second.error


def evaluate(tmp_path: Path, *words: str, **values: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code of ``fctune eval``, and the rows."""
    out = tmp_path / "out.jsonl"
    suite = f"agent:{write_agent_file(tmp_path, TASKS, **values)}"
    command = ["eval", "--model", str(TINY_BASE), "--suite", suite, "--max-new-tokens", "12", "--out", str(out)]
    return main([*command, *words]), [json.loads(line) for line in out.read_text().splitlines()]


def test_eval_asks_each_task_once_and_has_the_scorers_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = evaluate(tmp_path)
    assert code == 0
    assert [row["id"] for row in rows] == ["agent/1", "agent/2"]
    assert [row["category"] for row in rows] == ["even", "odd"]
    for row in rows:
        assert 0 <= row["parts"]["score"] <= 1
        assert row["verdict"] == (
            "correct" if row["parts"]["score"] == 1 else row["verdict"] if row["malformed"] else "wrong_answer"
        )
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
        assert [turn["answer"] for turn in row["turns"][0]][-1] == row["answer"]
    before = (tmp_path / "out.jsonl").read_text()
    assert evaluate(tmp_path)[0] == 0
    assert (tmp_path / "out.jsonl").read_text() == before, "resumed, nothing was asked again"
    code, solved = evaluate(tmp_path, "--fresh", scorer={"command": f"{SCORER} object"})
    assert code == 0
    assert [row["verdict"] for row in solved] == ["correct", "correct"]
    assert [row["messages"] for row in solved] == [row["messages"] for row in rows], "greedy"
    capsys.readouterr()
    assert main(["eval", "--model", "http://127.0.0.1:9", "--suite", f"agent:{tmp_path / 'agent.yaml'}"]) == 2
    assert "agents are evaluated with a model in this process" in capsys.readouterr().err


def test_a_task_whose_agent_fails_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(tmp_path, command=f"{AGENT} silent")[0] == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "none of 2 tasks could be measured, for example agent/1: the agent got no answer from the model" in said


@pytest.mark.thorough
def test_twenty_failing_tasks_in_a_row_end_the_run(open_tasks: Open, template: ChatTemplate) -> None:
    tasks = open_tasks([{"question": str(number)} for number in range(25)], command=f"{AGENT} silent")
    with pytest.raises(ConfigError, match=r"20 tasks in a row failed.*the agent got no answer from the model"):
        play(tasks, ServerLikeEngine(template, talk), 1)


def test_a_lost_server_ends_the_run(open_tasks: Open, template: ChatTemplate) -> None:
    class Lost(ServerLikeEngine):
        def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
            raise ConfigError("http://server: unavailable for 1,800 s.")

    with pytest.raises(ConfigError, match="unavailable for 1,800 s"):
        play(open_tasks(), Lost(template, talk))


def test_a_tasks_fields_stay_within_their_words() -> None:
    values = {"question": "a 'b' $(c); {id}", "id": 7, "base_url": "http://x"}
    words = fill_command("run --ask={question} {id} '{base_url} x' {{}}", values)
    assert words == ["run", "--ask=a 'b' $(c); {id}", "7", "http://x x", "{{}}"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_text_may_hold_any_line_separator_of_unicode_and_a_file_its_byte_order_mark(
    encoding: str, tmp_path: Path
) -> None:
    asked = [{"question": f"Sum up:{mark}then stop."} for mark in ("\u2028", "\u2029", "\u0085")]
    path = write_agent_file(tmp_path, TASKS)
    text = "\r\n".join(json.dumps(one, ensure_ascii=False) for one in asked)
    (tmp_path / "tasks.jsonl").write_bytes(text.encode(encoding))
    assert list(read_agent_file(path)[1].values()) == asked


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scorer": ({"scorer": {}}, "scorer: expected a command or an endpoint, one of them"),
    "two scorers": ({"scorer": {"command": SCORER, "endpoint": "http://x"}}, "scorer: expected a command or an"),
    "no program": ({"command": "no-such-program x"}, "command: there is no program no-such-program"),
    "no scoring program": ({"scorer": {"command": "no-such"}}, "scorer.command: there is no program no-such"),
    "an open quote": ({"command": "python 'x"}, "No closing quotation"),
    "no address": ({"scorer": {"endpoint": "ftp://x"}}, "scorer.endpoint"),
    "an unknown key": ({"time_limit": 3}, "time_limit: unknown key; did you mean time_limit_s?"),
    "no time": ({"time_limit_s": 0}, "time_limit_s=0"),
    "no tasks": ({"tasks": []}, "no tasks"),
    "no JSON": ({"tasks": ["{"]}, "tasks.jsonl:1: not JSON"),
    "no object": ({"tasks": ["3"]}, "tasks.jsonl:1: expected an object, got int"),
    "an id twice": ({"tasks": [{"id": "a"}, {"id": "a"}]}, "tasks.jsonl:2: the id 'a' belongs to an earlier task"),
    "a field that is missing": ({"command": f"{AGENT} {{qestion}}"}, "has {qestion}, but the task has no such field"),
    "a field that is taken": ({"tasks": [{"model": "x"}]}, "model stands for the episode's own value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_make_no_sense_are_refused_with_the_reason(name: str, open_tasks: Open) -> None:
    values, reason = WRONG[name]
    values = dict(values)
    tasks = values.pop("tasks", TASKS)
    with pytest.raises((ConfigError, DataError)) as caught:
        open_tasks(tasks, **values)
    assert reason in str(caught.value)


def test_the_digest_changes_with_what_rewards_depend_on(open_tasks: Open) -> None:
    digests = [
        open_tasks(**values).digest()
        for values in ({}, {"model": "x"}, {"max_answers": 3}, {"scorer": {"command": f"{SCORER} object"}})
    ]
    digests.append(open_tasks(TASKS[:1]).digest())
    assert len(set(digests)) == 5
    assert open_tasks(concurrency=2).digest() == digests[0]
