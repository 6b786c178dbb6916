"""Reasoning and template switches of rows, in every shape that public rows have them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from fctune.config.sections.model import find_template_args_problems
from fctune.data.sources.defects import RowError, describe_value

# Keys of a message's reasoning: of vLLM and Qwen, of OpenRouter and newer vLLM, and of gpt-oss.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Roles and speakers of a turn that is the reasoning of the assistant's next one.
REASONING_ROLES = ("reasoning", "thinking", "thought")

# Template switches that rows have as keys of their own, and the type of their values.
_ROW_SWITCHES: dict[str, type] = {"enable_thinking": bool, "thinking": bool, "reasoning_effort": str}
_ROW_ARGS = "chat_template_kwargs"

_SPACE = " \t\r\n"
_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<scratch_pad>": "</scratch_pad>",
    "[THINK]": "[/THINK]",
}
_OPENING = re.compile(r"\s*(" + "|".join(map(re.escape, _TAGS)) + ")")
_CLOSING = "</think>"  # the only tag that rows have without its opening, which is in the prompt of some models


def read_reasoning(message: dict[str, Any], pointer: str, role: str) -> str | None:
    """Return the reasoning under a message's keys, or None.

    Raises:
        RowError: It is empty, not text, given twice with different texts, or not the assistant's.
    """
    found: dict[str, str] = {}
    for key in REASONING_KEYS:
        value = message.get(key)
        if value is None:
            continue
        at = f"{pointer}.{key}"
        if role != "assistant":
            if value in ("", [], {}):
                continue
            raise RowError(at, "reasoning_role", f"only the assistant may have reasoning; this message is the {role}'s")
        text = _read_text(value, at)
        if not text.strip():
            raise RowError(at, "reasoning_empty", "empty reasoning; leave it out, or set it to null")
        found[key] = text
    if len(set(found.values())) > 1:
        first, second = list(found)[:2]
        raise RowError(f"{pointer}.{second}", "reasoning_conflict", f"differs from the reasoning in {first}; keep one")
    return next(iter(found.values()), None)


def take_reasoning(
    content: str | None, pointer: str, notes: Counter[str], given: str | None = None
) -> tuple[str | None, str | None]:
    """Split the text of an assistant's turn into its content and its reasoning.

    Args:
        content: Text that may begin with reasoning in tags.
        pointer: Its location.
        notes: Counts of conversions, updated in place.
        given: Reasoning that the row has elsewhere for this turn.

    Raises:
        RowError: A tag at the start is not closed, or the reasoning differs from that given.
    """
    if content is None:
        return None, given
    opening = _OPENING.match(content)
    if opening is not None:
        closing = _TAGS[opening[1]]
        end = content.find(closing, opening.end())
        if end < 0:
            reason = f"{opening[1]} at its start without {closing}: the reasoning is cut off"
            raise RowError(pointer, "unclosed_think", reason)
        start = opening.end()
    elif _CLOSING in content and "<think>" not in content:
        start, end, closing = 0, content.index(_CLOSING), _CLOSING
    else:
        return content, given
    reasoning = content[start:end].strip(_SPACE)
    rest = content[end + len(closing) :].lstrip(_SPACE)
    if not reasoning:
        notes["empty_think"] += 1
        return rest, given
    if given is not None and given.strip() != reasoning:
        reason = (
            f"the reasoning between {closing.replace('/', '')} and {closing} differs from that in the message's key"
        )
        raise RowError(pointer, "reasoning_conflict", f"{reason}; keep one")
    notes["reasoning_from_content"] += 1
    return rest, reasoning if given is None else given


def split_parts(parts: list[Any], pointer: str) -> tuple[list[Any], str | None]:
    """Split the parts of a content into those that are not reasoning, and the text of those that are, or None.

    Raises:
        RowError: A part of reasoning has no text.
    """
    others = [part for part in parts if not _is_reasoning_part(part)]
    if len(others) == len(parts):
        return parts, None
    texts = [_read_part(part, f"{pointer}[{i}]") for i, part in enumerate(parts) if _is_reasoning_part(part)]
    text = "\n".join(texts)
    if not text.strip():
        raise RowError(pointer, "reasoning_empty", "an empty reasoning part; leave it out")
    return others, text


def read_template_args(row: dict[str, Any]) -> dict[str, Any]:
    """Return the template switches that a row sets for itself.

    Raises:
        RowError: A switch has a value of the wrong type, or two values.
    """
    given = row.get(_ROW_ARGS)
    if given is None:
        given = {}
    elif not isinstance(given, dict):
        raise RowError(_ROW_ARGS, "template_switch", f"expected an object of switches, got {describe_value(given)}")
    switches = {name: value for name, value in given.items() if value is not None}  # Arrow fills nulls
    for problem in find_template_args_problems(switches, _ROW_ARGS):
        raise RowError(_ROW_ARGS, "template_switch", problem.removeprefix(f"{_ROW_ARGS}: "))
    for name, kind in _ROW_SWITCHES.items():
        value = row.get(name)
        if value is None or (name == "thinking" and not isinstance(value, bool)):
            continue  # a thinking column of another type is not a switch
        if not isinstance(value, kind):
            expected = "true or false" if kind is bool else "a string"
            raise RowError(name, "template_switch", f"expected {expected}, got {describe_value(value)}")
        if switches.setdefault(name, value) != value:
            raise RowError(name, "template_switch", f"is {value!r} here and {switches[name]!r} in {_ROW_ARGS}")
    return switches


def _read_text(value: Any, pointer: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return "\n".join(_read_part(part, f"{pointer}[{i}]") for i, part in enumerate(value))
    if value == []:
        return ""
    if isinstance(value, dict):
        return _read_part(value, pointer)
    raise RowError(pointer, "reasoning_not_text", f"expected text, got {describe_value(value)}")


def _is_reasoning_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning", "reasoning_text")


def _read_part(part: Any, pointer: str) -> str:
    """Return the text of a part such as ``{"type": "thinking", "thinking": ...}``, whose text may be parts again."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("thinking", "reasoning", "text", "content"):
            if isinstance(part.get(key), str | list):
                return _read_text(part[key], f"{pointer}.{key}")
    raise RowError(pointer, "reasoning_not_text", f"expected a part with text, got {describe_value(part)}")
