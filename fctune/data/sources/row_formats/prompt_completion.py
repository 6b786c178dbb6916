"""Rows of TRL's conversational prompt-completion format: ``prompt`` and ``completion``, lists of messages.

https://huggingface.co/docs/trl/dataset_formats. As in TRL, only the completion is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import TOOL_COLUMNS, ParsedRow, RowBuilder
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.exchange import decode, peek
from fctune.data.sources.row_formats.openai import add_messages


def read_prompt_completion(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a row; messages of the prompt are context only."""
    if row.get("label") is False:
        builder.reject_answer("label", "false: a completion that was rejected")
    builder.set_row_tools(row)
    for key in ("prompt", "completion"):
        messages = decode(row[key], key, builder)
        if not isinstance(messages, list) or not messages:
            reason = f"expected a list of messages, because text has no roles; got {describe_value(messages)}"
            raise RowError(key, "message_shape", reason)
        add_messages([(message, f"{key}[{i}]") for i, message in enumerate(messages)], builder)
        if key == "prompt":
            builder.messages = [replace(m, weight=0.0) if m.role == "assistant" else m for m in builder.messages]
    return builder.finish()


ROW_FORMAT = RowFormat(
    name="prompt_completion",
    keys="prompt and completion of messages[, tools]",
    matches=lambda row: "completion" in row and isinstance(peek(row.get("prompt")), list),
    read=read_prompt_completion,
    columns=("prompt", "completion", *TOOL_COLUMNS),
    priority=5,
)
