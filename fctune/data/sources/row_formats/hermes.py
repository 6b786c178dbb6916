"""Rows of NousResearch/hermes-function-calling-v1: ShareGPT turns with calls and results in XML tags.

https://github.com/NousResearch/Hermes-Function-Calling. Calls are ``<tool_call>`` blocks of JSON or, in
many rows, of Python literals; results are ``<tool_response>`` blocks; tools are in a column and again in the system
prompt.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError
from fctune.data.sources.row_builder import ParsedRow, RowBuilder, RowWarning
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.sharegpt import SPEAKERS, read_turns
from fctune.data.sources.row_reasoning import REASONING_ROLES

_OPENING = "You are a function calling AI model"
_TOOLS = re.compile(r"<tools>\s*(?=[\[{])")
_NO_TOOLS = re.compile(r"\[\s*\]")
_OTHER_SPEAKERS = ("function_call", "observation", *REASONING_ROLES)
_SPACE = " \t\r\n"


def _is_hermes(row: dict[str, Any]) -> bool:
    """Return True if a turn has Hermes' tags, outside reasoning and LLaMA-Factory's calls and results."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    for turn in turns:
        is_text = isinstance(turn, dict) and turn.get("from") not in _OTHER_SPEAKERS
        value = turn.get("value") if is_text else None
        if isinstance(value, str):
            value = value.rpartition("</think>")[2]
            if "<tool_call>" in value or "<tool_response>" in value or "<tools>" in value:
                return True
    return False


def read_hermes(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row; a system prompt that only declares the tools is replaced by the chat template's."""
    builder.set_tools(row.get("tools"))
    for speaker, value, pointer, given in read_turns(row, builder):
        match SPEAKERS[speaker]:
            case "system":
                _add_system(value, pointer, row, builder)
            case "user":
                builder.add("user", value, pointer)
            case "assistant":
                text, reasoning = builder.take_reasoning(value, pointer, given)
                content, calls = _read_calls(text, pointer, builder)
                builder.add("assistant", content, pointer, calls, reasoning=reasoning)
            case "reasoning":
                builder.add_reasoning(value, pointer)
            case "result":
                for content, name in _read_results(value, pointer, builder):
                    builder.add_result(content, pointer, name=name)
            case _:
                reason = "a function_call turn in a row with Hermes' tags: set the format to sharegpt or hermes"
                raise RowError(pointer, "message_shape", reason)
    return builder.finish()


def _add_system(value: str, pointer: str, row: dict[str, Any], builder: RowBuilder) -> None:
    match = _TOOLS.search(value)
    if match is None:
        builder.add("system", value, pointer)
        return
    if not builder.tools:
        if row.get("tools") not in (None, "", "null") and not _NO_TOOLS.match(value, match.end()):
            raise RowError("tools", "tools_disagree", "the column has no tools, but the system prompt does")
        declared, _ = builder.decode_literal_prefix(value, match.end(), pointer)
        builder.set_tools(declared if isinstance(declared, list) else [declared], pointer)
        builder.notes["tools_from_prompt"] += 1
    start = value.find(_OPENING)
    if start < 0:
        reason = "the system prompt lists tools in its own wording; the chat template lists them again"
        builder.warnings.append(RowWarning(pointer, "tools_in_prompt", reason))
        builder.add("system", value, pointer)
        return
    builder.notes["system_prompt_replaced"] += 1
    if before := value[:start].strip(_SPACE):
        builder.add("system", before, pointer)


def _read_calls(value: str, pointer: str, builder: RowBuilder) -> tuple[str | None, tuple[Call, ...]]:
    at = value.find("<tool_call>")
    if at < 0:
        if "</tool_call>" in value:
            raise RowError(pointer, "call_not_json", "</tool_call> without <tool_call>")
        return value, ()
    content = value[:at].rstrip(_SPACE) or None
    calls = []
    while value.startswith("<tool_call>", at):
        at = _skip_space(value, at + len("<tool_call>"))
        call, at = builder.decode_literal_prefix(value, at, pointer, "call_not_json")
        at = _skip_space(value, at)
        if not value.startswith("</tool_call>", at):
            raise RowError(pointer, "call_not_json", f"expected </tool_call> at character {at}")
        calls.append(builder.read_call(call, pointer))
        at = _skip_space(value, at + len("</tool_call>"))
    if at < len(value):
        raise RowError(pointer, "text_around_call", f"text after the calls: {value[at : at + 40]!r}")
    return content, tuple(calls)


def _read_results(value: str, pointer: str, builder: RowBuilder) -> list[tuple[str, str | None]]:
    """Return the content and tool name of each result in a turn."""
    at = _skip_space(value, 0)
    if not value.startswith("<tool_response>", at):
        return [(value, None)]
    results = []
    while value.startswith("<tool_response>", at):
        at += len("<tool_response>")
        end = value.find("</tool_response>", at)
        if end < 0:
            raise RowError(pointer, "message_shape", "<tool_response> without </tool_response>")
        body = value[at:end]
        if body.startswith("\\n"):
            body = body.removeprefix("\\n").removesuffix("\\n")
        results.append(_read_result(body.strip(_SPACE), builder))
        at = _skip_space(value, end + len("</tool_response>"))
    if at < len(value):
        raise RowError(pointer, "message_shape", f"text after the results: {value[at : at + 40]!r}")
    return results


def _read_result(text: str, builder: RowBuilder) -> tuple[str, str | None]:
    """Return a result's content and name, unwrapped if it is exactly ``{"name", "content"}``."""
    before = builder.notes.copy()
    try:
        value, end = builder.decode_literal_prefix(text, 0, "")
    except RowError:
        return text, None
    is_wrapped = isinstance(value, dict) and value.keys() == {"name", "content"} and end == len(text)
    if is_wrapped and isinstance(value["name"], str):
        content = value["content"]
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), value["name"]
    builder.notes = before  # nothing of it was taken
    return text, None


def _skip_space(text: str, at: int) -> int:
    """Return the index of the next character other than whitespace, which some rows escape once too often."""
    while at < len(text) and (text[at] in _SPACE or text.startswith("\\n", at)):
        at += 2 if text[at] == "\\" else 1
    return at


ROW_FORMAT = RowFormat(
    name="hermes",
    keys="conversations of from/value with <tool_call> tags",
    matches=_is_hermes,
    read=read_hermes,
    priority=3,
)
