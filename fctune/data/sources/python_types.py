"""Conversion of Python type names, which xLAM and ToolACE use as types, to JSON Schema."""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError

_TYPES = {
    "str": "string", "string": "string",
    "int": "integer", "integer": "integer", "long": "integer",
    "float": "number", "double": "number", "number": "number",
    "bool": "boolean", "boolean": "boolean",
    "list": "array", "tuple": "array", "set": "array", "array": "array", "sequence": "array", "iterable": "array",
    "dict": "object", "object": "object", "mapping": "object",
    "none": "null", "nonetype": "null", "null": "null",
}  # fmt: skip


def convert_type(text: str, pointer: str) -> tuple[dict[str, Any], bool]:
    """Return the JSON Schema of a Python type, and whether it is marked as optional (``str, optional``).

    Raises:
        RowError: ``type_unknown`` for a type that JSON Schema cannot express.
    """
    name, *remarks = _split(text)
    is_optional = False
    for remark in remarks:
        word = remark.strip().lower()
        if not word.startswith(("optional", "default", "required")):
            raise RowError(pointer, "type_unknown", f"no JSON Schema for the type {text!r}")
        is_optional = is_optional or not word.startswith("required")
    if name.strip().lower().startswith("optional["):
        is_optional = True
    return _convert(name.strip(), text, pointer), is_optional


def _convert(name: str, text: str, pointer: str) -> dict[str, Any]:
    base, bracket, inner = name.partition("[")
    base = base.strip().removeprefix("typing.").lower()
    if bracket and not inner.endswith("]"):
        raise RowError(pointer, "type_unknown", f"no JSON Schema for the type {text!r}")
    inside = [part.strip() for part in _split(inner[:-1])] if bracket else []
    parts = [_convert(part, text, pointer) for part in inside if part != "..."]
    if base == "any" and not bracket:
        return {}
    if not bracket and base in _TYPES:
        return {"type": _TYPES[base]}
    match base, parts:
        case "optional", [item]:
            return item
        case "union", [_, *_]:
            return {"anyOf": parts}
        case "list" | "sequence" | "iterable", [item]:
            return {"type": "array", "items": item}
        case "set", [item]:
            return {"type": "array", "items": item, "uniqueItems": True}
        case "tuple", [first, *others]:
            same = all(part == first for part in others)
            return {"type": "array", "items": first} if same else {"type": "array", "prefixItems": parts}
        case "dict" | "mapping", [_, item]:
            return {"type": "object", "additionalProperties": item}
    raise RowError(pointer, "type_unknown", f"no JSON Schema for the type {text!r}")


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def convert_schema(schema: Any, pointer: str) -> Any:
    """Return a schema with its Python type names converted to JSON Schema and all else unchanged."""
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{pointer}.{key}"
        if key == "type" and isinstance(value, str):
            converted.update(convert_type(value, at)[0])
        elif key == "properties" and isinstance(value, dict):
            converted[key] = {name: convert_schema(item, f"{at}.{name}") for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            converted[key] = convert_schema(value, at)
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            converted[key] = [convert_schema(item, at) for item in value]
        else:
            converted[key] = value
    return converted
