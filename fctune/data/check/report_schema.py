"""The JSON Schema of the check's report.

Adding a key keeps the version; removing a key or changing its meaning raises it.
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
    "An example in a row.",
    file=_text("File, hf: or synthetic: source"),
    line=_count("First line of the row, from 1; the number of the row in Parquet and on the hub"),
    pointer=_text("Location in the row, such as messages[1].tool_calls[0].function.arguments; empty: the complete row"),
    reason=_text("What is wrong"),
)
_FINDING = _object(
    "A kind of defect or warning.",
    kind=_text("Name"),
    meaning=_text("Meaning"),
    count=_count("Number of findings"),
    rows=_count("Number of rows that have it"),
    examples=_list("The first examples", _EXAMPLE),
)
_LENGTHS = _object(
    "A distribution over conversations.",
    count=_count("Number of values"),
    total=_count("Sum of the values"),
    min=_count("Minimum"),
    p50=_count("Median"),
    p90=_count("90th percentile"),
    p99=_count("99th percentile"),
    max=_count("Maximum"),
    bins=_list("[from, to, count] of from <= value < to", {"type": "array", "items": {"type": "integer"}}),
)
_REPEAT = _object(
    "A row that repeats an earlier one.",
    row=_text("file:line"),
    earlier=_text("file:line of the earlier row"),
    similarity={"type": "number", "description": "1 for an exact repeat, else the estimated Jaccard similarity"},
)
_OVERLAP = _object(
    "Items of a held-out set that occur in the rows.",
    against=_text("The held-out set"),
    purpose={"enum": ["validation", "eval"], "description": "Purpose of the held-out set"},
    num_items=_count("Items with a user turn of six words or more"),
    num_found=_count("Items whose runs of 8 words are at least half contained in one row's user turns"),
    num_rows=_count("Rows that contain such an item"),
    examples=_list(
        "The first examples",
        _object("One pair", row=_text("file:line"), item=_text("file:line (id)"), share={"type": "number"}),
    ),
)
_TOKENS = _object(
    "Token counts of the conversations; null without a tokenizer.",
    total=_count("Tokens"),
    supervised=_count("Tokens in the loss"),
    supervised_share={"type": "number", "description": "supervised / total"},
    seq_len={"type": ["integer", "null"], "description": "Length that conversations are compared with"},
    num_over_seq_len=_count("Conversations longer than seq_len"),
    num_unsupervised=_count("Conversations without supervised tokens"),
    num_not_renderable=_count("Conversations that the template or tokenizer rejects"),
    lengths=_LENGTHS,
)
_SOURCE = _object(
    "A source.",
    path=_text("Path as given"),
    rows=_count("Rows read"),
    conversations=_count("Rows kept"),
    row_formats={"type": "object", "description": "Rows kept, by row format", "additionalProperties": _count("Rows")},
    error={"type": ["string", "null"], "description": "Error that ended its reading"},
)

REPORT_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "fctune data check report",
    **_object(
        "Output of `fctune data check --json`. rows = conversations + defects.",
        schema_version={"const": SCHEMA_VERSION},
        rows=_count("Rows read"),
        conversations=_count("Rows that can be trained on"),
        calls=_count("Calls in the conversations"),
        tools=_count("Distinct tool names in the conversations"),
        duplicates=_count("Conversations that repeat an earlier one exactly"),
        near_duplicates=_count("Others that nearly repeat one (estimated Jaccard similarity of 3-word runs >= 0.8)"),
        defects=_count("Rows that cannot be trained on; each has one defect, its first"),
        warnings=_count("Warnings about rows that are kept"),
        defect_kinds=_list("Defects by kind, the most frequent first", _FINDING),
        warning_kinds=_list("Warnings by kind, the most frequent first", _FINDING),
        notes={
            "type": "object",
            "description": "Number of conversions made while reading rows, by kind",
            "additionalProperties": _count("Number of conversions"),
        },
        classes=_object(
            "Conversations by the class of their calls", **{name: _count(text) for name, text in CLASSES.items()}
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
        overlaps=_list("One entry per held-out set", _OVERLAP),
        sources=_list("One entry per source", _SOURCE),
        seconds={"type": "number", "description": "Duration of the check in seconds"},
    ),
}
