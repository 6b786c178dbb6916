"""Rows in ShareGPT's format as extended by LLaMA-Factory: ``conversations`` of ``from``/``value``, calls as turns.

https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md. A ``function_call`` turn is the JSON of one call or a
list of calls, an ``observation`` turn a result; ``tools`` is a JSON string of bare functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_reasoning import REASONING_KEYS, REASONING_ROLES, read_reasoning

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "answer": "assistant",
    "function_call": "call",
    "tool_call": "call",
    "observation": "result",
    "tool": "result",
    "tool_response": "result",
    "tool_output": "result",
    **dict.fromkeys(REASONING_ROLES, "reasoning"),
}
_WEIGHT_KEYS = ("weight", "loss", "train", "training")  # that ask for a turn to be context only
_READ_KEYS = frozenset({"from", "value", *REASONING_KEYS})


class Turn(NamedTuple):
    """A turn: its speaker (a key of ``SPEAKERS``), text, location, and the reasoning under a key of its own.

    The value is text, except of calls and results, which may be any value of JSON.
    """

    speaker: str
    value: Any
    pointer: str
    reasoning: str | None


def read_sharegpt(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row with ``conversations`` and optional ``tools``."""
    builder.set_row_tools(row)
    builder.add_system_column(row.get("system"))
    for speaker, value, pointer, given in read_turns(row, builder):
        match SPEAKERS.get(speaker):
            case "user":
                builder.add("user", value, pointer)
            case "assistant":
                content, reasoning = builder.take_reasoning(value, pointer, given)
                builder.add("assistant", content, pointer, reasoning=reasoning)
            case "reasoning":
                builder.add_reasoning(value, pointer)
            case "system":
                builder.add("system", value, pointer)
            case "call":
                reasoning = given
                if isinstance(value, str):
                    value, reasoning = builder.take_reasoning(value, pointer, given)
                calls = read_calls(value, pointer, builder)
                if speaker == "tool_call":
                    builder.add_calls(calls, pointer, reasoning)
                else:
                    builder.add("assistant", None, pointer, calls, reasoning=reasoning)
            case _:
                builder.add_result(value, pointer)
    return builder.finish()


def read_calls(value: Any, pointer: str, builder: RowBuilder) -> tuple[Call, ...]:
    """Return the calls of a turn: one or a list of them, as values of JSON or as its text (or Python literals)."""
    if isinstance(value, str):
        text = value.strip()
        value, end = builder.decode_literal_prefix(text, 0, pointer, "call_not_json")
        if end != len(text):
            raise RowError(pointer, "call_not_json", f"text after the call: {text[end : end + 40]!r}")
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise RowError(pointer, "call_shape", "expected a call, got an empty list")
    return tuple(builder.read_call(call, pointer) for call in listed)


def read_turns(row: dict[str, Any], builder: RowBuilder) -> list[Turn]:
    """Return the turns of a row."""
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
        builder.note_unread(turn, _READ_KEYS, pointer)
        is_answer = SPEAKERS[speaker] in ("assistant", "call")
        if is_answer and (
            unweighted := next((key for key in _WEIGHT_KEYS if turn.get(key) in (0, "0", "false")), None)
        ):
            reason = f"{turn[unweighted]!r}, but weights are read in rows of messages only; convert the row to messages"
            raise RowError(f"{pointer}.{unweighted}", "bad_weight", reason)
        if SPEAKERS[speaker] not in ("call", "result"):
            value = read_content(value, f"{pointer}.value", builder.notes)
        if value is None:
            raise RowError(f"{pointer}.value", "content_not_text", "expected text, got null")
        role = "assistant" if SPEAKERS[speaker] in ("assistant", "call") else speaker
        read.append(Turn(speaker, value, f"{pointer}.value", read_reasoning(turn, pointer, role)))
    return read


ROW_FORMAT = RowFormat(
    name="sharegpt",
    keys="conversations of from/value[, tools]",
    matches=lambda row: row.get("conversations") is not None,
    read=read_sharegpt,
    columns=("conversations", "system", *TOOL_COLUMNS),
    priority=1,
)
