"""Rows of Salesforce/xlam-function-calling-60k: a query, its calls and its tools, the latter two as JSON strings.

Parameters are not JSON Schema: ``{"city": {"description": ..., "type": "str, optional", "default": ...}}``. They are
converted to it; a parameter is required unless its type is marked as optional or it has a default.
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.python_types import convert_type
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_reasoning import REASONING_KEYS, read_reasoning


def read_xlam(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row as a conversation of the query and its calls."""
    query, answers, tools = row["query"], row["answers"], row.get("tools")
    if not isinstance(query, str):
        raise RowError("query", "content_not_text", f"expected text, got {describe_value(query)}")
    listed = builder.context.decode_tools(tools, "tools", builder.notes)
    builder.set_tools([_convert_tool(tool, where, builder) for tool, where in listed])
    answers = builder.decode(answers, "answers", "call_not_json") if isinstance(answers, str) else answers
    if not isinstance(answers, list):
        raise RowError("answers", "call_shape", f"expected a list of calls, got {describe_value(answers)}")
    builder.add_system_column(row.get("system"))
    builder.add("user", query, "query")
    if not answers:
        return _finish_without_call(row, builder)
    if row.get("response"):
        builder.unread["response"] = row["response"]  # only read as the reply of a row without calls
    calls = tuple(builder.read_call(answer, f"answers[{i}]") for i, answer in enumerate(answers))
    builder.add("assistant", None, "answers", calls, reasoning=read_reasoning(row, "", "assistant"))
    return builder.finish()


def _finish_without_call(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Return the conversation of a question that no tool answers, with the reply in the response column."""
    response = read_content(row.get("response"), "response", builder.notes)
    if response:
        builder.add("assistant", response, "response", reasoning=read_reasoning(row, "", "assistant"))
        return builder.finish()
    if builder.context.keeps_questions:
        return builder.finish(is_question=True)
    raise RowError(
        "answers",
        "no_answer_text",
        "[], and no text to train on instead: add a column response with the reply, in many wordings, or make cases of "
        "the rows (fctune data cases)",
    )


def _convert_tool(tool: Any, pointer: str, builder: RowBuilder) -> Any:
    parameters = tool.get("parameters") if isinstance(tool, dict) else None
    if not isinstance(parameters, dict) or isinstance(parameters.get("type"), str):
        return tool
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in parameters.items():
        at = f"{pointer}.parameters.{name}"
        if not isinstance(parameter, dict):
            raise RowError(at, "tool_shape", f"expected an object, got {describe_value(parameter)}")
        properties[name] = schema = {}
        is_optional = "default" in parameter
        for key, value in parameter.items():
            if key == "type" and isinstance(value, str):
                converted, is_marked = convert_type(value, f"{at}.type")
                schema.update(converted)
                is_optional = is_optional or is_marked
            else:
                schema[key] = value
        if not is_optional:
            required.append(name)
    builder.notes["type_converted"] += 1
    return {**tool, "parameters": {"type": "object", "properties": properties, "required": required}}


ROW_FORMAT = RowFormat(
    name="xlam",
    keys="query, answers[, tools]",
    matches=lambda row: "query" in row and "answers" in row,
    read=read_xlam,
    columns=("query", "answers", "tools", "system", "response", *REASONING_KEYS),
    harmless=("func_name", "func_desc"),  # of APIGen's mirrors
    priority=-1,
)
