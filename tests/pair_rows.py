"""Preference pairs for tests, and the same pair in the shapes of other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fctune.data.synthetic import iter_conversations
from fctune.data.synthetic.pairs import make_pairs as make_synthetic

USER = {"role": "user", "content": "Weather in Oslo?"}
ANSWER, OTHER = {"role": "assistant", "content": "Cold."}, {"role": "assistant", "content": "Warm."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"name": "get_weather", "arguments": {"city": "Oslo"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TAGGED = f"<TOOLCALL>{json.dumps([CALL])}</TOOLCALL>"
PAIR = {"prompt": [SYSTEM, USER], "chosen": [CALLING], "rejected": [OTHER], "tools": [TOOL]}
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "input": {"messages": [SYSTEM, USER], "tools": [TOOL], "parallel_tool_calls": True},
        "preferred_output": [CALLING],
        "non_preferred_output": [OTHER],
    },
    "When2Call": {
        "messages": [SYSTEM, USER],
        "chosen_response": {"role": "assistant", "content": TAGGED},
        "rejected_response": OTHER,
        "tools": [json.dumps(TOOL)],
    },
    "ms-swift": {"messages": [SYSTEM, USER, CALLING], "rejected_response": "Warm.", "tools": [TOOL]},
    "ms-swift's messages": {
        "messages": [SYSTEM, USER, CALLING],
        "rejected_messages": [SYSTEM, USER, OTHER],
        "tools": [TOOL],
    },
}
BAD_SHAPES: list[tuple[str, dict[str, Any], str, str]] = [
    ("OpenAI", {"input": "Weather?"}, "pair_shape", "input: expected an object with messages"),
    ("OpenAI", {"tools": [TOOL]}, "pair_shape", "tools: is in the row and in its input"),
    ("OpenAI", {"preferred_output": [USER, ANSWER]}, "pair_shape", "preferred_output[0]: an answer starts with"),
    ("OpenAI", {"non_preferred_output": [CALLING]}, "pair_equal", "the same answer as preferred_output"),
    ("OpenAI", {"non_preferred_output": None}, "pair_shape", "non_preferred_output: expected a list of messages"),
    ("OpenAI", {"input": {"messages": [{"role": "user"}]}}, "content_not_text", "input.messages[0].content"),
    ("OpenAI", {"input": {"messages": [USER], "note": "Be kind."}}, "unread_text", "note"),
    ("OpenAI", {"chosen": [OTHER]}, "pair_shape", "chosen: a second pair in the row"),
    ("When2Call", {"chosen_response": None}, "pair_shape", "chosen_response: expected a list of messages"),
    ("When2Call", {"chosen_response": TAGGED[:-20]}, "call_in_text", "chosen_response[0]"),
    ("When2Call", {"tools": []}, "call_without_tools", "chosen_response[0]"),
    ("When2Call", {"note": "Be kind."}, "unread_text", "note"),
    ("ms-swift", {"rejected_response": {"role": "assistant"}}, "content_not_text", "rejected_response[0].content"),
    ("ms-swift's messages", {"rejected_messages": [USER, OTHER]}, "pair_prompts", "share no prompt"),
]


def make_pairs(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Return rows of pairs: the last answer of a synthetic conversation, and a near miss."""
    return list(make_synthetic(iter_conversations("train", count, seed), seed))


def write_pairs(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows to a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
