"""Schemas as they are in the wild: their types, and what breaks them."""

from __future__ import annotations

import random
import socket
from typing import Any

import jsonschema
import pytest

from fctune.calls.plain_schema import compile_schema
from fctune.calls.schema import ToolSet, argument_types, schema_errors, to_json_schema
from fctune.data.conversation import Call, Tool
from tests.calls.bfcl_wheel import gold_calls, needs_wheel, python_cases
from tests.calls.mutations import mutate


def tool(properties: Any, **more: Any) -> list[Tool]:
    return [Tool({"name": "f", "parameters": {"type": "dict", "properties": properties, **more}})]


@needs_wheel
def test_2966_of_3152_gold_calls_obey_their_schema() -> None:
    """2,969 do as JSON Schema goes; three more name an argument that their schema does not."""
    valid = undeclared = total = 0
    for case in python_cases():
        for call in gold_calls(case):
            errors = schema_errors(call, case.tools)
            total += 1
            valid += not errors
            undeclared += bool(errors) and all("Additional properties" in line for line in errors)
    assert (valid, undeclared, total) == (2966, 3, 3152)


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ({"type": "float"}, 1, True),
        ({"type": "float"}, "1", False),
        ({"type": "integer"}, 1.0, True),
        ({"type": "integer"}, True, False),
        ({"type": "dict", "properties": {"k": {"type": "tuple"}}}, {"k": [1]}, True),
        ({"type": "dict", "properties": {"k": {"type": "tuple"}}}, {"k": 1}, False),
        ({"type": "any"}, None, True),
        ({"type": "ArrayList", "items": {"type": "String"}}, ["a"], True),
        ({"type": "ArrayList", "items": {"type": "String"}}, [1], False),
        ({"type": "string", "enum": ["a"]}, "b", False),
        ({"type": ["string", "null"]}, None, True),
        ({"type": "string", "required": True}, "a", True),
    ],
)
def test_types_are_taken_for_what_they_mean(schema: dict[str, Any], value: Any, is_valid: bool) -> None:
    assert (schema_errors(Call("f", {"a": value}), tool({"a": schema})) == ()) is is_valid


def test_each_fault_is_named() -> None:
    tools = tool({"a": {"type": "integer"}, "b": {"type": "string"}}, required=["a"])
    assert schema_errors(Call("g", {}), tools) == ("g: no such tool",)
    assert schema_errors(Call("f", {}), tools) == ("f: 'a' is a required property",)
    assert schema_errors(Call("f", {"a": "x"}), tools) == ("a: 'x' is not of type 'integer'",)
    assert "unexpected" in schema_errors(Call("f", {"a": 1, "c": 1}), tools)[0]
    assert schema_errors(Call("f", {"a": 1, "c": 1}), tool({"a": {}}, additionalProperties=True)) == ()
    assert "not a schema" in schema_errors(Call("f", {}), tool({"a": {"type": "string", "pattern": 5}}))[0]


def test_a_reference_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    errors = schema_errors(Call("f", {"a": 1}), tool({"a": {"$ref": "http://localhost:9/schema.json"}}))
    assert "cannot be followed" in errors[0]


def test_a_compiled_schema_says_what_jsonschema_says() -> None:
    rng = random.Random(6)
    num_compiled = num_obeying = 0
    for _ in range(4_000):
        schema = invented_schema(rng)
        check = compile_schema(schema)
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            assert check is None, schema
            continue
        if check is None:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        num_compiled += 1
        for _ in range(4):
            value = invented_value(rng)
            assert check(value) is validator.is_valid(value), (schema, value)
            num_obeying += check(value)
    assert num_compiled > 1_000
    assert num_obeying > 1_000


@needs_wheel
def test_calls_obey_where_nothing_is_wrong_with_them() -> None:
    rng = random.Random(7)
    num_obeying = total = 0
    for case in python_cases():
        tools = ToolSet(case.tools)
        for call in mutate(case, rng):
            if rng.random() < 0.3:
                assert tools.obeys(call) is (schema_errors(call, case.tools) == ()), (case.id, call)
                num_obeying += tools.obeys(call)
                total += 1
    assert 0.3 < num_obeying / total < 0.9


def invented_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of what is compiled and what is not, sometimes none at all."""
    if rng.random() < 0.03:
        return rng.choice([True, False, 5, None])
    names = ["string", "integer", "number", "boolean", "array", "object", "null"]
    types: list[Any] = [*names, rng.sample(names, 2), ["string", "string"], [], "unheard_of"]
    schema: dict[str, Any] = {}
    if rng.random() < 0.8:
        schema["type"] = rng.choice(types[: 8 if rng.random() < 0.95 else None])
    if rng.random() < 0.2:
        schema["enum"] = rng.choice([["a", "b"], [1, 2], ["a", 1, None], [True], [1.5], [], "a"])
    if rng.random() < 0.1:
        schema |= rng.choice(
            [{"description": "d"}, {"description": 5}, {"minimum": 1}, {"nullable": True}, {"default": 1},
             {"title": []}, {"$ref": "#"}, {"format": "date"}, {"pattern": "a"}, {"examples": [1]},
             {"anyOf": [{"type": "string"}]}]
        )  # fmt: skip
    if depth < 2 and rng.random() < 0.4:
        schema["properties"] = {key: invented_schema(rng, depth + 1) for key in rng.sample("abc", rng.randint(0, 3))}
        schema["required"] = rng.choice(
            [[], ["a"], ["a", "b"], ["a", "a"], [1], "a"][: 3 if rng.random() < 0.9 else None]
        )
        if rng.random() < 0.5:
            schema["additionalProperties"] = rng.choice([True, False, invented_schema(rng, depth + 1)])
    if depth < 2 and rng.random() < 0.2:
        schema["items"] = invented_schema(rng, depth + 1)
    return schema


def invented_value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.4:
        if rng.random() < 0.6:
            return {key: invented_value(rng, depth + 1) for key in rng.sample("abcd", rng.randint(0, 3))}
        return [invented_value(rng, depth + 1) for _ in range(rng.randint(0, 2))]
    return rng.choice(["a", "b", "", 0, 1, 2, 1.0, 1.5, True, False, None, 10**20, float("inf")])


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "dict"}, {"object"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "default": None}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "string", "default": "null"}, {"string"}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"integer", "string"}),
        ({"enum": ["a", 1]}, {"string", "integer"}),
        ({"const": "a"}, {"string"}),
    ],
)
def test_the_types_of_an_argument(schema: dict[str, Any], types: set[str]) -> None:
    assert argument_types(schema) == types


def test_an_unknown_type_constrains_nothing() -> None:
    assert len(argument_types({"type": "geometry"})) == 7
    assert len(argument_types({})) == len(argument_types(None)) == 7
    assert to_json_schema({"type": "geometry", "properties": {"type": {"type": "dict"}}}) == {
        "properties": {"type": {"type": "object"}}
    }
