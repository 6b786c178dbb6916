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
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder, RowWarning
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.sharegpt import SPEAKERS, read_turns
from fctune.data.sources.row_reasoning import REASONING_ROLES

_OPENING = "You are a function calling AI model"
_TOOLS = re.compile(r"<tools>\s*(?=[\[{])")
_NO_TOOLS = re.compile(r"\[\s*\]")
# What the chat templates of Qwen 2.5 and 3 add to a system message.
_QWEN_BLOCK = re.compile(
    r"# Tools\s+You may call one or more functions to assist with the user query\..*?</tools>.*?"
    r"<tool_call>\s*\{\"name\": <function-name>, \"arguments\": <args-json-object>\}\s*</tool_call>",
    re.DOTALL,
)
# How rendered prompts of Kimi declare tools, with what follows them.
_RAW_DECLARATIONS = (("<|im_system|>tool_declare<|im_middle|>", "<|im_end|>"),)
_OTHER_SPEAKERS = ("function_call", "tool_call", "observation", *REASONING_ROLES)
_SPACE = " \t\r\n"


def _is_hermes(row: dict[str, Any]) -> bool:
    """Return True if a turn has Hermes' tags, outside reasoning and LLaMA-Factory's calls and results."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    for turn in [{"value": row.get("system")}, *turns]:
        is_text = isinstance(turn, dict) and turn.get("from") not in _OTHER_SPEAKERS
        value = turn.get("value") if is_text else None
        if isinstance(value, str):
            value = value.rpartition("</think>")[2]
            if "<tool_call>" in value or "<tool_response>" in value or "<tools>" in value:
                return True
    return False


def read_hermes(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row; a system prompt that only declares the tools is replaced by the chat template's."""
    builder.set_row_tools(row)
    if system := read_content(row.get("system"), "system", builder.notes):
        builder.add_system_column(read_prompt(system, "system", row.get("tools"), builder))
    for speaker, value, pointer, given in read_turns(row, builder):
        match SPEAKERS[speaker]:
            case "system":
                if (prompt := read_prompt(value, pointer, row.get("tools"), builder)) is not None:
                    builder.add("system", prompt, pointer)
            case "user":
                builder.add("user", value, pointer)
            case "assistant":
                text, reasoning = builder.take_reasoning(value, pointer, given)
                content, calls = read_tagged_calls(text, pointer, builder)
                builder.add("assistant", content, pointer, calls, reasoning=reasoning)
            case "reasoning":
                builder.add_reasoning(value, pointer)
            case "result":
                results = read_tagged_results(value, pointer, builder) if isinstance(value, str) else None
                for content, name in results or [(value, None)]:
                    builder.add_result(content, pointer, name=name)
            case _:
                reason = f"a {speaker} turn in a row with Hermes' tags: set the format to sharegpt or hermes"
                raise RowError(pointer, "message_shape", reason)
    return builder.finish()


def read_prompt(value: str, pointer: str, column: Any, builder: RowBuilder) -> str | None:
    """Return a system prompt without the tools it declares in a known wording, or None if nothing else is in it.

    The tools are read where the row's columns have none; ``column`` is what the column of tools holds.
    """
    for head, tail in _RAW_DECLARATIONS:
        if (start := value.find(head)) >= 0:
            end = _read_prompt_tools(value, start + len(head), pointer, builder)
            builder.notes["system_prompt_replaced"] += 1
            return (value[:start] + value[end:].removeprefix(tail)).strip(_SPACE) or None
    match = _TOOLS.search(value)
    if match is None:
        return value
    if not builder.tools:
        if column not in (None, "", "null") and not _NO_TOOLS.match(value, match.end()):
            raise RowError("tools", "tools_disagree", "the column has no tools, but the system prompt does")
        _read_prompt_tools(value, match.end(), pointer, builder)
    if (start := value.find(_OPENING)) >= 0:
        builder.notes["system_prompt_replaced"] += 1
        return value[:start].strip(_SPACE) or None
    if (block := _QWEN_BLOCK.search(value)) is not None:
        builder.notes["system_prompt_replaced"] += 1
        return (value[: block.start()] + value[block.end() :]).strip(_SPACE) or None
    reason = "the system prompt lists tools in its own wording; the chat template lists them again"
    builder.warnings.append(RowWarning(pointer, "tools_in_prompt", reason))
    return value


def _read_prompt_tools(value: str, at: int, pointer: str, builder: RowBuilder) -> int:
    """Read the tools at an index of a prompt, a list or one after another, and return the index after them."""
    declared: list[Any] = []
    while value[at : at + 1] in ("[", "{"):
        found, at = builder.decode_literal_prefix(value, at, pointer)
        declared += found if isinstance(found, list) else [found]
        at = _skip_space(value, at)
    if not builder.tools and declared:
        builder.set_tools(declared, pointer)
        builder.notes["tools_from_prompt"] += 1
    return at


def read_tagged_calls(value: str, pointer: str, builder: RowBuilder) -> tuple[str | None, tuple[Call, ...]]:
    """Return the text before the calls of an assistant's turn, and the calls."""
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


def read_tagged_results(value: str, pointer: str, builder: RowBuilder) -> list[tuple[str, str | None]]:
    """Return the content and tool name of each result in a turn; none if it has no tag."""
    at = _skip_space(value, 0)
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
    if at < len(value) and "<tool_response>" in value:
        raise RowError(pointer, "message_shape", f"text around the results: {value[at : at + 40]!r}")
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
    columns=("conversations", "system", *TOOL_COLUMNS),
    harmless=("task", "schema"),
    priority=3,
)
