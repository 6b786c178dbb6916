"""Rollouts of Codex: lines of ``type`` and ``payload``, of which the ``response_item`` ones are the Responses API's.

A file is a conversation, and another one after each compaction, which begins with what was kept. Turns that the user
took back are left out. The files have no tools: pass those that the agent had (``--tools``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats.base import FileRow, LeftOut, LogRow, RowFormat
from fctune.data.sources.row_formats.responses import add_items

_SESSION = "codex_session"
_TYPES = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")
_NOT_SENT = ("ghost_snapshot",)  # items that the application keeps for itself
_LINE_KEYS = ("timestamp", "type", "payload", "ordinal")
_INTERNAL = ("internal_chat_message_metadata_passthrough",)
# How messages begin that the application sends in the user's name, which begin no turn.
_CONTEXT = re.compile(r"\s*(?:<[a-z_]+>|# AGENTS\.md instructions)")


def _is_rollout(row: dict[str, Any]) -> bool:
    return _SESSION in row or (row.get("type") in _TYPES and isinstance(row.get("payload"), dict))


def _expand(rows: Iterator[FileRow]) -> Iterator[LogRow]:
    """Yield each conversation of a file, with the line where it begins, or the defect of a line in it."""
    meta: dict[str, Any] = {}
    kept: list[Any] = []  # what the conversation begins with after a compaction
    items: list[Any] = []
    first = 1
    error: tuple[int, RowError] | None = None

    def finish() -> Iterator[LogRow]:
        if error is not None:
            yield error
        elif items:
            yield first, {_SESSION: meta, "context": kept, "items": items}

    for line, row in rows:
        if isinstance(row, RowError):
            error = error or (line, row)
            continue
        if _SESSION in row or "type" not in row:
            yield line, row  # a row of another format is read as one
            continue
        payload = row.get("payload")
        kind = row.get("type")
        if not isinstance(payload, dict) or kind not in _TYPES:
            if kind in ("response_item", "session_meta", "compacted"):
                reason = f"expected an object, got {describe_value(payload)}"
                error = error or (line, RowError("payload", "message_shape", reason))
            else:
                yield line, LeftOut("session_event")
        elif kind == "session_meta":
            if meta and payload.get("id") != meta.get("id"):
                yield from finish()
                kept, items, error = [], [], None
            meta = payload
        elif kind == "response_item" and payload.get("type") not in _NOT_SENT:
            first = first if items else line
            items.append({key: value for key, value in row.items() if key not in _LINE_KEYS} | payload)
        elif kind == "compacted":
            yield from finish()
            error = None  # what follows goes on from the summary
            history = payload.get("replacement_history")
            summary = [{"role": "user", "content": payload.get("message")}] if payload.get("message") else []
            kept, items = (history if isinstance(history, list) and history else summary), []
        elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
            yield line, LeftOut("session_event")
            turns = [number for number, item in enumerate(items) if _begins_turn(item)]
            count = payload.get("num_turns")
            if not isinstance(count, int) or not 0 <= count <= len(turns):
                reason = f"{describe_value(count)} turns were taken back, of which the file has {len(turns)} in full"
                error = error or (line, RowError("payload.num_turns", "history_missing", reason))
            elif count:
                for _ in items[turns[-count] :]:
                    yield line, LeftOut("taken_back_item")
                del items[turns[-count] :]
        else:
            yield line, LeftOut("session_event")
    yield from finish()


def _begins_turn(item: dict[str, Any]) -> bool:
    """Return True for a message that the user wrote."""
    if item.get("type") != "message" or item.get("role") != "user":
        return False
    content = item.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return not all(isinstance(text, str) and _CONTEXT.match(text) for text in texts)


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    meta = row[_SESSION]
    base, at = meta.get("base_instructions"), f"{_SESSION}.base_instructions"
    if isinstance(base, dict):
        builder.note_unread(base, ("text",), at)
    if text := read_content(base.get("text") if isinstance(base, dict) else base, at, builder.notes):
        builder.add("system", text, at)
    context = [item for item in row["context"] if not isinstance(item, dict) or item.get("type") not in _NOT_SENT]
    add_items([(_rename(item, builder), f"context[{i}]") for i, item in enumerate(context)], builder)
    # A model's turns in the context are trained where they were made.
    builder.messages[:] = [replace(m, weight=0.0) if m.role == "assistant" else m for m in builder.messages]
    num_context = len(builder.messages)
    add_items([(_rename(item, builder), f"items[{i}]") for i, item in enumerate(row["items"])], builder)
    if not any(message.role == "assistant" for message in builder.messages[num_context:]):
        raise RowError("items", "no_assistant", "no assistant message to train on")
    instructions = meta.get("instructions")
    if isinstance(instructions, str) and not any(instructions.strip() in (m.content or "") for m in builder.messages):
        builder.unread[f"{_SESSION}.instructions"] = instructions
    builder.join_turns()
    return builder.finish()


def _rename(item: Any, builder: RowBuilder) -> Any:
    """Return an item of a call with free text, or of the shell that the API defines, as that of a function."""
    if not isinstance(item, dict):
        return item
    item = {key: value for key, value in item.items() if key not in _INTERNAL}
    kind = item.get("type")
    if kind == "local_shell_call" and isinstance(item.get("action"), dict):
        builder.notes["custom_call"] += 1
        arguments = {key: value for key, value in item["action"].items() if key != "type"}
        renamed = {key: value for key, value in item.items() if key != "action"}
        return {**renamed, "type": "function_call", "name": "local_shell", "arguments": arguments}
    if kind == "custom_tool_call":
        builder.notes["custom_call"] += 1
        renamed = {key: value for key, value in item.items() if key != "input"}
        return {**renamed, "type": "function_call", "arguments": {"input": item.get("input")}}
    return {**item, "type": "function_call_output"} if kind == "custom_tool_call_output" else item


ROW_FORMAT = RowFormat(
    name="codex",
    keys="type session_meta, response_item, ... with payload",
    matches=_is_rollout,
    read=_read,
    expand=_expand,
    columns=(_SESSION, "context", "items"),
    is_log=True,
    priority=12,
)
