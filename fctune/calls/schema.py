"""A tool's schema: what types an argument may have, text read by them, and whether a call obeys.

Schemas in the wild are not all JSON Schema: the names of types that the Berkeley leaderboard and its descendants use
(``dict``, ``float``, ``tuple``, ``any``, Java's) are taken for what they mean.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import referencing
import referencing.exceptions

from fctune.calls.plain_schema import Check, compile_schema
from fctune.data.conversation import Call, Tool
from fctune.parsing.json_text import UnreadableError, decode_json
from fctune.parsing.python_text import PythonReader

MAX_ERRORS = 20

_TYPES = {
    "string": "string", "str": "string", "char": "string",
    "integer": "integer", "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "bigint": "integer",
    "number": "number", "float": "number", "double": "number",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array", "arraylist": "array", "set": "array", "queue": "array",
    "stack": "array",
    "object": "object", "dict": "object", "hashmap": "object", "hashtable": "object",
    "null": "null", "none": "null", "nonetype": "null",
}  # fmt: skip
_ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
_STRING_ONLY = frozenset(("string",))
_TYPE_ONLY = frozenset(("type", "description"))
_BRANCHES = ("anyOf", "oneOf", "allOf")


def argument_types(schema: Any) -> frozenset[str]:
    """The names of JSON's types that a schema lets an argument have.

    A value that the schema itself gives - its default, a member of its enum - shows its type as well: a
    ``"type": "string"`` with ``"default": null`` takes null.
    """
    if type(schema) is not dict and not isinstance(schema, Mapping):  # The second alone takes three times as long.
        return _ALL_TYPES
    declared = schema.get("type")
    if type(declared) is str and schema.keys() <= _TYPE_ONLY:
        return _named_types(declared)
    if declared is None:
        types = _types_of_branches(schema)
    else:
        types = _named_types(*map(str, declared)) if isinstance(declared, list) else _named_types(str(declared))
    if types == _ALL_TYPES:
        return types
    if schema.get("nullable") is True:
        types |= {"null"}
    for key in ("default", "const"):
        if key in schema and not isinstance(schema[key], str):
            types |= {type_name(schema[key])}
    if isinstance(enum := schema.get("enum"), list):
        types |= {type_name(value) for value in enum if not isinstance(value, str)}
    return types


@functools.lru_cache(maxsize=1024)
def _named_types(*declared: str) -> frozenset[str]:
    names = [_TYPES.get(name.lower()) for name in declared]
    return _ALL_TYPES if None in names else frozenset(name for name in names if name is not None)


def _types_of_branches(schema: Mapping[str, Any]) -> frozenset[str]:
    types: frozenset[str] = frozenset()
    for branch in (branch for key in _BRANCHES for branch in schema.get(key) or ()):
        types |= argument_types(branch)
    if not types and "enum" not in schema and "const" not in schema:
        return _ALL_TYPES
    enum = schema.get("enum")
    given = [*(enum if isinstance(enum, list) else ()), *(schema[key] for key in ("default", "const") if key in schema)]
    return types | {"string"} if any(isinstance(value, str) for value in given) else types


def type_name(value: Any) -> str:
    """What JSON calls the type of a value; whole numbers are ``integer``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for name, kinds in (("string", str), ("integer", int), ("number", float), ("object", dict)):
        if isinstance(value, kinds):
            return name
    return "array"


def read_typed_text(text: str, schema: Any) -> Any:
    """The value that a text without quotes stands for in an argument of that schema.

    A schema of strings only takes the text as it is. Otherwise the text is read as JSON, or with Python's words and
    quotes; what cannot be read, or has a type that the schema does not have while it has strings, is a string.
    """
    types = argument_types(schema)
    if types == _STRING_ONLY:
        return text
    try:
        value = decode_json(text)
    except UnreadableError:
        try:
            value = _read_python(text.strip())
        except UnreadableError:
            return text
    if "string" not in types or types == _ALL_TYPES:
        return value
    kind = type_name(value)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return value if is_allowed and kind != "string" else text


def find_tool(tools: Sequence[Tool], name: str) -> Tool | None:
    """The tool of that name, if it is on offer."""
    return next((tool for tool in tools if tool.name == name), None)


def argument_schemas(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """The schema of each argument of a tool; empty where tool or schema is missing."""
    tool = find_tool(tools, name)
    properties = tool.parameters.get("properties") if tool and isinstance(tool.parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def to_json_schema(schema: Any) -> Any:
    """The schema with its types named as JSON Schema names them; a type nobody knows constrains nothing."""
    if isinstance(schema, list):
        return [to_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, (str, list)):
            names = [_TYPES.get(str(name).lower()) for name in (value if isinstance(value, list) else [value])]
            if None not in names:
                result[key] = names if isinstance(value, list) else names[0]
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            result[key] = {name: to_json_schema(inner) for name, inner in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            result[key] = value
        elif key == "required" and not isinstance(value, list):
            continue  # Draft 3 and some datasets mark the property itself; Draft 2020-12 takes lists only.
        else:
            result[key] = to_json_schema(value)
    return result


def schema_errors(call: Call, tools: Sequence[Tool]) -> tuple[str, ...]:
    """What is wrong with a call by the schema of its tool, each as one line; empty if nothing is.

    A tool that is not on offer and an argument that the schema does not name are wrong, unless the schema
    allows more arguments in so many words.
    """
    return ToolSet(tools).errors(call)


class ToolSet:
    """Tools on offer, made ready to check many calls."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in reversed(tools)}
        self._checks: dict[str, Check | None] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def obeys(self, call: Call) -> bool:
        """Whether ``errors`` has nothing to say of a call."""
        tool = self._tools.get(call.name)
        if tool is None:
            return False
        if call.name not in self._checks:
            self._checks[call.name] = compile_schema(_arguments_schema(tool.parameters))
        check = self._checks[call.name]
        return check(call.arguments) if check is not None else not self.errors(call)

    def errors(self, call: Call) -> tuple[str, ...]:
        """As ``schema_errors`` says."""
        tool = self._tools.get(call.name)
        if tool is None:
            return (f"{call.name[:80]}: no such tool",)
        validator = _validator(json.dumps(tool.parameters, sort_keys=True, default=str))
        if validator is None:
            return (f"{call.name}: its schema is not a schema",)
        try:
            found = list(itertools.islice(validator.iter_errors(call.arguments), MAX_ERRORS))
        except (referencing.exceptions.Unresolvable, RecursionError) as error:
            return (f"{call.name}: its schema cannot be followed ({type(error).__name__})",)
        return tuple(
            f"{'.'.join(map(str, error.absolute_path)) or call.name}: {error.message[:200]}" for error in found
        )


@functools.lru_cache(maxsize=4096)
def _validator(parameters: str) -> jsonschema.Draft202012Validator | None:
    schema = _arguments_schema(json.loads(parameters))
    if schema is None:
        return None
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    # The default registry would fetch what a $ref names over the network.
    return jsonschema.Draft202012Validator(schema, registry=referencing.Registry())


def _arguments_schema(parameters: Any) -> dict[str, Any] | None:
    """The JSON Schema of a tool's arguments, which names all there may be unless it says otherwise."""
    schema = to_json_schema(parameters)
    if not isinstance(schema, dict):
        return None
    schema = {"type": "object", "additionalProperties": False, **schema}
    if not schema.get("properties") and "additionalProperties" not in parameters:
        schema["additionalProperties"] = any(key in schema for key in (*_BRANCHES, "$ref", "patternProperties"))
    return schema


def _read_python(text: str) -> Any:
    value, end = PythonReader(text).read_value(0)
    if end != len(text):
        raise UnreadableError("something follows the value", end)
    return value
