"""The rows of a source that are trained on: chosen by their scores, tools and lengths, and by how their runs ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fctune.config.conditions import COUNTS, Condition, parse_conditions
from fctune.config.sections.data import Failed, SourceConfig, WrongTurns
from fctune.data.conversation import Conversation
from fctune.data.sources.row_formats.exchange import peek

# Where records keep scores, feedback and other descriptions of themselves.
_HOLDERS = ("metadata", "meta", "extra_info", "extra", "attributes", "scores", "feedback_stats", "final_metrics")
MISSING = object()
"""Stands for the value of a condition that a row does not have."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a source are trained on.

    Attributes:
        where: Conditions that all hold.
        failed: Leave out runs and answers that failed, or keep them.
        wrong_turns: Train turns whose calls all failed, or keep them as context.
    """

    where: tuple[Condition, ...] = ()
    failed: Failed = "drop"
    wrong_turns: WrongTurns = "context"

    @classmethod
    def from_config(cls, source: SourceConfig) -> Selection:
        """Return the selection of a source of a config."""
        return cls(parse_conditions(source.where), source.failed, source.wrong_turns)

    def find_reason(self, row: Any, conversation: Conversation) -> str | None:
        """Return the kind of ``LEFT_OUT_KINDS`` of a row that is not selected; None if it is."""
        for condition in self.where:
            found = find_value(condition.name, row, conversation)
            if found is MISSING:
                return "where_missing"
            if not condition.holds(found):
                return "not_selected"
        return None


DEFAULT_SELECTION = Selection()


def find_value(name: str, row: Any, conversation: Conversation) -> Any:
    """Return what a condition compares: a count, the tools that are called, or a value of the row."""
    messages = conversation.messages
    if name == "tool":
        return [call.name for message in messages for call in message.calls]
    if name in COUNTS:
        counts = {
            "messages": len(messages),
            "calls": sum(len(message.calls) for message in messages),
            "characters": sum(len(message.content or "") for message in messages),
        }
        return counts[name]
    for holder in _iter_holders(row):
        found = _look_up(holder, name)
        if found is not MISSING and found is not None:
            return found
    return MISSING


def _iter_holders(row: Any) -> Iterator[Any]:
    yield row
    if isinstance(row, dict):
        yield from (row[name] for name in _HOLDERS if name in row)


def _look_up(value: Any, name: str) -> Any:
    """Return the value at a path of keys, joined by dots; scores may be a list of objects with name and value."""
    value = peek(value)
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and isinstance(item.get("name"), str)]
        value = {item["name"]: item.get("value", item.get("score")) for item in named}
    if not isinstance(value, dict):
        return MISSING
    if name in value:
        found = value[name]
        return found["avg"] if isinstance(found, dict) and "avg" in found else found
    nested = (_look_up(value[key], name[len(key) + 1 :]) for key in value if name.startswith(f"{key}."))
    return next((found for found in nested if found is not MISSING), MISSING)
