"""Nulls that belong to other rows.

Arrow gives every struct of a column the keys of all rows, and fills those that a row lacks with null: each tool then
carries the parameters of every other tool, and each call the arguments of every other call. Tables have such columns,
and so do JSON files that were written from them. A null is filling where the row cannot have meant it:

- in a tool: as the schema of a parameter or the value of a keyword, which JSON Schema does not allow;
- in arguments: at a key that the tool does not declare, or declares as optional with a type that excludes null.

Nulls that a schema allows are kept where the row's own text has them. In a table it is impossible to know, so they are
refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fctune.data.sources.defects import RowError

# Keywords of JSON Schema whose value may be null, and that hold values rather than schemas.
_VALUES = frozenset({"default", "const", "example", "examples", "enum"})
# Keywords that hold schemas by name.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


class ArrowStruct(dict[str, Any]):
    """An object from an Arrow struct, whose nulls may be filling."""


def remove_tool_filling(tools: Any, notes: Counter[str]) -> Any:
    """Return tools, in any form, without filled keys; counts the keys in ``notes``.

    A null ``default`` may be meant, unless the schema excludes null and the tools have filling elsewhere.
    """
    if not holds_null(tools):
        return tools
    is_struct = isinstance(tools, ArrowStruct) or (
        isinstance(tools, list) and any(isinstance(t, ArrowStruct) for t in tools)
    )
    kept, num_dropped = _remove_null_keys(tools, is_struct, is_struct)
    if num_dropped and not is_struct:
        kept, num_dropped = _remove_null_keys(tools, is_struct, drops_defaults=True)
    notes["null_key_dropped"] += num_dropped
    return kept


def _remove_null_keys(value: Any, is_struct: bool, drops_defaults: bool, is_map: bool = False) -> tuple[Any, int]:
    """Return a part of a tool without null keys, and their number; the keys of a map are names, not keywords."""
    if isinstance(value, list):
        parts = [_remove_null_keys(item, is_struct, drops_defaults) for item in value]
        return [part for part, _ in parts], sum(number for _, number in parts)
    if not isinstance(value, dict):
        return value, 0
    kept: dict[str, Any] = {}
    num_dropped = 0
    for key, item in value.items():
        if item is None:
            if is_map or key not in ("default", "const") or (drops_defaults and _excludes_default(value, is_struct)):
                num_dropped += 1
            else:
                kept[key] = None
        elif key in _VALUES and not is_map and not is_struct:
            kept[key] = item
        else:
            kept[key], number = _remove_null_keys(item, is_struct, drops_defaults, not is_map and key in _MAPS)
            num_dropped += number
    return kept, num_dropped


def _excludes_default(schema: dict[str, Any], is_struct: bool) -> bool:
    allowed = allows_null({key: value for key, value in schema.items() if key not in ("default", "const")})
    return allowed is False or (allowed is None and is_struct)


def holds_null(value: Any) -> bool:
    """Return True if null is anywhere in a value."""
    level: list[Any] = [[value]]
    while level:
        if any(None in items for items in level):
            return True
        parts = [item for items in level for item in items if isinstance(item, (dict, list))]
        level = [part.values() if isinstance(part, dict) else part for part in parts]
    return False


def allows_null(schema: Any) -> bool | None:
    """Return whether a schema allows null; None if that is unknown."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        return None
    if schema.get("nullable") is True:
        return True
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "null"
    if isinstance(kind, list):
        return "null" in kind
    if isinstance(schema.get("enum"), list):
        return None in schema["enum"]
    if "const" in schema:
        return schema["const"] is None
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            known = [allows_null(option) for option in schema[key]]
            return True if True in known else None if None in known else False
    return None


def is_filling(value: Any) -> bool:
    """Return True for null, and for an object that holds nothing else."""
    return value is None or (isinstance(value, dict) and bool(value) and all(map(is_filling, value.values())))


class ArgumentFilling:
    """Finds and removes the filling of one call's arguments, given the schema of its tool.

    Args:
        is_struct: The arguments are from an Arrow struct, so that a null which the schema allows is refused.
        notes: Counts the removed keys; changed in place.
    """

    def __init__(self, is_struct: bool, notes: Counter[str]) -> None:
        self._is_struct = is_struct
        self._notes = notes

    def has_undeclared(self, value: Any, schema: Any) -> bool:
        """Return True if a key that the schema does not declare holds nothing, which no row means."""
        if isinstance(value, list):
            items = schema.get("items") if isinstance(schema, dict) else None
            return any(self.has_undeclared(item, items) for item in value)
        if not isinstance(value, dict) or not _is_closed(schema):
            return False
        declared = schema["properties"]
        return any(
            self.has_undeclared(item, declared[key]) if key in declared else is_filling(item)
            for key, item in value.items()
        )

    def remove(self, value: Any, schema: Any, pointer: str) -> Any:
        """Return arguments, or a part of them, without filling.

        Raises:
            RowError: ``arrow_null`` for a null of a struct that may be the row's or filling.
        """
        if isinstance(value, list):
            items = schema.get("items") if isinstance(schema, dict) else None
            return [self._keep_item(item, items, f"{pointer}[{i}]") for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        properties = schema.get("properties") if isinstance(schema, dict) else None
        declared = properties if isinstance(properties, dict) else {}
        kept: dict[str, Any] = {}
        for key, item in value.items():
            at = f"{pointer}.{key}"
            if key not in declared and _is_closed(schema) and is_filling(item):
                self._notes["null_key_dropped"] += 1
            elif item is not None:
                kept[key] = self.remove(item, declared.get(key), at)
            elif key in declared and not _is_required(key, schema) and allows_null(declared[key]) is False:
                self._notes["null_key_dropped"] += 1
            elif self._is_struct:
                reason = "null in an Arrow column, which may be the row's or filling; store arguments as JSON strings"
                raise RowError(at, "arrow_null", reason)
            else:
                kept[key] = None
        return kept

    def _keep_item(self, item: Any, schema: Any, pointer: str) -> Any:
        if item is None and self._is_struct:
            reason = "null in a list of an Arrow column; store arguments as JSON strings"
            raise RowError(pointer, "arrow_null", reason)
        return self.remove(item, schema, pointer)


def _is_closed(schema: Any) -> bool:
    """Return True if a schema lists its properties and opens no way to others."""
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
        return False
    if schema.get("additionalProperties") not in (None, False):
        return False
    return not schema.keys() & {"patternProperties", "$ref", "anyOf", "oneOf", "allOf"}


def _is_required(key: str, schema: dict[str, Any]) -> bool:
    required = schema.get("required")
    return isinstance(required, list) and key in required
