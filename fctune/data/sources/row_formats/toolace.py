"""Rows of Team-ACE/ToolACE: tools as a JSON list inside the system text, calls as ``[name(argument=value)]``."""

from __future__ import annotations

import json
import re
from typing import Any

from fctune.base.declared_calls import DeclaredCallReader
from fctune.base.json_reader import ParseError
from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError
from fctune.data.sources.python_types import convert_schema
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.sharegpt import SPEAKERS, read_turns

_LIST_HEAD = re.compile(r"(?:Here is a )?list of functions in JSON format that you can invoke[.:]?\s*(?=\[)")
_PROMPT = (
    "You are an expert in composing functions. You are given a question and a set of possible functions. "
    "Based on the question, you will need to make one or more function/tool calls to achieve the purpose.",
    "If none of the functions can be used, point it out. If the given question lacks the parameters required by the "
    "function, also point it out.",
    "If none of the function can be used, point it out. If the given question lacks the parameters required by the "
    "function, also point it out.",
    "You should only return the function call in tools call sections.",
    "Should you decide to return the function call(s).",
    "Put it in the format of [func1(params_name=params_value, params_name2=params_value2...), func2(params)]",
    "If you decide to invoke any of the function(s), you MUST put it in the format of "
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "NO other text MUST be included.",
    "You SHOULD NOT include any other text in the response.",
)
_SPACE = " \t\r\n"


def _is_toolace(row: dict[str, Any]) -> bool:
    """Return True if the row's system text lists tools as ToolACE does."""
    system = row.get("system")
    has_turns = row.get("conversations") is not None
    return has_turns and isinstance(system, str) and _LIST_HEAD.search(system) is not None


def read_toolace(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row; ToolACE's own prompt is removed from its system text."""
    _read_system(row["system"], builder)
    names = [tool.name for tool in builder.tools]
    for speaker, value, pointer, given in read_turns(row, builder):
        match SPEAKERS[speaker]:
            case "user":
                builder.add("user", value, pointer)
            case "system":
                builder.add("system", value, pointer)
            case "assistant":
                text, reasoning = builder.take_reasoning(value, pointer, given)
                _add_assistant(text, pointer, names, builder, reasoning)
            case "reasoning":
                builder.add_reasoning(value, pointer)
            case "result":
                _add_results(value, pointer, builder)
            case _:
                raise RowError(pointer, "message_shape", f"a {speaker} turn in a row of ToolACE's format")
    return builder.finish()


def _read_system(system: Any, builder: RowBuilder) -> None:
    if not isinstance(system, str):
        raise RowError("system", "content_not_text", "expected text")
    match = _LIST_HEAD.search(system)
    if match is None:
        if system.strip(_SPACE):
            builder.add("system", system, "system")
        return
    tools, end = builder.decode_prefix(system, match.end(), "system")
    converted = [_convert_tool(tool, f"system.tools[{i}]") for i, tool in enumerate(tools)]
    builder.notes["type_converted"] += sum(a != b for a, b in zip(tools, converted, strict=True))
    builder.set_tools(converted, "system")
    rest = system[: match.start()] + "\n" + system[end:].lstrip(". ")
    for sentence in _PROMPT:
        rest = rest.replace(sentence, "")
    builder.notes["system_prompt_replaced"] += 1
    if rest := re.sub(r"\s*\n\s*", "\n", rest).strip(_SPACE):
        builder.add("system", rest, "system")


def _convert_tool(tool: Any, pointer: str) -> Any:
    if not isinstance(tool, dict) or "parameters" not in tool:
        return tool
    return {**tool, "parameters": convert_schema(tool["parameters"], f"{pointer}.parameters")}


def _add_assistant(value: str, pointer: str, names: list[str], builder: RowBuilder, reasoning: str | None) -> None:
    text = value.strip(_SPACE)
    reader = DeclaredCallReader(text, names)
    if not reader.is_call_list():
        for name in names:
            if f"[{name}(" in text:
                raise RowError(pointer, "text_around_call", f"text before the call to {name}")
        builder.add("assistant", value, pointer, reasoning=reasoning)
        return
    try:
        calls, end = reader.read_calls(0)
    except ParseError as error:
        got = repr(text[error.position : error.position + 30]) if error.position < len(text) else "the end"
        kind = "call_not_pythonic" if error.kind == "syntax" else error.kind
        raise RowError(pointer, kind, f"{error.reason} at character {error.position}, got {got}") from None
    if text[end:].strip(_SPACE):
        raise RowError(pointer, "text_around_call", f"text after the calls: {text[end:].strip(_SPACE)[:40]!r}")
    builder.add("assistant", None, pointer, tuple(Call(*call) for call in calls), reasoning=reasoning)


def _add_results(value: Any, pointer: str, builder: RowBuilder) -> None:
    """Add one result per call; ToolACE has all results of a turn in one list of ``{"name", "results"}``."""
    try:
        results = builder.context.json.decode(value) if isinstance(value, str) else value
    except RowError:
        results = None
    is_list = isinstance(results, list) and all(
        isinstance(item, dict) and item.keys() == {"name", "results"} for item in results
    )
    if is_list and [item["name"] for item in results] == [call.name for call in builder.pending]:
        for item in results:
            content = item["results"]
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            builder.add_result(text, pointer, name=item["name"])
    elif len(builder.pending) > 1:
        names = ", ".join(call.name for call in builder.pending)
        raise RowError(
            pointer, "result_without_call", f"expected a list with one result of each of {names}, in this order"
        )
    else:
        builder.add_result(value, pointer)


ROW_FORMAT = RowFormat(
    name="toolace",
    keys="system that lists tools, conversations",
    matches=_is_toolace,
    read=read_toolace,
    columns=("system", "conversations"),
    priority=2,
)
