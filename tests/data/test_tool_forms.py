"""Tools of other APIs and protocols are read as the functions that they describe, or refused with the reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fctune.data.conversation import Tool
from fctune.data.sources import Defect, ParsedRow, parse_source
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A town."}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city.", "parameters": PARAMETERS}
MCP = {
    "name": "get_weather",
    "title": "Weather",
    "description": "Weather of a city.",
    "inputSchema": PARAMETERS,
    "outputSchema": {"type": "object"},
    "annotations": {"readOnlyHint": True},
}
GEMINI = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {
        "type": "OBJECT",
        "properties": {"city": {"type": "STRING", "description": "A town."}, "days": {"type": "INTEGER"}},
        "required": ["city"],
        "propertyOrdering": ["city", "days"],
    },
}
FORMS: dict[str, Any] = {
    "wrapped": [{"type": "function", "function": FUNCTION}],
    "bare": [FUNCTION],
    "one function": FUNCTION,
    "Responses API": [{"type": "function", **FUNCTION}],
    "JSON": json.dumps([FUNCTION]),
    "list of JSON": [json.dumps(FUNCTION)],
    "Python": repr([FUNCTION]),
    "list of Python": [repr({"type": "function", "function": FUNCTION})],
    "Anthropic": [{"name": "get_weather", "description": "Weather of a city.", "input_schema": PARAMETERS}],
    "MCP result": {"tools": [MCP], "nextCursor": None},
    "MCP envelope": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [MCP]}},
    "JSON of an MCP envelope": json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"tools": [MCP]}}),
    "Gemini": [{"function_declarations": [GEMINI]}],
    "Gemini, camel case": {"functionDeclarations": [GEMINI]},
    "a declaration of Gemini's": [GEMINI],
    "OpenAPI": {
        "openapi": "3.1.0",
        "paths": {
            "/weather": {
                "get": {
                    "operationId": "get_weather",
                    "summary": "Weather of a city.",
                    "parameters": [
                        {
                            "name": "city",
                            "in": "query",
                            "required": True,
                            "schema": {"type": "string", "description": "A town."},
                        },
                        {"name": "days", "in": "query", "schema": {"type": "integer"}},
                    ],
                }
            }
        },
    },
}


def read(value: Any) -> tuple[list[dict[str, Any]], Counter[str]]:
    notes: Counter[str] = Counter()
    tools, _ = ReadContext().read_tools(value, "tools", notes)
    return [tool.function for tool in tools], notes


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tool_is_the_same_function(form: str) -> None:
    assert read(FORMS[form])[0] == [FUNCTION]


@pytest.mark.parametrize("form", FORMS)
def test_a_function_that_was_read_reads_as_itself(form: str) -> None:
    functions, _ = read(FORMS[form])
    again, notes = read([Tool(function).to_openai() for function in functions])
    assert again == functions
    assert not +notes


def test_rows_of_a_file_may_have_tools_in_different_forms(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "No."}]
    rows = [json.dumps({"messages": turns, "tools": value}) for value in FORMS.values()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    for row in parse_source(str(tmp_path / "rows.jsonl")):
        assert isinstance(row, ParsedRow), row
        assert row.conversation.tools == (Tool(FUNCTION),)


@pytest.mark.parametrize(
    ("value", "pointer", "reason"),
    [
        ("get_weather(city)", "tools", "nor a Python literal"),
        ("[{'name': 'f', 'x': open('/etc/passwd')}]", "tools", "nor a Python literal"),
        (3, "tools", "expected a list of tools, got number 3"),
        ([3], "tools[0]", "expected a list of tools, got number 3"),
        ([[[[[[[]]]]]]], "tools[0][0][0][0][0]", "inside one another"),
        ({"tools": [MCP], "nextCursor": "p2"}, "tools.nextCursor", "the page of tools after string 'p2' is missing"),
        ([{"google_search": {}}], "tools[0].name", "expected a name"),
        ({"jsonrpc": "2.0", "error": {"code": -32601}}, "tools.error", "an MCP server's error"),
        ({"jsonrpc": "2.0", "result": 3}, "tools.result", "expected a list of tools"),
        ([{"name": "f", "inputSchema": "x"}], "tools[0].parameters", "JSON Schema of an object"),
        ({"function_declarations": {}}, "tools.function_declarations", "expected a list"),
        (
            [{**GEMINI, "parameters": {"type": "OBJECT", "properties": {"a": 1}}}],
            "tools[0].parameters.properties.a",
            "schema",
        ),
        ({"swagger": "2.0", "paths": {}}, "tools", "swagger '2.0'; convert it to OpenAPI 3"),
        ({"openapi": "3.0.0", "paths": {}}, "tools.paths", "expected paths with operations"),
        ({"openapi": "3.0.0", "paths": {"/x": {}}}, "tools.paths", "no operations"),
    ],
)
def test_a_value_that_is_no_tool_is_refused_with_its_place(value: Any, pointer: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read(value)
    assert caught.value.pointer == pointer
    assert reason in caught.value.reason


OTHER_MCP = {**MCP, "name": "get_time"}
PAGES = ({"tools": [MCP], "nextCursor": "p2"}, {"tools": [OTHER_MCP]})


@pytest.mark.parametrize("write", [dict, json.dumps])
@pytest.mark.parametrize("has_envelope", [False, True])
def test_pages_of_tools_are_joined_and_the_last_must_be_there(
    write: Callable[[dict[str, Any]], Any], has_envelope: bool
) -> None:
    pages = [write({"jsonrpc": "2.0", "id": 1, "result": page} if has_envelope else page) for page in PAGES]
    assert [function["name"] for function in read(pages)[0]] == ["get_weather", "get_time"]
    with pytest.raises(RowError) as caught:
        read([*pages, pages[0]])
    result = ".result" if has_envelope else ""
    assert (caught.value.kind, caught.value.pointer) == ("tools_incomplete", f"tools[2]{result}.nextCursor")


def test_geminis_nullable_and_counts_become_json_schema() -> None:
    schema = {"type": "ARRAY", "items": {"type": "STRING", "nullable": True}, "maxItems": "5"}
    declaration = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"tags": schema}}}
    ((function,), _) = read([{"functionDeclarations": [declaration]}])
    expected = {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 5}
    assert function["parameters"] == {"type": "object", "properties": {"tags": expected}}


PETS: dict[str, Any] = {
    "openapi": "3.0.3",
    "paths": {
        "/pets/{id}": {
            "parameters": [{"$ref": "#/components/parameters/Id"}],
            "put": {
                "operationId": "update_pet",
                "description": "Change a pet.",
                "requestBody": {"$ref": "#/components/requestBodies/Pet"},
            },
            "delete": {
                "summary": "Remove a pet.",
                "parameters": [{"name": "id", "in": "path", "schema": {"type": "string"}}],
            },
        },
        "/pets": {
            "post": {
                "operationId": "add_pets",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}}}
                    },
                },
            }
        },
    },
    "components": {
        "parameters": {
            "Id": {
                "name": "id",
                "in": "path",
                "required": True,
                "description": "The pet.",
                "schema": {"type": "integer"},
            }
        },
        "requestBodies": {
            "Pet": {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Pet"}}}}
        },
        "schemas": {
            "Named": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            "Pet": {
                "allOf": [
                    {"$ref": "#/components/schemas/Named"},
                    {
                        "type": "object",
                        "properties": {
                            "tag": {"type": "string", "nullable": True, "example": "cat"},
                            "age": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                            "seen": {"type": "string", "readOnly": True},
                            "mother": {"$ref": "#/components/schemas/Pet"},
                        },
                        "required": ["seen", "tag"],
                    },
                ]
            },
        },
    },
}


def test_operations_become_functions_with_their_references_resolved() -> None:
    functions, notes = read(PETS)
    assert [function["name"] for function in functions] == ["update_pet", "delete_pets_id", "add_pets"]
    update, remove, add = functions
    assert update["description"] == "Change a pet."
    assert list(update["parameters"]["properties"]) == ["id", "name", "tag", "age", "mother"]
    assert update["parameters"]["required"] == ["id", "name", "tag"]
    assert update["parameters"]["properties"]["id"] == {"description": "The pet.", "type": "integer"}
    assert update["parameters"]["properties"]["tag"] == {"type": ["string", "null"]}
    assert update["parameters"]["properties"]["age"] == {"type": "integer", "exclusiveMinimum": 0}
    assert remove == {
        "name": "delete_pets_id",
        "description": "Remove a pet.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
    }
    assert add["parameters"]["required"] == ["body"]
    assert "$ref" not in json.dumps(functions)
    assert +notes == {"tools_from_openapi": 1}


def test_a_required_property_may_have_a_schema_that_is_true() -> None:
    schema = {"type": "object", "properties": {"data": True, "id": {"readOnly": True}}, "required": ["data", "id"]}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    ((function,), _) = read({"openapi": "3.1.0", "paths": {"/f": {"post": {"requestBody": body}}}})
    assert function["parameters"] == {"type": "object", "properties": {"data": True}, "required": ["data"]}


def test_parameters_of_one_name_in_two_places_are_refused() -> None:
    path = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    query = {"name": "id", "in": "query", "schema": {"type": "integer"}}
    with pytest.raises(RowError, match=r"path and query share the name id, .* rename one") as caught:
        read({"openapi": "3.0.0", "paths": {"/f/{id}": {"parameters": [path], "get": {"parameters": [query]}}}})
    assert (caught.value.kind, caught.value.pointer) == (
        "tool_shape",
        "tools.paths['/f/{id}'].get.parameters[0].name",
    )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "other.yaml#/Pet"}, "refers to another document (other.yaml#/Pet)"),
        ({"$ref": "#/components/schemas/Missing"}, "the document has no #/components/schemas/Missing"),
        ([], "expected a schema, got list []"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_named(schema: Any, reason: str) -> None:
    operation = {"operationId": "f", "parameters": [{"name": "a", "in": "query", "schema": schema}]}
    with pytest.raises(RowError) as caught:
        read({"openapi": "3.1.0", "paths": {"/f": {"get": operation}}})
    assert caught.value.pointer.startswith("tools.paths['/f'].get.parameters[0].schema")
    assert reason in caught.value.reason


def test_references_that_multiply_are_refused_in_bounded_time() -> None:
    schemas = {
        f"S{i}": {"type": "object", "properties": {n: {"$ref": f"#/components/schemas/S{i + 1}"} for n in "abcdefgh"}}
        for i in range(30)
    }
    schemas["S30"] = {"type": "string"}
    operation = {"parameters": [{"name": "a", "in": "query", "schema": {"$ref": "#/components/schemas/S0"}}]}
    with pytest.raises(RowError, match="split it"):
        read({"openapi": "3.1.0", "paths": {"/f": {"get": operation}}, "components": {"schemas": schemas}})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "cat"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "name", "tag"]), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = ("A", "B", "C")
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {}, {"type": ["boolean", "null"]}]),
    lambda inner: (
        st.builds(lambda i: {"type": "array", "items": i}, inner)
        | st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": sorted(r)},
            st.dictionaries(st.sampled_from(["a", "b", "name"]), inner, max_size=3),
            st.sets(st.sampled_from(["a", "b"]), max_size=1),
        )
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2))
        | st.sampled_from([{"$ref": f"#/components/schemas/{name}"} for name in NAMES[1:]])
    ),
    max_leaves=6,
)


@given(
    a=SCHEMAS,
    b=st.sampled_from([{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/C"}}]),
    c=st.sampled_from([{"type": "integer"}, {"type": "object", "properties": {"a": {"type": "string"}}}]),
    values=st.lists(VALUES, min_size=4, max_size=4),
)
def test_a_resolved_schema_accepts_what_the_documents_schema_accepts(a: Any, b: Any, c: Any, values: list[Any]) -> None:
    components = {"components": {"schemas": {"A": a, "B": b, "C": c}}}
    operation = {"operationId": "f", "parameters": [{"name": "x", "in": "query", "schema": a}]}
    ((function,), _) = read({"openapi": "3.1.0", "paths": {"/f": {"get": operation}}, **components})
    ours = jsonschema.Draft202012Validator(function["parameters"]["properties"]["x"])
    theirs = jsonschema.Draft202012Validator({**a, **components})
    for value in values:
        assert ours.is_valid(value) == theirs.is_valid(value)


def test_a_bad_document_is_a_defect_of_its_line(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "No."}]
    good, bad = ({"messages": turns, "tools": tools} for tools in ([FUNCTION], {"openapi": "3.0.0", "paths": {}}))
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    _, defect = parse_source(str(tmp_path / "rows.jsonl"))
    assert isinstance(defect, Defect)
    assert (defect.line, defect.pointer, defect.kind) == (2, "tools.paths", "tool_shape")
