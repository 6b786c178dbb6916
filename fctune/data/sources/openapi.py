"""Tools from OpenAPI 3 documents: one for each operation, its parameters and request body as one JSON Schema.

https://spec.openapis.org/oas/v3.0.4 and v3.1.1. References within the document are resolved; one to another document is
refused. A schema that refers to itself is cut at the first repetition, because a tool's parameters have no end to refer
to.
"""

from __future__ import annotations

import re
from typing import Any

from fctune.data.sources.defects import RowError, describe_value

_METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_MAX_SCHEMAS = 50_000  # resolved in one document: references can multiply, so that a small document has no small form
# Keys of a schema that say nothing about its values, or that only OpenAPI knows.
_DROPPED = frozenset(
    {"xml", "discriminator", "externalDocs", "example", "nullable", "readOnly", "writeOnly", "$schema"}
)
_SCHEMA_KEYS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"})
_LIST_KEYS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def read_operations(document: dict[str, Any], pointer: str) -> list[dict[str, Any]]:
    """Return the functions of a document's operations, in its order.

    An operation's name is its ``operationId``, or its method and path. A body that is an object adds its properties to
    the parameters; any other body, or one whose names are taken, is the parameter ``body``.

    Raises:
        RowError: ``tool_shape`` for another version, a malformed document, a reference that cannot be resolved, or two
            parameters of one name.
    """
    version = document.get("openapi")
    if not isinstance(version, str) or not version.startswith("3."):
        found = f"openapi {version!r}" if "openapi" in document else f"swagger {document.get('swagger')!r}"
        raise RowError(pointer, "tool_shape", f"expected an OpenAPI 3 document, got {found}; convert it to OpenAPI 3")
    paths = document.get("paths")
    if not isinstance(paths, dict) or not paths:
        raise RowError(f"{pointer}.paths", "tool_shape", f"expected paths with operations, got {describe_value(paths)}")
    resolver = _Resolver(document, pointer)
    functions = []
    for path, item in paths.items():
        where = f"{pointer}.paths[{path!r}]"
        item = resolver.follow(item, where)
        shared = item.get("parameters")
        for method in _METHODS:
            if (operation := item.get(method)) is not None:
                functions.append(_read_operation(operation, shared, method, path, f"{where}.{method}", resolver))
    if not functions:
        raise RowError(f"{pointer}.paths", "tool_shape", "no operations: expected one for each tool")
    return functions


def _read_operation(
    operation: Any, shared: Any, method: str, path: str, where: str, resolver: _Resolver
) -> dict[str, Any]:
    if not isinstance(operation, dict):
        raise RowError(where, "tool_shape", f"expected an operation, got {describe_value(operation)}")
    name = operation.get("operationId") or re.sub(r"[\W_]+", "_", f"{method}_{path}").strip("_")
    properties: dict[str, Any] = {}
    required: list[str] = []
    parameters: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}
    for listed in (shared, operation.get("parameters")):
        if listed is not None and not isinstance(listed, list):
            raise RowError(f"{where}.parameters", "tool_shape", f"expected a list, got {describe_value(listed)}")
        for i, value in enumerate(listed or ()):
            at = f"{where}.parameters[{i}]"
            parameter = resolver.follow(value, at)
            if not isinstance(parameter.get("name"), str):
                raise RowError(
                    f"{at}.name", "tool_shape", f"expected a name, got {describe_value(parameter.get('name'))}"
                )
            # An operation's parameter replaces that of its path with the same name and place.
            parameters[parameter["name"], str(parameter.get("in"))] = (parameter, at)
    for (parameter_name, _), (parameter, at) in parameters.items():
        if parameter_name in properties:
            places = " and ".join(p for n, p in parameters if n == parameter_name)
            reason = f"parameters in {places} share the name {parameter_name}, which a call could not tell apart"
            raise RowError(f"{at}.name", "tool_shape", f"{reason}; rename one of them")
        properties[parameter_name] = _read_parameter(parameter, at, resolver)
        if parameter.get("required") is True and parameter_name not in required:
            required.append(parameter_name)
    if operation.get("requestBody") is not None:
        _add_body(
            resolver.follow(operation["requestBody"], f"{where}.requestBody"), properties, required, where, resolver
        )
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    function = {"name": name, "parameters": schema}
    description = operation.get("description") or operation.get("summary")
    return {"name": name, "description": description, "parameters": schema} if description else function


def _read_parameter(parameter: dict[str, Any], where: str, resolver: _Resolver) -> Any:
    schema = parameter.get("schema")
    if schema is None:
        schema, where = _get_media_schema(parameter, where)
    read = resolver.resolve(schema if schema is not None else {}, f"{where}.schema")
    description = parameter.get("description")
    if isinstance(read, dict) and description and "description" not in read:
        read = {"description": description, **read}
    return read


def _add_body(
    body: dict[str, Any], properties: dict[str, Any], required: list[str], where: str, resolver: _Resolver
) -> None:
    schema, at = _get_media_schema(body, f"{where}.requestBody")
    if schema is None:
        return
    read = _merge_all_of(resolver.resolve(schema, f"{at}.schema"))
    is_required = body.get("required") is True
    own = read.get("properties") if isinstance(read, dict) else None
    if isinstance(own, dict) and own and not own.keys() & properties.keys() and not _LIST_KEYS & read.keys():
        properties.update(own)
        if is_required:
            required += [name for name in read.get("required", []) if name in own]
        return
    name = next(f"body{'_' * i}" for i in range(100) if f"body{'_' * i}" not in properties)
    properties[name] = {"description": body["description"], **read} if body.get("description") else read
    if is_required:
        required.append(name)


def _get_media_schema(value: dict[str, Any], where: str) -> tuple[Any, str]:
    """Return the schema of a parameter's or body's content, JSON's if it has several, and its location."""
    content = value.get("content")
    if content is None:
        return None, where
    if not isinstance(content, dict) or not all(isinstance(item, dict) for item in content.values()):
        raise RowError(f"{where}.content", "tool_shape", f"expected media types, got {describe_value(content)}")
    kind = next((kind for kind in content if "json" in kind.lower()), next(iter(content), None))
    return (content[kind].get("schema"), f"{where}.content[{kind!r}]") if kind is not None else (None, where)


def _merge_all_of(schema: Any) -> Any:
    """Return ``allOf`` of plain objects as one object; any other schema as it is."""
    parts = schema.get("allOf") if isinstance(schema, dict) else None
    if not isinstance(parts, list):
        return schema
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    merged: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    for part in [*map(_merge_all_of, parts), rest]:
        if not isinstance(part, dict) or part.get("type", "object") != "object" or _LIST_KEYS & part.keys():
            return schema
        if merged["properties"].keys() & part.get("properties", {}).keys():
            return schema
        merged["properties"] |= part.get("properties", {})
        merged["required"] += part.get("required", [])
        merged |= {key: value for key, value in part.items() if key not in ("type", "properties", "required")}
    return merged


class _Resolver:
    """Resolves the references of a document, and turns OpenAPI 3.0's own schema keys into JSON Schema's."""

    def __init__(self, document: dict[str, Any], pointer: str) -> None:
        self._document = document
        self._pointer = pointer
        self._num_schemas = 0

    def follow(self, value: Any, where: str) -> dict[str, Any]:
        """Return the object that a value is or refers to."""
        seen: set[str] = set()
        while isinstance(value, dict) and isinstance(value.get("$ref"), str):
            if value["$ref"] in seen:
                raise RowError(where, "tool_shape", f"the reference {value['$ref']} refers to itself")
            seen.add(value["$ref"])
            value = self._look_up(value["$ref"], where)
        if not isinstance(value, dict):
            raise RowError(where, "tool_shape", f"expected an object, got {describe_value(value)}")
        return value

    def resolve(self, schema: Any, where: str, open_refs: tuple[str, ...] = ()) -> Any:
        """Return a schema without references; one inside itself becomes its type and description."""
        self._num_schemas += 1
        if self._num_schemas > _MAX_SCHEMAS:
            reason = f"the document's references make more than {_MAX_SCHEMAS:,} schemas; split it"
            raise RowError(self._pointer, "tool_shape", reason)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise RowError(where, "tool_shape", f"expected a schema, got {describe_value(schema)}")
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._look_up(reference, where)
            siblings = {key: value for key, value in schema.items() if key != "$ref"}
            if reference in open_refs:
                kept = {key: target[key] for key in ("type", "description") if key in target}
                return {**kept, **siblings}
            resolved = self.resolve(target, where, (*open_refs, reference))
            return {**resolved, **siblings} if isinstance(resolved, dict) else resolved
        return self._convert(schema, where, open_refs)

    def _convert(self, schema: dict[str, Any], where: str, open_refs: tuple[str, ...]) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for key, value in schema.items():
            at = f"{where}.{key}"
            if key in _DROPPED or key.startswith("x-"):
                continue
            if key in _SCHEMA_KEYS and isinstance(value, dict):
                converted[key] = self.resolve(value, at, open_refs)
            elif key in _LIST_KEYS and isinstance(value, list):
                converted[key] = [self.resolve(item, f"{at}[{i}]", open_refs) for i, item in enumerate(value)]
            elif key in _MAP_KEYS and isinstance(value, dict):
                # A property that only answers have is not sent.
                sent = {n: v for n, v in value.items() if not (isinstance(v, dict) and v.get("readOnly") is True)}
                converted[key] = {n: self.resolve(v, f"{at}.{n}", open_refs) for n, v in sent.items()}
            elif key == "required" and isinstance(value, list):
                properties = schema.get("properties")
                properties = properties if isinstance(properties, dict) else {}
                hidden = [n for n, v in properties.items() if isinstance(v, dict) and v.get("readOnly") is True]
                converted[key] = [n for n in value if n not in hidden]
            else:
                converted[key] = value
        for key, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(converted.get(key), bool):  # 3.0 has a boolean next to the bound
                is_exclusive = converted.pop(key)
                if is_exclusive and bound in converted:
                    converted[key] = converted.pop(bound)
        if schema.get("nullable") is True:
            return allow_null(converted)
        return converted

    def _look_up(self, reference: str, where: str) -> Any:
        if not reference.startswith("#/"):
            raise RowError(where, "tool_shape", f"refers to another document ({reference}); bundle them into one")
        value: Any = self._document
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            elif isinstance(value, dict) and key in value:
                value = value[key]
            else:
                raise RowError(where, "tool_shape", f"the document has no {reference}, to which this refers")
        return value


def allow_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null, as ``nullable`` of OpenAPI 3.0 and of Gemini means."""
    kind = schema.get("type")
    if isinstance(kind, str):
        schema = {**schema, "type": [kind, "null"]}
    elif isinstance(kind, list) and "null" not in kind:
        schema = {**schema, "type": [*kind, "null"]}
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema = {**schema, "enum": [*schema["enum"], None]}
    return schema
