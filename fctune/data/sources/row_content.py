"""Content of messages and results, as text, in every shape that public rows have it."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import TEXT_ONLY, RowError, describe_value
from fctune.data.sources.filling import ArrowStruct, holds_null
from fctune.data.sources.row_json import check_depth

_TEXT_TYPES = ("text", "input_text", "output_text")
# Types of parts other than text, in OpenAI's, Anthropic's, MCP's and TRL's formats.
_MEDIA = re.compile("image|video|audio")
_FILES = ("document", "file", "input_file", "media", "container_upload")


def read_content(content: Any, pointer: str, notes: Counter[str]) -> str | None:
    """Return a message's text, with several text parts joined by line breaks, or None.

    Raises:
        RowError: It is neither text nor a list of text parts.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        reason = f"expected text, null, or a list of text parts, got {describe_value(content)}"
        raise RowError(pointer, "content_not_text", reason)
    texts = [_read_part(part, f"{pointer}[{i}]") for i, part in enumerate(content)]
    notes["text_parts_joined"] += len(texts) > 1
    return "\n".join(texts)


def read_result_content(content: Any, pointer: str, notes: Counter[str]) -> str:
    """Return a tool's result as text: its own, that of its text parts, or the JSON of any other value.

    Raises:
        RowError: It is null, has a part that is not text, or is an Arrow struct with nulls.
    """
    if isinstance(content, str):
        return content
    if content is None:
        raise RowError(pointer, "content_not_text", "expected the result's text, got null")
    if isinstance(content, list) and content and all(map(_is_part, content)):
        return read_content(content, pointer, notes) or ""
    structs = content if isinstance(content, list) else [content]
    if any(isinstance(item, ArrowStruct) for item in structs) and holds_null(content):
        reason = "null in an Arrow column, which may be the row's or filling; store results as JSON strings"
        raise RowError(pointer, "arrow_null", reason)
    check_depth(content, pointer)
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        reason = f"expected text or a value of JSON, got {describe_value(content)}"
        raise RowError(pointer, "content_not_text", reason) from None
    notes["result_from_json"] += 1
    return text


def read_string(value: Any, pointer: str) -> str | None:
    """Return a string, such as an id or a name, or None."""
    if value is None or isinstance(value, str):
        return value
    raise RowError(pointer, "message_shape", f"expected a string, got {describe_value(value)}")


def make_block_error(block: Any, pointer: str) -> RowError:
    """Return the error about a block of a type that a format does not read."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and (_MEDIA.search(kind) or kind in _FILES):
        return RowError(pointer, "not_text_only", f"a block of type {kind!r}; {TEXT_ONLY}")
    described = f"a block of type {kind!r}" if isinstance(kind, str) else describe_value(block)
    return RowError(pointer, "unknown_block", f"{described}, which is not read; remove it, or leave the row out")


def _is_part(value: Any) -> bool:
    """Return True for a content part: text with its type, or media."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    return kind in _TEXT_TYPES or (isinstance(kind, str) and _MEDIA.search(kind) is not None)


def _read_part(part: Any, pointer: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in (*_TEXT_TYPES, None) and isinstance(part.get("text"), str):
        text: str = part["text"]
        require_read_keys(part, ("type", "text"), pointer)
        return text
    if isinstance(kind, str) and _MEDIA.search(kind):
        raise RowError(pointer, "not_text_only", f"a part of type {kind!r}; {TEXT_ONLY}")
    raise RowError(pointer, "content_not_text", f"expected a part of type text, got {describe_value(part)}")
