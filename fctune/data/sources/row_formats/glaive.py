"""Rows of glaiveai/glaive-function-calling-v2: a ``system`` and a ``chat`` string with headers in the text.

Calls are ``<functioncall> {"name": "f", "arguments": '{"a": 1}'}``: JSON arguments in single quotes, which is not JSON.
A JSON decoder finds the end of the object between the quotes, whatever apostrophes it contains.
"""

from __future__ import annotations

import re
from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat

_HEADER = re.compile(r"(?:\A|\n{2,}) *(USER|ASSISTANT|FUNCTION RESPONSE):")
_FUNCTIONS = re.compile(
    r"You are a helpful assistant with access to the following functions\. Use them if required ?-?"
)
_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"([^"\\]*)"\s*:\s*')
_CALL_TAIL = re.compile(r"\s*\}")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CALL = "<functioncall>"
_END = "<|endoftext|>"
_SPACE = " \t\r\n"  # str.strip() without it would take U+0085 and no-break spaces too


def read_glaive(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row; a system prompt that only declares functions is replaced by the chat template's."""
    for key in ("system", "chat"):
        if not isinstance(row[key], str):
            raise RowError(key, "content_not_text", f"expected text, got {describe_value(row[key])}")
    _read_system(row["system"], builder)
    turns = _split_turns(row["chat"])
    for i, (header, text, pointer) in enumerate(turns):
        match header:
            case "USER":
                builder.add("user", text, pointer)
            case "FUNCTION RESPONSE":
                builder.add_result(text, pointer)
            case _:
                is_split = i + 1 < len(turns) and turns[i + 1][0] == "ASSISTANT"
                _add_assistant(text, pointer, is_split, builder)
    return builder.finish()


def _read_system(system: str, builder: RowBuilder) -> None:
    text = system.removeprefix("SYSTEM:").strip(_SPACE)
    match = _FUNCTIONS.match(text)
    if match is None:
        if text:
            builder.add("system", text, "system")
        return
    tools = []
    at = match.end()
    while text[at:].strip(_SPACE):
        tool, at = builder.decode_prefix(text, at, "system")
        tools.append(tool)
    builder.set_tools(tools, "system")
    builder.notes["system_prompt_replaced"] += 1


def _split_turns(chat: str) -> list[tuple[str, str, str]]:
    """Return the header, text and pointer of each turn."""
    headers = list(_HEADER.finditer(chat))
    before = chat[: headers[0].start()] if headers else chat
    if before.strip(_SPACE):
        raise RowError(
            "chat", "message_shape", f"expected USER: or ASSISTANT: first, got {before.strip(_SPACE)[:40]!r}"
        )
    if not headers:
        return []
    ends = [header.start() for header in headers[1:]] + [len(chat)]
    return [
        (header.group(1), chat[header.end() : end].strip(_SPACE), f"chat[{header.start(1)}:{end}]")
        for header, end in zip(headers, ends, strict=True)
    ]


def _add_assistant(text: str, pointer: str, is_split: bool, builder: RowBuilder) -> None:
    spoken, mark, rest = text.partition(_END)
    if rest.strip(_SPACE):
        raise RowError(pointer, "split_turn", f"text after {_END}: {rest.strip(_SPACE)[:40]!r}")
    if not mark:
        if is_split:
            raise RowError(pointer, "split_turn", f"no {_END}, and another ASSISTANT: header follows")
        builder.notes["missing_end_marker"] += 1
    spoken, reasoning = builder.take_reasoning(spoken.rstrip(_SPACE), pointer)
    content, mark, call = spoken.partition(_CALL)
    if not mark:
        builder.add("assistant", spoken, pointer, reasoning=reasoning)
        return
    calls = (_read_call(call, pointer, builder),)
    builder.add("assistant", content.rstrip(_SPACE) or None, pointer, calls, reasoning=reasoning)


def _read_call(text: str, pointer: str, builder: RowBuilder) -> Call:
    head = _CALL_HEAD.match(text)
    if head is None or text[head.end() : head.end() + 1] != "'":
        value, end = builder.decode_prefix(text, 0, pointer, "call_not_json")
    else:
        if head.group(2) != "arguments":
            raise RowError(pointer, "call_shape", f"expected the key 'arguments', got {head.group(2)!r}")
        arguments, text, end = _read_quoted(text, head.end() + 1, pointer, builder)
        value = {"name": head.group(1), "arguments": arguments}
    rest = text[end:].strip(_SPACE)
    if rest.startswith("}"):
        raise RowError(pointer, "call_not_json", "an extra closing brace after the call")
    if rest:
        raise RowError(pointer, "text_around_call", f"text after the call: {rest[:40]!r}")
    return builder.read_call(value, pointer)


def _read_quoted(text: str, start: int, pointer: str, builder: RowBuilder) -> tuple[Any, str, int]:
    """Return the JSON between single quotes, the text it was read from and the index after the call's brace."""
    kind = "arguments_not_json"
    try:
        value, end = builder.decode_prefix(text, start, pointer, kind)
    except RowError:
        # \' is not an escape in JSON and can only mean an apostrophe; other escapes keep their meaning.
        plain = text[:start] + _ESCAPE.sub(lambda match: "'" if match[1] == "'" else match[0], text[start:])
        if plain == text:
            raise
        value, end = builder.decode_prefix(plain, start, pointer, kind)
        text = plain
        builder.notes["escaped_apostrophe"] += 1
    while text[end : end + 1] in _SPACE and end < len(text):
        end += 1
    if text[end : end + 1] != "'":
        raise RowError(pointer, kind, f"expected the closing quote of the arguments, got {text[end : end + 20]!r}")
    tail = _CALL_TAIL.match(text, end + 1)
    if tail is None:
        raise RowError(pointer, "call_not_json", "expected a closing brace after the arguments: the call is truncated")
    builder.notes["quoted_arguments"] += 1
    return value, text, tail.end()


ROW_FORMAT = RowFormat(
    name="glaive",
    keys="system, chat",
    matches=lambda row: "chat" in row and "system" in row,
    read=read_glaive,
    columns=("system", "chat"),
)
