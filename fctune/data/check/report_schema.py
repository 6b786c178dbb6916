"""The JSON Schema of the check's report, version 1.

A key is added in a later release without a new version; a key that changes its meaning or goes makes a new one.
"""

from __future__ import annotations

from typing import Any

from fctune.data.check.report import SCHEMA_VERSION
from fctune.data.check.warnings import CLASSES


def _object(description: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
    }


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "description": description}


def _list(description: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "description": description, "items": items}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_EXAMPLE = _object(
    "A place in a row.",
    file=_text("The file, hf: or synthetic: source"),
    line=_count("The line that the row starts on, from 1; in Parquet and on the hub the number of the row"),
    pointer=_text("Where in the row, as messages[1].tool_calls[0].function.arguments; empty: the whole row"),
    reason=_text("What is wrong there"),
)
_FINDING = _object(
    "One kind of defect or warning.",
    kind=_text("Its name"),
    meaning=_text("What it means"),
    count=_count("How often it was found"),
    rows=_count("In how many rows"),
    examples=_list("The first ones", _EXAMPLE),
)
_LENGTHS = _object(
    "A distribution over conversations.",
    count=_count("Number of values"),
    total=_count("Their sum"),
    min=_count("The smallest"),
    p50=_count("The median"),
    p90=_count("The 90th percentile"),
    p99=_count("The 99th percentile"),
    max=_count("The largest"),
    bins=_list("[from, to, count] of from <= value < to", {"type": "array", "items": {"type": "integer"}}),
)
_REPEAT = _object(
    "A row that repeats an earlier one.",
    row=_text("file:line"),
    earlier=_text("file:line of the earlier one"),
    similarity={"type": "number", "description": "1 for the same, else the estimated Jaccard similarity"},
)
_OVERLAP = _object(
    "Items of a held-out set that stand in the rows.",
    against=_text("The held-out set"),
    purpose={"enum": ["validation", "eval"], "description": "What it is held out for"},
    num_items=_count("Items with a user turn of six words or more"),
    num_found=_count("Items of which a row's user turns hold half the runs of 8 words"),
    num_rows=_count("Rows that hold such an item"),
    examples=_list(
        "The first ones",
        _object("One pair", row=_text("file:line"), item=_text("file:line (id)"), share={"type": "number"}),
    ),
)
_TOKENS = _object(
    "What the tokenizer made of the conversations; null without one.",
    total=_count("Tokens"),
    supervised=_count("Tokens that are in the loss"),
    supervised_share={"type": "number", "description": "supervised / total"},
    seq_len={"type": ["integer", "null"], "description": "The row length compared with"},
    num_over_seq_len=_count("Conversations longer than seq_len"),
    num_unsupervised=_count("Conversations without a supervised token"),
    num_not_renderable=_count("Conversations that template or tokenizer refuse"),
    lengths=_LENGTHS,
)
_SOURCE = _object(
    "One source.",
    path=_text("As given"),
    rows=_count("Rows read"),
    conversations=_count("Rows kept"),
    formats={"type": "object", "description": "Rows kept by shape", "additionalProperties": _count("Rows")},
    error={"type": ["string", "null"], "description": "Why it could not be read to its end"},
)

REPORT_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "fctune data check report",
    **_object(
        "What `fctune data check --json` writes. rows = conversations + defects.",
        schema_version={"const": SCHEMA_VERSION},
        rows=_count("Rows read"),
        conversations=_count("Rows that can be trained on"),
        calls=_count("Calls in them"),
        tools=_count("Different tool names in them"),
        duplicates=_count("Conversations that say exactly what an earlier one says"),
        near_duplicates=_count("Further ones that nearly do (estimated Jaccard similarity of 3-word runs >= 0.8)"),
        defects=_count("Rows that cannot be trained on; each has one defect, its first"),
        warnings=_count("Warnings about rows that are kept"),
        defect_kinds=_list("Defects by kind, the most frequent first", _FINDING),
        warning_kinds=_list("Warnings by kind, the most frequent first", _FINDING),
        notes={
            "type": "object",
            "description": "How often rows were read in another way than as they stood, by kind",
            "additionalProperties": _count("How often"),
        },
        classes=_object(
            "Conversations by the calls they teach", **{name: _count(text) for name, text in CLASSES.items()}
        ),
        num_messages=_LENGTHS,
        num_characters=_LENGTHS,
        tokens={"anyOf": [_TOKENS, {"type": "null"}]},
        tool_use=_list(
            "The tools called most",
            _object("One tool", name=_text("Name"), declared=_count("Conversations"), calls=_count("Calls")),
        ),
        duplicate_examples=_list("The first duplicates", _REPEAT),
        near_duplicate_examples=_list("The first near duplicates", _REPEAT),
        overlaps=_list("One for each held-out set", _OVERLAP),
        sources=_list("One for each source", _SOURCE),
        seconds={"type": "number", "description": "How long the check took"},
    ),
}
