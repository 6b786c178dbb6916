"""JSON Schemas of tools: made strict, validated, and calls checked against them.

jsonschema is the validator. The schemas that most tools have are compiled to plain functions first
(``fctune.data.schema_compiler``): on BFCL's tools a schema is ready in 11 us instead of 570, and a call checked in 5
instead of 27.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from fctune.data.conversation import Call, Tool
from fctune.data.schema_compiler import compile_schema

_MAX_CACHED = 4_000
_MAX_ERRORS = 20
_MAX_REASON = 200
_NO_DOCUMENTS: Registry[Any] = Registry()  # the default registry would fetch what a $ref names over the network
_OPENING_KEYS = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
_KINDS = {
    "type": "wrong_type",
    "required": "missing_argument",
    "enum": "not_in_enum",
    "const": "not_in_enum",
    "additionalProperties": "unknown_argument",
}

TYPE_NAMES = {
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
"""JSON types by the names that the Berkeley leaderboard, its descendants and Java use, in lower case."""


@dataclass(frozen=True, slots=True)
class SchemaFinding:
    """A problem of a call's arguments or of a schema; ``path`` leads to it from there (``.days``)."""

    path: str
    kind: str
    reason: str


class ToolSchema:
    """A JSON Schema of arguments, ready to validate calls.

    ``problem`` is the reason why the schema itself cannot be used, or None. ``$schema`` selects the draft, by default
    2020-12. Documents named by a ``$ref`` are not fetched.

    Args:
        schema: JSON Schema.
        check_patterns: Whether strings must match the schema's regular expressions. One of an untrusted dataset can
            take forever.
    """

    def __init__(self, schema: Any, check_patterns: bool = True):
        self.problem: SchemaFinding | None = None
        self._schema = schema
        self._check_patterns = check_patterns
        self._validator: Validator | None = None
        self._compiled = compile_schema(schema)
        if self._compiled is None:
            self.problem = self._find_problem()

    @functools.cached_property
    def allows_nothing(self) -> bool:
        """True if the schema shows at a glance that it allows no arguments at all."""
        return self.problem is None and allows_nothing(self._schema)

    @property
    def check(self) -> Callable[[Any], bool]:
        """Function that does what ``accepts`` does, faster if called often."""
        return self._compiled if self._compiled is not None else self.accepts

    def accepts(self, arguments: Any) -> bool:
        """Return True if the schema is valid and the arguments obey it."""
        if self._compiled is not None:
            return self._compiled(arguments)
        return self.problem is None and not self.find_errors(arguments)

    def find_errors(self, arguments: Any) -> list[SchemaFinding]:
        """Return the first violations of the schema by these arguments; empty if the schema itself is unusable."""
        if self.problem is not None or (self._compiled is not None and self._compiled(arguments)):
            return []
        findings = []
        try:
            for error in islice(self._iter_errors(arguments), _MAX_ERRORS):
                findings.append(_describe_error(error))
        except (RecursionError, Unresolvable) as error:  # in a part that only these arguments lead to
            findings.append(_describe_unusable(error))
        return findings

    def _find_problem(self) -> SchemaFinding | None:
        if not isinstance(self._schema, dict):
            return SchemaFinding("", "schema_invalid", "not an object")
        try:
            self._draft().check_schema(self._schema)
            for _ in self._iter_errors({}):
                pass
        except SchemaError as error:
            path = "".join(f".{part}" for part in error.absolute_path)
            return SchemaFinding(path, "schema_invalid", _shorten(error.message))
        except (RecursionError, Unresolvable) as error:
            return _describe_unusable(error)
        return None

    def _draft(self) -> type[Validator]:
        if "$schema" not in self._schema:
            return Draft202012Validator
        return validator_for(self._schema, default=Draft202012Validator)

    def _iter_errors(self, arguments: Any) -> Iterator[ValidationError]:
        if self._validator is None:
            draft = self._draft() if self._check_patterns else _without_patterns(self._draft())
            self._validator = draft(self._schema, registry=_NO_DOCUMENTS)
        return self._validator.iter_errors(arguments)


class ToolSet:
    """Tools by name, ready to validate many calls.

    Unlike the schemas of a dataset's report, which are judged as they are, schemas here are read leniently and applied
    strictly: type names of other languages are translated, and arguments that a schema does not declare are errors
    unless it allows them explicitly.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in reversed(tools)}
        self._schemas: dict[str, ToolSchema] = {}
        self._checks: dict[str, Callable[[Any], bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._tools)

    def accepts(self, call: Call) -> bool:
        """Return True if the call is to one of the tools and obeys its schema."""
        check = self._checks.get(call.name)
        if check is None:
            schema = self._find_schema(call.name)
            if schema is None:
                return False
            check = self._checks[call.name] = schema.check
        return check(call.arguments)

    def has(self, name: str) -> bool:
        """Return True if there is a tool of this name."""
        return name in self._tools

    def has_unknown_argument(self, call: Call) -> bool:
        """Return True if a call has an argument that its tool does not declare, at any depth."""
        schema = self._find_schema(call.name)
        findings = [] if schema is None else schema.find_errors(call.arguments)
        return any(finding.kind == _KINDS["additionalProperties"] for finding in findings)

    def find_schema_problem(self, name: str) -> str | None:
        """Return why the schema of a tool can judge no call; None if it can, or if there is no such tool."""
        schema = self._find_schema(name)
        if schema is None or schema.problem is None:
            return None
        return f"{name}: its schema is unusable ({schema.problem.reason})"

    def find_errors(self, call: Call) -> tuple[str, ...]:
        """Return what is wrong with a call, one line each; empty if it is valid."""
        schema = self._find_schema(call.name)
        if schema is None:
            return (f"{call.name[:80]}: no such tool",)
        if (problem := self.find_schema_problem(call.name)) is not None:
            return (problem,)
        findings = schema.find_errors(call.arguments)
        return tuple(f"{finding.path.removeprefix('.') or call.name}: {finding.reason}" for finding in findings)

    def _find_schema(self, name: str) -> ToolSchema | None:
        if name not in self._schemas:
            if name not in self._tools:
                return None
            self._schemas[name] = _load_strict(marshal.dumps(self._tools[name].parameters, 2))
        return self._schemas[name]


@functools.lru_cache(maxsize=_MAX_CACHED)
def load_schema(marshalled: bytes) -> ToolSchema:
    """Return the schema of a dataset's tool as it is, patterns unchecked; ``marshalled`` is made by ``marshal.dumps``.

    marshal is ten times as fast as JSON, and keeps the order of keys.
    """
    return ToolSchema(marshal.loads(marshalled), check_patterns=False)


@functools.lru_cache(maxsize=_MAX_CACHED)
def _load_strict(marshalled: bytes) -> ToolSchema:
    parameters = marshal.loads(marshalled)
    schema = to_json_schema(parameters)
    if not isinstance(schema, dict):
        return ToolSchema(None)
    schema = {"type": "object", "additionalProperties": False, **schema}
    if not schema.get("properties") and "additionalProperties" not in parameters:
        schema["additionalProperties"] = any(key in schema for key in _OPENING_KEYS)
    return ToolSchema(schema)


def to_json_schema(schema: Any) -> Any:
    """Return the schema with JSON Schema's type names; an unknown type is dropped, so that it constrains nothing."""
    if isinstance(schema, list):
        return [to_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, (str, list)):
            names = [TYPE_NAMES.get(str(name).lower()) for name in (value if isinstance(value, list) else [value])]
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


def allows_nothing(schema: Any) -> bool:
    """Return True for a schema that shows at a glance that it allows no value; others may allow none as well.

    The schema is valid.
    """
    if not isinstance(schema, dict):
        return schema is False
    if any(schema.get(key) == [] for key in ("enum", "type", "anyOf", "oneOf")) or schema.get("not") in ({}, True):
        return True
    if any(map(allows_nothing, schema.get("allOf") or ())):
        return True
    if any(schema.get(key) and all(map(allows_nothing, schema[key])) for key in ("anyOf", "oneOf")):
        return True
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    names = required if isinstance(required, list) else []
    return any(allows_nothing(properties.get(name, not is_closed)) for name in names if isinstance(name, str))


@functools.cache
def _without_patterns(draft: type[Validator]) -> type[Validator]:
    return extend(draft, {"pattern": _allow, "patternProperties": _allow})  # type: ignore[no-untyped-call,no-any-return]


def _allow(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


def _describe_error(error: ValidationError) -> SchemaFinding:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return SchemaFinding(path, _KINDS.get(str(error.validator), "schema_violation"), _shorten(error.message))


def _describe_unusable(error: Exception) -> SchemaFinding:
    if isinstance(error, RecursionError):
        return SchemaFinding("", "schema_unusable", "refers to itself endlessly")
    return SchemaFinding("", "schema_unusable", f"refers to something outside it: {_shorten(str(error))}")


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "..."
