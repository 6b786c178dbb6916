"""Rollouts of several turns: generated ids stay, the template's follow, and the world decides the reward."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.calls.formats.registry import detect_format
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call
from fctune.tasks.environments.host import EnvironmentHost, Limits
from fctune.tasks.environments.tasks import EnvironmentTasks
from fctune.tasks.episode import EpisodeLimits, make_seed
from fctune.tasks.recorded import RecordedTasks
from fctune.tasks.rollouts import Request, Rollout, RolloutSettings
from tests.conftest import ROOT, TINY_BASE
from tests.tasks.recorded_rows import make_row
from tests.tasks.token_engine import ScriptedEngine

LIMITS = EpisodeLimits(max_turns=8, max_new_tokens=200, max_tokens=3000)
FAULTY = ROOT / "tests" / "tasks" / "environments" / "faulty_environments.py"


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(TINY_BASE)


@pytest.fixture
def open_tasks(template: ChatTemplate) -> Iterator[Callable[..., EnvironmentTasks]]:
    opened: list[EnvironmentTasks] = []

    def make(*names: str, num_tasks: int = 6, limits: EpisodeLimits = LIMITS, **options: Any) -> EnvironmentTasks:
        hosts = [EnvironmentHost(name, Limits(call_s=1.0)) for name in names]
        tasks = EnvironmentTasks(hosts, "train", num_tasks, RolloutSettings(template, limits, **options))
        opened.append(tasks)
        return tasks

    yield make
    for tasks in opened:
        tasks.close()


def follow_reference(tasks: EnvironmentTasks, template: ChatTemplate) -> Callable[[str], str]:
    """Return a policy that makes the calls of each task's solution one by one, and then tells the facts."""
    call_format = detect_format(template.source)
    specs = {}
    for case_id in tasks.ids:
        name, _, seed = case_id.rsplit("/", 2)
        spec = tasks._hosts[name].make_task(int(seed), "train").spec
        specs[spec.question] = spec

    def answer(text: str) -> str:
        spec = next(spec for question, spec in specs.items() if question in text)
        num_made = text.partition(spec.question)[2].count("<|start_header_id|>tool")
        if num_made < len(spec.calls):
            return call_format.render([Call(*spec.calls[num_made])])
        return "Here it is: " + ", ".join(spec.facts)

    return answer


def play(tasks: Any, engine: Any, num_samples: int = 1) -> list[Rollout]:
    requests = [Request(case_id, sample, sample) for case_id in tasks.ids for sample in range(num_samples)]
    return sorted(tasks.play(engine, requests), key=lambda one: (tasks.ids.index(one.case_id), one.sample))


def test_the_solution_of_every_task_gets_the_full_reward_and_silence_none(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("files", "calendar", "shop")
    rollouts = play(tasks, ScriptedEngine(template, follow_reference(tasks, template)))
    assert len(rollouts) == 18
    for rollout in rollouts:
        assert rollout.error is None
        assert rollout.reward == pytest.approx(1.0), rollout.text
        assert rollout.version == 7
        assert rollout.category.partition(": ")[0] in ("files", "calendar", "shop")
    for rollout in play(tasks, ScriptedEngine(template, lambda text: "")):
        assert rollout.reward == 0.0
        assert not any(value for name, value in rollout.parts.items() if name != "random")


def test_the_control_rewards_dialogues_by_chance_and_alike_each_time(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("files", num_tasks=32, weights={"random": 1.0})
    first, again = ([r.reward for r in play(tasks, ScriptedEngine(template, lambda text: "Done."))] for _ in range(2))
    assert first == again
    assert set(first) == {0.0, 1.0}
    assert 6 <= sum(first) <= 26


def test_a_dialogue_is_as_old_as_its_oldest_turn(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("shop", num_tasks=1)
    follow, engine = follow_reference(tasks, template), ScriptedEngine(template, lambda text: "")

    def answer(text: str) -> str:
        engine.version += 1  # published during the dialogue
        return follow(text)

    engine._answer = answer
    (rollout,) = play(tasks, engine)
    assert engine.version > 8
    assert rollout.version == 8


def test_generated_ids_stay_and_the_rest_is_the_templates(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("shop", "files")
    engine = ScriptedEngine(template, follow_reference(tasks, template))
    for rollout in play(tasks, engine):
        ids, flags = list(rollout.ids), list(rollout.is_generated)
        assert [value != 0.0 for value in rollout.logprobs] == flags
        assert flags[-1], "a dialogue ends with an answer"
        # Every prompt of the engine was a prefix of the final ids.
        prompts = [prompt for prompt in engine.prompts if prompt[: len(rollout.prompt_ids)] == rollout.prompt_ids]
        full = (*rollout.prompt_ids, *rollout.ids)
        assert all(full[: len(prompt)] == prompt for prompt in prompts)
        # Between the turns stands what the template prints, as the tokenizer of transformers sees it.
        text = template.decode(full)
        again = template.tokenizer.encode(text, add_special_tokens=False)
        assert again == list(full), "scripted answers are spelled as the tokenizer would"
        stops = [
            i for i, (token, flag) in enumerate(zip(ids, flags, strict=True)) if flag and token in template.stop_ids
        ]
        assert len(stops) == len(prompts), "each turn's stop token is trained"


def test_unusual_spellings_are_kept_token_by_token(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("files", num_tasks=3)
    follow = follow_reference(tasks, template)
    # Two spaces that no template prints, in the call and after it.
    spaced = ScriptedEngine(template, lambda text: follow(text).replace(": {", ":  {") + "  ")
    for rollout in play(tasks, spaced):
        assert rollout.error is None
        assert rollout.parts["solved"] == 1.0
        generated = [token for token, flag in zip(rollout.ids, rollout.is_generated, strict=True) if flag]
        assert ":  {" in template.decode(generated)


@pytest.mark.parametrize("num_calls", [1, 3])
def test_turns_and_tokens_are_limited(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate, num_calls: int
) -> None:
    call = detect_format(template.source).render([Call("list_directory", {"path": "/"})] * num_calls)
    tasks = open_tasks("files", num_tasks=2, limits=replace(LIMITS, max_turns=3))
    for rollout in play(tasks, ScriptedEngine(template, lambda text: call)):
        assert rollout.text.count("[tool]") == 2 * num_calls, "after the last turn, results are not needed"
        assert not rollout.is_cut
        assert rollout.reward == 0.0
    prompt_len = len(rollout.prompt_ids)
    short = open_tasks("files", num_tasks=1, limits=replace(LIMITS, max_tokens=prompt_len + 90))
    (rollout,) = play(short, ScriptedEngine(template, lambda text: call))
    assert rollout.is_cut
    assert len(rollout.prompt_ids) + len(rollout.ids) <= prompt_len + 90
    (rollout,) = play(
        open_tasks("files", num_tasks=1, limits=replace(LIMITS, max_new_tokens=4)),
        ScriptedEngine(template, lambda text: call),
    )
    assert (len(rollout.ids), rollout.is_cut) == (4, True)
    (rollout,) = play(
        open_tasks("files", num_tasks=1, limits=replace(LIMITS, max_tokens=50)),
        ScriptedEngine(template, lambda text: call),
    )
    assert "leave no room" in str(rollout.error)


def test_refused_and_malformed_calls_cost_but_do_not_end_the_run(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("files", num_tasks=3)
    follow = follow_reference(tasks, template)
    wrong = detect_format(template.source).render([Call("delete", {"path": "/no/such/file"})])
    for rollout in play(
        tasks, ScriptedEngine(template, lambda text: follow(text) if "does not exist" in text else wrong)
    ):
        assert rollout.error is None
        assert rollout.parts["validity"] < 1.0
        assert "does not exist" in rollout.text
    for rollout in play(tasks, ScriptedEngine(template, lambda text: '<tool_call>\n{"name": "dele')):
        assert rollout.reward == 0.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Hangs", "no result within 1 s"), ("Exits", "exited with code 7"), ("Raises", "raised KeyError")],
    ids=["Hangs", "Exits", "Raises"],
)
def test_an_environment_that_fails_ends_its_own_dialogue(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate, name: str, reason: str
) -> None:
    tasks = open_tasks(f"{FAULTY}:{name}", num_tasks=4)
    render = detect_format(template.source).render

    def answer(text: str) -> str:
        count = int(re.findall(r"Count to (\d+)", text)[-1])
        if "value" in text.rpartition("Count to")[2]:
            return "Done."
        return render([Call("add", {"by": 13 if count == 2 else count})])

    rollouts = play(tasks, ScriptedEngine(template, answer))
    assert [rollout.error is None for rollout in rollouts] == [True, False, True, True]
    assert [rollout.reward for rollout in rollouts] == pytest.approx([1.0, 0.0, 1.0, 1.0])
    assert reason in str(rollouts[1].error)
    assert rollouts[1].ids == ()


def test_one_task_that_always_fails_does_not_end_the_run(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("shop", num_tasks=1, limits=replace(LIMITS, max_tokens=10))
    rollouts = play(tasks, ScriptedEngine(template, lambda text: ""), num_samples=32)
    assert len(rollouts) == 32
    assert all("leave no room within 10" in str(rollout.error) for rollout in rollouts)


def test_an_environment_that_always_fails_ends_the_run_in_a_sentence(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks(f"{FAULTY}:Raises", num_tasks=30)
    fail = detect_format(template.source).render([Call("add", {"by": 13})])
    with pytest.raises(
        ConfigError, match=r"all dialogues of 20 tasks in a row failed, the last one, .* raised KeyError"
    ):
        play(tasks, ScriptedEngine(template, lambda text: fail))


def test_errors_of_the_engine_are_errors_of_their_rollouts(
    open_tasks: Callable[..., EnvironmentTasks], template: ChatTemplate
) -> None:
    tasks = open_tasks("files", num_tasks=2)

    def fail(text: str) -> str:
        raise RuntimeError("server says no")

    rollouts = play(tasks, ScriptedEngine(template, fail))
    assert [(rollout.error, rollout.version) for rollout in rollouts] == [("server says no", 7)] * 2


def test_an_unknown_part_of_the_reward_is_named(open_tasks: Callable[..., EnvironmentTasks]) -> None:
    with pytest.raises(ConfigError, match=r"grpo.reward.solvd: no such part of this reward; did you mean solved\?"):
        open_tasks("files", weights={"solvd": 1.0})


def test_recorded_results_answer_the_calls_of_the_row_in_any_order(template: ChatTemplate) -> None:
    call_format = detect_format(template.source)
    tasks = RecordedTasks([make_row()], RolloutSettings(template, LIMITS, {"solved": 1.0, "progress": 0.0}))

    def answer(text: str) -> str:
        if "And my coat?" in text:
            return "There." if "cleaner" in text else call_format.render([Call("find", {"what": "coat"})])
        if "in the hall" in text:
            assert text.index("on the sofa") < text.index("in the hall"), "results follow the order of the calls"
            return "In the hall and on the sofa."
        return call_format.render([Call("find", {"what": "hat"}), Call("find", {"what": "keys"})])

    (rollout,) = play(tasks, ScriptedEngine(template, answer))
    assert rollout.error is None
    assert dict(rollout.parts).items() >= {"solved": 1.0, "progress": 1.0}.items()
    assert rollout.text.count("[tool]") == 3
    assert "[user] And my coat?" in rollout.text


def test_a_dialogue_with_recorded_results_ends_where_the_policy_leaves_the_row(template: ChatTemplate) -> None:
    call_format = detect_format(template.source)
    tasks = RecordedTasks([make_row()], RolloutSettings(template, LIMITS, {"progress": 1.0}))
    first = [Call("find", {"what": "keys"}), Call("find", {"what": "hat"})]

    def answer(text: str) -> str:
        return call_format.render([Call("find", {"what": "shoes"})] if "in the hall" in text else first)

    (rollout,) = play(tasks, ScriptedEngine(template, answer))
    assert dict(rollout.parts).items() >= {"solved": 0.0, "progress": 0.25}.items()
    assert rollout.reward == 0.25


def test_rows_without_recorded_results_give_no_tasks(template: ChatTemplate) -> None:
    row = make_row()
    rows = [replace(row, messages=row.messages[:2]), replace(row, tools=())]
    with pytest.raises(DataError, match="no row has tools and calls with recorded results"):
        RecordedTasks(rows, RolloutSettings(template, LIMITS))
    both = RecordedTasks([row, row, *rows], RolloutSettings(template, LIMITS))
    assert len(both.ids) == 1
    other = RecordedTasks([make_row("Else?")], RolloutSettings(template, LIMITS))
    assert both.digest() != other.digest()


def test_tasks_of_other_settings_have_another_digest(open_tasks: Callable[..., EnvironmentTasks]) -> None:
    digests = [
        open_tasks("files").digest(),
        open_tasks("shop").digest(),
        open_tasks("files", num_tasks=7).digest(),
        open_tasks("files", limits=replace(LIMITS, max_turns=2)).digest(),
        open_tasks("files", weights={"solved": 1.0}).digest(),
    ]
    assert len(set(digests)) == 5
    assert open_tasks("files").digest() == digests[0]


ROLLOUT = Rollout(
    *("case", 3, "no_call", 17, (1, 2), (5, 6, 7), (True, False, True), (-math.pi, 0.0, -1e-300)),
    is_cut=True,
    reward=1 / 3,
    parts={"strict": 0.1 + 0.2},
    text="a\ud800\n",
    judging_s=0.5,
)


def test_json_gives_back_an_equal_rollout() -> None:
    copy = Rollout.from_json(json.loads(json.dumps({"step": 4, **ROLLOUT.to_json()})))
    assert copy == ROLLOUT
    assert copy.logprobs == ROLLOUT.logprobs
    assert copy.judging_s == 0.5
    assert copy.num_generated == 2


def test_flags_and_logprobs_belong_to_ids() -> None:
    with pytest.raises(AssertionError, match="one flag"):
        Rollout("case", 0, "all", 0, (1,), (2, 3), (True,), (0.0, 0.0))


def test_seeds_of_neighbouring_samples_differ() -> None:
    seeds = {make_seed(42, case, sample, step) for case in "abc" for sample in range(8) for step in range(8)}
    assert len(seeds) == 3 * 8 * 8
    assert make_seed("a", 1) == make_seed("a", 1)
