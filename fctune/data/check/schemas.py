"""Calls against the JSON Schemas of their tools, each schema prepared once."""

from __future__ import annotations

import marshal
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from jsonschema_specifications import REGISTRY as METASCHEMAS  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable

from fctune.data.conversation import Call, Tool

_MAX_CACHED = 4_000
_MAX_ERRORS = 20
_MAX_REASON = 200
_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_OPENING_KEYS = frozenset({"additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf"})
_KEYWORDS = frozenset(
    keyword for uri in METASCHEMAS if "2020-12" in uri for keyword in METASCHEMAS[uri].contents.get("properties", ())
)
"""Every keyword that the metaschema speaks of; any other key is allowed in a schema and means nothing."""
_NO_DOCUMENTS: Registry[Any] = Registry()
_KINDS = {
    "type": "wrong_type",
    "required": "missing_argument",
    "enum": "not_in_enum",
    "const": "not_in_enum",
    "additionalProperties": "unknown_argument",
}


@dataclass(frozen=True, slots=True)
class SchemaFinding:
    """What is wrong with a call's arguments or with a schema; ``path`` leads to it from there (``.days``)."""

    path: str
    kind: str
    reason: str


@dataclass(slots=True)
class _Prepared:
    """A schema that was looked at; its validator is made when the first call needs it."""

    schema: dict[str, Any]
    draft: type[Validator]
    problem: SchemaFinding | None
    closed: frozenset[str] | None
    """Argument names that the schema declares, where it is meant to list them all."""
    validator: Validator | None = None

    def validate(self, arguments: dict[str, Any]) -> Iterator[ValidationError]:
        if self.validator is None:
            self.validator = _without_pattern(self.draft)(self.schema, registry=_NO_DOCUMENTS)
        return self.validator.iter_errors(arguments)


class SchemaChecker:
    """Checks tools and calls; keeps the last schemas prepared.

    ``pattern`` is not checked: a regular expression of a stranger can take for ever. A ``$ref`` to another document is
    not fetched.
    """

    def __init__(self) -> None:
        self._prepared: dict[bytes, _Prepared] = {}

    def check_tool(self, tool: Tool) -> SchemaFinding | None:
        """What makes the tool's parameters no usable JSON Schema, if anything does."""
        return self._prepare(tool.parameters).problem

    def check_call(self, call: Call, tool: Tool) -> list[SchemaFinding]:
        """How the call breaks its tool's schema; empty where it does not, or where the schema is unusable."""
        prepared = self._prepare(tool.parameters)
        findings = []
        if prepared.closed is not None:
            for name in call.arguments:
                if name not in prepared.closed:
                    known = ", ".join(sorted(prepared.closed)) or "none"
                    reason = f"{call.name} declares no argument {name!r} (declared: {known})"
                    findings.append(SchemaFinding(f".{name}", "unknown_argument", reason[:_MAX_REASON]))
        if prepared.problem is None:
            try:
                for error in islice(prepared.validate(call.arguments), _MAX_ERRORS):
                    findings.append(_describe(error))
            except (RecursionError, Unresolvable) as error:  # in a part that only these arguments lead to
                findings.append(_describe_unusable(error))
        return findings

    def _prepare(self, schema: dict[str, Any]) -> _Prepared:
        key = marshal.dumps(schema, 2)  # ten times faster than JSON, and key order may stay significant
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _MAX_CACHED:
                self._prepared.clear()
            prepared = self._prepared[key] = _prepare(schema)
        return prepared


def _prepare(schema: dict[str, Any]) -> _Prepared:
    draft = Draft202012Validator if "$schema" not in schema else validator_for(schema, default=Draft202012Validator)
    properties = schema.get("properties")
    is_open = not _OPENING_KEYS.isdisjoint(schema)
    closed = frozenset(properties) if isinstance(properties, dict) and not is_open else None
    prepared = _Prepared(schema, draft, None, closed)
    if not is_plain_schema(schema):
        try:
            draft.check_schema(schema)
            for _ in prepared.validate({}):
                pass
        except SchemaError as error:
            at = "".join(f".{part}" for part in error.absolute_path)
            prepared.problem = SchemaFinding(at, "schema_invalid", _shorten(error.message))
        except (RecursionError, Unresolvable) as error:
            prepared.problem = _describe_unusable(error)
        if prepared.problem is not None:
            prepared.closed = None
    return prepared


def _describe_unusable(error: Exception) -> SchemaFinding:
    if isinstance(error, RecursionError):
        return SchemaFinding("", "schema_unusable", "refers to itself without end")
    return SchemaFinding("", "schema_unusable", f"refers to what it does not hold: {_shorten(str(error))}")


def is_plain_schema(schema: Any, depth: int = 20) -> bool:
    """Whether a schema uses only the common keywords, and each as it should be: then it needs no check itself.

    Checking a schema against the metaschema takes milliseconds, most schemas are plain, and datasets hold tens of
    thousands. False says nothing: the schema may still be valid.
    """
    if not isinstance(schema, dict) or depth < 0:
        return False
    for key, value in schema.items():
        match key:
            case "type":
                ok = value in _TYPES if isinstance(value, str) else _is_list_of_names(value, _TYPES)
            case "description" | "title" | "format":
                ok = isinstance(value, str)
            case "pattern":
                ok = isinstance(value, str) and _is_pattern(value)
            case "default" | "const":
                ok = True
            case "minItems" | "maxItems" | "minLength" | "maxLength":
                ok = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            case "uniqueItems":
                ok = isinstance(value, bool)
            case "enum":
                ok = isinstance(value, list)
            case "required":
                ok = _is_list_of_names(value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                ok = isinstance(value, (int, float)) and not isinstance(value, bool)
            case "properties":
                ok = isinstance(value, dict) and all(is_plain_schema(item, depth - 1) for item in value.values())
            case "items":
                ok = is_plain_schema(value, depth - 1)
            case "anyOf" | "oneOf" | "allOf":
                ok = isinstance(value, list) and len(value) > 0 and all(is_plain_schema(v, depth - 1) for v in value)
            case "additionalProperties":
                ok = isinstance(value, bool) or is_plain_schema(value, depth - 1)
            case _:
                ok = key not in _KEYWORDS
        if not ok:
            return False
    return True


def _is_pattern(value: str) -> bool:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _is_list_of_names(value: Any, allowed: frozenset[str] | None = None) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value) and (allowed is None or (len(value) > 0 and allowed.issuperset(value)))


_PATTERNLESS: dict[type[Validator], type[Validator]] = {}


def _without_pattern(draft: type[Validator]) -> type[Validator]:
    if draft not in _PATTERNLESS:
        ignore = {"pattern": _allow, "patternProperties": _allow}
        _PATTERNLESS[draft] = extend(draft, ignore)  # type: ignore[no-untyped-call]
    return _PATTERNLESS[draft]


def _allow(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


def _describe(error: ValidationError) -> SchemaFinding:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return SchemaFinding(path, _KINDS.get(str(error.validator), "schema_violation"), _shorten(error.message))


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
