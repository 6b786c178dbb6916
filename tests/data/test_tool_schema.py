"""Schemas of tools found in the wild, compiled and validated."""

from __future__ import annotations

import marshal
import random
import socket
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.data.conversation import Call, Tool
from fctune.data.schema_compiler import compile_schema
from fctune.data.tool_schema import ToolSchema, ToolSet, load_schema, to_json_schema
from tests.calls.mutations import mutate
from tests.tasks.benchmarks.bfcl.bfcl_wheel import gold_calls, needs_wheel, python_cases


def make_tools(properties: Any, **more: Any) -> ToolSet:
    return ToolSet([Tool({"name": "f", "parameters": {"type": "dict", "properties": properties, **more}})])


@needs_wheel
def test_2966_of_3152_gold_calls_obey_their_schema() -> None:
    """JSON Schema itself accepts 2,969; three of them have an argument that their schema does not declare."""
    valid = undeclared = total = 0
    for case in python_cases():
        tools = ToolSet(case.tools)
        for call in gold_calls(case):
            errors = tools.find_errors(call)
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
def test_type_names_of_other_languages_mean_json_types(schema: dict[str, Any], value: Any, is_valid: bool) -> None:
    call, tools = Call("f", {"a": value}), make_tools({"a": schema})
    assert tools.accepts(call) is is_valid
    assert (tools.find_errors(call) == ()) is is_valid


def test_each_error_is_named() -> None:
    tools = make_tools({"a": {"type": "integer"}, "b": {"type": "string"}}, required=["a"])
    assert tools.find_errors(Call("g", {})) == ("g: no such tool",)
    assert tools.find_errors(Call("f", {})) == ("f: 'a' is a required property",)
    assert tools.find_errors(Call("f", {"a": "x"})) == ("a: 'x' is not of type 'integer'",)
    assert "unexpected" in tools.find_errors(Call("f", {"a": 1, "c": 1}))[0]
    assert make_tools({"a": {}}, additionalProperties=True).find_errors(Call("f", {"a": 1, "c": 1})) == ()
    unusable = make_tools({"a": {"type": "string", "pattern": 5}})
    assert unusable.find_errors(Call("f", {})) == ("f: its schema is unusable (5 is not of type 'string')",)
    assert not unusable.accepts(Call("f", {}))


def test_a_reference_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    tools = make_tools({"a": {"$ref": "http://localhost:9/schema.json"}})
    assert "refers to something outside it" in tools.find_errors(Call("f", {"a": 1}))[0]
    assert not tools.accepts(Call("f", {"a": 1}))


def test_compiled_schemas_agree_with_jsonschema() -> None:
    rng = random.Random(6)
    num_compiled = num_accepted = 0
    for _ in range(1_500):
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
            num_accepted += check(value)
    assert num_compiled > 400
    assert num_accepted > 400


@needs_wheel
def test_calls_are_accepted_if_and_only_if_they_have_no_errors() -> None:
    rng = random.Random(7)
    num_accepted = total = 0
    for case in python_cases():
        tools = ToolSet(case.tools)
        for call in mutate(case, rng):
            if rng.random() < 0.3:
                assert tools.accepts(call) is (tools.find_errors(call) == ()), (case.id, call)
                num_accepted += tools.accepts(call)
                total += 1
    assert 0.3 < num_accepted / total < 0.9


def invented_schema(rng: random.Random, depth: int = 0) -> Any:
    """Draw a schema with compiled and other keywords; a few are invalid."""
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
            [{"description": "d"}, {"description": 5}, {"nullable": True}, {"default": 1}, {"title": []},
             {"$ref": "#"}, {"format": "date"}, {"pattern": "a"}, {"examples": [1]}]
        )  # fmt: skip
    if rng.random() < 0.2:
        bounds = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
                  "maxItems", "const"]  # fmt: skip
        schema[rng.choice(bounds)] = rng.choice([0, 1, 2, 2, 1, 1.5, "a", True, None, -1])
    if depth < 2 and rng.random() < 0.15:
        branches = [invented_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        schema[rng.choice(["anyOf", "oneOf", "allOf"])] = branches if rng.random() < 0.9 else []
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


def test_an_unknown_type_name_is_dropped() -> None:
    assert to_json_schema({"type": "geometry", "properties": {"type": {"type": "dict"}}}) == {
        "properties": {"type": {"type": "object"}}
    }


KEYWORDS = ["type", "properties", "required", "items", "enum", "minimum", "description", "pattern", "$ref", "x"]
KEYWORDS += ["anyOf", "minItems", "uniqueItems", "additionalProperties", "default", "examples", "$defs", "format"]
NAMES = st.sampled_from(["string", "object", "integer", "array", "str", "a", "", "#", "(", "#/properties/a"])
SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), st.none() | st.booleans() | st.integers() | NAMES | st.lists(NAMES)),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS), inner | NAMES | st.lists(NAMES) | st.dictionaries(NAMES, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(SCHEMAS)
def test_a_compiled_schema_is_valid(schema: dict[str, Any]) -> None:
    if compile_schema(schema) is not None:
        jsonschema.Draft202012Validator.check_schema(schema)


@settings(max_examples=80, deadline=None)
@given(SCHEMAS)
def test_any_schema_can_be_checked(schema: dict[str, Any]) -> None:
    for check_patterns in (True, False):
        ToolSchema(schema, check_patterns).find_errors({"a": [1, {"a": 2}]})


def test_a_pattern_that_takes_forever_is_not_tried_on_a_datasets_rows() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    start = time.process_time()
    assert load_schema(marshal.dumps(schema, 2)).find_errors({"a": "a" * 64 + "!"}) == []
    assert time.process_time() - start < 1
