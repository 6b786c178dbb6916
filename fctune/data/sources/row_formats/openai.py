"""Rows in OpenAI's format: ``messages`` with ``tool_calls``, and ``tools``.

https://platform.openai.com/docs/guides/fine-tuning. Arguments may be a string (OpenAI, axolotl, mlx) or an object
(TRL, axolotl); a result may name its call by ``tool_call_id`` (OpenAI) or by ``name`` (TRL). Calls and results may be
messages of their own (ms-swift's ``tool_call`` and ``tool_response``), or text between Hermes' tags.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder, RowWarning
from fctune.data.sources.row_content import read_content, read_string
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.hermes import read_prompt, read_tagged_calls, read_tagged_results
from fctune.data.sources.row_formats.sharegpt import read_calls
from fctune.data.sources.row_reasoning import REASONING_KEYS, REASONING_ROLES, read_reasoning, split_parts

_CALL_ROLES = ("tool_call", "function_call")
# The loss weight of a message: OpenAI's, ms-swift's and axolotl's.
_WEIGHT_KEYS = ("weight", "loss", "train", "training")
_WRAPPER_KEYS = ("function", "id", "type", "index")
_RESULT_ROLES = ("tool", "function", "tool_response", "tool_output", "observation")

_READ_FIELDS = frozenset(
    {
        "role",
        "content",
        "tool_calls",
        "tool_call_id",
        "name",
        "function_call",
        "channel",
        *_WEIGHT_KEYS,
        *REASONING_KEYS,
    }
)


def read_openai(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row with ``messages`` (or ``conversations`` of role and content) and ``tools``."""
    key = "messages" if "messages" in row else "conversations"
    messages = row[key]
    if isinstance(messages, str):
        messages = builder.decode(messages, key)
    if not isinstance(messages, list) or not messages:
        raise RowError(key, "message_shape", f"expected a list of messages, got {describe_value(messages)}")
    if key == "messages" and row.get("conversations"):
        builder.unread["conversations"] = row["conversations"]
    builder.set_row_tools(row)
    if builder.tools_pointer == "functions":
        builder.notes["legacy_function_call"] += 1
    if system := read_content(row.get("system"), "system", builder.notes):
        builder.add_system_column(read_prompt(system, "system", None, builder))
    add_messages([(message, f"{key}[{i}]") for i, message in enumerate(messages)], builder)
    if row.get("parallel_tool_calls") is False:
        for message, pointer in zip(builder.messages, builder.pointers, strict=True):
            if len(message.calls) > 1:
                reason = f"{len(message.calls)} calls in one turn, although parallel_tool_calls is false"
                builder.warnings.append(RowWarning(f"{pointer}.tool_calls", "parallel_not_allowed", reason))
    return builder.finish()


def add_messages(messages: Iterable[tuple[Any, str]], builder: RowBuilder) -> None:
    """Add messages, each with its location; the row's tools are read before."""
    tagged: list[str] = []  # pointers of messages whose calls are text
    for value, pointer in messages:
        _add_message(value, pointer, builder, tagged)
    offered = {tool.name for tool in builder.tools or builder.context.default_tools}
    for message, pointer in zip(builder.messages, builder.pointers, strict=True):
        missing = [call.name for call in message.calls if call.name not in offered] if pointer in tagged else ()
        if missing and offered:
            reason = f"a call of {missing[0]} in the text, which is not one of the row's tools"
            raise RowError(f"{pointer}.content", "call_in_text", reason)


def _add_message(message: Any, pointer: str, builder: RowBuilder, tagged: list[str]) -> None:
    if not isinstance(message, dict):
        raise RowError(pointer, "message_shape", f"expected an object, got {describe_value(message)}")
    role = message.get("role")
    content = message.get("content")
    reasoning = read_reasoning(message, pointer, role) if isinstance(role, str) else None
    if role == "assistant" and isinstance(content, list):
        content, thought = split_parts(content, f"{pointer}.content")
        content = content or None
        if thought is not None and reasoning not in (None, thought):
            reason = "its part of reasoning differs from the reasoning in the message's key; keep one"
            raise RowError(f"{pointer}.content", "reasoning_conflict", reason)
        reasoning = reasoning or thought
    if role not in (*_CALL_ROLES, *_RESULT_ROLES):
        content = read_content(content, f"{pointer}.content", builder.notes)
    if not _READ_FIELDS.issuperset(message):
        builder.note_unread(message, _READ_FIELDS, pointer)
        ignored = [name for name in message if name not in _READ_FIELDS and message[name] not in (None, "", [], {})]
        builder.notes["ignored_field"] += len(ignored)
    match role:
        case "system" | "developer" | "user":
            if role == "developer":
                builder.notes["developer_as_system"] += 1
            if content is None:
                raise RowError(f"{pointer}.content", "content_not_text", f"expected the {role}'s text, got null")
            if role == "user" and builder.pending and content.lstrip().startswith("<tool_response>"):
                _add_tagged_results(content, pointer, builder)
            elif role == "user":
                builder.add("user", content, pointer)
            elif (prompt := read_prompt(content, f"{pointer}.content", None, builder)) is not None:
                builder.add("system", prompt, pointer)
        case "assistant" | "answer":
            calls = _read_calls(message, pointer, builder)
            if message.get("channel") == "analysis" and content and not calls:
                builder.add_reasoning(content, f"{pointer}.content")
                return
            if content is not None:
                content, reasoning = builder.take_reasoning(content, f"{pointer}.content", reasoning)
                if "<tool_call>" in content and not calls:
                    content, calls = read_tagged_calls(content, f"{pointer}.content", builder)
                    builder.notes["tagged_calls"] += len(calls)
                    tagged.append(pointer)
                content = content or (None if calls else "")
            if content is None and not calls:
                reason = "null without tool_calls: an assistant message has text, calls, or both"
                raise RowError(f"{pointer}.content", "content_not_text", reason)
            builder.add("assistant", content, pointer, calls, _read_weight(message, pointer), reasoning)
        case str() if role in _CALL_ROLES:
            builder.add_calls(read_calls(content, f"{pointer}.content", builder), pointer, reasoning)
        case str() if role in _RESULT_ROLES:
            if role == "function":
                builder.notes["legacy_function_call"] += 1
            call_id = read_string(message.get("tool_call_id"), f"{pointer}.tool_call_id")
            name = read_string(message.get("name"), f"{pointer}.name")
            if isinstance(content, str) and content.lstrip().startswith("<tool_response>"):
                _add_tagged_results(content, pointer, builder, call_id, name)
            else:
                builder.add_result(content, pointer, call_id, name)
        case str() if role in REASONING_ROLES:
            if content is None:
                raise RowError(f"{pointer}.content", "reasoning_not_text", "expected the reasoning's text, got null")
            builder.add_reasoning(content, f"{pointer}.content")
        case _:
            reason = f"expected system, developer, user, assistant or tool, got {describe_value(role)}"
            raise RowError(f"{pointer}.role", "unknown_role", reason)


def _read_calls(message: dict[str, Any], pointer: str, builder: RowBuilder) -> tuple[Call, ...]:
    legacy, calls = message.get("function_call"), message.get("tool_calls")
    if legacy is not None:
        builder.notes["legacy_function_call"] += 1
        call = builder.read_call(legacy, f"{pointer}.function_call")
        if not calls:
            return (call,)
        builder.call_pointers.pop()  # the call is to be among the tool_calls
        read = _read_tool_calls(calls, pointer, builder)
        if not any(other.name == call.name and other.arguments == call.arguments for other in read):
            reason = "a call that is not among the message's tool_calls; keep one of the two keys"
            raise RowError(f"{pointer}.function_call", "call_shape", reason)
        return read
    return _read_tool_calls(calls, pointer, builder) if calls is not None else ()


def _read_tool_calls(calls: Any, pointer: str, builder: RowBuilder) -> tuple[Call, ...]:
    if not isinstance(calls, list):
        raise RowError(f"{pointer}.tool_calls", "call_shape", f"expected a list, got {describe_value(calls)}")
    read = []
    for i, call in enumerate(calls):
        at = f"{pointer}.tool_calls[{i}]"
        if not isinstance(call, dict):
            raise RowError(at, "call_shape", f"expected an object, got {describe_value(call)}")
        if call.get("type") not in (None, "function"):
            raise RowError(f"{at}.type", "call_shape", f"expected 'function', got {describe_value(call['type'])}")
        if "function" in call:
            builder.note_unread(call, _WRAPPER_KEYS, at)
            at, function = f"{at}.function", call["function"]
        else:
            function = call
        read.append(builder.read_call(function, at, read_string(call.get("id"), f"{at}.id")))
    return tuple(read)


def _add_tagged_results(
    content: str, pointer: str, builder: RowBuilder, call_id: str | None = None, name: str | None = None
) -> None:
    results = read_tagged_results(content, f"{pointer}.content", builder)
    builder.notes["tagged_results"] += len(results)
    for text, own_name in results:
        builder.add_result(text, pointer, call_id, name or own_name)


def _read_weight(message: dict[str, Any], pointer: str) -> float:
    """Return the loss weight of a message, the lowest if several keys give one."""
    weights = [1.0]
    for key in _WEIGHT_KEYS:
        value = message.get(key)
        if value is None:
            continue
        is_switch = isinstance(value, bool) and key != "weight"
        if not is_switch and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1):
            expected = "0 (context only) to 1" if key == "weight" else "true, false (context only), or 0 to 1"
            raise RowError(f"{pointer}.{key}", "bad_weight", f"expected {expected}, got {describe_value(value)}")
        weights.append(float(value))
    return min(weights)


def _is_openai(row: dict[str, Any]) -> bool:
    turns = row.get("conversations")
    has_roles = isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "role" in turns[0]
    return "messages" in row or has_roles


ROW_FORMAT = RowFormat(
    name="openai",
    keys="messages[, tools]",
    matches=_is_openai,
    read=read_openai,
    columns=("messages", "conversations", "system", "parallel_tool_calls", *TOOL_COLUMNS),
    harmless=("target_tools", "error_class", "suite", "case", "got"),  # Toucan's, and those of fctune's own drafts
    priority=4,
)
