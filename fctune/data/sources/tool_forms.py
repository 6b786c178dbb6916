"""Tools as other APIs and protocols write them, turned into functions with JSON Schema.

Read are lists, single objects, and strings that hold either as JSON or as a Python literal, of: OpenAI's tools with and
without their wrapper, bare functions, Anthropic's tools (``input_schema``), Gemini's ``function_declarations``, the
result of MCP's ``tools/list`` (``inputSchema``), with or without its JSON-RPC envelope, and OpenAPI 3 documents. A list
may hold several of these, such as the pages of ``tools/list``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fctune.base.json_reader import ParseError
from fctune.base.python_reader import PythonReader
from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.openapi import allow_null, read_operations
from fctune.data.sources.row_json import RowJsonReader

_MAX_NESTING = 4  # lists, envelopes and strings around a tool
_GEMINI_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_GEMINI_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")

# Keys of tools that are read, or that say nothing about the call.
_ANTHROPIC_KEYS = ("name", "description", "input_schema", "type", "allowed_callers")
_GEMINI_KEYS = (
    *("type", "name", "description", "parameters", "parametersJsonSchema", "parameters_json_schema", "behavior"),
    *("response", "responseJsonSchema", "response_json_schema"),
)

Decode = Callable[[str, str], Any]


def decode_tools(text: str, pointer: str, reader: RowJsonReader, notes: Counter[str]) -> Any:
    """Return the value that a text holds as JSON, or as a literal of Python (``[{'name': ...}]``).

    Raises:
        RowError: It holds neither.
    """
    try:
        return reader.decode(text, pointer)
    except RowError as error:
        if error.kind != "not_json":
            raise
        value = _read_python(text)
        if value is None:
            raise RowError(pointer, error.kind, f"{error.reason}; nor a Python literal") from None
    notes["tools_from_python"] += 1
    return value


class _Page(NamedTuple):
    """A result of ``tools/list``: its location and the cursor of the page after it, if there is one."""

    pointer: str
    next_cursor: Any


def iter_tools(value: Any, pointer: str, decode: Decode, notes: Counter[str]) -> Iterator[tuple[Any, str]]:
    """Yield the tools of a value and their locations, each a function or OpenAI's wrapper of one; neither is checked.

    Args:
        value: Tools in any of the forms.
        pointer: Location of the value in its row.
        decode: Decodes a string at a location.
        notes: Counts the conversions; changed in place.

    Raises:
        RowError: ``tool_shape``; ``tools_incomplete`` if the last page of tools names a next one; or what ``decode``
            raises.
    """
    pages: list[_Page] = []
    yield from _iter_tools(value, pointer, decode, notes, pages, 0)
    if pages and pages[-1].next_cursor:
        raise RowError(
            f"{pages[-1].pointer}.nextCursor",
            "tools_incomplete",
            f"the page of tools after {describe_value(pages[-1].next_cursor)} is missing; pass all pages of tools/list "
            "as a list, or remove nextCursor if the model should have only these tools",
        )


def _iter_tools(
    value: Any, pointer: str, decode: Decode, notes: Counter[str], pages: list[_Page], depth: int
) -> Iterator[tuple[Any, str]]:
    """Do what ``iter_tools`` does, and add each page; ``depth`` counts the lists and strings around the value."""
    if depth > _MAX_NESTING:
        raise RowError(pointer, "tool_shape", "lists or strings of tools inside one another")
    if isinstance(value, str):
        yield from _iter_tools(decode(value, pointer), pointer, decode, notes, pages, depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            at = f"{pointer}[{i}]"
            if isinstance(item, dict) and "function" in item and "name" not in item:
                yield _read_wrapped(item, f"{at}.function", notes), at  # as most rows have them
            elif isinstance(item, dict):
                yield from _iter_object(item, at, decode, notes, pages, depth)
            else:
                yield from _iter_tools(item, at, decode, notes, pages, depth + 1)
    elif isinstance(value, dict):
        yield from _iter_object(value, pointer, decode, notes, pages, depth)
    else:
        raise RowError(pointer, "tool_shape", f"expected a list of tools, got {describe_value(value)}")


def _iter_object(
    value: dict[str, Any], pointer: str, decode: Decode, notes: Counter[str], pages: list[_Page], depth: int
) -> Iterator[tuple[Any, str]]:
    if "name" in value:
        yield _read_named(value, pointer, notes), pointer
    elif "function" in value:
        yield _read_wrapped(value, f"{pointer}.function", notes), pointer
    elif "openapi" in value or "swagger" in value:
        notes["tools_from_openapi"] += 1
        for function in read_operations(value, pointer):
            yield function, pointer
    elif "jsonrpc" in value:
        if "error" in value:
            raise RowError(f"{pointer}.error", "tool_shape", f"an MCP server's error: {describe_value(value['error'])}")
        yield from _iter_tools(value.get("result"), f"{pointer}.result", decode, notes, pages, depth + 1)
    elif "tools" in value:
        pages.append(_Page(pointer, value.get("nextCursor")))
        yield from _iter_tools(value["tools"], f"{pointer}.tools", decode, notes, pages, depth + 1)
    elif (key := next((k for k in ("function_declarations", "functionDeclarations") if k in value), None)) is not None:
        declared = value[key]
        if not isinstance(declared, list):
            raise RowError(f"{pointer}.{key}", "tool_shape", f"expected a list, got {describe_value(declared)}")
        notes["tools_from_gemini"] += len(declared)
        require_read_keys(value, (key,), pointer)
        for i, item in enumerate(declared):
            yield _read_gemini(item, f"{pointer}.{key}[{i}]"), f"{pointer}.{key}[{i}]"
    else:
        yield value, pointer


def _read_wrapped(tool: dict[str, Any], pointer: str, notes: Counter[str]) -> Any:
    """Return a tool in OpenAI's wrapper, whose function may have Gemini's types."""
    function = tool["function"]
    if not isinstance(function, dict) or not _has_gemini_types(function.get("parameters")):
        return tool
    notes["tools_from_gemini"] += 1
    return {
        **tool,
        "function": {**function, "parameters": _convert_gemini(function["parameters"], f"{pointer}.parameters")},
    }


def _has_gemini_types(parameters: Any) -> bool:
    """Return True if a schema, or one of its properties, has a type in capitals."""
    if not isinstance(parameters, dict):
        return False
    properties = parameters.get("properties")
    schemas = [parameters, *(properties.values() if isinstance(properties, dict) else ())]
    types = [schema.get("type") for schema in schemas if isinstance(schema, dict)]
    return any(isinstance(kind, str) and kind in _GEMINI_TYPES for kind in types)


def _read_named(tool: dict[str, Any], pointer: str, notes: Counter[str]) -> Any:
    """Return a function without another API's keys; itself if it has none."""
    if "inputSchema" in tool:
        notes["tools_from_mcp"] += 1
        return _make_function(tool["name"], tool.get("description") or tool.get("title"), tool["inputSchema"])
    if "input_schema" in tool:
        notes["tools_from_anthropic"] += 1
        require_read_keys(tool, _ANTHROPIC_KEYS, pointer)
        return _make_function(tool["name"], tool.get("description"), tool["input_schema"])
    if _has_gemini_types(tool.get("parameters")):
        notes["tools_from_gemini"] += 1
        return _read_gemini(tool, pointer)
    if tool.get("type") == "function" and "function" not in tool:  # OpenAI's Responses API has no wrapper
        notes["tool_type_dropped"] += 1
        return {key: value for key, value in tool.items() if key != "type"}
    return tool


def _make_function(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {key: value for key, value in function.items() if value is not None}


def _read_gemini(tool: Any, pointer: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    require_read_keys(tool, _GEMINI_KEYS, pointer)
    schema = tool.get("parametersJsonSchema", tool.get("parameters_json_schema"))
    if schema is None and tool.get("parameters") is not None:
        schema = _convert_gemini(tool["parameters"], f"{pointer}.parameters")
    return _make_function(tool.get("name"), tool.get("description"), schema)


def _convert_gemini(schema: Any, pointer: str) -> Any:
    """Return a schema of Gemini's (types in capitals, counts as strings, ``nullable``) as JSON Schema."""
    if not isinstance(schema, dict):
        raise RowError(pointer, "tool_shape", f"expected a schema, got {describe_value(schema)}")
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{pointer}.{key}"
        if key in ("nullable", "propertyOrdering", "example"):
            continue
        if key == "type" and isinstance(value, str) and value in _GEMINI_TYPES:
            converted[key] = value.lower()
        elif key in _GEMINI_COUNTS and isinstance(value, str) and value.isdecimal():
            converted[key] = int(value)
        elif key == "properties" and isinstance(value, dict):
            converted[key] = {name: _convert_gemini(item, f"{at}.{name}") for name, item in value.items()}
        elif key == "items":
            converted[key] = _convert_gemini(value, at)
        elif key == "anyOf" and isinstance(value, list):
            converted[key] = [_convert_gemini(item, f"{at}[{i}]") for i, item in enumerate(value)]
        else:
            converted[key] = value
    return allow_null(converted) if schema.get("nullable") is True else converted


def _read_python(text: str) -> Any:
    """Return a Python list or dict as JSON's values; None if the text is anything else."""
    reader = PythonReader(text, has_json_constants=True)
    try:
        value, end = reader.read_value(reader.skip_space(0))
        if reader.skip_space(end) != len(text) or not isinstance(value, (list, tuple, dict)):
            return None
        return json.loads(json.dumps(value, allow_nan=False))  # tuples become lists
    except (ParseError, TypeError, ValueError):
        return None
