"""Defects of rows that cannot be trained on: location, kind and reason."""

from __future__ import annotations

from dataclasses import dataclass

OVERLONG = "overlong"

DEFECT_KINDS: dict[str, str] = {
    "arguments_not_json": "a call's arguments are a string, or hold a value, that is not JSON",
    "arguments_not_object": "a call's arguments are neither an object nor a string holding one",
    "arrow_null": "an Arrow struct has a null that may belong to the row or may be filling",
    "bad_weight": "a message weight outside 0 to 1",
    "call_in_text": "an assistant's text that spells a call, which would be trained as text",
    "call_not_json": "a call is not JSON",
    "call_not_pythonic": "a call is not `[name(argument=value, ...)]`",
    "call_shape": "a call lacks its name or arguments, or has unknown keys",
    "call_without_tools": "a call in a row without tools",
    "column_conflict": "a column that is mapped to one which the row has too",
    "csv_fields": "a row of a CSV file with more or fewer fields than its header",
    "content_not_text": "a message's content is not text",
    "duplicate_call_id": "two open calls share an id",
    "duplicate_key": "a JSON object has a key twice",
    "duplicate_tool": "two different definitions of one tool",
    "history_missing": "earlier turns that a server holds, so that the row has no text of them",
    "invalid_utf8": "bytes that are not UTF-8, or a lone surrogate",
    "message_shape": "a message or turn is malformed",
    "no_answer_text": "no call is expected, and the row has no text of the answer to train on",
    "no_assistant": "no assistant message to train on",
    "not_finite": "NaN, Infinity, or a number too large for a float",
    "not_json": "a row, or a column that should contain JSON, is not JSON",
    "not_renderable": "the chat template or tokenizer rejects the conversation, or loses a part of it",
    "not_text_only": "a row with images, video or sound",
    OVERLONG: "a conversation longer than data.seq_len, with data.overlong=fail",
    "pair_equal": "the two answers of a preference pair are the same",
    "pair_prompts": "the two answers of a preference pair follow different prompts",
    "pair_shape": "a preference pair lacks its prompt or an answer, or has one of the wrong form",
    "pair_unsupervised": "an answer of a preference pair has no supervised token",
    "reasoning_conflict": "a turn has two different reasonings",
    "reasoning_empty": "a message's reasoning is an empty string",
    "reasoning_not_text": "a message's reasoning is not text",
    "reasoning_role": "reasoning in a message that is not the assistant's, or that no assistant's turn follows",
    "result_without_call": "a result that answers no call",
    "row_too_large": "a row larger than the limit",
    "special_token_in_content": "the text of a control token of the tokenizer in a message, tool or template switch",
    "split_turn": "an assistant turn split by a stray header",
    "system_conflict": "a system column and a different system message",
    "template_switch": "a template switch of the row has a wrong value, or two",
    "text_around_call": "text after, between or around calls, which no chat template can render",
    "too_deep": "JSON nested deeper than the limit",
    "tool_shape": "a tool is not a function with a name and an object of parameters",
    "tools_disagree": "the tools column and the prompt disagree on the tools",
    "tools_incomplete": "a page of an MCP server's tools without the page that follows",
    "type_unknown": "a parameter type that JSON Schema cannot express",
    "unclosed_think": "reasoning that begins with a tag, such as <think>, and does not end",
    "unknown_block": "a block, part or item of a type that is not read",
    "unknown_role": "an unknown role or speaker",
    "unknown_row_format": "keys of no known row format",
    "unread_text": "text in a column or under a key that nothing reads",
    "unreviewed": "a draft that is marked as not reviewed",
}
"""The kinds of defects and their meanings."""


# Remedy of ``not_text_only``.
TEXT_ONLY = "only text is trained: describe it in words, or leave the row out"


@dataclass(frozen=True, slots=True)
class Defect:
    """A row that cannot be trained on; ``kind`` is a key of ``DEFECT_KINDS``, ``line`` is where the row starts."""

    file: str
    line: int
    pointer: str
    kind: str
    reason: str

    def __str__(self) -> str:
        """``file:line: pointer: reason``, without the pointer if the defect is of the complete row."""
        where = f"{self.file}:{self.line}"
        return f"{where}: {self.pointer}: {self.reason}" if self.pointer else f"{where}: {self.reason}"


class RowError(Exception):
    """The first defect of a row; raised by readers and turned into a ``Defect`` where file and line are known.

    Kinds in ``LEFT_OUT_KINDS``, such as ``answer_failed``, are of rows that are left out, and no defects.
    """

    def __init__(self, pointer: str, kind: str, reason: str) -> None:
        super().__init__(reason)
        # Keys of a row may hold half a surrogate pair, which no report could be written with.
        self.pointer = pointer.encode("utf-8", "backslashreplace").decode()
        self.kind = kind
        self.reason = reason.encode("utf-8", "backslashreplace").decode()


def describe_value(value: object) -> str:
    """Describe a value for an error message: its JSON type and a short excerpt."""
    names = {str: "string", dict: "object", list: "list", bool: "boolean", int: "number", float: "number"}
    if value is None:
        return "null"
    text = repr(value)
    return f"{names.get(type(value), type(value).__name__)} {text if len(text) <= 60 else text[:60] + '...'}"
