"""What is said about a row that cannot be trained on: where it is, what is wrong with it, and of which kind that is."""

from __future__ import annotations

from dataclasses import dataclass

DEFECT_KINDS: dict[str, str] = {
    "arguments_not_json": "a call's arguments are a string that is not JSON",
    "arguments_not_object": "a call's arguments are neither an object nor a string holding one",
    "arrow_null": "an Arrow struct holds a null that may be the row's own or only fill",
    "bad_weight": "a message weight outside 0 to 1",
    "call_not_json": "a call is not JSON",
    "call_not_pythonic": "a call is not `[name(argument=value, ...)]`",
    "call_shape": "a call lacks its name or arguments, or has keys that no reader knows",
    "content_not_text": "a message's content is not text",
    "duplicate_call_id": "two open calls share an id",
    "duplicate_key": "a JSON object has a key twice",
    "duplicate_tool": "one tool name, two different definitions",
    "invalid_utf8": "bytes that are not UTF-8, or a lone surrogate",
    "message_shape": "a message or turn is not of its shape",
    "no_assistant": "no assistant message, so nothing to learn",
    "not_finite": "NaN, Infinity, or a number too large for a float",
    "not_json": "a row, or a column that holds JSON, is not JSON",
    "result_without_call": "a result that answers no call",
    "row_too_large": "a row of more bytes than the limit",
    "split_turn": "an assistant turn broken in two by a stray header",
    "text_around_call": "text after, between or around calls, which no chat template can say",
    "too_deep": "JSON nested deeper than the limit",
    "tool_shape": "a tool is not a function with a name and an object of parameters",
    "tools_disagree": "the tools column and the prompt disagree on the tools",
    "type_unknown": "a parameter type that JSON Schema cannot say",
    "unknown_role": "a role or speaker that no reader knows",
    "unknown_shape": "keys of no known row shape",
    "unreviewed": "a draft that says of itself that nobody has reviewed it",
}
"""Every kind of defect, with what it means."""


@dataclass(frozen=True, slots=True)
class Defect:
    """One row that cannot be trained on; ``kind`` is a key of ``DEFECT_KINDS``, ``line`` is where the row starts."""

    file: str
    line: int
    pointer: str
    kind: str
    reason: str

    def __str__(self) -> str:
        """``file:line: pointer: reason``; the pointer is left out where the whole row is meant."""
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.pointer}: {self.reason}" if self.pointer else f"{where}: {self.reason}"


class RowError(Exception):
    """A row's first defect, raised inside a reader and turned into a ``Defect`` by whoever knows file and line."""

    def __init__(self, pointer: str, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.pointer = pointer
        self.kind = kind
        self.reason = reason


def describe_value(value: object, limit: int = 60) -> str:
    """The value as an error message shows it: its JSON type and a short excerpt."""
    names = {str: "string", dict: "object", list: "list", bool: "boolean", int: "number", float: "number"}
    if value is None:
        return "null"
    text = repr(value)
    return f"{names.get(type(value), type(value).__name__)} {text if len(text) <= limit else text[:limit] + '...'}"
