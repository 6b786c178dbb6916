"""Multi-turn conversations: correct ones, wrong ones, and early ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.config.intervals import format_count
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation
from fctune.engines.engine import Answer, Prompt
from fctune.engines.server import ServerEngine, to_messages
from fctune.tasks.benchmarks import find_suite_files
from fctune.tasks.benchmarks.bfcl.cases import MULTI_TURN
from fctune.tasks.evaluation.results import ResultsFile, read_rows
from fctune.tasks.evaluation.run import run_suite
from fctune.tasks.evaluation.summary import summarise_run
from fctune.tasks.judge import judge_row
from fctune.tasks.suite import Suite
from fctune.tasks.suite_files import benchmark_of, load_suite
from fctune.tasks.task import MultiTurnCase
from tests.engines.fault_server import Handler, serve
from tests.tasks.benchmarks.bfcl.bfcl_wheel import SHARED_DIRECTORIES, data_dir, needs_wheel
from tests.tasks.benchmarks.bfcl.scripted_player import (
    BROKEN,
    HERMES,
    Player,
    gold,
    load_multi_turn_suite,
    place_of,
    run,
    sample,
    stray_plan,
)

pytestmark = needs_wheel


def assert_all_right(suite: Suite, rows: Sequence[dict[str, Any]]) -> None:
    assert [row["id"] for row in rows] == [case.id for case in suite.multi_turn]
    for row in rows:
        verdicts = (row["verdict"], row["lenient"]["verdict"])
        assert verdicts == ("correct",) * 2, (row["id"], row["differences"])
        assert row["bfcl"] == row["lenient"]["bfcl"] == {"valid": True, "reason": ""}
        assert row["calls"] == row["expected_calls"]
    summary = summarise_run(suite, rows, {})
    assert summary["num_cases"] == len(rows)
    assert summary["num_no_answer"] == 0
    assert {key: rate["rate"] for key, rate in summary["typed"].items()} == dict.fromkeys(summary["scores"], 1.0)
    for name in ("scores", "lenient"):
        assert {score["rates"]["argument_f1"]["rate"] for score in summary[name].values()} == {1.0}
        assert "all" not in summary[name]


def test_the_answers_replayed_are_right(tmp_path: Path) -> None:
    suite = sample()
    assert {case.category for case in suite.multi_turn} == set(MULTI_TURN)
    engine = Player(suite)
    assert_all_right(suite, run(suite, engine, tmp_path / "out.jsonl", num_at_once=6))
    # Conversations run concurrently, and the next begins when one has ended.
    assert engine.rounds[0] == 6
    assert sum(size == 6 for size in engine.rounds) > len(engine.rounds) / 2


@pytest.mark.slow
def test_all_800_answers_replayed_are_right(tmp_path: Path) -> None:
    suite = load_multi_turn_suite()
    assert len(suite.multi_turn) == 800
    assert_all_right(suite, run(suite, Player(suite), tmp_path / "out.jsonl"))


def test_a_held_out_function_is_offered_in_its_turn_with_the_benchmarks_sentence() -> None:
    cases = {case.id: case for case in load_multi_turn_suite().multi_turn}
    case = cases["multi_turn_miss_func_2"]  # holds out cp and cat until its fifth turn
    names = [[tool.name for tool in turn.tools] for turn in case.turns]
    assert not {"cp", "cat"} & {name for turn in names[:4] for name in turn}
    assert all(turn == [*names[0], "cp", "cat"] for turn in names[4:])
    (message,) = case.turns[4].messages
    assert message.content == "I have updated some more functions you can choose from. What about now?"
    assert sum(len(case.turns[0].tools) < len(case.turns[-1].tools) for case in cases.values()) == 200


def test_an_omitted_call_is_wrong_and_the_turn_is_named(tmp_path: Path) -> None:
    suite = sample(40, ["multi_turn_base", "multi_turn_miss_param"])

    def forgetful(case: MultiTurnCase, turn: int, step: int) -> list[Call]:
        last = max(place for place, calls in enumerate(case.expected) if calls)
        calls = gold(case, turn, step)
        return calls[:-1] if turn == last and 2 * step + 2 >= len(case.expected[turn]) else calls

    rows = run(suite, Player(suite, forgetful), tmp_path / "out.jsonl")
    for case, row in zip(suite.multi_turn, rows, strict=True):
        last = max(place for place, calls in enumerate(case.expected) if calls)
        due = len(case.expected[last])
        if row["bfcl"]["valid"]:  # the same result was had before
            continue
        assert row["verdict"] == row["lenient"]["verdict"] == ("missed_call" if due == 1 else "wrong_count")
        assert row["bfcl"]["reason"].startswith(f"turn {last + 1}: ")
        assert f"turn {last + 1}: {case.expected[last][-1].name}: not called" in row["differences"]
    assert sum(not row["bfcl"]["valid"] for row in rows) >= len(rows) - 1
    rates = summarise_run(suite, rows, {})["scores"]["multi_turn_base"]["rates"]
    assert 0.5 < rates["tool_recall"]["rate"] < 1
    assert rates["tool_precision"]["rate"] == 1


def test_calls_without_end_are_stopped_and_the_reason_is_kept(tmp_path: Path) -> None:
    suite = sample(66, ["multi_turn_base"])

    def endless(case: MultiTurnCase, turn: int, step: int) -> list[Call]:
        return gold(case, turn, step) or [case.expected[0][0]]

    engine = Player(suite, endless)
    rows = run(suite, engine, tmp_path / "out.jsonl")
    assert {len(case.turns) > 1 for case in suite.multi_turn} == {True, False}
    for case, row in zip(suite.multi_turn, rows, strict=True):
        assert row["stopped"] == row["differences"][0] == "turn 1, step 21: still calling after 20 steps"
        assert [len(turn) for turn in row["turns"]] == [21]
        assert row["verdict"] == row["lenient"]["verdict"] == "wrong_count"
        # The benchmark judges a conversation that it stops in the last turn like any other.
        assert row["bfcl"]["valid"] == (len(case.turns) == 1)
        if len(case.turns) > 1:
            assert row["bfcl"]["reason"] == f"1 turn instead of {len(case.turns)}"


def test_a_malformed_call_ends_its_turn_and_is_never_right(tmp_path: Path) -> None:
    """Also where the benchmark, which sees no call in it, has nothing against it."""
    suite = sample(40)

    def sloppy(case: MultiTurnCase, turn: int, step: int) -> list[Call] | str:
        return gold(case, turn, step) or BROKEN

    for row in run(suite, Player(suite, sloppy), tmp_path / "out.jsonl"):
        assert row["verdict"] == row["lenient"]["verdict"] == "malformed"
        assert row["bfcl"]["valid"]
        assert any(line.startswith("turn 1: malformed at ") for line in row["differences"])


def test_of_an_answer_with_a_malformed_call_none_is_made(tmp_path: Path) -> None:
    suite = sample(100)

    def half(case: MultiTurnCase, turn: int, step: int) -> str:
        return HERMES.render(gold(case, turn, step)) + BROKEN

    for row in run(suite, Player(suite, half), tmp_path / "out.jsonl"):
        assert [len(turn) for turn in row["turns"]] == [1] * len(row["turns"])
        assert "tool" not in {message["role"] for message in row["messages"]}
        assert (row["verdict"], row["bfcl"]["valid"]) == ("malformed", False)


def test_calls_that_only_servers_read_are_made_and_not_right_strictly(tmp_path: Path) -> None:
    suite = sample(100)

    def loose(case: MultiTurnCase, turn: int, step: int) -> list[Call] | str:
        return HERMES.render(gold(case, turn, step)).replace('"arguments"', '"parameters"') or "Done."

    for row in run(suite, Player(suite, loose), tmp_path / "out.jsonl"):
        assert (row["verdict"], row["lenient"]["verdict"]) == ("malformed", "correct")
        assert row["lenient"]["calls"] == row["expected_calls"]
        assert row["calls"] == []


def test_a_stopped_run_resumes_with_the_same_results(tmp_path: Path) -> None:
    suite = sample()
    complete = run(suite, Player(suite), tmp_path / "complete.jsonl", num_at_once=4)
    path = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(suite, Player(suite, dies_after=60), path, num_at_once=4)
    kept = {row["id"] for row in read_rows(path)}
    assert 0 < len(kept) < len(complete)
    again = Player(suite)
    assert run(suite, again, path, num_at_once=4) == complete
    assert not kept & {prompt.source.split()[-1] for prompt in again.prompts}


class Narrow(Player):
    """Accepts prompts up to a number of characters, as a model with that many positions; raises if it accepts none."""

    limit = 0

    def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        limit, asked = prompts[0].max_new_tokens, [prompt.conversation for prompt in prompts]
        reason = f"99 prompt tokens and {limit} for the answer exceed the model's 98 positions; lower it"
        fits = [len(json.dumps(prompt.to_openai())) <= self.limit for prompt in asked]
        if not any(fits):
            raise DataError(f"model: none of {len(asked)} prompts can be answered\n  {asked[0].source}: {reason}")
        for index, prompt in enumerate(asked):
            yield self.say(index, prompt) if fits[index] else Answer(index, error=reason)


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_a_conversation_that_outgrows_the_context_is_wrong_with_that_reason(tmp_path: Path, num_at_once: int) -> None:
    suite = sample(66, ["multi_turn_base"])
    sizes = [sum(len(json.dumps(tool.to_openai())) for tool in case.turns[0].tools) for case in suite.multi_turn]
    engine = Narrow(suite)
    engine.limit = max(sizes) + 800
    path = tmp_path / "out.jsonl"
    rows = run(suite, engine, path, num_at_once=num_at_once)
    grown = [row for row in rows if "stopped" in row]
    assert grown
    for row in grown:
        assert row["verdict"] == row["lenient"]["verdict"] == "no_answer"
        assert "outgrew the model's context" in row["differences"][0] == row["stopped"]
        assert not row["bfcl"]["valid"]
        assert "error" not in row
    assert sum(row["verdict"] == "correct" for row in rows) + len(grown) == len(rows)
    summary = summarise_run(suite, rows, {})
    assert summary["scores"]["multi_turn_base"]["n"] == len(rows)
    assert summary["num_no_answer"] == 0
    # It is final: nothing is queried again.
    again = Player(suite)
    assert run(suite, again, path) == rows
    assert not again.prompts


def test_conversations_that_outgrow_it_all_at_once_end_once_each(tmp_path: Path) -> None:
    class Shrinking(Narrow):
        @property
        def limit(self) -> int:  # type: ignore[override]
            return 10**9 if len(self.rounds) < 2 else 0

        def answer(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
            self.rounds += [len(prompts)] if len(prompts) > 1 else []
            return super().answer(prompts)

    suite, seen = sample(66, ["multi_turn_base"]), []
    run(
        suite, Shrinking(suite), tmp_path / "out.jsonl", on_row=lambda row, *_: seen.append((row["id"], row["stopped"]))
    )
    assert sorted(case for case, _ in seen) == sorted(case.id for case in suite.multi_turn)
    assert {stopped[:15] for _, stopped in seen} == {"turn 1, step 2:"}


def test_one_that_outgrows_it_after_its_last_call_has_no_answer_either(tmp_path: Path) -> None:
    class Full(Player):
        def say(self, index: int, prompt: Conversation) -> Answer:
            case, (turn, step) = self.cases[prompt.source.split()[-1]], place_of(prompt)
            is_full = turn == len(case.turns) - 1 and step > 0 and not gold(case, turn, step)
            error = "HTTP 400: This model's maximum context length is 4096 tokens."
            return Answer(index, error=error) if is_full else super().say(index, prompt)

    suite = sample(100)
    for row in run(suite, Full(suite), tmp_path / "out.jsonl"):
        num_turns = len(row["turns"])
        assert row["stopped"].startswith(f"turn {num_turns + 1}, step ")
        assert "outgrew the model's context (HTTP 400: This" in row["stopped"]
        assert row["verdict"] == row["lenient"]["verdict"] == "no_answer"
        assert row["bfcl"]["reason"] == f"{format_count(num_turns, 'turn')} instead of {num_turns + 1}"
        assert row["calls"] == row["expected_calls"]


def test_a_model_that_accepts_no_prompt_is_reported(tmp_path: Path) -> None:
    suite = sample(66, ["multi_turn_base"])
    with pytest.raises(DataError, match="none of 4 prompts can be answered"):
        run(suite, Narrow(suite), tmp_path / "out.jsonl")


def test_a_template_that_takes_one_call_an_answer_is_given_them_one_by_one(tmp_path: Path) -> None:
    class Single(Player):
        num_refused = 0

        def say(self, index: int, prompt: Conversation) -> Answer:
            if any(len(message.calls) > 1 for message in prompt.messages):
                self.num_refused += 1
                return Answer(index, error="the chat template refuses it: only single tool-calls at once")
            return super().say(index, prompt)

    suite = sample(100)

    def all_at_once(case: MultiTurnCase, turn: int, step: int) -> list[Call]:
        return list(case.expected[turn]) if step == 0 else []

    engine = Single(suite, all_at_once)
    rows = run(suite, engine, tmp_path / "out.jsonl")
    assert_all_right(suite, rows)
    assert engine.num_refused
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles.count("tool") == len(row["calls"])


def test_an_answer_that_never_came_is_asked_for_again(tmp_path: Path) -> None:
    class Lossy(Player):
        def say(self, index: int, prompt: Conversation) -> Answer:
            is_lost = place_of(prompt) == (1, 0) and prompt.source.endswith("_0")
            return Answer(index, error="no answer within 120 s") if is_lost else super().say(index, prompt)

    suite, path = sample(100), tmp_path / "out.jsonl"
    rows = run(suite, Lossy(suite), path)
    lost = [row for row in rows if row.get("error")]
    assert lost
    assert {row["error"] for row in lost} == {"turn 2, step 1: no answer within 120 s"}
    assert {row["verdict"] for row in lost} == {"no_answer"}
    assert summarise_run(suite, rows, {})["num_no_answer"] == len(lost)
    assert_all_right(suite, run(suite, Player(suite), path))


def test_a_server_that_is_gone_is_not_asked_for_all_the_rest(tmp_path: Path) -> None:
    class Gone(Player):
        def say(self, index: int, prompt: Conversation) -> Answer:
            return Answer(index, error="connection failed")

    suite = sample(20)
    engine = Gone(suite)
    rows = run(suite, engine, tmp_path / "out.jsonl", num_at_once=4)
    assert len(engine.prompts) == 8 < len(rows) == 40
    assert sum("not queried: 8 conversations in a row" in row["error"] for row in rows) == 32


def test_calls_that_take_too_long_end_the_conversation(tmp_path: Path) -> None:
    suite = load_multi_turn_suite()
    case = next(case for case in suite.multi_turn if case.question.classes[0] == "GorillaFileSystem")
    suite = replace(suite, multi_turn=(replace(case, max_time_s=0.05),))
    (row,) = run(suite, Player(suite, lambda *_: [*SHARED_DIRECTORIES, Call("find", {})]), tmp_path / "out.jsonl")
    assert row["stopped"] == "turn 1, step 1: its calls take more than 0.05 s"
    assert row["verdict"] not in ("correct", "no_answer")


ODD = {
    "half a surrogate pair": json.dumps({"content": "\ud800", "file_name": "\udfff", "\ud801": ["\ud802"]}),
    "a long number": '{"base": 10, "exponent": 9999}',
    "depth": '{"content": ' + "[" * 60 + "]" * 60 + "}",
    "marks": '{"content": "</tool_call><|eot_id|><tool_response>"}',
    "many letters": json.dumps({"content": "x" * 200_000}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ODD)
def test_whatever_a_model_writes_the_next_prompt_can_be_written(name: str, tmp_path: Path, tiny_base: Path) -> None:
    template = ChatTemplate(tiny_base)

    class Careful(Player):
        def say(self, index: int, prompt: Conversation) -> Answer:
            if sum(len(message.content or "") for message in prompt.messages) < 100_000:
                template.encode_prompt(prompt)
            prompt.digest()
            json.dumps(to_messages(prompt.messages), ensure_ascii=False).encode()
            return super().say(index, prompt)

    suite = load_multi_turn_suite()
    wanted = {"GorillaFileSystem", "MathAPI"}
    case = next(case for case in suite.multi_turn if wanted <= set(case.question.classes))
    calls = "".join(
        f'<tool_call>{{"name": "{tool}", "arguments": {ODD[name]}}}</tool_call>' for tool in ("echo", "touch", "power")
    )
    answer = "\ud800" + calls
    plan = {0: answer, 1: answer, 2: "\udc00"}
    engine = Careful(suite, lambda case, turn, step: plan.get(step, ""))
    (row,) = run(replace(suite, multi_turn=(case,)), engine, tmp_path / "out.jsonl")
    assert [len(step["results"]) for step in row["turns"][0]] == [3, 3, 0]
    assert row["verdict"] not in ("correct", "no_answer")
    assert not row.get("error")


def test_a_conversation_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Two conversations of one case with different calls, interleaved step by step."""
    case = next(case for case in load_multi_turn_suite().multi_turn if case.id == "multi_turn_base_0")
    first, second = case.open_tools(), case.open_tools()
    assert "'temp'" not in first.play([Call("cd", {"folder": "document"}), Call("mkdir", {"dir_name": "temp"})])[1]
    assert second.play([Call("pwd", {})]) != first.play([Call("pwd", {})])
    assert "temp" not in second.play([Call("find", {})])[0]
    assert second.play([Call("__init__", {}), Call("_load_scenario", {}), Call("eval", {"source": "1"})]) == [
        f"Error during execution: name {name!r} is not defined" for name in ("__init__", "_load_scenario", "eval")
    ]


def test_a_server_is_queried_turn_by_turn_and_its_own_calls_are_made(tmp_path: Path) -> None:
    suite = sample(50, ["multi_turn_miss_func"])
    by_question = {case.turns[0].messages[0].content: case for case in suite.multi_turn}
    assert len(by_question) == len(suite.multi_turn)

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        questions = [message["content"] for message in body["messages"] if message["role"] == "user"]
        roles = [message["role"] for message in body["messages"]]
        last = len(roles) - 1 - roles[::-1].index("user")
        calls = gold(by_question[questions[0]], len(questions) - 1, roles[last:].count("assistant"))
        functions = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in calls]
        sent = [{"id": f"x{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
        handler.say(None if calls else "Done.", **({"tool_calls": sent} if calls else {}))

    with serve(behave) as log:
        engine = ServerEngine(log.url, concurrency=4)
        rows = run_suite(suite, engine, None, ResultsFile(tmp_path / "out.jsonl"), num_at_once=16)
    assert rows is not None
    assert_all_right(suite, rows)
    assert all(row["seconds"] > 0 for row in rows)
    results = [m for body in log.bodies for m in body["messages"] if m["role"] == "tool"]
    assert results
    assert all(len(message["tool_call_id"]) == 9 for message in results)


@pytest.mark.parametrize(
    ("status", "message", "is_final"),
    [
        (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens", True),
        (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens).", True),
        (400, "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it", True),
        (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096", True),
        (400, "something else is wrong with it", False),
    ],
)
def test_a_servers_error_about_an_overlong_prompt_ends_the_case(
    status: int, message: str, is_final: bool, tmp_path: Path
) -> None:
    suite = sample(400, ["multi_turn_base"])
    (case,) = suite.multi_turn

    def behave(handler: Handler, number: int, body: dict[str, Any]) -> None:
        if number < 2:
            handler.say(HERMES.render(gold(case, 0, number)) or "Done.")
        else:
            handler.send(status, json.dumps({"error": {"message": message}}))

    with serve(behave) as log:
        (row,) = run(suite, ServerEngine(log.url, concurrency=1), tmp_path / "out.jsonl")
    assert row["verdict"] == "no_answer"
    assert ("stopped" in row, "error" in row) == (is_final, not is_final)
    assert message[:40] in (row["stopped"] if is_final else row["error"])


def test_the_verdicts_of_the_results_are_those_of_the_summary(tmp_path: Path) -> None:
    suite = sample(13)
    rows = run(suite, Player(suite, stray_plan), tmp_path / "out.jsonl")
    cases = {case.id: case for case in suite.multi_turn}
    for row in rows:
        judgement, _ = judge_row(cases[row["id"]], row)
        assert (judgement.outcome.verdict, list(judgement.differences)) == (row["verdict"], row["differences"])
        assert judgement.benchmark is not None
        assert judgement.benchmark.to_plain() == row["bfcl"]
    summary = summarise_run(suite, rows[1:], {})
    assert sum(score["n"] for score in summary["scores"].values()) == len(rows) == summary["num_cases"]
    right = sum(row["verdict"] == "correct" for row in rows[1:])
    assert sum(score["verdicts"]["correct"] for score in summary["scores"].values()) == right > 0
    assert summary["num_no_answer"] == 1


def test_without_the_wheel_the_categories_are_not_run(without_wheel: None) -> None:
    path = find_suite_files()["bfcl"]
    suite = load_suite(path, categories=["multi_turn"], options={"bfcl_data": str(data_dir())}, has_multi_turn=True)
    assert suite.all_cases == []
    assert suite.not_run.keys() == set(MULTI_TURN)
    assert all("need the wheel bfcl-eval" in reason for reason in suite.not_run.values())


def test_they_are_a_benchmark_and_are_selected_like_other_categories() -> None:
    suite = load_multi_turn_suite()
    assert not suite.not_run
    assert benchmark_of(suite) == benchmark_of(replace(suite, benchmark=None)) == "BFCL v4"
    assert [case.id for case in suite.select(["multi_turn_miss_func"], limit=2).multi_turn] == [
        "multi_turn_miss_func_0",
        "multi_turn_miss_func_1",
    ]
    with pytest.raises(ConfigError, match="it has multi_turn_base"):
        suite.select(["multi_turn"])
    digests = {suite.digest(), suite.select(limit=2).digest(), suite.select(["multi_turn_base"]).digest()}
    assert len(digests) == 3


def test_where_answers_are_read_one_by_one_they_are_left_out() -> None:
    suite = load_suite(find_suite_files()["bfcl"], categories=["multi_turn_base", "parallel"])
    assert not suite.multi_turn
    assert set(suite.not_run) == {"multi_turn_base"}
