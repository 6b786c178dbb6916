"""Public sets of the real-model benchmark: references can be read from requests, and pairs have the same tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_public_sets import Found, is_given, make_pairs, read_api_bank, read_toolalpaca, write_public_sets
from benchmarks.real_rows import write_rows
from fctune.base.errors import DataError
from fctune.tasks.suite_files import load_suite

CLASS = """
class {name}(API):
    description = "{name} for people."
    input_parameters = {parameters}

    def __init__(self):
        raise RuntimeError("never run")

    def call(self, {signature}):
        pass
"""


def make_api(name: str, category: str, *requests: tuple[str, list[tuple[str, str]]]) -> dict[str, Any]:
    """Return an API in ToolAlpaca's shape, with a path parameter, a body, and a key that the client adds."""
    city = {"name": "city", "in": "path", "required": True, "schema": {"type": "string"}, "description": "A city."}
    key = {"name": "key", "in": "query", "required": True, "schema": {"type": "string"}}
    units = {"name": "units", "in": "query", "schema": {"type": "string", "enum": ["metric", "imperial"]}}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Alert"}}}}
    alert = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    document = {
        "paths": {
            f"/{name}/{{city}}": {"get": {"summary": f"Look up {name}", "parameters": [city, key, units]}},
            f"/{name}": {"post": {"operationId": f"{name}Alert", "requestBody": body}},
        },
        "components": {"schemas": {"Alert": alert}},
    }
    return {
        "Name": name,
        "Category": category,
        "Authentication": {"key": "***"},
        "Documentation": json.dumps(document),
        "Instructions": [text for text, _ in requests],
        "Golden_Answers": [[{"Action": a, "Action_Input": i} for a, i in steps] for _, steps in requests],
    }


@pytest.fixture
def toolalpaca(tmp_path: Path) -> Found:
    weather = make_api(
        "weather",
        "Weather",
        ("What is the weather like in Oslo today?", [("weather_city_get", '{"city": "Oslo", "key": "123"}')]),
        ("Is it warm in Rome and in Lima right now?", [("weather_city_get", '{"city": "Rome"}'),
                                                       ("weather_city_get", '{"city": "Lima"}')]),
        ("Warn me at thirty degrees, please do so.", [("weatherAlert", '{"degrees": 35}')]),
        ("Warn me where I am, at 3 degrees please.", [("weatherAlert", '{"degrees": ${mean}}')]),
        ("Warn me of the tide in Lima next week.", [("tideAlert", '{"degrees": 3}')]),
        ("Show Oslo and warn me at 3 degrees.", [("weather_city_get", '{"city": "Oslo"}'),
                                                ("weatherAlert", '{"degrees": 3}')]),
        ("Warn me at 3 degrees, with all my heart.", [("weatherAlert", '{"degrees": "3"}')]),
    )  # fmt: skip
    books = make_api(
        "books", "Books", ("Which books are about Oslo, I wonder?", [("books_city_get", '{"city": "Oslo"}')])
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "eval_real.json").write_text(json.dumps([weather]))
    (tmp_path / "data" / "eval_simulated.json").write_text(json.dumps([books]))
    return read_toolalpaca(tmp_path)


def test_requests_to_apis_have_their_calls_without_keys_and_others_are_counted(toolalpaca: Found) -> None:
    calls = [[(call.name, call.arguments) for call in request.calls] for request in toolalpaca.requests]
    assert calls == [
        [("weather_city_get", {"city": "Oslo"})],
        [("weather_city_get", {"city": "Rome"}), ("weather_city_get", {"city": "Lima"})],
        [("books_city_get", {"city": "Oslo"})],
    ]
    assert toolalpaca.left_out == {
        "has a value that no text gives": 1,
        "depends on a result": 1,
        "calls a tool that is not on offer": 1,
        "several steps": 1,
        "does not fit its tool": 1,
    }
    get, post = toolalpaca.requests[0].conversation.tools
    assert (get.parameters["required"], set(get.parameters["properties"])) == (["city"], {"city", "units"})
    assert get.parameters["properties"]["city"] == {"type": "string", "description": "A city."}
    assert post.parameters == {
        "type": "object",
        "properties": {"degrees": {"type": "integer"}},
        "required": ["degrees"],
    }


def test_a_pair_offers_the_same_tools_and_only_one_request_fits_them(toolalpaca: Found, tmp_path: Path) -> None:
    rows = make_pairs("set", toolalpaca)
    for name, cases in zip(("fit", "unfit"), rows, strict=True):
        write_rows(tmp_path / f"{name}.jsonl", cases)
    fitting, unfit = (load_suite(tmp_path / f"{name}.jsonl").cases for name in ("fit", "unfit"))
    assert len(fitting) == len(unfit) == 3
    categories = {"weather": "Weather", "books": "Books"}
    for yes, no in zip(fitting, unfit, strict=True):
        assert yes.prompt.tools == no.prompt.tools
        assert (yes.category, no.category) == ("set", "set_no_call")
        assert yes.expected
        assert not no.expected
        (asked,) = [opening for opening in toolalpaca.openings if opening.text == no.prompt.messages[0].content]
        assert categories[yes.prompt.tools[0].name.partition("_")[0]] not in asked.domains


@pytest.fixture
def api_bank(tmp_path: Path) -> Found:
    root = tmp_path / "api-bank"
    (root / "apis").mkdir(parents=True)
    (root / "data").mkdir()
    (root / "lv1-lv2-samples" / "level-1-given-desc").mkdir(parents=True)
    text = {"type": "str", "description": "Text."}
    tools = {
        "GetToken": ("accounts", {"user": text}, "user"),
        "AddEvent": ("plans", {"token": text, "time": text, "guests": {"type": "list(str)", "description": "Who."}},
                     "token, time, guests=None"),
        "BookHotel": ("travel", {"rooms": {"type": "int", "description": "Rooms."}}, "rooms"),
        "Play": ("music", {"song": text}, "song"),
        "Wiki": ("facts", {"keyword": text}, "keyword"),
    }  # fmt: skip
    for name, (_, parameters, signature) in tools.items():
        source = CLASS.format(name=name, parameters=parameters, signature=signature)
        (root / "apis" / f"{name}.py").write_text(source)
    (root / "apis" / "api.py").write_text("class API:\n    pass\n")
    lines = ["类名,应用场景", *(f"{name},{domain}" for name, (domain, _, _) in tools.items())]
    (root / "data" / "all_apis.csv").write_text("\n".join(lines), encoding="utf-8")

    def call(name: str, arguments: dict[str, Any], output: Any) -> dict[str, Any]:
        return {"role": "API", "api_name": name, "param_dict": arguments, "result": {"output": output}}

    dialogues = {
        "event": [
            {"role": "User", "text": "Plan a party for me on May 3rd, 2024 at 7 pm."},
            {"role": "AI", "text": "Who are you?"},
            {"role": "User", "text": "I am ann42."},
            {"role": "AI", "text": "Let me see."},
            call("GetToken", {"user": "ann42"}, {"token": "t0k3n"}),
            {"role": "AI", "text": "Now I add it."},
            call("AddEvent", {"token": "t0k3n", "time": "2024-05-03 19:00:00"}, "success"),
        ],
        "hotel": [
            {"role": "User", "text": "Please book a hotel with two rooms."},
            call("BookHotel", {"rooms": "2"}, "done"),
            {"role": "AI", "text": "Booked."},
            {"role": "User", "text": "And then as many as my friends need."},
            call("BookHotel", {"rooms": "7"}, "done"),
        ],
        "fact": [
            {"role": "User", "text": "Tell me about the moon and the tides."},
            call("Wiki", {"keyword": "moon"}, "far away"),
        ],
    }
    for name, messages in dialogues.items():
        path = root / "lv1-lv2-samples" / "level-1-given-desc" / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, messages)))
    return read_api_bank(tmp_path)


def test_dialogues_end_where_the_assistant_calls_and_hold_earlier_calls_with_results(api_bank: Found) -> None:
    token, event, hotel = api_bank.requests
    assert [message.role for message in token.conversation.messages] == ["user", "assistant", "user"]
    assert token.conversation.messages[-1].content == "I am ann42."
    before, result = event.conversation.messages[-2:]
    assert (before.role, before.content) == ("assistant", "Let me see.")
    assert [(call.name, call.arguments) for call in before.calls] == [("GetToken", {"user": "ann42"})]
    assert (result.role, result.content) == ("tool", '{"token": "t0k3n"}')
    assert [call.arguments for call in event.calls] == [{"token": "t0k3n", "time": "2024-05-03 19:00:00"}]
    assert [call.arguments for call in hotel.calls] == [{"rooms": 2}]
    assert api_bank.left_out == {"has a value that no text gives": 1, "unknown tool, or one that fits anything": 1}


def test_tools_of_a_dialogue_are_offered_among_those_of_other_domains(api_bank: Found) -> None:
    token, _, hotel = api_bank.requests
    assert {tool.name for tool in token.conversation.tools} == {"GetToken", "AddEvent", "BookHotel", "Play"}
    assert {tool.name for tool in hotel.conversation.tools} == {"GetToken", "AddEvent", "BookHotel", "Play"}
    add = next(tool for tool in token.conversation.tools if tool.name == "AddEvent")
    assert add.parameters["required"] == ["token", "time"]
    assert add.parameters["properties"]["guests"]["type"] == "array"


@pytest.mark.parametrize(
    ("value", "text", "schema", "given"),
    [
        ("Oslo", "the weather in Oslo?", {}, True),
        ("Oslo", "the weather in oslo?", {}, False),
        ("Don", "Don't forget it", {}, False),
        ("m", "I'm here", {"enum": ["m", "f"]}, False),
        ("jpg", "as a JPG file", {"enum": ["jpg", "png"]}, True),
        ("NO", "the holidays in Norway", {}, False),
        (3, "three facts", {}, True),
        (3, "the year 2023", {}, False),
        (1.5, "for $1.50", {}, False),
        (1.5, "at 1.5 percent", {}, True),
        (2000, "2000, please", {}, True),
        (True, "with images", {}, True),
        (["a b", "c"], "c and a b", {}, True),
        (["a b", "d"], "c and a b", {}, False),
        ({"url": "http://x"}, "take http://x", {}, True),
        ("2024-05-03", "on May 3rd, 2024", {}, True),
        ("2024-05-03", "on 3 May 2024", {}, True),
        ("2024-05-03", "on May 3rd", {}, False),
        ("2024-05-03", "on the 4th of May 2024", {}, False),
        ("05-03", "on the 3rd of May", {}, True),
        ("2024-05-03 19:30:00", "2024-05-03 at 7:30 p.m.", {}, True),
        ("2024-05-03 07:30:00", "2024-05-03 at 7:30 p.m.", {}, False),
        ("2024-05-03 00:00:00", "May 3, 2024", {}, False),
        (None, "nothing", {}, False),
    ],
)
def test_a_value_counts_as_given_if_a_reader_would_write_it_so(
    value: Any, text: str, schema: dict[str, Any], given: bool
) -> None:
    assert is_given(value, text, schema) is given


def test_clones_that_are_missing_or_of_another_revision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ToolAlpaca: no such clone of ToolAlpaca at 1890699"):
        write_public_sets(tmp_path, tmp_path / "rows")
    (tmp_path / "ToolAlpaca" / "data").mkdir(parents=True)
    for name in ("eval_real", "eval_simulated"):
        (tmp_path / "ToolAlpaca" / "data" / f"{name}.json").write_text("[]")
    with pytest.raises(DataError, match="its files differ from those of ToolAlpaca at 1890699"):
        write_public_sets(tmp_path, tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
