"""Reference of every config key, generated from the schema: a page of documentation and a JSON Schema."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fctune.config.composition import EXTENDS
from fctune.config.fields import NotEmpty, Null, Range, join_key, read_field_docs
from fctune.config.intervals import IsInterval, IsShare
from fctune.config.parsing import split_annotation
from fctune.config.schema import RunConfig

_TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def render_config_reference() -> str:
    """Return ``docs/reference/config.md``: type, default and meaning of every key, by section."""
    lines = [
        "# Config keys",
        "",
        "Every key of a run's config. `key=value` on the command line overrides a key (`optimizer.lr=1e-4`,",
        "`data.sources=[{path: rows.jsonl}]`), and `~key` drops one. `fctune config check CONFIG` checks a config, and",
        "`fctune config schema` prints its JSON Schema. `extends: FILE`, or a list of files, merges a config over",
        "others; `fctune config show CONFIG` prints the result ([Train](../train.md#configs-that-extend-others)).",
        "",
        "Generated from `fctune/config/schema.py` and `fctune/config/sections/` by `make reference`.",
    ]
    return "\n".join([*lines, *render_sections(RunConfig)]) + "\n"


def render_sections(schema: type[Any]) -> Iterator[str]:
    """Yield the lines of a table of keys for each section of a schema."""
    for key, section in _sections(schema, ""):
        yield from ["", f"## {f'`{key}`' if key else 'Top level'}", "", _summarise(section), ""]
        yield from ["| key | type | default | meaning |", "|---|---|---|---|"]
        docs = read_field_docs(section)
        for spec, hint, constraints in _fields(section):
            meaning = docs[spec.name] + "".join(f" Null: {c.meaning}." for c in constraints if isinstance(c, Null))
            cells = (f"`{spec.name}`", _describe_type(hint, constraints), _describe_default(spec), meaning)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a run's config."""
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fctune run config"}
    full = _schema_of(RunConfig)
    partial = _without_required(full)
    partial["properties"][EXTENDS] = {
        "description": "Config, or list of configs, that this one is merged over, relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return header | partial | {"if": {"required": [EXTENDS]}, "else": _only_required(full)}


def _without_required(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section whose required keys another config may give; list items are always complete."""
    partial = {key: value for key, value in schema.items() if key != "required"}
    if "properties" in schema:
        partial["properties"] = {name: _without_required(inner) for name, inner in schema["properties"].items()}
    if "anyOf" in schema:
        partial["anyOf"] = [_without_required(arm) for arm in schema["anyOf"]]
    return partial


def _only_required(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that says which keys are required."""
    kept = {"required": schema["required"]} if "required" in schema else {}
    inner = {name: part for name, one in schema.get("properties", {}).items() if (part := _only_required(one))}
    arms = [part for arm in schema.get("anyOf", ()) if arm.get("type") == "object" and (part := _only_required(arm))]
    return kept | ({"properties": inner} if inner else {}) | (arms[0] if arms else {})


def _sections(cls: type[Any], key: str) -> Iterator[tuple[str, type[Any]]]:
    yield key, cls
    for spec, hint, _ in _fields(cls):
        inner, is_list = _section_of(hint)
        if inner is not None:
            yield from _sections(inner, join_key(key, f"{spec.name}[]" if is_list else spec.name))


def _fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any, tuple[Any, ...]]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(spec, *split_annotation(hints[spec.name])) for spec in dataclasses.fields(cls)]


def _section_of(hint: Any) -> tuple[type[Any] | None, bool]:
    """Return the dataclass of a section, or of a list's items, and whether it is a list."""
    if get_origin(hint) is list:
        return _section_of(get_args(hint)[0])[0], True
    candidates = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None), False


def _summarise(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _describe_type(hint: Any, constraints: tuple[Any, ...]) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if interval := next((c for c in constraints if isinstance(c, IsInterval | IsShare)), None):
        return interval.describe()
    if origin in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _describe_type(a, constraints) for a in args)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    bounds = "".join(f" ({c.describe()})" for c in constraints if isinstance(c, Range))
    if origin is list:
        inner, _ = _section_of(args[0])
        items = "sections" if inner else "mappings" if get_origin(args[0]) is dict else _TYPE_NAMES[args[0]] + "s"
        return f"list of {items}{bounds}"
    if origin is dict:
        return "mapping"
    return ("section" if dataclasses.is_dataclass(hint) else _TYPE_NAMES[hint]) + bounds


def _describe_default(spec: dataclasses.Field[Any]) -> str:
    value = _default_of(spec)
    if value is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return f"`{_to_yaml(value)}`"


def _default_of(spec: dataclasses.Field[Any]) -> Any:
    return spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default


def _to_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_yaml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _schema_of(cls: type[Any]) -> dict[str, Any]:
    docs = read_field_docs(cls)
    properties: dict[str, Any] = {}
    required = []
    for spec, hint, constraints in _fields(cls):
        value = _default_of(spec)
        own = _schema_of_type(hint, constraints)
        if dataclasses.is_dataclass(value):  # null selects the defaults, also over a section of an extended config
            own = {"anyOf": [{"type": "null"}, own]}
        properties[spec.name] = {"description": docs[spec.name], **own}
        if value is dataclasses.MISSING:
            required.append(spec.name)
        elif not dataclasses.is_dataclass(value):
            properties[spec.name]["default"] = value
    schema = {"description": _summarise(cls), "type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _schema_of_type(hint: Any, constraints: tuple[Any, ...]) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else _schema_of_type(a, constraints) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    bounds: dict[str, Any] = {}
    for constraint in constraints:
        bounds |= constraint.to_json_schema() if isinstance(constraint, Range) else {}
    if origin is list:
        items = _schema_of_type(args[0], constraints)
        return {"type": "array", "items": items} | ({"minItems": 1} if _is_not_empty(constraints) else {})
    if origin is dict:
        return {"type": "object"}
    if dataclasses.is_dataclass(hint):
        return _schema_of(hint)  # type: ignore[arg-type]
    return {"type": _TYPE_NAMES[hint]} | bounds


def _is_not_empty(constraints: tuple[Any, ...]) -> bool:
    return any(isinstance(constraint, NotEmpty) for constraint in constraints)
