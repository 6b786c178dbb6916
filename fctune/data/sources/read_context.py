"""State shared by the rows of a source: the JSON reader, and a cache of the tools that several rows declare."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fctune.data.conversation import Tool
from fctune.data.sources.columns import Columns, require_read_keys
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.filling import ArrowStruct, remove_tool_filling
from fctune.data.sources.row_json import RowJsonReader, check_depth, check_values
from fctune.data.sources.tool_forms import decode_tools, iter_tools
from fctune.data.value_bytes import dump_value

_MAX_CACHED_TOOLS = 2_000


class ReadContext:
    """State shared by the rows of a source: the JSON reader, a cache of tools, and how the rows are to be read.

    Attributes:
        columns: The format's name for each column of another name.
        default_tools: Tools of the rows that have none.
        keeps_questions: Keep rows whose right answer is no call, and that have no text of it; else they are defects.
        keeps_requests: Read requests without an answer, which are the beginning of others; else they are defects.
        keeps_failed: Read answers that the row marks as failed as others.
        trains_wrong_turns: Train turns whose calls all failed.
    """

    def __init__(
        self,
        columns: Columns | None = None,
        default_tools: tuple[Tool, ...] = (),
        keeps_questions: bool = False,
        keeps_failed: bool = False,
        trains_wrong_turns: bool = False,
        keeps_requests: bool = False,
    ) -> None:
        self.columns = columns or {}
        self.default_tools = default_tools
        self.keeps_questions = keeps_questions
        self.keeps_requests = keeps_requests
        self.keeps_failed = keeps_failed
        self.trains_wrong_turns = trains_wrong_turns
        # What the text of the current row may hold; True also where there is no text to search.
        self.has_escaped_surrogate = False
        self.may_have_null = True
        self.json = RowJsonReader()
        self._tools: dict[str, tuple[tuple[Tool, ...], list[str], Counter[str]]] = {}
        self._tools_by_bytes: dict[bytes, Tool] = {}

    def read_tools(self, value: Any, pointer: str, notes: Counter[str]) -> tuple[tuple[Tool, ...], list[str]]:
        """Return the tools, and the names of tools that are declared twice identically."""
        if not isinstance(value, str):
            return self._list_tools(self.decode_tools(value, pointer, notes))
        cached = self._tools.get(value)
        if cached is None:
            if len(self._tools) >= _MAX_CACHED_TOOLS:
                self._tools.clear()
            made: Counter[str] = Counter()
            cached = self._tools[value] = (*self._list_tools(self.decode_tools(value, pointer, made)), made)
        notes.update(cached[2])
        return cached[:2]

    def decode_tools(self, value: Any, pointer: str, notes: Counter[str]) -> list[tuple[Any, str]]:
        """Return the tools of a row and their locations, as functions with or without OpenAI's wrapper.

        Raises:
            RowError: The value is none of the forms of ``fctune.data.sources.tool_forms``.
        """

        def decode(text: str, where: str) -> Any:
            decoded = decode_tools(text, where, self.json, notes) if text.strip() else None
            return remove_tool_filling(decoded, notes) if "null" in text or "None" in text else decoded

        if isinstance(value, str):
            value = decode(value, pointer)
        elif self.may_have_null:
            if isinstance(value, list) and any(isinstance(item, ArrowStruct) for item in value):
                notes["arrow_struct"] += 1
            value = remove_tool_filling(value, notes)
        return [] if value is None else list(iter_tools(value, pointer, decode, notes))

    def _list_tools(self, listed: list[tuple[Any, str]]) -> tuple[tuple[Tool, ...], list[str]]:
        tools = tuple([self._read_tool(item, where) for item, where in listed])
        first: dict[str, Tool] = {}
        repeated: list[str] = []
        for tool, (_, where) in zip(tools, listed, strict=True):
            earlier = first.get(tool.name)
            if earlier is None:
                first[tool.name] = tool
                continue
            if earlier != tool:
                raise RowError(where, "duplicate_tool", f"{tool.name} is declared twice, with different definitions")
            repeated.append(tool.name)
        return tools, repeated

    def _read_tool(self, value: Any, pointer: str) -> Tool:
        """Return the tool of an object; rows with equal objects share it."""
        key = dump_value(value)
        if key is None:
            return _read_tool(value, pointer)
        tool = self._tools_by_bytes.get(key)
        if tool is None:
            tool = _read_tool(value, pointer)
            if len(self._tools_by_bytes) >= _MAX_CACHED_TOOLS:
                self._tools_by_bytes.clear()
            self._tools_by_bytes[key] = tool
        return tool


def _read_tool(value: Any, pointer: str) -> Tool:
    if not isinstance(value, dict):
        raise RowError(pointer, "tool_shape", f"expected an object, got {describe_value(value)}")
    function = value
    if "function" in value and "name" not in value:
        function, pointer = value["function"], f"{pointer}.function"
        if value.get("type", "function") != "function" or not isinstance(function, dict):
            raise RowError(pointer, "tool_shape", f"expected a tool of type function, got {describe_value(value)}")
        require_read_keys(value, ("type", "function"), pointer.removesuffix(".function"))
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
    check_values(function, pointer, "tool_shape")
    return Tool(function)
