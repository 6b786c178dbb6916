"""Rows of LangChain's messages: a ``type`` for a role, calls as ``tool_calls`` of ``name`` and ``args``.

https://python.langchain.com/api_reference/core/messages.html. Messages are plain objects, objects with their fields
in ``data`` (``messages_to_dict``), or serialised constructors (``lc``, with their fields in ``kwargs``).
"""

from __future__ import annotations

from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder
from fctune.data.sources.row_content import make_block_error, read_content, read_string
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.exchange import (
    ALL_SETTINGS,
    AssistantTurn,
    list_values,
    note_settings,
    peek,
    require_object,
)
from fctune.data.sources.row_reasoning import REASONING_KEYS

_TYPES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("ai", "assistant"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function"), "tool"),
}
_FIELDS = (
    *("type", "role", "content", "name", "id", "tool_calls", "tool_call_id", "invalid_tool_calls", "additional_kwargs"),
    *("response_metadata", "usage_metadata", "tool_call_chunks", "chunk_position", "example", "artifact", "status"),
)
# Blocks that repeat a call of ``tool_calls``.
_CALL_BLOCKS = ("tool_use", "tool_call", "function_call")
_REASONING_BLOCKS = ("thinking", "reasoning", "redacted_thinking", "reasoning_content")


def is_langchain_message(message: Any) -> bool:
    """Return True for a message in one of LangChain's forms."""
    if not isinstance(message, dict) or message.get("role"):
        return False
    if message.get("lc"):
        return True
    kind = message.get("type")
    return isinstance(kind, str) and kind in _TYPES and ("content" in message or "data" in message)


def read_langchain(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row of messages and tools."""
    note_settings(row, "", builder)
    builder.set_row_tools(row)
    builder.add_system_column(row.get("system"))
    for message, at in list_values(row["messages"], "messages", builder):
        add_langchain_message(message, at, builder)
    return builder.finish()


def add_langchain_message(message: Any, at: str, builder: RowBuilder) -> None:
    """Add a message in any of the forms."""
    message = require_object(message, at)
    kind = message.get("type")
    if message.get("lc"):
        path = message.get("id")
        name = path[-1] if isinstance(path, list) and path else path
        builder.note_unread(message, ("lc", "type", "id", "kwargs"), at)
        kind = str(name).removesuffix("Chunk").removesuffix("Message").lower()
        message, at = require_object(message.get("kwargs"), f"{at}.kwargs"), f"{at}.kwargs"
    elif message.get("data") is not None:
        builder.note_unread(message, ("type", "data"), at)
        message, at = require_object(message["data"], f"{at}.data"), f"{at}.data"
    kind = message.get("role") if kind == "chat" else str(kind).removesuffix("MessageChunk").lower()
    role = _TYPES.get(str(kind))
    if role is None:
        raise RowError(at, "unknown_role", f"expected human, ai, system or tool, got {describe_value(kind)}")
    builder.note_unread(message, _FIELDS, at)
    extra = require_object(message.get("additional_kwargs") or {}, f"{at}.additional_kwargs")
    read = ("tool_calls", "function_call", "parsed", *REASONING_KEYS) if role == "assistant" else ()
    builder.note_unread(extra, read, f"{at}.additional_kwargs")
    if role == "assistant":
        _add_ai(message, extra, at, builder)
        return
    content = message.get("content")
    if role == "tool":
        name, is_error = read_string(message.get("name"), f"{at}.name"), message.get("status") == "error"
        call_id = read_string(message.get("tool_call_id"), f"{at}.tool_call_id")
        builder.add_result(content, f"{at}.content", call_id, name, is_error)
        return
    text = read_content(content, f"{at}.content", builder.notes)
    if text is None:
        raise RowError(f"{at}.content", "content_not_text", f"expected the {role}'s text, got null")
    builder.add("user" if role == "user" else "system", text, at)


def _add_ai(message: dict[str, Any], extra: dict[str, Any], at: str, builder: RowBuilder) -> None:
    if invalid := message.get("invalid_tool_calls"):
        reason = f"a call that LangChain could not parse: {describe_value(invalid)}"
        raise RowError(f"{at}.invalid_tool_calls", "arguments_not_json", reason)
    turn = AssistantTurn(at, builder)
    for key in REASONING_KEYS:
        if extra.get(key):
            turn.add_reasoning(extra[key], f"{at}.additional_kwargs.{key}")
    calls = _read_calls(message, extra, at, builder)
    ids, num_added = [call.id for call in calls], 0
    content = message.get("content")
    blocks = (
        [(content or "", f"{at}.content")]
        if isinstance(content, str | None)
        else list_values(content, f"{at}.content", builder, "blocks")
    )
    for block, where in blocks:
        kind = block.get("type") if isinstance(block, dict) else "text"
        if not isinstance(block, dict) or kind in ("text", "output_text"):
            turn.add_text(read_content([block], where, builder.notes) or "", where)
        elif kind in _REASONING_BLOCKS:
            text = block.get("thinking") or block.get("reasoning")
            require_read_keys(block, ("type", "thinking", "reasoning", "data", "extras", "encrypted_content"), where)
            turn.add_reasoning(text, where)
        elif kind in _CALL_BLOCKS and (call_id := block.get("call_id", block.get("id")) or None) in ids:
            num_called = ids.index(call_id) + 1
            for call in calls[num_added:num_called]:  # here, so that text after the block comes after its call
                turn.add_call(call)
            num_added = max(num_added, num_called)
        else:
            raise make_block_error(block, where)
    for call in calls[num_added:]:
        turn.add_call(call)
    turn.finish()


def _read_calls(message: dict[str, Any], extra: dict[str, Any], at: str, builder: RowBuilder) -> list[Call]:
    """Return the calls of a message, or else those that it has as its provider wrote them."""
    calls = []
    for call, where in list_values(message.get("tool_calls") or [], f"{at}.tool_calls", builder, "calls"):
        call_id = read_string(require_object(call, where).get("id"), f"{where}.id")
        calls.append(builder.read_call(call, where, call_id, "args"))
    if calls:
        return calls
    where = f"{at}.additional_kwargs"
    for call, pointer in list_values(extra.get("tool_calls") or [], f"{where}.tool_calls", builder, "calls"):
        call = require_object(call, pointer)
        call_id = read_string(call.get("id"), f"{pointer}.id")
        calls.append(builder.read_call(call.get("function"), f"{pointer}.function", call_id))
    if extra.get("function_call"):
        builder.notes["legacy_function_call"] += 1
        calls.append(builder.read_call(extra["function_call"], f"{where}.function_call"))
    return calls


def _is_langchain(row: dict[str, Any]) -> bool:
    messages = row.get("messages")
    if isinstance(messages, str):
        messages = peek(messages) if '"lc"' in messages or '"human"' in messages else None
    return isinstance(messages, list) and bool(messages) and is_langchain_message(messages[0])


ROW_FORMAT = RowFormat(
    name="langchain",
    keys="messages of type human, ai and tool[, tools]",
    matches=_is_langchain,
    read=read_langchain,
    columns=("messages", "system", *TOOL_COLUMNS),
    harmless=ALL_SETTINGS,
    is_log=True,
    priority=7,
)
