"""Reference of every config key, generated from the schema: a page of documentation and a JSON Schema."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from fctune.config.composition import EXTENDS
from fctune.config.fields import Change, Field, NotEmpty, Range, iter_fields, list_fields, read_field_docs
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
        "A run resumes only with the same values, except for keys with `may change`, or with `same content`: then the",
        "weights, prepared rows or cases must be the same. `same rows`: rows are not prepared again for another value.",
        "",
        "Generated from `fctune/config/schema.py` and `fctune/config/sections/` by `make reference`.",
    ]
    return "\n".join([*lines, *render_sections(RunConfig)]) + "\n"


def render_sections(schema: type[Any]) -> Iterator[str]:
    """Yield the lines of a table of keys for each section of a schema."""
    fields = dict(iter_fields(schema))
    has_changes = any(field.change for field in fields.values())
    yield from _render_section("Top level", schema, None, has_changes)
    for key, field in fields.items():
        if field.section is not None:
            outer = [part.change for name, part in fields.items() if f"{key}.".startswith(f"{name}.") and part.change]
            title = f"`{key}{'[]' if field.is_list else ''}`"
            yield from _render_section(title, field.section, outer[0] if outer else None, has_changes)


def _render_section(title: str, section: type[Any], change: Change | None, has_changes: bool) -> Iterator[str]:
    heads = ["key", "type", "default", *(["on resume"] if has_changes else []), "meaning"]
    yield from ["", f"## {title}", "", _summarise(section), ""]
    yield from [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    docs = read_field_docs(section)
    for field in list_fields(section):
        cells = [f"`{field.name}`", _describe_type(field), _describe_default(field)]
        if has_changes:
            cells.append(getattr(field.change or change, "value", ""))
        cells.append(docs[field.name] + ("" if field.null is None else f" Null: {field.null}."))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a run's config."""
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fctune run config"}
    schema = header | _schema_of(RunConfig, is_partial=True)
    schema["properties"][EXTENDS] = {
        "description": "Config, or list of configs, that this one is merged over, relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return schema | {"if": {"required": [EXTENDS]}, "else": _require(RunConfig)}


def _require(section: type[Any]) -> dict[str, Any]:
    """Return the part of a schema that says which keys are required."""
    fields = list_fields(section)
    required = [field.name for field in fields if field.is_required]
    sections = {field.name: field.section for field in fields if field.section is not None and not field.is_list}
    inner = {name: part for name, one in sections.items() if (part := _require(one))}
    return ({"required": required} if required else {}) | ({"properties": inner} if inner else {})


def _summarise(cls: type[Any]) -> str:
    return " ".join((inspect.getdoc(cls) or "").split())


def _describe_type(field: Field) -> str:
    if field.notation is not None:
        return field.notation
    bounds = "".join(f" ({note.describe()})" for note in field.constraints if isinstance(note, Range))
    return " or ".join([*(_describe_arm(arm, bounds) for arm in field.arms), *(["null"] if field.is_nullable else [])])


def _describe_arm(arm: Any, bounds: str) -> str:
    origin, args = get_origin(arm), get_args(arm)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is list:
        items = "mappings" if get_origin(args[0]) is dict else f"{_TYPE_NAMES.get(args[0], 'section')}s"
        return f"list of {items}{bounds}"
    return "mapping" if origin is dict else _TYPE_NAMES.get(arm, "section") + bounds


def _describe_default(field: Field) -> str:
    if field.is_required:
        return "required"
    return "its defaults" if dataclasses.is_dataclass(field.default) else f"`{_to_yaml(field.default)}`"


def _to_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_to_yaml, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _schema_of(cls: type[Any], is_partial: bool) -> dict[str, Any]:
    """Return the schema of a section; of a partial one, another config may give the required keys."""
    docs, properties = read_field_docs(cls), {}
    for field in list_fields(cls):
        bounds = next((note.to_json_schema() for note in field.constraints if isinstance(note, Range)), {})
        arms = [_schema_of_arm(arm, field, bounds, is_partial) for arm in field.arms]
        has_defaults = dataclasses.is_dataclass(field.default)
        if has_defaults:  # null selects the defaults, also over a section of an extended config
            arms.insert(0, {"type": "null"})
        elif field.is_nullable:
            arms.append({"type": "null"})
        default = {} if field.is_required or has_defaults else {"default": field.default}
        own = arms[0] if len(arms) == 1 else {"anyOf": arms}
        properties[field.name] = {"description": docs[field.name], **own, **default}
    schema = {"description": _summarise(cls), "type": "object", "properties": properties, "additionalProperties": False}
    required = [field.name for field in list_fields(cls) if field.is_required]
    return schema | ({"required": required} if required and not is_partial else {})


def _schema_of_arm(arm: Any, field: Field, bounds: dict[str, Any], is_partial: bool) -> dict[str, Any]:
    origin, args = get_origin(arm), get_args(arm)
    if origin is Literal:
        return {"enum": list(args)}
    if origin is list:
        is_filled = any(isinstance(note, NotEmpty) for note in field.constraints)
        return {"type": "array", "items": _schema_of_arm(args[0], field, bounds, is_partial=False)} | (
            {"minItems": 1} if is_filled else {}
        )
    if origin is dict:
        return {"type": "object"}
    return _schema_of(arm, is_partial) if dataclasses.is_dataclass(arm) else {"type": _TYPE_NAMES[arm]} | bounds  # type: ignore[arg-type]
