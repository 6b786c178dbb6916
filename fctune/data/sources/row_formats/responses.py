"""Rows of OpenAI's Responses API: the items of ``input`` and ``output``.

https://platform.openai.com/docs/api-reference/responses. A row is a request, with its response in ``response`` or its
items in ``output``. Rows of NVIDIA's NeMo Gym have the request in ``responses_create_params``, and those of its server
single_step_tool_use_with_argument_comparison the answer that is due in ``expected_action``
(https://github.com/NVIDIA-NeMo/Gym, resources_servers); other rows need their server to judge an answer.
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
    decode,
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

_GYM, _ACTION = "responses_create_params", "expected_action"
_COLUMNS = ("instructions", "input", "output", "tools", "previous_response_id", "conversation")
_KEYS = frozenset({"input", "output", "request", _GYM})
_ITEMS = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
_ROLES = ("user", "system", "developer", "assistant")


def is_responses_item(item: Any) -> bool:
    """Return True for an item of a type that only this API has; messages need no type."""
    return (
        isinstance(item, dict) and item.get("type") in _ITEMS and bool(item.get("role")) == (item["type"] == "message")
    )


def is_responses_response(response: Any) -> bool:
    """Return True for a response of this API."""
    return isinstance(response, dict) and (response.get("object") == "response" or _holds_items(response.get("output")))


def is_responses_request(request: dict[str, Any]) -> bool:
    """Return True if a request has instructions and an input, or items of this API."""
    has_messages = isinstance(peek(request.get("input")), list) if "instructions" in request else False
    return has_messages or any(_holds_items(request.get(key)) for key in ("input", "output"))


def _holds_items(value: Any) -> bool:
    items = peek(value)
    return isinstance(items, list) and any(map(is_responses_item, items))


def _is_responses(row: dict[str, Any]) -> bool:
    if _KEYS.isdisjoint(row):  # nearly all rows
        return False
    if _GYM in row:
        return True
    request = peek_request(row)
    if not ("input" in request or "output" in request):
        return False
    return is_responses_request(request) or any(map(is_responses_response, (request, peek(row.get("response")))))


def read_responses(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a request with its response, if the row has one."""
    exchange = open_exchange(row, _COLUMNS, builder, _GYM if _GYM in row else "request")
    request, response = exchange.request, exchange.response
    if request.get("object") == "response" and not request.get("input"):
        reason = "a response without the input of its request, so that no question is in the row"
        raise RowError(join(exchange.at, "input"), "history_missing", reason)
    if isinstance(response, dict):  # it repeats what the request says, which a log may not hold
        request = {key: response[key] for key in ("instructions", "tools") if response.get(key)} | {
            key: value for key, value in request.items() if value not in (None, "", [])
        }
    add_responses_request(request, exchange.at, builder)
    if response is not None:
        add_responses_response(response, exchange.response_at, builder)
    elif _GYM in row and row.get(_ACTION) is not None:
        add_items(_list_expected(row[_ACTION], builder), builder)
    try:
        return builder.finish()
    except RowError as error:
        if _GYM not in row or error.kind != "no_assistant":
            raise
        agent = row.get("agent_ref")
        name = f" ({agent['name']})" if isinstance(agent, dict) and isinstance(agent.get("name"), str) else ""
        reason = f"a task of NeMo Gym{name} without {_ACTION} or a response: only its resource server can judge answers"
        raise RowError("", "no_assistant", reason) from None


def add_responses_request(request: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add the tools, instructions and items of a request, or of a response that repeats them."""
    for key in ("previous_response_id", "conversation"):
        if request.get(key):
            reason = "the turns before are at the API's server, not in the row; log the complete input"
            raise RowError(join(at, key), "history_missing", reason)
    note_request(request, (*_COLUMNS, "prompt"), at, builder)
    require_finished(request, at, builder)
    if request.get("prompt"):
        raise RowError(join(at, "prompt"), "history_missing", "a prompt that the API's server holds, not the row")
    set_api_tools(request.get("tools"), join(at, "tools"), builder)
    instructions = request.get("instructions")
    if isinstance(instructions, str) and instructions:
        builder.add("system", instructions, join(at, "instructions"))
    elif instructions:
        add_items(list_values(instructions, join(at, "instructions"), builder, "items"), builder)
    for key in ("input", "output"):
        value = decode(request.get(key), join(at, key), builder)
        if isinstance(value, str):
            builder.add("user" if key == "input" else "assistant", value, join(at, key))
        elif value is not None:
            add_items(list_values(value, join(at, key), builder, "items"), builder)


def add_responses_response(response: Any, at: str, builder: RowBuilder) -> None:
    """Add the items of a response, which repeats its request's instructions and tools."""
    response = require_object(response, at)
    require_finished(response, at, builder)
    builder.note_unread(response, {"output", "tools", *ALL_SETTINGS}, at)
    add_items(list_values(response.get("output"), f"{at}.output", builder, "items"), builder)


def _list_expected(action: Any, builder: RowBuilder) -> list[tuple[Any, str]]:
    """Return the items of the answer that is due: a message, a call, or a batch of calls."""
    action = require_object(decode(action, _ACTION, builder), _ACTION)
    match action.get("type"):
        case "function_call":
            return [(action, _ACTION)]
        case "function_call_batch":
            return list_values(action.get("calls"), f"{_ACTION}.calls", builder, "calls")
        case "message":
            return [({"role": "assistant", **action}, _ACTION)]
        case kind:
            reason = f"expected message, function_call or function_call_batch; got {describe_value(kind)}"
            raise RowError(f"{_ACTION}.type", "unknown_block", reason)


def add_items(items: list[tuple[Any, str]], builder: RowBuilder) -> None:
    """Add items, each with its location; calls that follow a message of the assistant are of its turn."""
    thoughts: list[str] = []
    thoughts_at = ""
    for item, at in items:
        item = require_object(item, at)
        kind = item.get("type") or ("message" if item.get("role") else None)
        if item.get("status") == "incomplete":
            builder.reject_answer(f"{at}.status", "'incomplete': an answer that was cut off")
        if kind == "reasoning":
            if text := _read_reasoning(item, at, builder):
                thoughts_at = thoughts_at or at
                thoughts.append(text)
            continue
        if thoughts:
            builder.add_reasoning("\n".join(thoughts), thoughts_at)
            thoughts = []
        match kind:
            case "message":
                _add_message(item, at, builder)
            case "function_call":
                read = ("call_id", "status", "namespace", "caller")
                call = {key: value for key, value in item.items() if key not in read}
                call_id = read_string(item.get("call_id"), f"{at}.call_id")
                builder.add_calls((builder.read_call(call, at, call_id),), at)
            case "function_call_output":
                require_read_keys(item, ("type", "call_id", "output", "status", "caller"), at)
                output = item.get("output")
                call_id = read_string(item.get("call_id"), f"{at}.call_id")
                builder.add_result(output, f"{at}.output", call_id)
            case "item_reference":
                raise RowError(at, "history_missing", "an item that the API's server holds, not the row")
            case _:
                raise make_block_error(item, at)
    if thoughts:
        builder.add_reasoning("\n".join(thoughts), thoughts_at)


def _read_reasoning(item: dict[str, Any], at: str, builder: RowBuilder) -> str:
    """Return the text of an item's reasoning, or else that of its summary, which may be empty too."""
    require_read_keys(item, ("type", "summary", "content", "encrypted_content", "status"), at)
    for key in ("content", "summary"):
        parts = item.get(key) or []
        texts = []
        for part, where in list_values(parts, f"{at}.{key}", builder, "parts"):
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str):
                raise RowError(where, "reasoning_not_text", f"expected a part with text, got {describe_value(part)}")
            require_read_keys(part, ("type", "text"), where)
            texts.append(text)
        if any(text.strip() for text in texts):
            builder.notes["reasoning_summary"] += key == "summary"
            return "\n".join(texts)
    builder.notes["reasoning_hidden"] += 1
    return ""


def _add_message(item: dict[str, Any], at: str, builder: RowBuilder) -> None:
    builder.note_unread(item, ("type", "role", "content", "status", "phase"), at)
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise RowError(f"{at}.role", "unknown_role", f"expected one of {', '.join(_ROLES)}; got {describe_value(role)}")
    if isinstance(content, list):
        parts = []
        for i, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "refusal":  # an answer in words, as any other
                require_read_keys(part, ("type", "refusal"), f"{at}.content[{i}]")
                part = {"type": "text", "text": part.get("refusal")}
            elif kind not in ("input_text", "output_text", "text"):
                raise make_block_error(part, f"{at}.content[{i}]")
            parts.append(part)
        content = parts
    text = read_content(content, f"{at}.content", builder.notes)
    if text is None:
        raise RowError(f"{at}.content", "content_not_text", f"expected the {role}'s text, got null")
    if role == "assistant":
        text, reasoning = builder.take_reasoning(text, f"{at}.content")
        builder.add("assistant", text, at, reasoning=reasoning)
        return
    builder.notes["developer_as_system"] += role == "developer"
    builder.add("user" if role == "user" else "system", text, at)


ROW_FORMAT = RowFormat(
    name="responses",
    keys="input and output of items[, instructions, tools], or responses_create_params",
    matches=_is_responses,
    read=read_responses,
    columns=(*_COLUMNS, *EXCHANGE_COLUMNS, _GYM, _ACTION),
    harmless=(*ALL_SETTINGS, "agent_ref"),
    is_log=True,
    priority=9,
)
