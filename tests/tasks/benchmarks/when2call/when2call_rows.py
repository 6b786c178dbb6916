"""Rows of When2Call's shape, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TOOL = {
    "name": "weather.get",
    "description": "Weather of a city on a day.",
    "parameters": {
        "type": "dict",
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "Name of the city, such as 'Köln'."},
            "days": {"type": "array", "items": {"type": "float"}, "default": [1]},
            "type": {"type": "any", "description": "A property that has the name of a keyword.", "enum": ["int", 2]},
        },
    },
}


def make_row(number: int, right: str, question: str, *, has_tool: bool = True, **answers: str) -> dict[str, Any]:
    """Return a row; ``answers`` replace those of the four kinds."""
    return {
        "uuid": f"0000-{number}",
        "source": "written by hand",
        "source_id": f"hand_{number}",
        "question": question,
        "correct_answer": right,
        "answers": {
            "direct": "It is sunny in Köln, and it will stay so.",
            "tool_call": '{"name": "weather.get", "arguments": {"city": "Köln", "days": [1, 2.5]}}',
            "request_for_info": "For which city do you need it?",
            "cannot_answer": "I am sorry, but I have no tool for that.",
            **answers,
        },
        "target_tool": None,
        "tools": [json.dumps(_TOOL)] if has_tool else [],
        "orig_tools": [json.dumps(_TOOL)],
        "held_out_param": None,
    }


ROWS = (
    make_row(1, "tool_call", "How is the weather in Köln today and the day after tomorrow?"),
    make_row(2, "tool_call", "Weather in Köln?", direct="Fine."),
    make_row(3, "request_for_info", "How is the weather today?"),
    make_row(4, "cannot_answer", "Book me a flight to Köln."),
    make_row(5, "cannot_answer", "How is the weather in Köln?", has_tool=False),
    make_row(6, "direct", "Say something nice about Köln."),
)


def write_rows(path: Path, rows: tuple[dict[str, Any], ...] = ROWS) -> Path:
    """Write rows as JSONL."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
