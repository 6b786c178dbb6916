"""Rows of two public repositories become conversations that say what the files say, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_public_rows import read_dialogues, read_public_rows, read_tool_questions
from fctune.base.errors import DataError
from fctune.data.tool_schema import ToolSet

INSTRUCTION = """You are an assistant.

**Available Tools**
1. Name: Get Weather
Description: Weather of a city
Parameters: {"city": {"description": "City", "type": "str", "default": ""}, "days": {"description": "Days", \
"type": "int, optional", "default": ""}, "unit": {"description": "Unit", "type": "string", "default": "C"}}
2. Name: x7_Q
Description: Adds numbers
Parameters: {"p": {"description": "Numbers", "type": "List[List[float]]", "default": ""}}

**Steps for Each Turn**
1. **Think:** Recall."""


def make_row(question: str, output: str) -> dict[str, str]:
    history = f"**Dialogue Records History**\n<user> {question} </user>"
    return {"instruction": INSTRUCTION, "input": history, "output": output}


def call(name: str, **parameters: Any) -> str:
    line = json.dumps({"name": name, "parameters": parameters})
    return f"<think> Hm. </think>\n<tool_call>\n{line}\n</tool_call>"


def test_questions_keep_calls_that_fit_their_tools(tmp_path: Path) -> None:
    two = call("Get Weather", city="Oslo") + call("Get Weather", city="Rome", days=2)
    rows = [
        make_row("Weather in Oslo?", call("Get Weather", city="Oslo", days=3)),
        make_row("Oslo, and Rome for two days?", two),
        make_row("Add.", call("x7_Q", p=[[1.5]])),
        make_row("Hello", "<think> Hm. </think>\n<response> No tool can do that. </response>"),
        make_row("Weather?", call("Get Weather", city=3)),  # does not fit
        make_row("Weather?", call("Get Rain", city="Oslo")),  # not on offer
        make_row("Weather?", "<tool_call>\n{cut\n</tool_call>"),
        make_row("Weather? </user> <obs> 3 </obs> <user> More?", call("Get Weather", city="Oslo")),
        make_row("Hello", f"<response> {'No. ' * 200}</response>"),
    ]
    file = tmp_path / "rlla_sft.json"
    file.write_text(json.dumps(rows))
    found = read_tool_questions(file)
    asked = ["Weather in Oslo?", "Oslo, and Rome for two days?", "Add.", "Hello"]
    assert [row.messages[0].content for row in found] == asked
    calls = [[(one.name, one.arguments) for one in row.messages[-1].calls] for row in found]
    assert calls[0] == [("Get_Weather", {"city": "Oslo", "days": 3})]
    assert calls[1] == [("Get_Weather", {"city": "Oslo"}), ("Get_Weather", {"city": "Rome", "days": 2})]
    assert calls[3] == []
    assert found[3].messages[-1].content == "No tool can do that."
    weather, adds = (tool.parameters for tool in found[0].tools)
    assert weather["required"] == ["city"]
    assert adds["required"] == ["p"]
    assert weather["properties"]["days"]["type"] == "integer"
    assert weather["properties"]["unit"]["description"] == "Unit Default: C."
    assert adds["properties"]["p"]["items"] == {"type": "array", "items": {"type": "number"}}


def test_a_parameter_that_a_call_omits_is_not_required(tmp_path: Path) -> None:
    file = tmp_path / "rlla_sft.json"
    file.write_text(json.dumps([make_row("Weather for 3 days?", call("Get Weather", days=3))]))
    (row,) = read_tool_questions(file)
    assert row.tools[0].parameters["required"] == []


SERVICES = [
    {
        "service_name": name,
        "slots": [
            {"name": "city", "description": "City", "is_categorical": False, "possible_values": ["Oslo"]},
            {"name": "live", "description": "Music", "is_categorical": True, "possible_values": ["True", "False"]},
            {"name": "seats", "description": "Seats", "is_categorical": True, "possible_values": ["1", "2"]},
            {"name": "price", "description": "Price", "is_categorical": True, "possible_values": ["low", "high"]},
        ],
        "intents": [
            {
                "name": intent,
                "description": "Find",
                "required_slots": ["city"],
                "optional_slots": {"live": "dontcare", "seats": "1", "price": "low"},
            }
        ],
    }
    for name, intent in (("Bars_1", "FindBars"), ("Trains_1", "FindTrains"), ("Hotels_2", "FindHotels"))
]


def make_dialogue(number: int, parameters: dict[str, str]) -> dict[str, Any]:
    called = {"method": "FindBars", "parameters": parameters}
    results = [{"name": "Blue"}, {"name": "Red"}, {"name": "Green"}]
    frame = {"service": "Bars_1", "service_call": called, "service_results": results}
    turns = [
        {"speaker": "USER", "utterance": "Find me a bar.", "frames": [{}]},
        {"speaker": "SYSTEM", "utterance": "Where?", "frames": [{}]},
        {"speaker": "USER", "utterance": "In Oslo, with live music, for 2, high.", "frames": [{}]},
        {"speaker": "SYSTEM", "utterance": "Blue is one.", "frames": [frame]},
        {"speaker": "USER", "utterance": "Thanks.", "frames": [{}]},
        {"speaker": "SYSTEM", "utterance": "Anything else?", "frames": [{}]},
        {"speaker": "USER", "utterance": "No.", "frames": [{}]},
        {"speaker": "SYSTEM", "utterance": "Bye.", "frames": [{}]},
    ]
    return {"dialogue_id": f"1_{number}", "services": ["Bars_1"], "turns": turns}


def test_dialogues_ask_call_and_report(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/schema.json").write_text(json.dumps(SERVICES))
    given = {"city": "Oslo", "live": "True", "seats": "2", "price": "high"}
    dialogues = [make_dialogue(0, given), make_dialogue(1, {"city": "Bergen"})]  # nobody said Bergen
    (tmp_path / "train/dialogues_001.json").write_text(json.dumps(dialogues))
    (row,) = read_dialogues(tmp_path, 1, seed=0)
    assert row.source == "sgd:1_0"
    roles = [message.role for message in row.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]  # without the farewell
    made = row.messages[3].calls[0]
    assert made.arguments == {"city": "Oslo", "live": True, "seats": 2, "price": "high"}
    assert json.loads(row.messages[4].content or "") == [{"name": "Blue"}, {"name": "Red"}]
    assert not ToolSet(row.tools).find_errors(made)
    with pytest.raises(DataError, match="has 1 dialogues of 14 turns at most; 2 are needed"):
        read_dialogues(tmp_path, 2, seed=0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert read_public_rows(None, 0, 0) == ([], [])
    with pytest.raises(DataError, match=r"Pass --public-rows DIR .*, or --mixture public=0 guided=0"):
        read_public_rows(None, 1, 0)
    with pytest.raises(DataError, match=r"not ToolRL's rlla_sft\.json"):
        read_public_rows(tmp_path, 1, 0)
    with pytest.raises(DataError, match="not the Schema-Guided Dialogues"):
        read_public_rows(tmp_path, 0, 1)
