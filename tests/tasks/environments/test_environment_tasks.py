"""The shipped environments: every task is solvable, worth solving and deterministic, and held-out tasks differ."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet
from fctune.tasks.environments.base import CheckedTask, Environment, Split, ToolError
from fctune.tasks.environments.host import BUILT_IN
from fctune.tasks.environments.tasks import has_fact, score_episode

NUM_TASKS = 300


def make(name: str) -> Environment:
    module, _, kind = BUILT_IN[name].partition(":")
    environment: Environment = getattr(importlib.import_module(module), kind)()
    return environment


def play(environment: Environment, spec: Any) -> tuple[CheckedTask, list[Any]]:
    """Return the task with its states, and the results of its calls."""
    environment.reset(spec.state)
    start = environment.state()
    results = [environment.call(name, dict(arguments)) for name, arguments in spec.calls]
    return CheckedTask("t", spec, start, environment.state()), results


@pytest.fixture(params=sorted(BUILT_IN))
def environment(request: pytest.FixtureRequest) -> Environment:
    return make(request.param)


@pytest.mark.sample(3)
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_task_is_solved_by_its_calls_and_by_nothing_less(environment: Environment, split: Split) -> None:
    tools = ToolSet([Tool(function) for function in environment.list_tools()])
    categories = set()
    for seed in range(NUM_TASKS):
        spec = environment.make_task(seed, split)
        categories.add(spec.category)
        assert not [problem for call in spec.calls for problem in tools.find_errors(Call(*call))], spec
        task, results = play(environment, spec)
        answer = " ".join(spec.facts)
        parts = score_episode(task, task.goal, [True] * len(results), answer)
        assert parts == {"solved": 1.0, "progress": 1.0, "economy": 1.0, "validity": 1.0}, spec
        assert not any(score_episode(task, task.start, [], answer).values()), "nothing done, but the facts guessed"
        assert score_episode(task, task.start, [True], "")["solved"] == 0, "an idle call"
        assert (task.goal != task.start) != bool(spec.facts), "a task changes the state or asks for facts"
        for fact in spec.facts:
            assert not has_fact(spec.question, fact), spec
        # The last call matters: without it, the task is not solved.
        environment.reset(spec.state)
        for name, arguments in spec.calls[:-1]:
            environment.call(name, dict(arguments))
        assert score_episode(task, environment.state(), [True] * len(spec.calls), "")["solved"] == 0, spec
    assert len(categories) >= 11


def test_facts_are_in_the_results_of_the_calls_or_count_them(environment: Environment) -> None:
    for seed in range(NUM_TASKS):
        spec = environment.make_task(seed, "train")
        results = play(environment, spec)[1]
        for fact in spec.facts:
            counted = [str(len(result)) for result in results if isinstance(result, list)]
            assert fact in counted or fact in json.dumps(results), spec


def test_tasks_and_results_are_the_same_every_time(environment: Environment) -> None:
    again = type(environment)()
    for seed in range(40):
        spec = environment.make_task(seed, "train")
        assert again.make_task(seed, "train") == spec
        assert json.dumps(play(again, spec)[1]) == json.dumps(play(environment, spec)[1])


def test_a_task_leaves_the_given_state_as_it_was(environment: Environment) -> None:
    for seed in range(60):
        spec = environment.make_task(seed, "train")
        before = json.dumps(spec.state)
        play(environment, spec)
        assert json.dumps(spec.state) == before


def test_held_out_questions_use_other_words_and_phrases(environment: Environment) -> None:
    questions = {
        split: [environment.make_task(seed, split).question for seed in range(NUM_TASKS)] for split in ("train", "test")
    }
    assert len(set(questions["train"])) > 0.85 * NUM_TASKS, "variety"
    states = {json.dumps(environment.make_task(seed, "train").state) for seed in range(NUM_TASKS)}
    assert len(states) == NUM_TASKS
    assert not set(questions["train"]) & set(questions["test"])


def test_a_refused_call_says_why_and_changes_nothing(environment: Environment) -> None:
    spec = environment.make_task(1, "train")
    environment.reset(spec.state)
    before = environment.state()
    wrong = {"path": "/no/such", "product_id": "p99", "order_id": "o1", "event_id": "e99", "code": "NONE"}
    wrong |= {"source": "/no/such", "destination": "/x"}
    num_refused = 0
    for function in environment.list_tools():
        names = function["parameters"]["properties"]
        if not set(names) & set(wrong):
            continue
        arguments = {name: wrong.get(name, 1 if name in ("quantity", "minutes") else "2026-03-04") for name in names}
        with pytest.raises(ToolError, match=r"\w+"):
            environment.call(function["name"], arguments)
        num_refused += 1
    assert num_refused >= 5
    assert environment.state() == before


def test_needless_and_refused_calls_cost() -> None:
    environment = make("shop")
    spec = next(s for s in (environment.make_task(seed, "train") for seed in range(99)) if s.category == "add")
    task = play(environment, spec)[0]
    good = score_episode(task, task.goal, [True, True], "")
    wordy = score_episode(task, task.goal, [True, True, True, False], "")
    assert (good["economy"], good["validity"]) == (1.0, 1.0)
    assert (wordy["economy"], wordy["validity"]) == (0.5, 0.75)
    assert wordy["solved"] == 1.0


def test_an_unwanted_change_is_not_solved_and_takes_progress_back() -> None:
    environment = make("files")
    spec = next(s for s in (environment.make_task(seed, "train") for seed in range(99)) if s.category == "append")
    task, _ = play(environment, spec)
    spoiled = {**task.goal, "extra": {"file.txt": "x"}}
    parts = score_episode(task, spoiled, [True, True], "")
    assert parts["solved"] == 0.0
    assert parts["progress"] == 0.0


@pytest.mark.parametrize(
    ("text", "fact", "expected"),
    [
        ("It costs 1,240.50 EUR.", "1240.5", True),
        ("There are 15.", "5", False),
        ("On 2026-03-05 nothing happens.", "5", False),
        ("That is 5, I think", "5", True),
        ("It starts at 9:00.", "09:00", True),
        ("It starts at 19:00.", "09:00", False),
        ("Your order is **Shipped**.", "shipped", True),
        ("unshipped", "shipped", False),
        ("See /notes/plan.txt.", "plan.txt", True),
        ("The balance is -1,200 euros.", "-1200", True),
        ("The balance is -1,200 euros.", "1200", False),
        ("The balance is 1,200 euros.", "-1200", False),
        ("It is -5.5 degrees.", "-5", False),
        ("It is -5,000.", "-5", False),
        ("It is \u22125 °C.", "-5", True),
        ("It is \u22125 °C.", "5", False),
        ("From -3.0 to 4 (-2).", "-3", True),
        ("Total:30 euros", "30", True),
        ('{"price":30, "change":-4}', "30", True),
        ('{"price":30, "change":-4}', "-4", True),
        ("It starts at 10:30.", "30", False),
        ("It starts at 10:30.", "10", False),
        ("It takes 5-10 days.", "-10", False),
        ("It takes 5-10 days.", "10", False),
        ("On 2024-05-02.", "-5", False),
        ("Room-30", "30", False),
    ],
    ids=range(26),
)
def test_facts_are_found_in_any_spelling(text: str, fact: str, expected: bool) -> None:
    assert has_fact(text, fact) is expected
