"""Rows in ShareGPT's format as extended by LLaMA-Factory: ``conversations`` of ``from``/``value``, calls as turns.

https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md. A ``function_call`` turn is the JSON of one call or a
list of calls, an ``observation`` turn a result; ``tools`` is a JSON string of bare functions.
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "call",
    "observation": "result",
    "tool": "result",
}


def read_sharegpt(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row with ``conversations`` and optional ``tools``."""
    builder.set_tools(row.get("tools"))
    system = row.get("system")
    if isinstance(system, str) and system:
        builder.add("system", system, "system")
    for speaker, value, pointer in read_turns(row, builder):
        match SPEAKERS.get(speaker):
            case "user":
                builder.add("user", value, pointer)
            case "assistant":
                builder.add("assistant", value, pointer)
            case "system":
                builder.add("system", value, pointer)
            case "call":
                calls = builder.decode(value, pointer, "call_not_json")
                listed = calls if isinstance(calls, list) else [calls]
                if not listed:
                    raise RowError(pointer, "call_shape", "expected a call, got an empty list")
                builder.add("assistant", None, pointer, tuple(builder.read_call(call, pointer) for call in listed))
            case _:
                builder.add_result(value, pointer)
    return builder.finish()


def read_turns(row: dict[str, Any], builder: RowBuilder) -> list[tuple[str, str, str]]:
    """Return the speaker (a key of ``SPEAKERS``), text and pointer of each turn."""
    turns = row["conversations"]
    if isinstance(turns, str):
        turns = builder.decode(turns, "conversations")
    if not isinstance(turns, list) or not turns:
        raise RowError("conversations", "message_shape", f"expected a list of turns, got {describe_value(turns)}")
    read = []
    for i, turn in enumerate(turns):
        pointer = f"conversations[{i}]"
        if not isinstance(turn, dict):
            raise RowError(pointer, "message_shape", f"expected an object, got {describe_value(turn)}")
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise RowError(f"{pointer}.from", "unknown_role", f"expected one of {known}; got {describe_value(speaker)}")
        if not isinstance(value, str):
            raise RowError(f"{pointer}.value", "content_not_text", f"expected text, got {describe_value(value)}")
        read.append((speaker, value, f"{pointer}.value"))
    return read


ROW_FORMAT = RowFormat(
    name="sharegpt",
    keys="conversations of from/value[, tools]",
    matches=lambda row: row.get("conversations") is not None,
    read=read_sharegpt,
    priority=1,
)
