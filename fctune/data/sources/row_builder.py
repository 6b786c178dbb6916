"""Shared parts of all row readers: strict tools and calls, ordered messages, results matched to their calls."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fctune.data.conversation import Call, Conversation, Message, Role, Tool
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_json import RowJsonReader, check_depth

_MAX_CACHED_TOOLS = 2_000


class ArrowStruct(dict[str, Any]):
    """An object from an Arrow struct, whose nulls may be filling."""


class RowWarning(NamedTuple):
    """A problem in a row that is kept despite it."""

    pointer: str
    kind: str
    reason: str


@dataclass(slots=True)
class ParsedRow:
    """A conversation with the location of each part in its row.

    ``message_pointers[i]`` is the location of ``conversation.messages[i]``, ``tools_pointer[i]tools_suffix`` that of
    ``conversation.tools[i]``. ``notes`` counts the conversions that were made, by their kind in ``NOTE_KINDS``.
    """

    conversation: Conversation
    message_pointers: list[str]
    tools_pointer: str
    tools_suffix: str = ""
    row_format: str = ""
    warnings: list[RowWarning] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


NOTE_KINDS: dict[str, str] = {
    "arrow_null_dropped": "nulls that Arrow filled into a struct, removed",
    "arrow_struct": "arguments or tools from an Arrow struct, whose key order is the column's",
    "content_with_call": "assistant text before a call, kept with it",
    "developer_as_system": "developer messages read as system messages",
    "escaped_apostrophe": "\\' in quoted arguments read as an apostrophe",
    "ignored_field": "message fields that no chat template of tool calls uses",
    "legacy_function_call": "OpenAI's old function_call, function role or functions",
    "missing_end_marker": "Glaive assistant turns without <|endoftext|>",
    "number_respelled": "numbers whose value is kept but not their spelling (1e5, 1.50)",
    "quoted_arguments": "Glaive arguments in single quotes, read as the JSON between the quotes",
    "system_prompt_replaced": "system prompts that only declared tools, which the chat template declares instead",
    "tools_from_prompt": "tools read from the prompt because the tools column is empty",
    "type_converted": "tools whose Python type names were converted to JSON Schema",
}
"""The kinds of conversions made while reading rows."""


class RowBuilder:
    """Builds a conversation from the messages of a row; raises ``RowError`` at the first defect."""

    def __init__(self, context: ReadContext, source: str = "") -> None:
        self.context = context
        self.source = source
        self.messages: list[Message] = []
        self.pointers: list[str] = []
        self.warnings: list[RowWarning] = []
        self.notes: Counter[str] = Counter()
        self.tools: tuple[Tool, ...] = ()
        self.tools_pointer = "tools"
        self.tools_suffix = ""
        self.pending: list[Call] = []

    def add(
        self, role: Role, content: str | None, pointer: str, calls: tuple[Call, ...] = (), weight: float = 1.0
    ) -> None:
        """Add a message that is not a result."""
        if self.pending and not (role == "assistant" and calls):
            names = ", ".join(call.name for call in self.pending)
            self.warnings.append(RowWarning(pointer, "call_without_result", f"no result of {names} precedes it"))
            self.pending = []
        if calls:
            if content:
                self.notes["content_with_call"] += 1
            self.pending.extend(calls)
            ids = [call.id for call in self.pending if call.id is not None]
            if len(set(ids)) != len(ids):
                raise RowError(pointer, "duplicate_call_id", f"two calls without a result share an id: {ids}")
        self.messages.append(Message(role, content, calls, weight=weight))
        self.pointers.append(pointer)

    def add_result(self, content: str, pointer: str, call_id: str | None = None, name: str | None = None) -> None:
        """Add a result of a call that has none yet, matched by id, else by name, else to the oldest call."""
        call = self._find_call(call_id, name)
        if call is None:
            given = f"id {call_id!r}" if call_id is not None else f"name {name!r}" if name is not None else "no id"
            open_calls = ", ".join(f"{c.name} ({c.id})" if c.id else c.name for c in self.pending) or "none"
            reason = f"answers no call (it has {given}; calls without a result: {open_calls})"
            raise RowError(pointer, "result_without_call", reason)
        self.pending.remove(call)
        self.messages.append(Message("tool", content, call_id=call_id, name=name))
        self.pointers.append(pointer)

    def finish(self) -> ParsedRow:
        """Return the conversation with its locations, warnings and notes."""
        if not any(message.role == "assistant" for message in self.messages):
            raise RowError("", "no_assistant", "no assistant message to train on")
        conversation = Conversation(tuple(self.messages), self.tools, self.source)
        if self.context.has_escaped_surrogate:
            try:
                json.dumps(conversation.to_openai(), ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                reason = "half a surrogate pair (\\ud800 to \\udfff), which UTF-8 cannot hold"
                raise RowError("", "invalid_utf8", reason) from None
        return ParsedRow(
            conversation,
            self.pointers,
            self.tools_pointer,
            self.tools_suffix,
            warnings=self.warnings,
            notes=+self.notes,
        )

    def read_call(self, value: Any, pointer: str, call_id: str | None = None) -> Call:
        """Read a call from an object with ``name`` and ``arguments``, an object or a string with its JSON."""
        if not isinstance(value, dict):
            raise RowError(
                pointer, "call_shape", f"expected an object with name and arguments, got {describe_value(value)}"
            )
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise RowError(f"{pointer}.name", "call_shape", f"expected a tool's name, got {describe_value(name)}")
        if "arguments" not in value:
            keys = ", ".join(map(str, value))
            raise RowError(pointer, "call_shape", f"expected the key 'arguments', got {keys}")
        arguments = self.read_arguments(value["arguments"], f"{pointer}.arguments", name)
        return Call(name, arguments, call_id)

    def read_arguments(self, value: Any, pointer: str, name: str) -> dict[str, Any]:
        """Read the arguments of a call to the tool ``name``."""
        if isinstance(value, str):
            value = self.decode(value, pointer, "arguments_not_json")
        elif isinstance(value, ArrowStruct):
            self.notes["arrow_struct"] += 1
            value = _remove_filling(value, self._find_schema(name), pointer, self.notes)
        if not isinstance(value, dict):
            reason = f"expected an object or a string with its JSON, got {describe_value(value)}"
            raise RowError(pointer, "arguments_not_object", reason)
        check_depth(value, pointer)
        return value

    def decode(self, text: str, pointer: str, kind: str = "not_json") -> Any:
        """Decode JSON inside the row strictly and count respelled numbers."""
        before = self.context.json.num_respelled
        value = self.context.json.decode(text, pointer, kind)
        self.notes["number_respelled"] += self.context.json.num_respelled - before
        return value

    def decode_prefix(self, text: str, start: int, pointer: str, kind: str = "not_json") -> tuple[Any, int]:
        """Decode JSON at ``start`` of a longer text; returns the value and the index after it."""
        before = self.context.json.num_respelled
        value, end = self.context.json.decode_prefix(text, start, pointer, kind)
        self.notes["number_respelled"] += self.context.json.num_respelled - before
        return value, end

    def set_tools(self, value: Any, pointer: str = "tools") -> None:
        """Read the tools of the row: a list or its JSON, of functions with or without OpenAI's wrapper."""
        self.tools, repeated = self.context.read_tools(value, pointer, self.notes)
        self.tools_pointer = pointer
        if isinstance(value, list) and value and isinstance(value[0], dict) and "function" in value[0]:
            self.tools_suffix = ".function"
        for name in repeated:
            self.warnings.append(RowWarning(pointer, "repeated_tool", f"{name} is declared twice, identically"))

    def _find_call(self, call_id: str | None, name: str | None) -> Call | None:
        if call_id is not None and any(call.id is not None for call in self.pending):
            return next((call for call in self.pending if call.id == call_id), None)
        if name is not None:
            return next((call for call in self.pending if call.name == name), None)
        return self.pending[0] if self.pending else None

    def _find_schema(self, name: str) -> dict[str, Any] | None:
        return next((tool.parameters for tool in self.tools if tool.name == name), None)


class ReadContext:
    """State shared by the rows of a source: the JSON reader and a cache of tools."""

    def __init__(self) -> None:
        self.has_escaped_surrogate = False
        self.json = RowJsonReader()
        self._tools: dict[str, tuple[tuple[Tool, ...], list[str]]] = {}

    def read_tools(self, value: Any, pointer: str, notes: Counter[str]) -> tuple[tuple[Tool, ...], list[str]]:
        """Return the tools, and the names of tools that are declared twice identically."""
        if isinstance(value, str):
            cached = self._tools.get(value)
            if cached is None:
                decoded = self.json.decode(value, pointer) if value.strip() else None
                if len(self._tools) >= _MAX_CACHED_TOOLS:
                    self._tools.clear()
                cached = self._tools[value] = _list_tools(decoded, pointer)
            return cached
        if isinstance(value, list) and any(isinstance(item, ArrowStruct) for item in value):
            value = [_remove_nulls(item, notes) for item in value]
            notes["arrow_struct"] += 1
        return _list_tools(value, pointer)


def _remove_filling(value: Any, schema: Any, pointer: str, notes: Counter[str]) -> Any:
    """Remove the nulls that Arrow filled into arguments.

    A null is filling if the tool's schema does not declare the key, or declares it as optional with a type that
    excludes null. A null that the schema allows, or for which there is no schema, is rejected as ``arrow_null``.
    """
    if not isinstance(value, dict):
        if _holds_null(value):
            raise RowError(pointer, "arrow_null", "null in a list of an Arrow column; store arguments as JSON strings")
        return value
    properties = schema.get("properties") if isinstance(schema, dict) else None
    kept: dict[str, Any] = {}
    for key, item in value.items():
        declared = properties.get(key) if isinstance(properties, dict) else None
        if item is not None:
            kept[key] = _remove_filling(item, declared, f"{pointer}.{key}", notes)
        elif isinstance(properties, dict) and (key not in properties or _excludes_null(declared, key, schema)):
            notes["arrow_null_dropped"] += 1
        else:
            reason = "null in an Arrow column, which may be the row's or filling; store arguments as JSON strings"
            raise RowError(f"{pointer}.{key}", "arrow_null", reason)
    return kept


def _excludes_null(declared: Any, key: str, schema: Any) -> bool:
    types = declared.get("type") if isinstance(declared, dict) else None
    required = schema.get("required")
    if isinstance(required, list) and key in required:
        return False
    return types != "null" if isinstance(types, str) else isinstance(types, list) and "null" not in types


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_null(item) for item in value.values())
    return any(_holds_null(item) for item in value) if isinstance(value, list) else value is None


def _remove_nulls(value: Any, notes: Counter[str]) -> Any:
    """Remove the nulls of a tool schema from an Arrow struct; only ``default`` and ``const`` could allow them."""
    if isinstance(value, dict):
        kept = {key: _remove_nulls(item, notes) for key, item in value.items() if item is not None}
        notes["arrow_null_dropped"] += len(value) - len(kept)
        return kept
    return [_remove_nulls(item, notes) for item in value] if isinstance(value, list) else value


def _list_tools(value: Any, pointer: str) -> tuple[tuple[Tool, ...], list[str]]:
    if value is None:
        return (), []
    if not isinstance(value, list):
        raise RowError(pointer, "tool_shape", f"expected a list of tools, got {describe_value(value)}")
    tools = tuple(_read_tool(item, f"{pointer}[{i}]") for i, item in enumerate(value))
    first: dict[str, Tool] = {}
    repeated: list[str] = []
    for i, tool in enumerate(tools):
        earlier = first.setdefault(tool.name, tool)
        if earlier is tool:
            continue
        if earlier != tool:
            reason = f"{tool.name} is declared twice, with different definitions"
            raise RowError(f"{pointer}[{i}]", "duplicate_tool", reason)
        repeated.append(tool.name)
    return tools, repeated


def _read_tool(value: Any, pointer: str) -> Tool:
    if not isinstance(value, dict):
        raise RowError(pointer, "tool_shape", f"expected an object, got {describe_value(value)}")
    function = value
    if "function" in value and "name" not in value:
        function, pointer = value["function"], f"{pointer}.function"
        if value.get("type", "function") != "function" or not isinstance(function, dict):
            raise RowError(pointer, "tool_shape", f"expected a tool of type function, got {describe_value(value)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"{pointer}.name", "tool_shape", f"expected a name, got {describe_value(name)}")
    parameters = function.get("parameters")
    if parameters is not None:
        properties = parameters.get("properties") if isinstance(parameters, dict) else ()
        if not isinstance(parameters, dict) or not isinstance(properties, dict | None):
            reason = f"expected a JSON Schema of an object, got {describe_value(parameters)}"
            raise RowError(f"{pointer}.parameters", "tool_shape", reason)
    check_depth(function, pointer)
    return Tool(function)
