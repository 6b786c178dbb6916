"""Runs of software agents, with how each was judged: ``messages`` (SWE-smith) or ``trajectory`` (nebius' sets).

Messages are OpenAI's, those of SWE-agent's history, or have the role ``ai`` and their text in ``text`` or
``system_prompt``.

https://github.com/SWE-bench/SWE-smith/blob/main/swesmith/train/traj_mgr/collect_trajs.py
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.openai import read_openai

_KEYS = ("trajectory", "messages")
_OUTCOMES = ("resolved", "target")
# One of them stands beside the messages of a run; other rows may have a column ``resolved`` as well.
_OF_A_RUN = ("instance_id", "traj_id", "patch")
# Keys of SWE-agent's messages that repeat their text and calls.
_REPEATED = ("agent", "message_type", "thought", "action", "tool_call_ids")
# Columns of an instance and of how its run was judged.
_INSTANCE = (
    *("patch", "model_patch", "generated_patch", "test_patch", "gold_patch", "generated_text", "eval_logs"),
    *("exit_status", "problem_statement", "hints_text", "base_commit", "image_name", "docker_image", *_OUTCOMES),
    *("FAIL_TO_PASS", "PASS_TO_PASS", "gen_tests_correct", "pred_passes_gen_tests"),
)


def _is_trajectory(row: dict[str, Any]) -> bool:
    value = row.get("trajectory")
    if value is None:
        value = row.get("messages") if "resolved" in row and not row.keys().isdisjoint(_OF_A_RUN) else None
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]
    return is_list or (isinstance(value, str) and value.lstrip().startswith("[") and '"role"' in value[:100])


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    for name in _OUTCOMES:
        if str(row.get(name)).lower() in ("false", "0", "0.0"):  # tables may hold words and numbers
            builder.reject_answer(name, f"{name} is {row[name]!r}: a run that did not solve its task")
    key = next((key for key in _KEYS if row.get(key) is not None), _KEYS[0])
    messages = row[key]
    if isinstance(messages, str):
        messages = builder.decode(messages, key)
    if not isinstance(messages, list) or not messages:
        raise RowError(key, "message_shape", f"expected a list of messages, got {describe_value(messages)}")
    columns = {name: value for name, value in row.items() if name not in (*_KEYS, "conversations")}
    for name in ("messages", "conversations"):
        if name != key and row.get(name):
            builder.unread[name] = row[name]
    try:
        parsed = read_openai({**columns, "messages": [_rename(message) for message in messages]}, builder)
    except RowError as error:
        raise RowError(_locate(error.pointer, key), error.kind, error.reason) from None
    parsed.message_pointers = [_locate(pointer, key) for pointer in parsed.message_pointers]
    builder.unread = {_locate(pointer, key): value for pointer, value in builder.unread.items()}
    return parsed


def _rename(message: Any) -> Any:
    """Return a message with OpenAI's names of its role and text."""
    if not isinstance(message, dict):
        return message
    if "message_type" in message:
        return _rename_history(message)
    if "content" in message:
        return message
    texts = [message[key] for key in ("text", "system_prompt") if message.get(key)]
    renamed = {key: value for key, value in message.items() if key not in ("text", "system_prompt", "mask")}
    if len(texts) == 1:
        renamed["content"] = texts[0]
    role = message.get("role")
    return {**renamed, "role": "assistant"} if role == "ai" else renamed


def _rename_history(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of SWE-agent's history without what repeats it, and a result with the id of its call."""
    content, calls = message.get("content"), message.get("tool_calls")
    is_repeated = {
        "thought": isinstance(content, str) and str(message.get("thought") or "").strip() in content,
        "action": bool(calls) or (isinstance(content, str) and str(message.get("action") or "").strip() in content),
    }
    renamed = {key: value for key, value in message.items() if key not in _REPEATED or not is_repeated.get(key, True)}
    ids = message.get("tool_call_ids")
    if message.get("role") == "tool" and isinstance(ids, list) and len(ids) == 1:
        renamed.setdefault("tool_call_id", ids[0])
    return renamed


def _locate(pointer: str, key: str) -> str:
    return key + pointer.removeprefix("messages") if pointer.startswith("messages[") else pointer


ROW_FORMAT = RowFormat(
    name="swe_trajectory",
    keys="trajectory of messages, or messages and resolved[, tools]",
    matches=_is_trajectory,
    read=_read,
    columns=(*_KEYS, "system", "parallel_tool_calls", *TOOL_COLUMNS),
    harmless=_INSTANCE,
    priority=5,
)
