"""Rows of tables such as CSV files: a query, and in columns of their own the tool that it calls and the arguments.

An empty ``tool`` says that no call is right; ``response`` is the reply.
"""

from __future__ import annotations

from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import CallPointer, ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_reasoning import REASONING_KEYS, read_reasoning


def read_table_row(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row as a conversation of the query and its call."""
    query, tool = row["query"], row.get("tool")
    for name, value in (("query", query), ("tool", tool or "")):
        if not isinstance(value, str):
            raise RowError(name, "content_not_text", f"expected text, got {describe_value(value)}")
    if row.get("tools"):
        builder.set_tools(row["tools"])
    builder.add_system_column(row.get("system"))
    builder.add("user", query, "query")
    reasoning = read_reasoning(row, "", "assistant")
    if tool:
        if row.get("response"):
            builder.unread["response"] = row["response"]  # only read as the reply of a row without a call
        arguments = builder.read_arguments(row.get("arguments") or {}, "arguments", tool)
        builder.call_pointers.append(CallPointer("tool", "arguments"))
        builder.add("assistant", None, "tool", (Call(tool, arguments, None),), reasoning=reasoning)
        return builder.finish()
    if row.get("arguments"):
        raise RowError("arguments", "call_shape", "arguments of no call, because the column tool is empty")
    response = read_content(row.get("response"), "response", builder.notes)
    if not response:
        raise RowError("response", "no_answer_text", "empty; a row without a call needs the reply to train on")
    builder.add("assistant", response, "response", reasoning=reasoning)
    return builder.finish()


ROW_FORMAT = RowFormat(
    name="table",
    keys="query, tool, arguments[, tools, response]",
    matches=lambda row: "query" in row and ("tool" in row or "response" in row),
    read=read_table_row,
    columns=("query", "tool", "arguments", "tools", "system", "response", *REASONING_KEYS),
    priority=-2,
)
