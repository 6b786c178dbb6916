"""Schemas that say names, types and enums only, compiled to plain functions.

Most tools' schemas do, and a verdict takes microseconds then. jsonschema stays the reference, and has all others:
``compile_schema`` knows a schema wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema

Check = Callable[[Any], bool]

_TYPES: dict[str, Check] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
# Python's types of which every value passes.
_PASSES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (float, int),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_COMPILED = frozenset(("type", "enum", "items", "properties", "required", "additionalProperties"))
# They demand nothing of a value, but must be what a schema may have there.
_TEXTS = frozenset(("title", "description", "format"))
# What else a schema can demand, or name in itself.
_UNKNOWN = (frozenset(jsonschema.Draft202012Validator.VALIDATORS) - _COMPILED - _TEXTS) | frozenset(
    ("definitions", "dependencies", "examples", "deprecated", "readOnly", "writeOnly")
)


def compile_schema(schema: Any) -> Check | None:
    """Whether a value obeys the schema, as a function; None for a schema that says more, or that is none.

    Args:
        schema: JSON Schema, Draft 2020-12.
    """
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, dict) or not _is_plain(schema):
        return None
    checks: list[Check] = []
    if "type" in schema:
        type_check = _compile_type(schema["type"])
        if type_check is None:
            return None
        checks.append(type_check)
    if "enum" in schema:
        enum = schema["enum"]
        if not isinstance(enum, list) or not all(type(member) in (str, int, type(None)) for member in enum):
            return None
        members = frozenset(enum)
        # To JSON Schema 1 and 1.0 are one value, as to Python, but true is another.
        checks.append(lambda value: type(value) in (str, int, float, type(None)) and value in members)
    if "items" in schema:
        item_check = compile_schema(schema["items"])
        if item_check is None:
            return None
        checks.append(lambda value: not isinstance(value, list) or all(map(item_check, value)))
    if not schema.keys().isdisjoint(("properties", "required", "additionalProperties")):
        object_check = _compile_object(schema)
        if object_check is None:
            return None
        checks.append(object_check)
    if len(checks) == 1:
        return checks[0]
    if len(checks) == 2:
        first, second = checks
        return lambda value: first(value) and second(value)
    return lambda value: all(check(value) for check in checks)


def _is_plain(schema: Mapping[str, Any]) -> bool:
    for key, value in schema.items():
        if not isinstance(key, str) or key in _UNKNOWN or key.startswith(("$", "content")):
            return False
        if key in _TEXTS and not isinstance(value, str):
            return False
    return True


def _says_type_only(schema: Any) -> bool:
    return (
        isinstance(schema, dict)
        and isinstance(schema.get("type"), str)
        and _COMPILED.isdisjoint(schema.keys() - {"type"})
    )


def _compile_type(names: Any) -> Check | None:
    if isinstance(names, str):
        return _TYPES.get(names)
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        return None
    checks = [_TYPES.get(name) for name in names if isinstance(name, str)]
    known = [check for check in checks if check is not None]
    return (lambda value: any(check(value) for check in known)) if len(known) == len(names) else None


def _compile_object(schema: Mapping[str, Any]) -> Check | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    if not all(isinstance(name, str) for name in required) or len(set(required)) < len(required):
        return None
    checks = {name: compile_schema(inner) for name, inner in properties.items()}
    known = {name: check for name, check in checks.items() if check is not None}
    others = compile_schema(schema.get("additionalProperties", True))
    if others is None or len(known) < len(checks):
        return None
    names = frozenset(required)
    # Most items need no more than a look at their type.
    plain = {name: _PASSES[inner["type"]] for name, inner in properties.items() if _says_type_only(inner)}

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        if not names <= value.keys():
            return False
        for name, item in value.items():
            if type(item) not in plain.get(name, ()) and not known.get(name, others)(item):
                return False
        return True

    return check
