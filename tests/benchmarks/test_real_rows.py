"""Rows and cases of the real-model benchmark: nothing held out is trained on, and calls fit their tools."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_arguments import check_inputs, make_parser, parse_mixture
from benchmarks.real_dialogues import make_dialogue
from benchmarks.real_options import add_options, make_list
from benchmarks.real_quantities import describe_quantities, describe_unfit_quantities
from benchmarks.real_requests import multiply_question, rename_tools, revalue_question, take_tools_away
from benchmarks.real_rows import BenchmarkFilter, Mixture, check_contamination, mix_rows, split_by_tools, write_rows
from benchmarks.real_summary import format_pairs, format_table, read_answers, summarise, summarise_pairs
from fctune.base.errors import ConfigError, DataError
from fctune.config.loading import load_config
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.tool_schema import ToolSet
from fctune.tasks.task import Case
from tests.conftest import TINY_BASE

PLACES = ("Paris", "Rome", "Oslo", "Lima")


def make_tool(number: int) -> Tool:
    """Return a tool with a name of its own, whose descriptions give examples as Seal-Tools' do."""
    subject = "".join(chr(97 + int(digit)) * 3 for digit in f"{number:03}")
    properties = {
        "city": {"type": "string", "description": f"The city (e.g., {', '.join(PLACES)})"},
        "days": {"type": "integer", "description": "Number of days (e.g., 3, 7, 14)"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    name = f"get{subject.capitalize()}"
    return Tool(
        {"name": name, "description": f"Find {subject}k {subject}l {subject}m {subject}n", "parameters": parameters}
    )


def make_row(numbers: list[int]) -> Conversation:
    """Return a question that calls the tools with these numbers, among one other."""
    tools = [make_tool(number) for number in numbers]
    calls = tuple(Call(tool.name, {"city": "Paris"}) for tool in tools)
    asked = " and ".join(f"the {tool.name[3:6].lower()}-{number}" for tool, number in zip(tools, numbers, strict=True))
    question = f"Show me {asked} report for Paris in this week please."
    other = make_tool(999 - numbers[0])
    return Conversation((Message("user", question), Message("assistant", calls=calls)), (*tools, other))


def make_pool(rows: list[Conversation]) -> ToolPool:
    pool = ToolPool()
    for row in rows:
        pool.add(row)
    return pool


@pytest.fixture
def rows() -> list[Conversation]:
    return [make_row([n] if n % 3 else [n, n + 1]) for n in range(80)]


MADE_KINDS = [field.name for field in dataclasses.fields(Mixture) if field.name not in ("seed", "renamed_share")]
SMALL = Mixture(
    natural=20,
    seal_copies=1,
    glaive=5,
    no_call=20,
    twins=10,
    described=20,
    parallel=20,
    listed=15,
    joined=5,
    quantities=15,
    dialogues=15,
    synthetic=0,
)


def test_no_training_row_offers_or_calls_a_tool_that_a_held_out_case_calls(rows: list[Conversation]) -> None:
    split = split_by_tools(rows, 10, 20)
    held = {call.name for row in (*split.validation, *split.test) for call in row.messages[-1].calls}
    made = mix_rows(split.train, [], SMALL, lambda row: True)
    plain = {re.sub(r"[^a-z]", "", tool.name.lower()) for row in made for tool in row.tools}
    assert made
    assert len(split.test) == 20
    assert not plain & {name.lower() for name in held}


def test_every_call_of_a_made_row_fits_the_schema_of_a_tool_on_offer(rows: list[Conversation]) -> None:
    made = mix_rows(rows, [], SMALL, lambda row: True)
    calls = [(row, call) for row in made for message in row.messages for call in message.calls]
    assert len(calls) > 100
    for row, call in calls:
        assert call.name in {tool.name for tool in row.tools}
        assert not ToolSet(row.tools).find_errors(call), (call, row.tools)


def test_a_row_without_its_tools_calls_nothing_and_offers_none_of_them(rows: list[Conversation]) -> None:
    pool, rng = make_pool(rows), random.Random(5)
    answers = set()
    for row in rows:
        made = take_tools_away(row, pool, rng)
        answers.add(made.messages[-1].content)
        called = {call.name for call in row.messages[-1].calls}
        assert made.tools
        assert not called & {tool.name for tool in made.tools}
        assert not any(message.calls for message in made.messages)
    assert len(answers) > len(rows) / 2


def test_a_near_miss_offers_what_its_row_offers_except_the_tools_that_can_do_it(rows: list[Conversation]) -> None:
    like_the_called = make_tool(0)
    search = Tool({**like_the_called.function, "name": "search_again"})
    rows = [replace(rows[0], tools=(*rows[0].tools, search)), *rows[1:]]
    rows.append(replace(alone := make_row([500]), tools=alone.tools[:1]))
    only_near = Mixture(**dict.fromkeys(MADE_KINDS, 0) | {"public": len(rows), "near_misses": len(rows)})
    made = mix_rows([], [], only_near, lambda row: True, public=rows)
    by_question: dict[str, list[Conversation]] = {}
    for row in made:
        by_question.setdefault(row.messages[0].content or "", []).append(row)
    refused = [row for row in made if not row.messages[-1].calls]
    assert len(refused) == len(rows) - 1  # the last offers nothing else
    for row in refused:
        twin = next(one for one in by_question[row.messages[0].content or ""] if one.messages[-1].calls)
        called = {call.name for call in twin.messages[-1].calls}
        assert {tool.name for tool in row.tools} == {tool.name for tool in twin.tools} - called - {"search_again"}


def test_each_question_without_a_call_has_a_twin_that_calls_one_of_the_same_tools(rows: list[Conversation]) -> None:
    only_twins = Mixture(**dict.fromkeys(MADE_KINDS, 0) | {"twins": 40})
    made = mix_rows(rows, [], dataclasses.replace(only_twins, renamed_share=0.5), lambda row: True)
    by_tools: dict[str, list[Conversation]] = {}
    for row in made:
        by_tools.setdefault("".join(tool.to_json() for tool in row.tools), []).append(row)
    assert len(made) == 80
    assert sum(len(row.messages[-1].calls) for row in made) == 40
    for group in by_tools.values():
        assert 2 * sum(bool(row.messages[-1].calls) for row in group) == len(group)
        names = {tool.name for tool in group[0].tools}
        assert {call.name for row in group for call in row.messages[-1].calls} <= names


def test_several_values_are_several_calls_or_one_with_a_list_as_the_schema_says(rows: list[Conversation]) -> None:
    rng, pool = random.Random(3), make_pool(rows)
    parallel = multiply_question(rows[1], pool, rng)
    assert parallel is not None
    assert len(parallel.messages[-1].calls) > 1
    cities = [call.arguments["city"] for call in parallel.messages[-1].calls]
    assert all(city in (parallel.messages[0].content or "") for city in cities)
    listed = make_list(parallel, rng)
    assert listed is not None
    assert listed.messages[0] == parallel.messages[0]
    (call,) = listed.messages[-1].calls
    assert list(call.arguments.values()) == [cities]
    assert not ToolSet(listed.tools).find_errors(call)


def test_options_are_arguments_only_where_the_question_asks_for_them(rows: list[Conversation]) -> None:
    asked = 0
    for seed in range(60):
        changed = add_options(rows[1], random.Random(seed))
        (call,) = changed.messages[-1].calls
        extra = call.arguments.keys() - {"city"}
        asked += bool(extra)
        assert bool(extra) == (len(changed.messages[0].content or "") > len(rows[1].messages[0].content or ""))
        assert not ToolSet(changed.tools).find_errors(call)
    assert 10 < asked < 60


def test_a_renamed_tool_is_called_by_its_new_name(rows: list[Conversation]) -> None:
    renamed = rename_tools(rows[0], 1.0, random.Random(0))
    assert {tool.name for tool in renamed.tools}.isdisjoint(tool.name for tool in rows[0].tools)
    assert {call.name for call in renamed.messages[-1].calls} <= {tool.name for tool in renamed.tools}


@pytest.mark.parametrize("num_calls", [1, 2, 4])
def test_invented_calculations_have_every_number_of_the_request_and_different_calls(num_calls: int) -> None:
    rng = random.Random(7)
    for _ in range(150):
        made = describe_quantities(rng, num_calls)
        calls, question = made.messages[-1].calls, made.messages[0].content or ""
        assert len({json.dumps(call.arguments) for call in calls}) == num_calls
        for call in calls:
            assert not ToolSet(made.tools).find_errors(call), (call, made.tools)
            for value in call.arguments.values():
                for number in value if isinstance(value, list) else [value]:
                    if isinstance(number, bool | str):
                        continue
                    said = [number, f"{number:,}", round(number * 100, 1), round(number / 1e6, 1)]
                    texts = {str(int(one)) if float(one).is_integer() else str(one) for one in map(_to_number, said)}
                    assert any(text in question.replace(",", "") for text in texts), (question, number)


def test_a_calculation_that_no_tool_does_has_tools_for_other_calculations() -> None:
    rng = random.Random(3)
    for _ in range(100):
        made = describe_unfit_quantities(rng)
        question = (made.messages[0].content or "").lower()
        assert made.tools
        assert not made.messages[-1].calls
        for tool in made.tools:
            measure = tool.function["description"].partition(" the ")[2].partition(" of a ")[0]
            assert measure not in question, (question, measure)


def test_a_dialogue_asks_again_about_its_tools_and_each_call_has_its_result(rows: list[Conversation]) -> None:
    pool, rng = make_pool(rows), random.Random(4)
    singles = [row for row in rows if len(row.messages[-1].calls) == 1]
    num_asked, num_unfit, num_calls, num_joined = 0, 0, 0, 0
    for _ in range(100):
        made = make_dialogue(pool, singles, rng)
        messages = made.messages
        tools = ToolSet(made.tools)
        assert 3 <= sum(message.role == "user" for message in messages) <= 5
        assert messages[-1].role == "assistant"
        for at, message in enumerate(messages):
            if message.role == "user":
                num_asked += 1
                num_unfit += not messages[at + 1].calls
                assert bool(messages[at + 1].calls) is not bool(messages[at + 1].content)
            if not message.calls:
                continue
            num_calls += 1
            num_joined += len({call.name for call in message.calls}) > 1
            assert not any(tools.find_errors(call) for call in message.calls)
            if at + 1 == len(messages):
                continue
            end = at + 1 + len(message.calls)
            results = [json.loads(one.content or "") for one in messages[at + 1 : end]]
            assert all(one.role == "tool" for one in messages[at + 1 : end])
            assert messages[end].role == "assistant"
            for result in results:
                assert str(result.get("result", "Done.")) in (messages[end].content or "")
            assert messages[end + 1].role == "user"
    assert num_unfit + num_calls == num_asked
    assert 0.05 < num_unfit / num_asked < 0.3
    assert 0.1 < num_joined / num_asked < 0.35


def _to_number(said: Any) -> float:
    return float(str(said).replace(",", ""))


def test_only_whole_values_of_a_question_are_replaced(rows: list[Conversation]) -> None:
    tool = make_tool(1)
    seen = set()
    for seed in range(30):
        call = Call(tool.name, {"city": "Paris", "days": 3})
        question = "Paris, 13 stops, 3.5 km and 3 days, no Parisian food"
        row = Conversation((Message("user", question), Message("assistant", calls=(call,))), (tool,))
        made = revalue_question(row, make_pool([row]), random.Random(seed))
        (changed,) = made.messages[-1].calls
        city, days = changed.arguments["city"], changed.arguments["days"]
        assert made.messages[0].content == f"{city}, 13 stops, 3.5 km and {days} days, no Parisian food"
        seen.add((city, days))
    assert len(seen) > 3


@pytest.fixture
def benchmark(tmp_path: Path) -> tuple[Path, list[Case]]:
    """Return a file of one question, and its case with one tool."""
    question = "Please compute the greatest common divisor of the numbers 12 and 18 for me."
    path = tmp_path / "BFCL_v4_simple.json"
    path.write_text(json.dumps({"id": "simple_1", "question": [[{"role": "user", "content": question}]]}) + "\n")
    tool = Tool({"name": "math.gcd_of", "description": "", "parameters": {"type": "object", "properties": {}}})
    return path, [Case("simple_1", "simple", Conversation((Message("user", question),), (tool,)), ())]


@pytest.mark.parametrize("kind", ["question", "tool"])
def test_a_planted_question_or_tool_of_the_benchmark_is_found(
    kind: str, benchmark: tuple[Path, list[Case]], rows: list[Conversation], tmp_path: Path
) -> None:
    path, cases = benchmark
    planted = {
        "question": Conversation((*cases[0].prompt.messages, Message("assistant", "6")), rows[0].tools),
        "tool": Conversation(rows[0].messages, (*rows[0].tools, Tool({"name": "mathGcdOf", "parameters": {}}))),
    }[kind]
    for bad, row in ((False, rows[0]), (True, planted)):
        file = tmp_path / f"{bad}.jsonl"
        write_rows(file, [row.to_openai()])
        found = check_contamination(file, [path], cases)
        assert bool(found.num_found_questions or found.found_tools) is bad
        assert BenchmarkFilter([path], cases).allows(row) is not bad


def test_the_table_gives_rates_of_both_readings_and_the_paired_difference() -> None:
    def row(number: int, is_right: bool) -> dict[str, Any]:
        verdict = "correct" if is_right else "missed_call"
        return {"id": f"c{number}", "category": "c", "verdict": verdict, "lenient": {"verdict": "correct"}}

    summary = summarise([row(n, False) for n in range(10)], [row(n, n < 8) for n in range(10)])
    table = format_table(summary)
    assert summary["c"]["difference"][0] == pytest.approx(0.8)
    assert summary["c"]["p"] == pytest.approx(2 / 2**8)
    assert "| c | 10 | 0.0% (0.0% - 27.8%) | 80.0% (49.0% - 94.3%) | 100.0% |" in table


def make_answer(case_id: str, verdict: str, lenient: str | None = None) -> dict[str, Any]:
    """Return a row of results of the category that the id names."""
    row = {"id": case_id, "category": case_id.rpartition("-")[0], "verdict": verdict}
    return {**row, "expected_calls": [], "lenient": {"verdict": lenient or verdict}}


def test_a_model_is_compared_with_the_better_way_to_ask_its_base_in_each_category() -> None:
    def answer(rights: dict[str, int]) -> list[dict[str, Any]]:
        return [
            make_answer(f"{name}-{n}", "correct" if n < right else "missed_call")
            for name, right in rights.items()
            for n in range(10)
        ]

    before, prompted, after = (
        answer({"a": 2, "b": 7, "c": 1}),
        answer({"a": 5, "b": 7}),
        answer({"a": 9, "b": 9, "c": 9}),
    )
    for row in prompted:  # the prompt of the leaderboard keeps dots in names
        row["expected_calls"] = ["spelled otherwise"]
    summary = summarise(before, after, prompted)
    assert {name: round(one["difference"][0], 3) for name, one in summary.items()} == {"a": 0.4, "b": 0.2, "c": 0.8}
    assert [one.get("compared_with") for one in summary.values()] == ["before_prompt", "before", None]
    assert "| a | 10 | 20.0% (5.7% - 51.0%) | 20.0% | 50.0% (23.7% - 76.3%) | 50.0% | 90.0%" in format_table(summary)
    with pytest.raises(DataError, match="a: the answers before and after are to different cases"):
        summarise(before, after, prompted[1:])


def test_refusals_and_calls_of_pairs_are_counted_by_what_was_meant() -> None:
    fitting = [("correct", "correct"), ("missed_call", "correct"), ("missed_call", "missed_call"), ("wrong_name",) * 2]
    unfit = [("correct", "correct"), ("correct", "false_call"), ("correct", "correct"), ("malformed", "malformed")]
    rows = [make_answer(f"set-{n}", *verdicts) for n, verdicts in enumerate(fitting)]
    rows += [make_answer(f"set_no_call-{n}", *verdicts) for n, verdicts in enumerate(unfit)]
    pairs = summarise_pairs([*rows, make_answer("other-0", "missed_call")])
    assert {key: one if key == "n" else one["successes"] for key, one in pairs["set"].items()} == {
        "n": 4,
        "refused": 1,
        "called": 2,
        "both_right": 1,
    }
    assert "| set | after | 4 | 25.0% (4.6% - 69.9%) | 50.0% " in format_pairs({"after": pairs})
    assert not format_pairs({"after": {}})


def test_only_the_answers_of_the_suites_asked_for_are_compared(tmp_path: Path) -> None:
    for name in ("smoke", "parallel"):
        row = {"id": f"{name}-1", "category": "single", "verdict": "correct"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    categories = {row["id"]: row["category"] for row in read_answers(tmp_path)}
    assert categories == {"smoke-1": "smoke", "parallel-1": "single"}
    assert [row["id"] for row in read_answers(tmp_path, ["parallel"])] == ["parallel-1"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "{tmp}", "--seal", "{tmp}", "--glaive", "{tmp}"], "no config.json"),
        (["--model", "hf:nobody/nothing"], "--seal None: no such rows"),  # before anything is downloaded
        (["--model", "{model}", "--seal", "{tmp}/none.jsonl"], "none.jsonl: no such rows"),
        (["--model", "{model}", "--seal", "{tmp}", "--glaive", "{tmp}", "--out", "/proc/x"], "cannot be written"),
        (["--model", "{model}", "--server", "http://127.0.0.1:1"], "--only before or --only after"),
        (["--model", "{model}", "--limit", "-5"], "--limit -5: expected 0 or more"),
        (["--model", "{model}", "--max-new-tokens", "0"], "--max-new-tokens 0: expected 1 or more"),
        (["--model", "{model}", "--categories", "simpel"], "--categories simpel: expected simple_python, "),
        (["--model", "{model}", "--vllm", "/nowhere/python"], "--vllm /nowhere/python: cannot be started"),
        (["--model", "{model}", "--vllm", "python", "--port", "0"], "--port 0: expected 1 to 65535"),
    ],
    ids=["model", "no rows", "missing rows", "out", "server", "limit", "length", "category", "vllm", "port"],
)
def test_wrong_input_is_one_sentence(options: list[str], says: str, tmp_path: Path) -> None:
    values = {"tmp": str(tmp_path), "model": "fctune/assets/tiny_base"}
    arguments = make_parser("benchmarks.real_model", None).parse_args([option.format(**values) for option in options])
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_inputs(arguments)


# 40 tools of four words each, drawn from words of different frequency: equal scores whose terms are added in different
# orders differ in the last bit, and the tools change places.
RANKING = """
import random
from fctune.data.augment.tool_pool import ToolPool
from fctune.data.conversation import Conversation, Tool
rng = random.Random(1)
words = [f"word{chr(97 + n)}" for n in range(24)]
tools = [Tool({"name": f"tool{n}", "description": " ".join(rng.sample(words, 6))}) for n in range(60)]
pool = ToolPool()
pool.add(Conversation((), tuple(tools)))
print([[tool.name for tool in pool.draw_others([], " ".join(words), 8, random.Random(n))] for n in range(20)])
"""


def test_the_draws_do_not_depend_on_the_order_of_sets() -> None:
    shown = {
        subprocess.run(
            [sys.executable, "-c", RANKING],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(shown) == 1


def make_inputs(tmp_path: Path, **config: Any) -> list[str]:
    """Return options with rows, and with a model whose config.json has these values."""
    shutil.copytree(TINY_BASE, tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | config))
    rows = ["--seal", str(tmp_path), "--glaive", str(tmp_path)]
    return ["--model", str(tmp_path / "model"), *rows, "--out", str(tmp_path / "out")]


def test_a_known_model_needs_no_further_options_and_those_that_are_given_win(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, model_type="qwen2", hidden_size=896)
    parser = make_parser("benchmarks.real_model", None)
    arguments = parser.parse_args(inputs)
    check_inputs(arguments)
    config = load_config(arguments.config)
    assert config.model.path == "hf:Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert arguments.chat_template is config.model.chat_template is None
    mixture = parse_mixture(arguments.mixture)
    assert 500 < sum(value for value in dataclasses.asdict(mixture).values() if isinstance(value, int)) < 600
    given = [
        "--mixture",
        "no_call=7",
        "--limit",
        "3",
        "--chat-template",
        "hermes",
        "--config",
        "configs/tiny_lora.yaml",
    ]
    arguments = parser.parse_args([*inputs, *given])
    check_inputs(arguments)
    assert parse_mixture(arguments.mixture) == dataclasses.replace(mixture, no_call=7)
    assert (arguments.limit, arguments.chat_template, arguments.config.stem) == (3, "hermes", "tiny_lora")


def test_the_template_of_a_model_without_settings_is_that_of_the_keys_on_the_command_line(tmp_path: Path) -> None:
    arguments = make_parser("benchmarks.real_model", None).parse_args(make_inputs(tmp_path))
    check_inputs(arguments)
    assert (arguments.config.stem, arguments.chat_template, arguments.limit) == ("gemma3_270m_lora", "hermes", 100)
    arguments.chat_template, arguments.overrides = None, ["model.chat_template=null"]
    check_inputs(arguments)
    assert arguments.chat_template is None


def test_a_mixture_names_its_kinds() -> None:
    assert parse_mixture(["no_call=5", "renamed_share=0.25"]) == Mixture(no_call=5, renamed_share=0.25)
    with pytest.raises(ConfigError, match="expected KIND=NUMBER with one of natural"):
        parse_mixture(["nocall=5"])
