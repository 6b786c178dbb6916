"""Rows of Anthropic's Messages API: requests, or requests with their response.

https://docs.anthropic.com/en/api/messages. ``system`` is text or blocks; tools have an ``input_schema``; calls are
blocks ``tool_use`` of the assistant, results are blocks ``tool_result`` at the start of the user's next message.
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import make_block_error, read_content, read_string
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.exchange import (
    ALL_SETTINGS,
    EXCHANGE_COLUMNS,
    SETTINGS,
    AssistantTurn,
    join,
    list_values,
    note_request,
    open_exchange,
    peek,
    peek_request,
    require_finished,
    require_object,
    set_api_tools,
)

_COLUMNS = ("system", "messages", "tools")
_BLOCKS = ("tool_use", "tool_result", "server_tool_use", "redacted_thinking")
_FINISHED = ("end_turn", "tool_use", "stop_sequence")
# Request keys that OpenAI's API does not have.
_OWN_KEYS = ("stop_sequences", "anthropic_version")


def is_anthropic_message(message: Any) -> bool:
    """Return True if a message has blocks that only this API has."""
    content = message.get("content") if isinstance(message, dict) and "role" in message else None
    return isinstance(content, list) and any(isinstance(b, dict) and b.get("type") in _BLOCKS for b in content)


def is_anthropic_response(response: Any) -> bool:
    """Return True for a response of this API."""
    return isinstance(response, dict) and response.get("type") == "message" and "content" in response


def is_anthropic_request(request: dict[str, Any]) -> bool:
    """Return True if a request has blocks or settings that only this API has."""
    messages = request.get("messages")
    if isinstance(messages, str):
        messages = peek(messages) if any(f'"{kind}"' in messages for kind in _BLOCKS) else None
    if not isinstance(messages, list):
        return False
    if any(map(is_anthropic_message, messages)):  # beside results of OpenAI's API they are a mistake of the row
        return not any(isinstance(message, dict) and message.get("role") == "tool" for message in messages)
    if "max_tokens" not in request:
        return False
    has_own_key = any(key in request for key in _OWN_KEYS) or isinstance(request.get("thinking"), dict)
    # Other APIs with some of these keys have OpenAI's messages.
    is_plain = all(isinstance(message, dict) and message.keys() <= {"role", "content"} for message in messages)
    return has_own_key and is_plain


def _is_anthropic(row: dict[str, Any]) -> bool:
    if "messages" not in row and "request" not in row:
        return False
    request = peek_request(row)
    if "messages" not in request:
        return False
    return is_anthropic_request(request) or ("response" in row and is_anthropic_response(peek(row["response"])))


def read_anthropic(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a request with its response, if the row has one."""
    exchange = open_exchange(row, _COLUMNS, builder)
    add_anthropic_request(exchange.request, exchange.at, builder)
    if exchange.response is not None:
        add_anthropic_response(exchange.response, exchange.response_at, builder)
    return builder.finish()


def add_anthropic_request(request: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add the tools and messages of a request."""
    note_request(request, _COLUMNS, at, builder)
    set_api_tools(request.get("tools"), join(at, "tools"), builder)
    if system := read_content(request.get("system"), join(at, "system"), builder.notes):
        builder.add("system", system, join(at, "system"))
    for message, pointer in list_values(request["messages"], join(at, "messages"), builder):
        add_anthropic_message(message, pointer, builder)


def add_anthropic_response(response: Any, at: str, builder: RowBuilder) -> None:
    """Add the answer of a response."""
    response = require_object(response, at)
    require_finished(response, at, builder, "stop_reason", _FINISHED)
    num_messages = len(builder.messages)
    add_anthropic_message(response, at, builder)
    builder.join_prefilled(num_messages)


def add_anthropic_message(message: Any, pointer: str, builder: RowBuilder) -> None:
    """Add a message: text, or blocks."""
    message = require_object(message, pointer)
    builder.note_unread(message, ("role", "content", *SETTINGS), pointer)
    role, content = message.get("role"), message.get("content")
    at = f"{pointer}.content"
    if content is None:
        raise RowError(at, "content_not_text", f"expected the {role}'s text or blocks, got null")
    blocks = (
        [({"type": "text", "text": content}, at)]
        if isinstance(content, str)
        else list_values(content, at, builder, "blocks")
    )
    match role:
        case "assistant":
            _add_assistant(blocks, pointer, builder)
        case "user":
            _add_user(blocks, pointer, builder)
        case "system":
            builder.add("system", read_content(content, at, builder.notes) or "", pointer)
        case _:
            reason = f"expected user, assistant or system, got {describe_value(role)}"
            raise RowError(f"{pointer}.role", "unknown_role", reason)


def _add_assistant(blocks: list[tuple[Any, str]], pointer: str, builder: RowBuilder) -> None:
    turn = AssistantTurn(pointer, builder)
    for block, at in blocks:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                turn.add_text(read_content([block], at, builder.notes) or "", at)
            case "thinking":
                require_read_keys(block, ("type", "thinking", "signature"), at)
                turn.add_reasoning(block.get("thinking"), f"{at}.thinking")
            case "redacted_thinking":
                turn.add_reasoning(None, at)
            case "tool_use":
                call = {key: value for key, value in block.items() if key not in ("caller", "toolset_name")}
                turn.add_call(builder.read_call(call, at, read_string(block.get("id"), f"{at}.id"), "input"))
            case _:
                raise make_block_error(block, at)
    turn.finish()


def _add_user(blocks: list[tuple[Any, str]], pointer: str, builder: RowBuilder) -> None:
    texts: list[dict[str, Any]] = []
    for block, at in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                reason = "a result after text of the same message; results come first"
                raise RowError(at, "result_without_call", reason)
            add_result_block(block, at, builder)
        elif isinstance(block, dict) and block.get("type") == "text":
            texts.append(block)
        else:
            raise make_block_error(block, at)
    if texts or not blocks:
        builder.add("user", read_content(texts, f"{pointer}.content", builder.notes) or "", pointer)


def add_result_block(block: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add a block ``tool_result``, whose content is text, blocks, or missing."""
    require_read_keys(block, ("type", "tool_use_id", "content", "is_error", "toolset_name"), at)
    content = block.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise make_block_error(part, f"{at}.content[{i}]")
    call_id = read_string(block.get("tool_use_id"), f"{at}.tool_use_id")
    is_error = block.get("is_error") is True
    builder.add_result("" if content in (None, []) else content, at, call_id, is_error=is_error)


ROW_FORMAT = RowFormat(
    name="anthropic",
    keys="messages with blocks tool_use and tool_result[, system, tools, response]",
    matches=_is_anthropic,
    read=read_anthropic,
    columns=(*_COLUMNS, *EXCHANGE_COLUMNS),
    harmless=ALL_SETTINGS,
    is_log=True,
    priority=10,
)
