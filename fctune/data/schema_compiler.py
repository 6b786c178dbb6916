"""Common JSON Schemas compiled to plain functions that check a value in microseconds.

Tool schemas rarely use more than names, types, enums and bounds. jsonschema remains the reference: every other schema
is left to it, and a compiled schema is always a valid one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
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
# Python types whose every value has the JSON type.
_EXACT_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (float, int),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NUMBER_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_SIZE_BOUNDS: dict[str, tuple[type[str] | type[list[Any]], Callable[[Any, Any], bool]]] = {
    "minLength": (str, operator.ge),
    "maxLength": (str, operator.le),
    "minItems": (list, operator.ge),
    "maxItems": (list, operator.le),
}
_BRANCHES: dict[str, Callable[[Iterable[bool]], bool]] = {
    "anyOf": any,
    "allOf": all,
    "oneOf": lambda results: sum(results) == 1,
}
_OBJECT_KEYS = ("properties", "required", "additionalProperties")
_COMPILED = frozenset(("type", "enum", "const", "items", *_OBJECT_KEYS, *_NUMBER_BOUNDS, *_SIZE_BOUNDS, *_BRANCHES))
# They constrain no value, but the metaschema requires them to be strings.
_TEXTS = frozenset(("title", "description", "format"))
# Keys that constrain values or schemas in ways that are not compiled.
_NOT_COMPILED = (frozenset(jsonschema.Draft202012Validator.VALIDATORS) - _COMPILED - _TEXTS) | frozenset(
    ("definitions", "dependencies", "examples", "deprecated", "readOnly", "writeOnly")
)


def compile_schema(schema: Any) -> Check | None:
    """Compile a schema of Draft 2020-12 to a function that tests a value; None if it uses more, or is invalid."""
    if isinstance(schema, bool):
        return lambda value: schema
    if not isinstance(schema, dict) or not _has_compiled_keys_only(schema):
        return None
    checks: list[Check | None] = []
    if "type" in schema:
        checks.append(_compile_type(schema["type"]))
    if "enum" in schema:
        checks.append(_compile_members(schema["enum"]))
    if "const" in schema:
        checks.append(_compile_members([schema["const"]]))
    if "items" in schema:
        checks.append(_compile_items(schema["items"]))
    if not schema.keys().isdisjoint(_OBJECT_KEYS):
        checks.append(_compile_object(schema))
    if not schema.keys().isdisjoint(_RARE):
        checks += [compile_(schema[key], key) for key, compile_ in _RARE.items() if key in schema]
    known = [check for check in checks if check is not None]
    if len(known) < len(checks):
        return None
    if len(known) == 1:
        return known[0]
    if len(known) == 2:
        first, second = known
        return lambda value: first(value) and second(value)
    return lambda value: all(check(value) for check in known)


def _has_compiled_keys_only(schema: Mapping[str, Any]) -> bool:
    for key, value in schema.items():
        if not isinstance(key, str) or key in _NOT_COMPILED or key.startswith(("$", "content")):
            return False
        if key in _TEXTS and not isinstance(value, str):
            return False
    return True


def _compile_type(names: Any) -> Check | None:
    if isinstance(names, str):
        return _TYPES.get(names)
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        return None
    checks = [_TYPES.get(name) for name in names if isinstance(name, str)]
    known = [check for check in checks if check is not None]
    return (lambda value: any(check(value) for check in known)) if len(known) == len(names) else None


def _compile_members(allowed: Any) -> Check | None:
    if not isinstance(allowed, list) or not all(type(member) in (str, int, type(None)) for member in allowed):
        return None
    members = frozenset(allowed)
    # JSON Schema, like Python, treats 1 and 1.0 as equal, but not true.
    return lambda value: type(value) in (str, int, float, type(None)) and value in members


def _compile_items(schema: Any) -> Check | None:
    check = compile_schema(schema)
    return None if check is None else lambda value: not isinstance(value, list) or all(map(check, value))


def _compile_number_bound(bound: Any, key: str) -> Check | None:
    compare, is_number = _NUMBER_BOUNDS[key], _TYPES["number"]
    return (lambda value: not is_number(value) or compare(value, bound)) if is_number(bound) else None


def _compile_size_bound(bound: Any, key: str) -> Check | None:
    kind, compare = _SIZE_BOUNDS[key]
    is_size = type(bound) is int and bound >= 0
    return (lambda value: not isinstance(value, kind) or compare(len(value), bound)) if is_size else None


def _compile_branches(branches: Any, key: str) -> Check | None:
    if not isinstance(branches, list) or not branches:
        return None
    checks = [compile_schema(branch) for branch in branches]
    known = [check for check in checks if check is not None]
    combine = _BRANCHES[key]
    return (lambda value: combine(check(value) for check in known)) if len(known) == len(checks) else None


_RARE: dict[str, Callable[[Any, str], Check | None]] = {
    **dict.fromkeys(_NUMBER_BOUNDS, _compile_number_bound),
    **dict.fromkeys(_SIZE_BOUNDS, _compile_size_bound),
    **dict.fromkeys(_BRANCHES, _compile_branches),
}


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
    # For most properties a look at the type is enough.
    exact = {name: _EXACT_TYPES[inner["type"]] for name, inner in properties.items() if _has_type_only(inner)}

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return True
        if not names <= value.keys():
            return False
        for name, item in value.items():
            if type(item) not in exact.get(name, ()) and not known.get(name, others)(item):
                return False
        return True

    return check


def _has_type_only(schema: Any) -> bool:
    return (
        isinstance(schema, dict)
        and isinstance(schema.get("type"), str)
        and _COMPILED.isdisjoint(schema.keys() - {"type"})
    )
