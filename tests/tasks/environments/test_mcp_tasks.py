"""Tasks with a real MCP server: each episode starts anew, its calls decide the reward, and a replay equals the run."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.registry import detect_format
from fctune.config.loading import load_config
from fctune.config.sections.rollouts import DialogueConfig
from fctune.config.yaml_text import dump_yaml
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call
from fctune.engines.mcp_client import McpResult
from fctune.tasks.environments.mcp.task_file import FinalCheck, McpTaskSpec, ToolCall, read_task_file
from fctune.tasks.environments.mcp.tasks import McpTasks, is_met, score_calls
from fctune.tasks.episode import EpisodeLimits
from fctune.tasks.rollouts import Request, Rollout, RolloutSettings
from fctune.tasks.sampling.task_sets import open_dialogue_tasks
from fctune.training.reinforcement import PolicyTasks
from tests.conftest import ROOT, TINY_BASE
from tests.engines import faulty_stdio_server as faults
from tests.engines.mcp_server import serve_bookings
from tests.tasks.token_engine import ScriptedEngine

REAL_SERVER = Path(faults.__file__).with_name("booking_server.py")
BOOKINGS = f"stdio: {shlex.quote(sys.executable)} {shlex.quote(str(REAL_SERVER))}"
COUNTER = f"stdio: {shlex.quote(sys.executable)} -S {shlex.quote(str(Path(faults.__file__)))}"
CLEAR = {"reset": {"tool": "clear"}}
BLUE, RED = {"room": "blue", "day": "friday"}, {"room": "red", "day": "monday"}
TASKS: list[dict[str, Any]] = [
    {
        "id": "book",
        "question": "Book the blue room for Friday.",
        "calls": [{"tool": "book", "arguments": BLUE}],
        "facts": ["blue"],
    },
    {"id": "price", "question": "What does the red room cost?", "calls": [{"tool": "list_rooms"}], "facts": [80]},
    {
        "id": "state",
        "question": "Book the red room for Monday.",
        "calls": [{"tool": "book", "arguments": RED}],
        "check": {"tool": "list_bookings", "result": {"red/monday": "booked"}},
    },
]

Open = Callable[..., McpTasks]
Script = Callable[[str, int], Sequence[Call] | str]


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_bookings() as address:
        yield address


@pytest.fixture
def open_tasks(template: ChatTemplate, tmp_path: Path) -> Iterator[Open]:
    opened: list[McpTasks] = []
    settings = RolloutSettings(template, EpisodeLimits(200, max_tokens=3000))

    def start(
        server: str, tasks: Sequence[dict[str, Any]] = TASKS, config: DialogueConfig | None = None, **options: Any
    ) -> McpTasks:
        keys = {name: options.pop(name) for name in ("split", "record", "log") if name in options}
        path = write_file(tmp_path, server, tasks, **options)
        config = config or DialogueConfig(call_timeout_s=30.0)
        made = open_dialogue_tasks(f"mcp:{path}", config, settings, **keys)
        assert isinstance(made, McpTasks)
        opened.append(made)
        return made

    yield start
    for tasks in opened:
        tasks.close()


def write_file(folder: Path, server: str, tasks: Sequence[dict[str, Any]], **options: Any) -> Path:
    path = folder / "rooms.yaml"
    path.write_text(dump_yaml({"server": server, "test_share": 0.0, **options, "tasks": list(tasks)}))
    return path


def play(tasks: McpTasks, template: ChatTemplate, script: Script, num_samples: int = 1) -> list[Rollout]:
    """Play each task; ``script`` returns the calls, or the text, of an answer to a question after so many results."""
    call_format = detect_format(template.source)
    questions = [spec.question for spec in tasks._specs.values()]

    def answer(text: str) -> str:
        question = next(one for one in questions if one in text)
        made = script(question, text.partition(question)[2].count("<|start_header_id|>tool"))
        return made if isinstance(made, str) else call_format.render(list(made))

    requests = [Request(task_id, sample, sample) for task_id in tasks.ids for sample in range(num_samples)]
    played = tasks.play(ScriptedEngine(template, answer), requests)
    return sorted(played, key=lambda one: (tasks.ids.index(one.case_id), one.sample))


def solve(question: str, num_results: int) -> Sequence[Call] | str:
    """Make the calls of a task's solution, and tell all facts."""
    (task,) = (one for one in TASKS if one["question"] == question)
    if num_results:
        return "The blue room is booked; the red one costs 80."
    return [Call(one["tool"], one.get("arguments", {})) for one in task["calls"]]


def test_each_episode_starts_anew_and_solutions_get_the_full_reward(
    open_tasks: Open, template: ChatTemplate, url: str
) -> None:
    for server, options in ((BOOKINGS, {"tasks": TASKS[:1]}), (url, CLEAR)):
        tasks = open_tasks(server, **options)
        assert ("clear" in [tool.name for tool in tasks.tools]) is (server != url)
        tasks.check()
        rollouts = play(tasks, template, solve, num_samples=2)
        assert [one.error for one in rollouts] == [None] * len(rollouts)
        assert [one.parts["solved"] for one in rollouts] == [1.0] * len(rollouts), [one.text for one in rollouts]
        assert all(one.reward == 1.0 for one in rollouts)
    for rollout in play(tasks, template, lambda question, num_results: "Done: blue, 80."):
        assert rollout.reward == 0.0


def test_a_replay_without_the_server_equals_the_run_and_refuses_other_calls(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    def act(question: str, num_results: int) -> Sequence[Call] | str:
        if "Friday" in question and num_results == 0:
            return [Call("list_rooms", {}), Call("book", {"place": "blue"}), Call("book", RED)]
        if "cost" in question and num_results == 0:
            return [Call("book", BLUE), Call("book", BLUE)]  # the second is refused
        return solve(question, num_results)

    record = tmp_path / "run" / "mcp_calls" / "rank00000.jsonl"
    with serve_bookings() as url:
        live_tasks = open_tasks(url, record=record, **CLEAR)
        live = play(live_tasks, template, act, num_samples=2)
    assert {one.parts["solved"] for one in live} == {0.0, 1.0}
    replaying = DialogueConfig(replay=str(record.parent))
    replayed_tasks = open_tasks("http://127.0.0.1:9/mcp", config=replaying, record=record, **CLEAR)
    assert replayed_tasks.digest() == live_tasks.digest()
    before = record.read_bytes()
    assert play(replayed_tasks, template, act, num_samples=2) == live
    assert record.read_bytes() == before
    others = play(replayed_tasks, template, lambda question, num_results: [Call("list_bookings", {})])
    assert [one.error for one in others] == [None] * 3
    assert not any(one.parts["solved"] or one.parts["validity"] for one in others)
    # A new attempt has the results of any attempt that made the same calls.
    request = Request(live_tasks.ids[0], 9, 99)
    call_format = detect_format(template.source)
    engine = ScriptedEngine(template, lambda text: call_format.render(list(act("Friday", 0))))
    (again,) = replayed_tasks.play(engine, [request])
    assert again.text.splitlines()[:4] == live[0].text.splitlines()[:4]


def test_a_recording_that_a_kill_has_cut_off_goes_on(open_tasks: Open, template: ChatTemplate, tmp_path: Path) -> None:
    record = tmp_path / "calls.jsonl"
    with serve_bookings() as url:
        tasks = open_tasks(url, record=record, **CLEAR)
        first = play(tasks, template, solve)
        abandoned = tasks.begin(Request(tasks.ids[0], 5, 5))
        abandoned.start()
        abandoned.close()
        with record.open("a") as file:
            file.write('{"task": "rooms/train/book", "sam')
        play(open_tasks(url, record=record, **CLEAR), template, solve)
    tasks = open_tasks("stdio: none", config=DialogueConfig(replay=str(record)), **CLEAR)
    assert play(tasks, template, solve) == first
    assert len(record.read_text().splitlines()) == 2 * (1 + len(TASKS)), "only what ended is recorded"
    record.write_text('{"tools": []}\n')
    with pytest.raises(DataError, match=r"calls.jsonl:1: not an episode \(KeyError"):
        open_tasks("stdio: none", config=DialogueConfig(replay=str(record)))


def count(by: int = 2, **more: Any) -> dict[str, Any]:
    return {"question": f"Add {by}.", "calls": [{"tool": "add", "arguments": {"by": by}}], **more}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (faults.HANG, "call of add: no result within 1 s"),
        (faults.EXIT, "it said: out of paper"),
        (faults.GARBAGE, "no result within 1 s"),
        (faults.WRONG_SHAPE, "call of add: "),
        (faults.INTERNAL, "call of add: no such number"),
    ],
    ids=["hang", "exit", "garbage", "wrong shape", "internal error"],
)
def test_a_fault_of_the_server_drops_its_episode_alone_and_is_replayed(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path, fault: int, reason: str
) -> None:
    def act(question: str, num_results: int) -> Sequence[Call] | str:
        if num_results:
            return "Done."
        return [Call("add", {"by": 3}), Call("add", {"by": fault})] if "3" in question else [Call("add", {"by": 2})]

    config = DialogueConfig(call_timeout_s=1.0 if "within" in reason else 30.0)
    record = tmp_path / "calls.jsonl"
    failed, solved = live = play(open_tasks(COUNTER, [count(3), count()], config, record=record), template, act)
    assert failed.error is not None
    assert "MCP server " in failed.error
    assert reason in failed.error
    assert (failed.ids, failed.parts) == ((), {})
    assert solved.parts["solved"] == 1.0
    replaying = DialogueConfig(replay=str(record))
    assert play(open_tasks(COUNTER, [count(3), count()], replaying), template, act) == live


def test_faults_of_the_model_are_results_that_it_sees(open_tasks: Open, template: ChatTemplate) -> None:
    wrong = [{"by": faults.REFUSED}, {"by": faults.LONG}, {"by": "2"}, {}]

    def act(question: str, num_results: int) -> Sequence[Call] | str:
        calls = [*(Call("add", one) for one in wrong), Call("subtract", {}), Call("add", {"by": 2})]
        return [calls[num_results]] if num_results < len(calls) else "Done."

    config = DialogueConfig(call_timeout_s=30.0, max_result_bytes=1000)
    (rollout,) = play(open_tasks(COUNTER, [count()], config), template, act)
    assert rollout.error is None
    assert "no such number" in rollout.text
    assert "the result has 20,000 bytes; at most 1,000 are allowed" in rollout.text
    assert rollout.parts["solved"] == 1.0
    assert rollout.parts["validity"] == pytest.approx(1 / 6)
    assert rollout.parts["economy"] == pytest.approx(1 / 6)


def test_changed_tools_drop_episodes_and_many_in_a_row_end_the_run(
    open_tasks: Open, template: ChatTemplate, tmp_path: Path
) -> None:
    marker = tmp_path / "changed"
    tasks = open_tasks(f"{COUNTER} {marker}", [count(2), count(3)], concurrency=4)
    solved = play(tasks, template, lambda question, n: "Done." if n else [Call("add", {"by": int(question[4])})])
    assert [one.parts["solved"] for one in solved] == [1.0, 1.0]
    marker.write_text("")
    requests = [Request(task_id, sample, 1) for task_id in tasks.ids for sample in range(12)]
    call_format, seen = detect_format(template.source), list[Rollout]()
    engine = ScriptedEngine(template, lambda text: call_format.render([Call("add", {"by": 2})]))
    with pytest.raises(ConfigError, match=r"all dialogues of 2 tasks in a row failed.*add was changed"):
        seen += tasks.play(engine, requests)
    assert len(seen) == 19
    assert all("its tools changed since the run began: add was changed" in str(one.error) for one in seen)


def test_the_calls_of_an_episode_have_a_limit_together(open_tasks: Open, template: ChatTemplate) -> None:
    config = DialogueConfig(call_timeout_s=30.0, episode_timeout_s=0.001)
    tasks = open_tasks(COUNTER, [{**count(), "calls": [], "facts": [2]}], config)
    (rollout,) = play(tasks, template, lambda *_: [Call("add", {"by": 2})])
    assert "its calls took over 0.001 s together" in str(rollout.error)


def test_state_that_may_carry_over_is_said(open_tasks: Open, url: str) -> None:
    said: list[str] = []
    open_tasks(url, log=said.append)
    assert len(said) == 1
    assert "may carry over to others" in said[0]
    open_tasks(url, log=said.append, **CLEAR)
    open_tasks(COUNTER, [count()], log=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"calls": [{"tool": "add", "arguments": {"by": faults.REFUSED}}]}, "its own call of add is refused: no such"),
        ({"calls": [{"tool": "add", "arguments": {"to": 1}}]}, "calls has one that does not match its tool"),
        ({"check": {"tool": "read", "result": 0}}, "its check is met before any call"),
        (count(check={"tool": "read", "result": 3}), "its check is not met after its own calls: read returned 2"),
    ],
    ids=range(4),
)
def test_a_task_that_its_own_calls_do_not_solve_is_named_at_the_start(
    open_tasks: Open, task: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_tasks(COUNTER, [{"question": "Do it.", **task}]).check()


def test_samples_that_begin_together_check_their_task_once(open_tasks: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, checked = open_tasks(COUNTER, [count(1), count(2)]), list[str]()
    find_defect = tasks._find_defect

    def check(server: Any, task_id: str) -> str | None:
        checked.append(task_id)
        time.sleep(0.2)
        return find_defect(server, task_id)

    monkeypatch.setattr(tasks, "_find_defect", check)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tasks.check_solution, 4 * tasks.ids))
    assert sorted(checked) == sorted(tasks.ids)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": ["add", "raed"]}, "the server has no tool raed; did you mean read"),
        ({"tools": ["read"]}, "tasks call add, which tools does not offer"),
        ({"reset": {"tool": "clear"}}, "the server has no tool clear"),
        ({"split": "test"}, "no task is in test"),
        ({"server": "stdio: no-such-program"}, r"no usable MCP server \(.*No such file"),
        ({"server": "http://me:pw@host/mcp"}, "holds a name or password"),
        ({"tasks": [count(check={"tool": "add", "result": 1})]}, "does not declare read-only"),
        ({"tasks": [], "tols": []}, r"tols: unknown key; did you mean tools"),
        ({"tasks": []}, "tasks: empty"),
        (
            {"tasks": [{"question": " ", "facts": [True]}]},
            r"(?s)tasks.0.question: empty.*tasks.0.facts: expected texts",
        ),
        ({"tasks": [{"question": "Go."}]}, "tasks.0: asks for nothing; give calls, facts or a check"),
        ({"tasks": [count(id="a"), count(3, id="a")]}, "tasks: 2 have the id 'a'; ids must be unique"),
        ({"tasks": [count(split="train"), count(split="test")]}, "train and test both ask 'Add 2.'"),
        ({"reset": {"tool": "add"}, "tools": ["add"]}, "add resets the server, so the model must not have it"),
        ({"concurrency": 0}, "concurrency=0: expected 1 or more"),
        ({"server": "python rooms.py"}, "server=python rooms.py: expected a URL, or 'stdio: COMMAND'"),
    ],
    ids=range(16),
)
def test_what_is_wrong_with_a_file_is_said_in_one_sentence(
    open_tasks: Open, options: dict[str, Any], reason: str
) -> None:
    given = {"server": COUNTER, "tasks": [count()], **options}
    with pytest.raises(ConfigError, match=reason):
        open_tasks(**given)


def test_a_question_is_on_one_side_only_whatever_else_is_in_the_file(tmp_path: Path) -> None:
    tasks = [count(number) for number in range(400)]
    file = read_task_file(write_file(tmp_path, COUNTER, tasks, test_share=0.25))
    train, test = ({one.question for one in file.select(split).values()} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 400
    assert 70 <= len(test) <= 130
    fewer = read_task_file(write_file(tmp_path, COUNTER, tasks[::3], test_share=0.25))
    assert {one.question for one in fewer.select("test").values()} < test


BOOK = ToolCall(tool="book", arguments={"day": "friday"})
OTHER, LOOK = Call("book", {"day": "monday"}), Call("look", {})


@pytest.mark.parametrize(
    ("spec", "made", "is_met", "text", "parts"),
    [
        ({"calls": [BOOK]}, [(BOOK.to_call(), True)], False, "", (1, 1, 1, 1)),
        ({"calls": [BOOK]}, [(LOOK, True), (BOOK.to_call(), True)], False, "", (1, 1, 0.5, 1)),
        ({"calls": [BOOK]}, [(OTHER, False), (BOOK.to_call(), True)], False, "", (1, 1, 0.5, 0.5)),
        ({"calls": [BOOK]}, [(OTHER, True), (BOOK.to_call(), True)], False, "", (0, 0, 0, 1)),
        ({"calls": [BOOK]}, [(BOOK.to_call(), True)] * 2, False, "", (0, 0, 0, 1)),
        ({"calls": [BOOK]}, [(BOOK.to_call(), False)], False, "", (0, 0, 0, 0)),
        ({"calls": [BOOK, BOOK]}, [(BOOK.to_call(), True)], False, "", (0, 0.5, 0, 1)),
        ({"calls": [BOOK], "facts": [3]}, [(BOOK.to_call(), True)], False, "It is 3.", (1, 1, 1, 1)),
        ({"calls": [BOOK], "facts": [3]}, [(BOOK.to_call(), True)], False, "It is 31.", (0, 0.5, 0, 1)),
        ({"facts": [3]}, [], False, "It is 3.", (0, 0, 0, 0)),
        ({"facts": [3]}, [(LOOK, True)] * 2, False, "It is 3.", (1, 1, 0.5, 1)),
        ({"facts": [3]}, [(OTHER, True)], False, "It is 3.", (0, 0, 0, 1)),
        ({"calls": [BOOK], "check": True}, [(OTHER, True)] * 2, True, "", (1, 1, 0.5, 1)),
        ({"calls": [BOOK], "check": True}, [(BOOK.to_call(), True)], False, "", (0, 0, 0, 1)),
    ],
    ids=range(14),
)
def test_the_parts_of_the_reward(
    spec: dict[str, Any], made: list[tuple[Call, bool]], is_met: bool, text: str, parts: tuple[float, ...]
) -> None:
    if "check" in spec:
        spec = {**spec, "check": FinalCheck(tool="look", result=1)}
    scored = score_calls(McpTaskSpec(question="?", **spec), made, frozenset({"look"}), is_met, text)
    assert tuple(scored.values()) == parts


def test_a_check_compares_text_and_json() -> None:
    deep = "[" * 100_000
    for expected, text, structured, is_right in (
        ("red", "red", None, True),
        ("red", "Red", None, False),
        ({"a": [1, True]}, '{"a": [1.0, true]}', None, True),
        ({"a": [1, 1]}, '{"a": [1, true]}', None, False),
        ([1, 2], "1\n2", {"result": [1, 2]}, True),
        (None, "null", None, True),
        (None, "", None, False),
        (1, deep, None, False),
    ):
        check = FinalCheck(tool="look", result=expected)
        assert is_met(check, McpResult(text, False, structured)) is is_right, (expected, text)
        assert not is_met(check, McpResult(text, True, structured))


def test_processes_that_would_reset_each_others_state_are_refused(
    template: ChatTemplate, tmp_path: Path, url: str
) -> None:
    path = write_file(tmp_path, url, TASKS, **CLEAR)
    overrides = [f"grpo.cases=mcp:{path}", f"output_dir={tmp_path / 'run'}", "grpo.dialogue.call_timeout_s=30"]
    data = PolicyTasks(load_config(ROOT / "configs" / "tiny_grpo.yaml", overrides), template, rank=1)
    try:
        with pytest.raises(ConfigError, match=r"which 2 processes would share\. Set grpo\.engine=server"):
            data.open_source(SimpleNamespace(world=SimpleNamespace(world_size=2)), lambda: None)  # type: ignore[arg-type]
    finally:
        data.tasks.close()


def test_a_replay_is_for_mcp_cases_and_must_exist(tmp_path: Path) -> None:
    path = write_file(tmp_path, COUNTER, TASKS)
    for overrides, reason in (
        (["grpo.cases=mcp:no.yaml"], "no.yaml does not exist; name a file of tasks with an MCP server"),
        ([f"grpo.cases=mcp:{path}", "grpo.dialogue.replay=none"], "grpo.dialogue.replay=none: does not exist"),
        (["grpo.cases=environment:files:3", f"grpo.dialogue.replay={path}"], "only for cases of an MCP server"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_config(ROOT / "configs" / "tiny_grpo.yaml", overrides)
