"""Suggested mappings of columns to those of a table, guessed from names and values; they are only ever printed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fctune.data.sources.columns import IGNORE, Columns

TABLE_NEEDS = (
    "A table needs the columns query (what the user says) and either tool and arguments (the call, arguments as "
    "JSON) or answers (several calls, as JSON); response (the reply) in rows without a call; and tools (those on "
    "offer, as JSON), or --tools FILE. "
)

_Kind = Literal["tools", "answers", "arguments", "tool", "word", "text", "other"]

# Words in the names of columns, by the column that they stand for.
_USUAL_WORDS = {
    "tool": ("function", "tool", "name", "action", "intent", "api"),
    "arguments": ("arg", "argument", "param", "parameter", "slot"),
    "response": ("reply", "response", "output", "completion", "assistant", "agent", "bot"),
    "query": (
        *("query", "question", "prompt", "user", "customer", "input", "instruction", "request", "utterance"),
        *("text", "message"),
    ),
}
_NAMED: dict[str, _Kind] = {"tool": "word", "arguments": "text"}  # what values look like if the name must tell
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.-]*")
_DEFINITION_KEYS = ("parameters", "input_schema", "inputSchema", "description")
_ORDER = ("query", "tool", "arguments", "answers", "response", "tools")
_MOST = 0.9  # of a column's values that are alike; a file may have some that are malformed


def suggest_columns(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], tools: Collection[str], mapped: Columns
) -> str:
    """Return what a table needs, and how its columns could be mapped; "" if the rows are no table.

    Args:
        columns: All columns.
        rows: Some rows under these columns, without empty values.
        tools: Names of the tools that the rows may call, if they are known.
        mapped: The mapping so far.
    """
    known = [name for name in ("tools", *mapped) if mapped.get(name, name) == "tools"]
    if any(isinstance(value, dict | list) for row in rows for name, value in row.items() if name not in known):
        return ""
    listed = guess_columns(columns, rows, tools, mapped)
    if not listed:
        return TABLE_NEEDS
    return f"{TABLE_NEEDS}Perhaps: --columns {listed}. This is a guess from the columns' names and values; check it. "


def guess_columns(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], tools: Collection[str], mapped: Columns
) -> str:
    """Return the mapping so far, with further columns that look right, as ``--columns`` takes it; "" without any."""
    given = {own: name for own, name in mapped.items() if own in columns}
    taken = {*given.values(), *(name for name in columns if name not in given)} - {IGNORE}
    kinds = {name: _classify([row[name] for row in rows if name in row], tools) for name in columns}
    free = [name for name in columns if name not in given and name not in _ORDER]
    found = {own: target for target, own in _match(free, kinds, rows, taken).items()}
    if not found:
        return ""
    pairs = sorted((given | found).items(), key=lambda pair: (*_ORDER, pair[1]).index(pair[1]))
    return ",".join(f"{own}={name}" for own, name in pairs)


def _match(
    free: Sequence[str], kinds: Mapping[str, _Kind], rows: Sequence[Mapping[str, Any]], taken: Collection[str]
) -> dict[str, str]:
    """Return the column that looks right for each column of a table that is missing."""
    found: dict[str, str] = {}
    has_calls = "answers" in taken
    for target in ("tools", "answers", "tool", "arguments"):
        likely = [name for name in free if kinds[name] == target]
        if target in _NAMED:
            likely.sort(key=lambda name: not _is_named(name, target))
            likely += [name for name in free if kinds[name] == _NAMED[target] and _is_named(name, target)]
        own = next(iter(likely), None)
        if own is not None and target not in taken and not (has_calls and target in ("tool", "arguments")):
            found[target] = own
        has_calls = has_calls or "answers" in found
    texts = [name for name in free if kinds[name] in ("text", "word") and name not in found.values()]
    replies = [name for name in texts if _is_named(name, "response")]
    asked = [name for name in texts if name not in replies]
    asked.sort(key=lambda name: (not _is_named(name, "query"), kinds[name] != "text", -_count(rows, name)))
    if asked and "query" not in taken and (_is_named(asked[0], "query") or kinds[asked[0]] == "text"):
        found["query"] = asked[0]
    if replies and "response" not in taken and "answers" not in found:
        found["response"] = replies[0]
    return found


def _classify(values: Sequence[Any], tools: Collection[str]) -> _Kind:
    """Return what most values of a column look like."""
    counts: dict[_Kind, int] = {}
    for value in values:
        kind = _classify_value(value, tools)
        counts[kind] = counts.get(kind, 0) + 1
    kind = max(counts, key=lambda name: counts[name], default="other")
    return kind if counts and counts[kind] >= _MOST * len(values) else "text" if "text" in counts else "other"


def _classify_value(value: Any, tools: Collection[str]) -> _Kind:
    if not isinstance(value, str):
        return "tools" if isinstance(value, list) else "other"
    text = value.strip()
    if text in tools:
        return "tool"
    if text[:1] in ("{", "["):
        try:
            return _classify_json(json.loads(text))
        except (ValueError, RecursionError):
            return "text"
    if _IDENTIFIER.fullmatch(text):
        return "word"
    return "text" if " " in text and any(character.isalpha() for character in text) else "other"


def _classify_json(value: Any) -> _Kind:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        inner = first["function"] if isinstance(first.get("function"), dict) else first
        if "name" in inner and "arguments" in inner:
            return "answers"
        if "name" in inner and any(key in inner for key in _DEFINITION_KEYS):
            return "tools"
    return "arguments" if isinstance(value, dict) else "other"


def _is_named(column: str, target: str) -> bool:
    """Return True if a word of a column's name usually stands for a column of a table."""
    return any(word.lower().removesuffix("s") in _USUAL_WORDS[target] for word in _WORDS.findall(column))


def _count(rows: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(name in row for row in rows)
