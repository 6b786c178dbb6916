"""Requests that are drafted from drawn calls, and what a teacher may change of them."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fctune.apps.generate.drafts import Draft, Drafter, list_unknown
from fctune.apps.generate.kinds import KINDS
from fctune.apps.generate.plan import Planner
from fctune.apps.generate.prompts import UnusableText, read_json_answer, read_values
from fctune.base.errors import ConfigError
from fctune.data.check.similarity import SeenTexts, WordHasher
from fctune.data.conversation import Call, Tool
from tests.apps.generate.commands import generate, read_log, read_rows, read_summary
from tests.apps.generate.scripted_teacher import TOOLS, Teacher, name_prompt, serve_teacher
from tests.conftest import ROOT
from tests.engines.fault_server import Handler

HARBOUR = [
    Tool(function) for function in yaml.safe_load((ROOT / "benchmarks/generate/held_out.yaml").read_text())["tools"]
]
VALUES: dict[tuple[str, str], list[Any]] = {
    (tool.name, name): ["Ondine", "Moll", "Sula"] if name == "boat" else [8.5, 12, 40.25]
    for tool, name in list_unknown(HARBOUR)
}
SCHEMAS = {tool.name: tool.parameters for tool in HARBOUR}
BOOKING = json.dumps({"berth": "A9", "boat": "Grebe", "arrival": "2027-08-14", "nights": 1, "id": 7})


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


def spellings(value: Any) -> list[str]:
    """Return the ways in which a message may say a value, written independently of the drafts."""
    if isinstance(value, bool):
        return []
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        day = date.fromisoformat(text)
        month = day.strftime("%B")
        return [text, f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"]
    return [text, text.replace("_", " ")]


def is_said(value: Any, text: str) -> bool:
    return isinstance(value, bool) or any(one in text for one in spellings(value))


def always_says(asked: str, text: str) -> Teacher:
    """Return a teacher that answers all prompts of one kind with a text, and the others well."""

    def misbehave(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind == asked:
            teacher.say(handler, text)
        return kind == asked

    teacher = Teacher(misbehave)
    return teacher


def draft(planner: Planner, index: int, kind: str) -> list[Draft]:
    plan, drafter = planner.plan(index, kind), Drafter(VALUES)
    if kind == "dependent_calls":
        if "get_booking" not in {tool.name for tool in plan.tools}:
            return []
        made = drafter.draft_dependent(plan, Call("get_booking", {"booking_id": "HB-1234"}), BOOKING)
        return [made] if made is not None else []
    calls = drafter.complete(plan)
    assert calls is not None
    return drafter.draft(plan, calls)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"dependent_calls", "small_talk", "no_tool"}))
def test_drafts_state_every_value_of_their_calls_and_no_names_of_the_schema(kind: str) -> None:
    planner = Planner(HARBOUR, None, seed=5, hides_tools=True)
    wordings = set()
    for index in range(150):
        drafts = draft(planner, index, kind)
        said = ""
        for one in drafts:
            said += f"\n{one.text}"
            wordings.add(re.sub(r"[\d-]+", "", one.text))
            assert not re.search(r"\w_\w", one.text)
            for call in (call for step in one.steps for call in step):
                jsonschema.validate(call.arguments, SCHEMAS[call.name])
                assert all(is_said(value, said) for value in call.arguments.values()), (said, call)
        shape = [[len(step) for step in one.steps] for one in drafts]
        match kind:
            case "one_call":
                assert shape == [[1]]
            case "several_calls" | "repeated_tool":
                [calls] = drafts[0].steps
                assert len(shape) == 1
                assert len(calls) in (2, 3)
                assert len({json.dumps(call.arguments) + call.name for call in calls}) == len(calls)
                assert (len({call.name for call in calls}) == 1) is (kind == "repeated_tool")
            case "missing_value":
                assert shape == [[], [1]]
            case "multi_turn":
                assert len(shape) in (2, 3)
                assert shape[0] == [1]
    assert len(wordings) > 100


def test_a_missing_value_is_not_said_before_it_is_asked_for() -> None:
    planner = Planner(HARBOUR, None, seed=2)
    for index in range(100):
        plan = planner.plan(index, "missing_value")
        first, second = draft(planner, index, "missing_value")
        [[call]] = second.steps
        value = call.arguments[str(plan.missing)]
        assert is_said(value, second.text)
        others = [other for name, other in call.arguments.items() if name != plan.missing]
        if not any(str(value) in spelling for other in others for spelling in spellings(other)):
            assert not any(re.search(rf"\b{re.escape(one)}\b", first.text) for one in spellings(value))


def test_a_request_that_no_tool_fulfils_is_one_to_a_tool_that_is_not_on_offer() -> None:
    planner = Planner(HARBOUR, None, seed=3, hides_tools=True)
    for index in range(40):
        plan = planner.plan(index, "no_tool")
        assert plan.hidden is not None
        assert plan.hidden not in plan.tools
        [one] = draft(planner, index, "no_tool")
        assert one.steps == ()


def make_tool(name: str, description: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool({"name": name, "description": description, "parameters": parameters})


def test_a_request_that_no_tool_fulfils_is_not_one_that_a_similar_tool_does() -> None:
    weather = [
        make_tool("get_weather", "Get the weather of a city.", city={"type": "string"}),
        make_tool("fetch_weather", "Get the current weather of a city.", city={"type": "string"}),
    ]
    notes = [make_tool("add_note", "Write a note."), make_tool("pay_bill", "Pay an invoice of a supplier.")]
    planner = Planner([*weather, *notes], None, seed=3, hides_tools=True)
    hidden = set()
    for index in range(40):
        plan = planner.plan(index, "no_tool")
        assert plan.hidden is not None
        assert plan.tools
        hidden.add(plan.hidden.name)
        if plan.hidden in weather:
            assert not {tool.name for tool in plan.tools} & {tool.name for tool in weather}
    assert hidden == {tool.name for tool in (*weather, *notes)}
    assert Planner(weather, None, seed=3, hides_tools=True).plan(0, "no_tool").hidden is None


def test_a_rewording_that_loses_a_negation_is_not_used() -> None:
    stay = make_tool("book_room", "Book a room.", nights={"enum": [2, 3]}, breakfast={"type": "boolean"})
    planner, num_without = Planner([stay], None, seed=1, hides_tools=True), 0
    for index in range(20):
        plan = planner.plan(index, "one_call")
        calls = Drafter({}).complete(plan)
        assert calls is not None
        [one] = Drafter({}).draft(plan, calls)
        assert one.is_reworded_by(f"Well, {one.text}", plan.tools, is_checked=True)
        if not calls[0].arguments["breakfast"]:
            num_without += 1
            assert not one.is_reworded_by(re.sub("(?i)without ", "", one.text), plan.tools, is_checked=True)
    assert num_without > 3


def test_a_required_parameter_of_any_value_is_listed_and_one_without_a_schema_has_no_value() -> None:
    anything = make_tool("set_value", "Set a value of the store.", value=True)
    assert list_unknown([anything]) == [(anything, "value")]
    plan = Planner([anything], None, seed=1, hides_tools=True).plan(0, "one_call")
    assert Drafter({}).complete(plan) is None
    assert Drafter({("set_value", "value"): ["amber"]}).complete(plan) == (Call("set_value", {"value": "amber"}),)
    number = {"type": "integer", "minimum": 1, "maximum": 99}
    parameters = {"type": "object", "properties": {"number": number}, "required": ["number", "tenant"]}
    undescribed = Tool({"name": "open_ticket", "description": "Open a ticket.", "parameters": parameters})
    assert list_unknown([undescribed]) == []
    assert Drafter({}).complete(Planner([undescribed], None, seed=1, hides_tools=True).plan(0, "one_call")) is None


def test_a_dependent_call_takes_a_value_that_the_message_does_not_say() -> None:
    planner = Planner(HARBOUR, None, seed=4)
    made = [one for index in range(60) for one in draft(planner, index, "dependent_calls")]
    assert len(made) > 20
    result = json.loads(BOOKING)
    for one in made:
        [[first], [second]] = one.steps
        assert (first.name, second.name == first.name) == ("get_booking", False)
        jsonschema.validate(second.arguments, SCHEMAS[second.name])
        taken = [name for name, value in second.arguments.items() if result.get(name) == value]
        assert [name for name in taken if not is_said(result[name], one.text)] or taken == ["nights"]
        assert all(is_said(value, one.text) for name, value in second.arguments.items() if name not in taken)


def test_values_that_look_like_dates_and_are_none_are_said_as_they_are() -> None:
    day = {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}
    tool = Tool({"name": "get_gps_log", "description": "GPS positions of a day.", "parameters": day})
    drafter, planner = Drafter({("get_gps_log", "day"): ["2027-02-31"]}), Planner([tool], None, seed=0)
    plans = [planner.plan(index, "one_call") for index in range(40)]
    texts = [one.text for plan in plans for one in drafter.draft(plan, drafter.complete(plan) or ())]
    assert all("2027-02-31" in text for text in texts)
    assert any("GPS positions of a day" in text for text in texts)
    assert not any("gPS" in text for text in texts)


def test_values_are_listed_for_schemas_whose_draws_are_never_valid() -> None:
    code = {"type": "string", "description": "Such as AB-12", "pattern": "^AB-0{2}$"}
    tool = Tool({"name": "f", "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]}})
    assert list_unknown([tool]) == [(tool, "code")]


def test_only_values_that_schemas_do_not_give_are_asked_for() -> None:
    assert {name for _, name in list_unknown(HARBOUR)} == {"boat"}
    for index in range(10):
        plan = Planner(HARBOUR, None, seed=0).plan(index, "one_call")
        calls = Drafter({}).complete(plan)
        assert (calls is None) is ("boat" in plan.targets[0].parameters["required"])
        for call in calls or ():
            numbers = [value for name, value in call.arguments.items() if name in ("length_m", "litres")]
            assert all(1 <= number <= 500 and round(number, 2) == number for number in numbers)


@pytest.mark.parametrize(
    ("text", "is_checked", "is_used"),
    [
        ("Could somebody bring 40 litres of diesel to C14?", True, True),
        ("Could somebody bring 40 litres of diesel to c14?", True, True),
        ("Could somebody bring 40 litres of diesel?", True, False),  # C14 is lost
        ("order_fuel 40 diesel to C14", True, False),  # names the tool
        ("Could somebody bring 40 of diesel to C14? " + "And so on, " * 60, True, False),
        ("", True, False),
        ("Could somebody bring 40 litres of diesel to C14?", False, False),  # nobody would see that it is the same
        ("I need fuel please, so order 40 litres of diesel to berth C14.", False, True),
        ("Order fuel, 40 litres diesel, berth C14, and then tell my crew where the kiosk sells coffee", False, False),
    ],
)  # fmt: skip
def test_a_rewording_is_used_if_it_says_the_same(text: str, is_checked: bool, is_used: bool) -> None:
    one = Draft("Please order fuel: berth C14, diesel, 40 litres.", ("C14", "diesel", "40"), ())
    assert one.is_reworded_by(text, HARBOUR, is_checked) is is_used


@pytest.mark.parametrize(
    ("values", "text", "is_used"),
    [
        (("6", "134217728"), "Bed is 6.134217728 liters", False),
        (("6", "13"), "13 liters for bed 6, please", True),
        (("6", "13"), "13 liters for bed 16, please", False),
        (("6", "13"), "Bed 6 gets 13l.", True),
        (("6", "13"), "Bed 6,13 liters", False),
        (("6", "13"), "Bed -6 gets 13 liters", False),
        (("A9", "Moll"), "Moll's berth is A9", True),
        (("A9", "Moll"), "Molly's berth is A9", False),
        (("A9", "Moll"), "Moll's berth is A91", False),
        (("北京",), "请查北京的天气", True),
        (("18:30",), "at 18:30, please", True),
        (("8:30",), "at 18:30, please", False),
    ],
)
def test_a_rewording_states_each_value_as_a_word_of_its_own(values: tuple[str, ...], text: str, is_used: bool) -> None:
    one = Draft(f"Please water it, bed and liters: {', '.join(values)}.", values, ())
    assert one.is_reworded_by(text, HARBOUR, True) is is_used


@pytest.mark.thorough
def test_rows_of_drafts_need_no_answers_of_a_weak_teacher(tools: Path, tmp_path: Path) -> None:
    """The teacher of this test never calls anything."""

    teacher, out = always_says("answer", "As you wish."), tmp_path / "rows.jsonl"
    with serve_teacher(teacher) as log:
        assert generate(log.url, tools, out, "--requests", "drafted", "--votes", "0", num=100) == 0
    rows = read_rows(out)
    read_summary(out)
    found = Counter(row["metadata"]["generated"]["kind"] for row in rows)
    assert found == {kind: round(100 * share) for kind, share in KINDS.items()}
    assert all(row["metadata"]["generated"]["requests"] == "drafted" for row in rows)
    assert (teacher.asked["list"], teacher.asked["write"]) == (3, 0), "for names, not for the number"
    assert teacher.asked["reword"] > 50
    assert sum(row["messages"][0]["content"].startswith("Well, ") for row in rows) > 50
    for row in rows:
        kind, calls = row["metadata"]["generated"]["kind"], [m.get("tool_calls") or [] for m in row["messages"]]
        assert (sum(map(len, calls)) == 0) is (kind in ("no_tool", "small_talk"))
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant" and not m.get("tool_calls")]
        assert said
        assert all(said)
        if kind == "missing_value":
            assert [m["role"] for m in row["messages"]] == [
                "user",
                "assistant",
                "user",
                "assistant",
                "tool",
                "assistant",
            ]
            assert said[0] != "As you wish."


@pytest.mark.thorough
@pytest.mark.parametrize("num_rows", [80, 1000])
def test_small_talk_of_the_default_number_of_rows_and_of_many_more_is_drafted_without_repetitions(
    num_rows: int,
) -> None:
    assert Planner(HARBOUR, None, seed=0).split(2_000)["small_talk"] == 80
    planner, drafter, seen = Planner(HARBOUR, None, seed=0), Drafter({}), SeenTexts(WordHasher())
    texts = (drafter.draft_small_talk(planner.plan(index, "small_talk")).text for index in range(4 * num_rows + 8))
    assert sum(seen.add(text) is None for text in texts) >= num_rows


def test_small_talk_is_reworded_and_its_rows_are_different(tools: Path, tmp_path: Path) -> None:
    teacher, out = always_says("answer", "As you wish."), tmp_path / "rows.jsonl"
    with serve_teacher(teacher) as log:
        options = ["--requests", "drafted", "--votes", "1", "--kinds", "small_talk"]
        assert generate(log.url, tools, out, *options, num=80) == 0
    summary, texts = read_summary(out), [row["messages"][0]["content"] for row in read_rows(out)]
    assert summary["asked"] < 100
    assert len(set(texts)) == 80
    assert sum(text.startswith("Well, ") for text in texts) > 40
    prompts = [body["messages"][1]["content"] for body in log.bodies if name_prompt(body) == "reword"]
    assert not any("The new message is" in prompt for prompt in prompts)


def test_small_talk_without_more_drafts_leaves_its_share_to_the_other_kinds() -> None:
    shares = {"one_call": 0.5, "no_tool": 0.25, "small_talk": 0.25}
    planner = Planner(HARBOUR, shares, seed=0, max_small_talk=10)
    assert planner.split(40) == {"one_call": 20, "no_tool": 10, "small_talk": 10}
    assert planner.describe_limit(40) is None
    assert planner.split(100) == {"one_call": 60, "no_tool": 30, "small_talk": 10}
    assert planner.describe_limit(100) == (
        "small_talk: 10 rows in place of 25, as there are no more drafts; other kinds get the rest."
    )
    with pytest.raises(ConfigError, match="at most 10 different rows"):
        Planner(HARBOUR, {"small_talk": 1}, seed=0, max_small_talk=10).split(11)


def test_votes_guard_drafts_as_well(tools: Path, tmp_path: Path) -> None:
    teacher, out = always_says("answer", "As you wish."), tmp_path / "rows.jsonl"
    with serve_teacher(teacher) as log:
        kinds = ["--kinds", "one_call=50%,no_tool=50%"]
        assert generate(log.url, tools, out, "--requests", "drafted", "--votes", "1", *kinds, num=8) == 1
    summary = read_summary(out)
    assert summary["kinds"]["one_call"].get("kept", 0) == 0
    assert summary["dropped"].keys() == {"other_calls"}
    assert summary["kinds"]["no_tool"]["kept"] == 4


def test_a_teacher_that_loses_values_rewords_nothing(tools: Path, tmp_path: Path) -> None:
    said = json.dumps({"message": "Do what I want, please, and quickly."})
    teacher, out = always_says("reword", said), tmp_path / "rows.jsonl"
    with serve_teacher(teacher) as log:
        options = ["--requests", "drafted", "--votes", "0", "--kinds", "one_call=100%"]
        assert generate(log.url, tools, out, *options, num=20) == 0
    for row in read_rows(out):
        assert "what I want" not in row["messages"][0]["content"]
        [call] = row["messages"][1]["tool_calls"]
        for value in json.loads(call["function"]["arguments"]).values():
            assert is_said(value, row["messages"][0]["content"])


def test_values_are_listed_once_though_a_run_is_resumed(tools: Path, tmp_path: Path) -> None:
    options = ["--requests", "drafted", "--votes", "0"]
    teacher, parts = Teacher(), tmp_path / "rows.jsonl"
    with serve_teacher(teacher) as log:
        assert generate(log.url, tools, parts, *options, "--max-requests", "30") == 0
        assert read_summary(parts)["usage"]["requests"] == 30
        assert teacher.asked["list"] == 3
        assert generate(log.url, tools, parts, *options) == 0
        assert teacher.asked["list"] == 3
        usage = read_summary(parts)["usage"]["requests"]
    assert len(read_rows(parts)) == 24
    assert usage == sum(line["usage"]["requests"] for line in read_log(parts)) + 3


def test_rows_whose_values_nobody_knows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher, out = always_says("list", "I would rather talk about amber."), tmp_path / "rows.jsonl"
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([tool for tool in TOOLS if tool["name"] != "set_alarm"]))
    with serve_teacher(teacher) as log:
        options = ["--requests", "drafted", "--votes", "0", "--kinds", "one_call=50%,small_talk=50%"]
        assert generate(log.url, tools, out, *options, num=8) == 1
    summary = read_summary(out)
    assert summary["dropped"].keys() == {"no_values"}
    assert summary["kinds"]["small_talk"]["kept"] == 4
    assert teacher.asked["list"] == 3 * 2
    assert summary["unlisted"] == ["get_weather.city", "find_user.name", "send_note.user_id"]
    said = capsys.readouterr().out
    assert "listing values for 3 parameters" in said
    assert "no values for 3 parameters (get_weather.city, find_user.name, send_note.user_id)" in said


def test_lists_are_short_and_one_that_takes_too_long_is_asked_for_once_more(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed: list[tuple[int, int]] = []

    def hang(handler: Handler, kind: str, body: dict[str, Any]) -> bool:
        if kind == "list":
            values = body["response_format"]["json_schema"]["schema"]["properties"]["values"]
            listed.append((body["max_tokens"], values["maxItems"]))
            time.sleep(2)
        return False

    out = tmp_path / "rows.jsonl"
    with serve_teacher(Teacher(hang)) as log:
        options = ["--requests", "drafted", "--votes", "0", "--kinds", "one_call=50%,small_talk=50%"]
        options += ["--timeout", "1", "--attempts", "4"]
        assert generate(log.url, tools, out, *options, num=4) == 0
    assert sorted(listed) == [(256, 8)] * 3 + [(256, 24)] * 3
    assert len(read_summary(out)["unlisted"]) == 3
    assert {row["tools"][0]["function"]["name"] for row in read_rows(out)}
    said = capsys.readouterr().out
    assert "writing 4 rows for 4 tools, 4 at a time" in said, "progress is not for terminals alone"
    assert said.count("no answer within 1 s; raise --timeout") == 6


def test_answers_are_taken_on_trust_only_where_calls_are_drafted(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("http://127.0.0.1:9/v1", tools, tmp_path / "rows.jsonl", "--votes", "0") == 2
    assert "--votes 0: expected 1 or more, or 0 with --requests drafted." in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"say": "..."}', '{"say": ""}', '{"calls": []}'])
def test_placeholders_that_a_weak_teacher_copies_are_no_words(text: str) -> None:
    with pytest.raises(UnusableText):
        read_json_answer(text)


@pytest.mark.parametrize("text", ["明天有雨。", "Дождь.", "غدا", "Rain."])
def test_words_of_any_script_are_words(text: str) -> None:
    assert read_json_answer(json.dumps({"say": text})) == ([], text)


def test_listed_values_are_different_valid_and_more_than_the_name_of_the_parameter() -> None:
    [boat] = [tool for tool in HARBOUR if tool.name == "book_berth"]
    answer = json.dumps({"values": ["Boat", "Boat Name", "Ondine", "Ondine", " ", 4, "Name of Moll", "Łódź", "日本丸"]})
    assert read_values(answer, boat, "boat") == ["Ondine", "Name of Moll", "Łódź", "日本丸"]
    assert read_values(
        '{"values": [1, 2.5, 1, "3"]}', next(t for t in HARBOUR if t.name == "order_fuel"), "litres"
    ) == [1, 2.5]
