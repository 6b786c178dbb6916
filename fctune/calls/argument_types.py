"""The JSON types that a tool's arguments may have, and unquoted text read by them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fctune.base.json_reader import ParseError, decode_json
from fctune.base.python_reader import PythonReader
from fctune.data.conversation import Tool
from fctune.data.tool_schema import TYPE_NAMES

_ALL_TYPES = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
_STRING_ONLY = frozenset(("string",))
_TYPE_ONLY = frozenset(("type", "description"))


def argument_types(schema: Any) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows.

    The type of a value that the schema itself contains (its default, a member of its enum) is allowed too: a
    ``"type": "string"`` with ``"default": null`` accepts null.
    """
    if type(schema) is not dict and not isinstance(schema, Mapping):  # the isinstance alone takes three times as long
        return _ALL_TYPES
    declared = schema.get("type")
    if type(declared) is str and schema.keys() <= _TYPE_ONLY:
        return _types_by_name(declared)
    if declared is None:
        types = _branch_types(schema)
    else:
        types = _types_by_name(*map(str, declared)) if isinstance(declared, list) else _types_by_name(str(declared))
    if types == _ALL_TYPES:
        return types
    if schema.get("nullable") is True:
        types |= {"null"}
    for key in ("default", "const"):
        if key in schema and not isinstance(schema[key], str):
            types |= {_type_of(schema[key])}
    if isinstance(enum := schema.get("enum"), list):
        types |= {_type_of(value) for value in enum if not isinstance(value, str)}
    return types


def argument_schemas(tools: Sequence[Tool], name: str) -> Mapping[str, Any]:
    """Return the schema of each argument of the named tool; empty if the tool or its schema is missing."""
    tool = next((tool for tool in tools if tool.name == name), None)
    properties = tool.parameters.get("properties") if tool and isinstance(tool.parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def read_typed_text(text: str, schema: Any) -> Any:
    """Return the value of an unquoted text in an argument with this schema.

    If the schema allows strings only, the text is returned unchanged. Otherwise it is read as JSON, or with Python's
    words and quotes. Text that cannot be read stays a string, as does a value of a type that the schema does not allow
    if the schema allows strings.
    """
    types = argument_types(schema)
    if types == _STRING_ONLY:
        return text
    try:
        value = decode_json(text)
    except ParseError:
        try:
            value = _read_python(text.strip())
        except ParseError:
            return text
    if "string" not in types or types == _ALL_TYPES:
        return value
    kind = _type_of(value)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return value if is_allowed and kind != "string" else text


@functools.lru_cache(maxsize=1024)
def _types_by_name(*declared: str) -> frozenset[str]:
    names = [TYPE_NAMES.get(name.lower()) for name in declared]
    return _ALL_TYPES if None in names else frozenset(name for name in names if name is not None)


def _branch_types(schema: Mapping[str, Any]) -> frozenset[str]:
    types: frozenset[str] = frozenset()
    for branch in (branch for key in ("anyOf", "oneOf", "allOf") for branch in schema.get(key) or ()):
        types |= argument_types(branch)
    if not types and "enum" not in schema and "const" not in schema:
        return _ALL_TYPES
    enum = schema.get("enum")
    given = [*(enum if isinstance(enum, list) else ()), *(schema[key] for key in ("default", "const") if key in schema)]
    return types | {"string"} if any(isinstance(value, str) for value in given) else types


def _type_of(value: Any) -> str:
    """Return the JSON type of a value; ints are ``integer``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for name, kinds in (("string", str), ("integer", int), ("number", float), ("object", dict)):
        if isinstance(value, kinds):
            return name
    return "array"


def _read_python(text: str) -> Any:
    value, end = PythonReader(text).read_value(0)
    if end != len(text):
        raise ParseError("extra text after the value", end)
    return value
