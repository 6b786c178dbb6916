"""Columns of rows: own names mapped to those of the formats, and columns with text that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

from fctune.base.errors import DataError
from fctune.config.parsing import suggest, suggest_in_brackets
from fctune.data.conversation import Conversation
from fctune.data.sources.defects import RowError

Columns = Mapping[str, str]
"""The format's name for each own column, or ``IGNORE``."""

IGNORE = "ignore"

# Columns and keys that may hold text and are left unread: what identifies, dates, classifies or rates a row. They may
# have a prefix (conversation_id, response_quality).
_WORDS = (
    "id|uuid|guid|uid|index|idx|key|hash|sha256|md5|digest|"
    "source|dataset|url|uri|link|license|licence|author|creator|annotator|generator|model|version|revision|split|"
    "subset|subset_name|config|file|filename|path|repo|"
    "category|subcategory|categories|domain|topic|tag|label|type|kind|task|difficulty|level|language|lang|locale|"
    "timestamp|date|datetime|time|created|updated|"
    "score|rating|quality|reward|confidence|assessment"
)
_EXACT = (
    "meta|metadata|annotations|citations|usage|stats|statistics|extra_info|extra|tool_choice|finish_reason|stop_reason|status|"
    "logprobs|signature|used_in|cache_control|audio|ability"
)
_HARMLESS = re.compile(rf"_?(?:(?:\w+[_-])?(?:{_WORDS})s?|{_EXACT}|\w+_(?:at|on))", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Values that say nothing: dates, addresses, hashes, and constants as CSV writes them.
_NO_TEXT = re.compile(
    r"[\W\d_]*|\d{4}-\d\d-\d\d(?:[T ][\d:.+Z-]*)?|https?://\S+|[0-9a-f-]{12,}|true|false|null|none|nan|-?[\d.]+e[+-]?\d+",
    re.IGNORECASE,
)


def map_columns(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return a row with its own columns under the format's names, without those that are ignored.

    Raises:
        RowError: The row also has the column that one is mapped to.
    """
    mapped = {name: value for name, value in row.items() if name not in columns}
    for own, name in columns.items():
        if own not in row or name == IGNORE:
            continue
        if mapped.get(name) is not None:
            reason = (
                f"columns maps {own} to {name}, which the row has too; map that one to {IGNORE}, or to another name"
            )
            raise RowError(name, "column_conflict", reason)
        mapped[name] = row[own]
    return mapped


def check_columns(columns: Columns, known: Iterable[str], where: str) -> None:
    """Check that every column is mapped to a known name, and no two to the same.

    Args:
        columns: The mapping.
        known: The columns that the formats read.
        where: Location of the rows, for the message.

    Raises:
        DataError: The first problem.
    """
    names = sorted(set(known))
    sources: dict[str, str] = {}
    for own, name in columns.items():
        if name == IGNORE:
            continue
        if name not in names:
            hint = suggest(name, [*names, IGNORE]) or f". Expected {IGNORE}, or one of {', '.join(names)}."
            raise DataError(f"{where}: columns: {own}={name}: no row format reads a column {name}{hint}")
        if name in sources:
            raise DataError(f"{where}: columns: {sources[name]} and {own} are both mapped to {name}; map one of them.")
        sources[name] = own


def describe_missing(missing: Iterable[str], columns: Iterable[str], where: str = "no row") -> str:
    """Describe columns of a mapping that rows lack, with the names that may have been meant.

    Args:
        missing: The columns that rows lack.
        columns: All columns that they have.
        where: What has been searched.
    """
    present = list(map(str, columns))
    described = ", ".join(name + suggest_in_brackets(name, present) for name in missing)
    listed = ", ".join(present[:12]) or "none"
    return f"columns maps {described}, which {where} has. Columns found: {listed}."


def is_harmless(name: str) -> bool:
    """Return True if a column or key of this name may be left unread, whatever it holds."""
    return _HARMLESS.fullmatch(_CAMEL.sub("_", name)) is not None


def require_read(columns: Mapping[str, Any], keys: Mapping[str, Any], conversation: Conversation) -> None:
    """Check that what was not read of a row holds no text, or only what one of its messages says too.

    Args:
        columns: Columns that were not read, with their values.
        keys: Keys of messages and calls that were not read, by their pointers.
        conversation: What was read.

    Raises:
        RowError: ``unread_text``, with all columns or keys.
    """
    said: set[str] | None = None
    unread: dict[str, list[str]] = {"columns": [], "keys": []}
    for part, values in (("columns", columns), ("keys", keys)):
        for name, value in values.items():
            texts = _list_texts(value)
            if texts and said is None:
                said = {text.strip() for m in conversation.messages for text in (m.content, m.reasoning) if text}
            if said is not None and any(text not in said for text in texts):
                unread[part].append(name)
    if found := unread["columns"]:
        reason = (
            f"text in {'a column' if len(found) == 1 else 'columns'} that the row's format does not read "
            f"({', '.join(found)}); map it to a column of the format, or leave it out: --columns "
            f"{','.join(f'{name}={IGNORE}' for name in found)}, or in the source "
            f"columns: {{{', '.join(f'{name}: {IGNORE}' for name in found)}}}"
        )
        raise RowError(found[0], "unread_text", reason)
    if found := unread["keys"]:
        others = f" (as in {', '.join(found[1:4])})" if len(found) > 1 else ""
        raise RowError(found[0], "unread_text", f"text under a key that is not read{others}; rename or remove the key")


def require_read_keys(value: Mapping[str, Any], read: Container[str], pointer: str) -> None:
    """Check that the keys of an object that are neither read nor harmless hold no text.

    Raises:
        RowError: ``unread_text``, with the first such key.
    """
    for key, item in value.items():
        if key not in read and not is_harmless(str(key)) and _list_texts(item):
            reason = "text under a key that is not read; rename or remove the key"
            raise RowError(f"{pointer}.{key}", "unread_text", reason)


def _list_texts(value: Any) -> list[str]:
    """Return the strings of a value that hold words."""
    if isinstance(value, str):
        text = value.strip()
        return [] if _NO_TEXT.fullmatch(text) else [text]
    if isinstance(value, dict):
        return [text for item in value.values() for text in _list_texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _list_texts(item)]
    return []
