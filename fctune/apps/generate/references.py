"""References of tools' schemas: MCP servers that are built on pydantic list nested types as ``$ref`` to ``$defs``.

Parameters are drawn, validated and sent to the teacher by themselves, where such a reference leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from fctune.data.conversation import Tool

# Keys whose values are schemas, lists of schemas, and schemas by name; in all others, $ref is a value like any other.
_SCHEMAS = frozenset({
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
})  # fmt: skip
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset({"default", "deprecated", "description", "examples", "title"})
_MAX_SCHEMAS = 5_000  # definitions that use each other twice grow exponentially


class _TooLarge(Exception):
    """The schema is too large without references."""


def inline_references(tool: Tool) -> Tool:
    """Return a tool whose schema has no references.

    Those that refer to themselves or to nothing remain, with the definitions; a schema that would grow out of
    proportion remains as it is.
    """
    if next(_iter_references(tool.parameters), None) is None:
        return tool
    try:
        inlined = _Inliner(tool.parameters).inline(tool.parameters)
    except (_TooLarge, RecursionError):
        return tool
    if not isinstance(inlined, dict):
        return tool
    without = {key: value for key, value in inlined.items() if key not in _DEFINITIONS}
    if next(_iter_references(without), None) is None:
        inlined = without
    else:
        inlined |= {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    return replace(tool, function={**tool.function, "parameters": inlined})


def find_unresolvable(schema: Any) -> str | None:
    """Return the first reference of a schema that leads to nothing in it; None if there is none."""
    references = dict.fromkeys(_iter_references(schema))
    if not references:
        return None
    look_up = _make_lookup(schema)
    for reference in references:
        try:
            look_up(reference)
        except Unresolvable:
            return reference
    return None


def loosen_references(schema: Any) -> Any:
    """Return a schema in which what is referred to may be anything, for use inside another schema."""
    if next(_iter_references(schema), None) is None:
        return schema
    if "$ref" in schema:
        schema = {key: value for key, value in schema.items() if key != "$ref"}
    return _map({key: value for key, value in schema.items() if key not in _DEFINITIONS}, loosen_references)


class _Inliner:
    def __init__(self, root: Any):
        self._look_up = _make_lookup(root)
        self._num_schemas = 0

    def inline(self, schema: Any, open_references: tuple[str, ...] = ()) -> Any:
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            raise _TooLarge
        if not isinstance(schema, dict):
            return schema
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return _map(schema, lambda inner: self.inline(inner, open_references))
        if reference in ("#", *open_references):
            return schema
        try:
            target = self._look_up(reference)
        except Unresolvable:
            return schema
        target = self.inline(target, (*open_references, reference))
        siblings = {key: value for key, value in schema.items() if key not in ("$ref", *_DEFINITIONS)}
        siblings = _map(siblings, lambda inner: self.inline(inner, open_references))
        if not siblings:
            return target
        if isinstance(target, dict) and not (target.keys() & siblings.keys() - _ANNOTATIONS):
            return {**target, **siblings}
        return {"allOf": [target], **siblings} if "allOf" not in siblings else {"allOf": [target, siblings]}


def _make_lookup(root: Any) -> Callable[[str], Any]:
    # The empty registry fetches no documents.
    resolver = Registry[Any]().resolver_with_root(DRAFT202012.create_resource(root))
    return lambda reference: resolver.lookup(reference).contents


def _iter_references(schema: Any) -> Iterator[str]:
    """Yield the references of a schema, those of its definitions included."""
    if not isinstance(schema, dict):
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference
    for inner in _iter_inner(schema):
        yield from _iter_references(inner)


def _iter_inner(schema: dict[str, Any]) -> Iterator[Any]:
    for key, value in schema.items():
        if key in _LISTS and isinstance(value, list):
            yield from value
        elif key in _MAPS and isinstance(value, dict):
            yield from value.values()
        elif key in _SCHEMAS:
            yield value


def _map(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with its inner schemas changed; definitions stay as they are."""
    changed = dict(schema)
    for key, value in schema.items():
        if key in _DEFINITIONS:
            continue
        if key in _LISTS and isinstance(value, list):
            changed[key] = [change(inner) for inner in value]
        elif key in _MAPS and isinstance(value, dict):
            changed[key] = {name: change(inner) for name, inner in value.items()}
        elif key in _SCHEMAS:
            changed[key] = change(value)
    return changed
