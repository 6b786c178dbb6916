"""The values that rows are planned with, and the schemas that hold a teacher to them."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from enum import Enum
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from fctune.apps.generate.kinds import KINDS
from fctune.apps.generate.plan import Planner, RowPlan
from fctune.apps.generate.prompts import UnusableText, ask_for_values, read_request, request_schema
from fctune.apps.generate.values import draw_arguments, draw_value, is_valid
from fctune.data.conversation import Call, Tool
from fctune.data.tool_schema import ToolSet
from tests.conftest import ROOT

HARBOUR = [
    Tool(function) for function in yaml.safe_load((ROOT / "benchmarks/generate/held_out.yaml").read_text())["tools"]
]
MADE_UP = {"string": "Ondine", "number": 12.5, "integer": 3}


def test_drawn_values_are_valid_and_cover_the_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "port": {"type": "string", "enum": ["Skarvik", "Lunde", "Holmen"]},
            "day": {"type": "string", "description": "Day as YYYY-MM-DD"},
            "at": {"type": "string", "description": "24-hour clock as HH:MM"},
            "berth": {"type": "string", "description": "Pier and number, such as C14"},
            "code": {"type": "string", "pattern": "^X-[0-4]+$", "examples": ["X-123"]},
            "nights": {"type": "integer", "minimum": 1, "maximum": 3},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "loud": {"type": "boolean"},
            "name": {"type": "string", "description": "Name of the boat"},
            "litres": {"type": "number", "exclusiveMinimum": 0},
        },
        "required": ["port", "day", "at", "berth", "code", "nights", "share", "loud", "name", "litres"],
    }
    rng = random.Random(0)
    drawn = [draw_arguments(Tool({"name": "x", "parameters": schema}), rng) for _ in range(300)]
    seen: dict[str, Counter[Any]] = {}
    for arguments in drawn:
        jsonschema.validate(arguments, {**schema, "required": []})
        for name, value in arguments.items():
            seen.setdefault(name, Counter())[value] += 1
    assert {"name", "litres"}.isdisjoint(seen), "the teacher makes them up"
    assert seen["port"].keys() == {"Skarvik", "Lunde", "Holmen"}
    assert seen["nights"].keys() == {1, 2, 3}
    assert seen["loud"].keys() == {True, False}
    assert all(re.fullmatch(r"[A-Z]\d\d", berth) for berth in seen["berth"])
    assert 0 < seen["code"].total() < 300, "examples with other digits that break the pattern are left to the teacher"
    assert len(seen["day"]) > 200


@pytest.mark.parametrize(
    ("schema", "name", "pattern", "bounds"),
    [
        ({"type": "integer", "description": "Number of the bed, 1 to 12"}, "bed", None, (1, 12)),
        ({"type": "integer", "description": "0-100"}, "opening", None, (0, 100)),
        ({"type": "integer", "description": "between 3 and 7"}, "level", None, (3, 7)),
        ({"type": "integer", "description": "1 to 12", "maximum": 6}, "bed", None, (1, 6)),
        ({"type": "integer"}, "opening_percent", None, (0, 100)),
        ({"type": "number", "description": "How far it opens, in percent"}, "opening", None, (0, 100)),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "description": "HH:MM"}, "off", r"\d\d:\d\d", None),
        ({"type": "string", "description": "when it goes off, such as 18:30"}, "off", r"\d\d:\d\d", None),
        ({"type": "string", "description": "first day, e.g. 2026-05-01"}, "day", r"\d{4}-\d\d-\d\d", None),
    ],
)
def test_ranges_and_forms_are_read_from_descriptions(
    schema: dict[str, Any], name: str, pattern: str | None, bounds: tuple[int, int] | None
) -> None:
    parameters = {"type": "object", "properties": {name: schema}, "required": [name]}
    tool, rng = Tool({"name": "f", "parameters": parameters}), random.Random(0)
    values = [draw_arguments(tool, rng)[name] for _ in range(200)]
    for value in values:
        jsonschema.validate(value, schema)
        assert pattern is None or re.fullmatch(pattern, value)
        assert bounds is None or bounds[0] <= value <= bounds[1]
    if bounds is not None:
        assert max(values) - min(values) > 0.8 * (bounds[1] - bounds[0])


def test_ranges_are_read_from_the_arguments_in_the_description_of_the_tool() -> None:
    text = "Water a bed.\n\nArgs:\n    bed (int): which one, 1 to 12\n    off: HH:MM\n"
    properties = {"bed": {"type": "integer"}, "off": {"type": "string"}}
    tool = Tool({"name": "f", "description": text, "parameters": {"type": "object", "properties": properties}})
    drawn = [draw_arguments(tool, random.Random(seed)) for seed in range(100)]
    assert all(1 <= arguments.get("bed", 1) <= 12 for arguments in drawn)
    assert any("off" in arguments for arguments in drawn)
    assert all(re.fullmatch(r"\d\d:\d\d", arguments.get("off", "00:00")) for arguments in drawn)


@pytest.mark.parametrize(
    "bounds",
    [
        {}, {"minimum": 0}, {"exclusiveMinimum": 0}, {"minimum": 1000}, {"maximum": 30}, {"maximum": -3},
        {"minimum": 0, "maximum": 2**31 - 1}, {"minimum": -5, "exclusiveMaximum": 20},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_free_numbers_are_such_as_people_say_and_valid(kind: str, bounds: dict[str, float]) -> None:
    schema, rng = {"type": kind, **bounds}, random.Random(0)
    drawn = [draw_value(schema, rng, "litres", is_free=True) for _ in range(200)]
    values = [value for value in drawn if value is not None]
    assert len(values) > 150
    for value in values:
        jsonschema.validate(value, schema)
        assert round(value, 2) == value
        assert abs(value) <= bounds.get("minimum", 0) + 503


@pytest.mark.parametrize(
    ("description", "is_possible"), [("Find a user by name.", False), ("Return a user's id.", True)]
)
def test_dependent_calls_are_left_out_where_no_tool_returns_what_another_requires(
    description: str, is_possible: bool
) -> None:
    def make(name: str, description: str, parameter: str) -> Tool:
        properties = {parameter: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [parameter]}
        return Tool({"name": name, "description": description, "parameters": parameters})

    tools = [make("look_up", description, "name"), make("write", "Send a note.", "user_id")]
    planner = Planner(tools, None, seed=0, hides_tools=True)
    assert ("dependent_calls" in planner.shares) is is_possible
    assert len(planner.describe_left_out()) == (0 if is_possible else 1)
    assert sum(planner.split(80).values()) == 80
    assert "dependent_calls" in Planner(tools, None, seed=0).shares, "a teacher may see more than the words tell"
    assert "dependent_calls" in Planner(tools, {"dependent_calls": 1}, seed=0, hides_tools=True).shares


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(BaseModel):
    """A place."""

    city: str
    unit: Unit = Unit.C


class Node(BaseModel):
    name: str
    children: list[Node] = []


class Query(BaseModel):
    unit: Unit = Field(description="unit of the answer")
    place: Place
    others: list[Place] = []
    parent: Place | None = None


def make_tool(model: type[BaseModel]) -> Tool:
    return Tool({"name": "f", "description": "Find it.", "parameters": model.model_json_schema()})


def test_references_are_replaced_by_what_they_refer_to() -> None:
    given = make_tool(Query)
    [tool] = Planner([given], None, seed=0).tools
    assert "$ref" in json.dumps(given.parameters)
    assert not re.search(r"\$ref|\$defs", json.dumps(tool.parameters))
    assert tool.parameters["properties"]["unit"]["description"] == "unit of the answer"
    drawn = [draw_arguments(tool, random.Random(seed)) for seed in range(20)]
    assert {arguments["unit"] for arguments in drawn} == {"celsius", "fahrenheit"}
    place = {"city": "Bern", "unit": "celsius"}
    values: list[Any] = [place, {"city": 3}, None, {"unit": "celsius"}, {"city": "Bern", "unit": "kelvin"}, [place], []]
    for value in values:
        for name in ("place", "others", "parent"):
            arguments = {"unit": "celsius", "place": place, name: value}
            is_right = ToolSet([given]).accepts(Call("f", arguments))
            assert is_valid(value, tool.parameters["properties"][name]) is is_right
            assert ToolSet([tool]).accepts(Call("f", arguments)) is is_right


def test_a_schema_that_refers_to_itself_keeps_its_references_where_they_lead_somewhere() -> None:
    given = make_tool(Node)
    planner = Planner([given], {"one_call": 1}, seed=0)
    [tool], plan = planner.tools, planner.plan(0, "one_call")
    tree = {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}
    for arguments, is_right in ((tree, True), ({**tree, "children": [{"children": []}]}, False)):
        assert ToolSet([tool]).accepts(Call("f", arguments)) is is_right
    assert is_valid([], tool.parameters["properties"]["children"])
    assert not is_valid(tree["children"], tool.parameters["properties"]["children"]), "it leads out of this part"
    for schema in (request_schema(plan), ask_for_values(tool, "children", 0)[1]):
        assert "$ref" not in json.dumps(schema)
    answer = {"turns": [{"steps": [[{"name": "f", "arguments": tree}]], "request": "all of it"}]}
    jsonschema.validate(answer, request_schema(plan))


def test_definitions_that_grow_out_of_proportion_stay_where_they_are() -> None:
    layers = {f"L{i}": {"anyOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(40)}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/L0"}}, "$defs": {**layers, "L40": {"const": 1}}}
    [tool] = Planner([Tool({"name": "f", "parameters": schema})], None, seed=0).tools
    assert tool.parameters == schema


def write_answer(plan: RowPlan) -> dict[str, Any]:
    """Return what a teacher would write to a plan that keeps to it."""
    tools = {tool.name: tool for tool in (*plan.tools, *plan.targets, *([plan.hidden] if plan.hidden else []))}
    calls = []
    for call in plan.calls:
        properties = tools[call.name].parameters["properties"]
        missing = [name for name in tools[call.name].parameters["required"] if name not in call.arguments]
        made_up = {name: MADE_UP[properties[name]["type"]] for name in missing}
        calls.append({"name": call.name, "arguments": {**call.arguments, **made_up}})
    asked, silent = {"steps": [calls], "request": "please"}, {"steps": [], "request": "hello"}
    match "one_call" if plan.hidden is not None else plan.kind:
        case "one_call" | "several_calls" | "repeated_tool":
            return {"turns": [asked]}
        case "multi_turn":
            return {"turns": [asked, silent]}
        case "missing_value":
            return {"turns": [silent, asked]}
        case "dependent_calls":
            later = [{"name": plan.tools[0].name, "arguments": {}}]
            first = {"name": "get_booking", "arguments": {"booking_id": "HB-1"}}
            name = "get_booking" if "get_booking" in tools else None
            return {"turns": [{"steps": [[first] if name else calls, later], "request": "both"}]}
    return {"turns": [silent]}


@pytest.mark.parametrize(
    "kind", [kind if kind == "multi_turn" else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS]
)
def test_the_schema_of_a_kind_allows_what_is_read_as_that_kind_and_nothing_less(kind: str) -> None:
    planner = Planner(HARBOUR, None, seed=3, max_tools=5)
    for index in range(40):
        plan = planner.plan(index, kind)
        schema, answer = request_schema(plan), write_answer(plan)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(answer, schema)
        jsonschema.validate({"refuse": "no"}, schema)
        assert read_request(json.dumps(answer), plan)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"turns": []}, schema)
        if drawn := [(i, name) for i, call in enumerate(plan.calls) for name in call.arguments]:
            turns = [turn for turn in answer["turns"] if turn["steps"]]
            if turns and kind != "dependent_calls":
                i, name = drawn[0]
                turns[0]["steps"][0][i]["arguments"][name] = "another"
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(answer, schema)


def test_a_request_of_another_kind_is_unusable() -> None:
    plan = Planner(HARBOUR, None, seed=0, max_tools=5).plan(0, "one_call")
    with pytest.raises(UnusableText, match="not those of one_call"):
        read_request(json.dumps({"turns": [{"steps": [], "request": "hello"}]}), plan)
