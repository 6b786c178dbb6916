"""Runs of software agents: a ``trajectory`` column of messages, as SWE-smith and nebius' sets have it.

Messages are OpenAI's, or have the role ``ai`` and their text in ``text`` or ``system_prompt``.
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.openai import read_openai

_KEY = "trajectory"
_OUTCOMES = ("resolved", "target")
# Columns of an instance and of how its run was judged.
_INSTANCE = (
    *("patch", "model_patch", "generated_patch", "test_patch", "gold_patch", "generated_text", "eval_logs"),
    *("exit_status", "problem_statement", "hints_text", "base_commit", "image_name", "docker_image", *_OUTCOMES),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "gen_tests_correct", "pred_passes_gen_tests"),
)


def _is_trajectory(row: dict[str, Any]) -> bool:
    value = row.get(_KEY)
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
    return is_list or (isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value[:100])


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    for name in _OUTCOMES:
        if name in row and row[name] in (False, 0):
            builder.reject_answer(name, f"{name} is {row[name]!r}: a run that did not solve its task")
    messages = row[_KEY]
    if isinstance(messages, str):
        messages = builder.decode(messages, _KEY)
    if not isinstance(messages, list) or not messages:
        raise RowError(_KEY, "message_shape", f"expected a list of messages, got {describe_value(messages)}")
    columns = {name: value for name, value in row.items() if name not in (_KEY, "messages", "conversations")}
    for name in ("messages", "conversations"):
        if row.get(name):
            builder.unread[name] = row[name]
    try:
        parsed = read_openai({**columns, "messages": [_rename(message) for message in messages]}, builder)
    except RowError as error:
        raise RowError(_locate(error.pointer), error.kind, error.reason) from None
    parsed.message_pointers = [_locate(pointer) for pointer in parsed.message_pointers]
    builder.unread = {_locate(pointer): value for pointer, value in builder.unread.items()}
    return parsed


def _rename(message: Any) -> Any:
    """Return a message with OpenAI's names of its role and text."""
    if not isinstance(message, dict) or "content" in message:
        return message
    texts = [message[key] for key in ("text", "system_prompt") if message.get(key)]
    renamed = {key: value for key, value in message.items() if key not in ("text", "system_prompt", "mask")}
    if len(texts) == 1:
        renamed["content"] = texts[0]
    role = message.get("role")
    return {**renamed, "role": "assistant"} if role == "ai" else renamed


def _locate(pointer: str) -> str:
    return _KEY + pointer.removeprefix("messages") if pointer.startswith("messages[") else pointer


ROW_FORMAT = RowFormat(
    name="swe_trajectory",
    keys="trajectory of messages[, tools]",
    matches=_is_trajectory,
    read=_read,
    columns=(_KEY, "system", "parallel_tool_calls", *TOOL_COLUMNS),
    harmless=_INSTANCE,
    priority=5,
)
