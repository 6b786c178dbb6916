"""What is odd about a conversation that can be trained on: each finding is a warning, never a rejection."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fctune.data.check.schemas import SchemaChecker
from fctune.data.conversation import Call, Conversation, Tool
from fctune.data.sources import ParsedRow, RowWarning

WARNING_KINDS: dict[str, str] = {
    "call_without_result": "the conversation goes on without the result of a call",
    "empty_turn": "a message that says nothing",
    "ends_on_result": "the last message is a result, which nobody answers",
    "ends_on_user": "the last message is the user's, which nobody answers",
    "missing_argument": "a call without an argument that its tool requires",
    "no_supervision": "no assistant message has a weight above 0",
    "not_in_enum": "an argument outside the values that its tool allows",
    "not_renderable": "the chat template or tokenizer refuses the conversation",
    "parallel_not_allowed": "several calls in a turn of a row that sets parallel_tool_calls to false",
    "placeholder_value": "an argument that reads like a placeholder",
    "repeated_call": "the same call twice in one turn",
    "repeated_tool": "a tool declared twice in the same words",
    "schema_invalid": "a tool's parameters are not valid JSON Schema",
    "schema_unusable": "a tool's parameters refer to themselves without end, or to another document",
    "schema_violation": "arguments that break another rule of the tool's schema",
    "tools_in_prompt": "the system prompt lists tools in words of its own",
    "turn_order": "turns in an order that chat templates may refuse",
    "undeclared_tool": "a call to a tool that the row does not declare",
    "unknown_argument": "an argument that the tool does not declare",
    "wrong_type": "an argument of another type than its tool declares",
}
"""Every kind of warning, with what it means."""

_PLACEHOLDER = re.compile(
    r"<[A-Za-z][\w .-]*>|\{\{.*\}\}|\[(?:insert|your|enter)\b.*\]|your[_ -]?(?:api[_ -]?key|token|password)\w*", re.I
)
_AFTER = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}


def iter_findings(row: ParsedRow, schemas: SchemaChecker) -> Iterator[RowWarning]:
    """The warnings about a row: the reader's, then those of turns, tools and calls."""
    yield from row.warnings
    yield from _iter_turn_findings(row)
    tools = {tool.name: tool for tool in row.conversation.tools}
    for i, tool in enumerate(row.conversation.tools):
        problem = schemas.check_tool(tool)
        if problem is not None:
            pointer = f"{row.tools_pointer}[{i}]{row.tools_suffix}.parameters{problem.path}"
            yield RowWarning(pointer, problem.kind, f"{tool.name}: {problem.reason}")
    for message, pointer in zip(row.conversation.messages, row.message_pointers, strict=True):
        for j, call in enumerate(message.calls):
            at = locate_call(row.format, pointer, j, len(message.calls))
            yield from _iter_call_findings(call, at, tools, schemas)
        if len(message.calls) > 1:
            texts = [call.name + json.dumps(call.arguments, sort_keys=True) for call in message.calls]
            if len(set(texts)) < len(texts):
                yield RowWarning(pointer, "repeated_call", "the same call stands twice in one turn")


def locate_call(format: str, pointer: str, index: int, num_calls: int) -> str:
    """Where a call stands in its row."""
    if format in ("openai", "synthetic"):
        return f"{pointer}.tool_calls[{index}].function"
    return f"{pointer}[{index}]" if num_calls > 1 or format == "xlam" else pointer


def _iter_call_findings(
    call: Call, pointer: str, tools: dict[str, Tool], schemas: SchemaChecker
) -> Iterator[RowWarning]:
    tool = tools.get(call.name)
    if tool is None:
        declared = ", ".join(list(tools)[:8]) or "none"
        yield RowWarning(f"{pointer}.name", "undeclared_tool", f"{call.name} is not declared (declared: {declared})")
    else:
        for finding in schemas.check_call(call, tool):
            yield RowWarning(f"{pointer}.arguments{finding.path}", finding.kind, finding.reason)
    for name, value in call.arguments.items():
        if isinstance(value, str) and len(value) < 100 and _PLACEHOLDER.fullmatch(value.strip()):
            yield RowWarning(f"{pointer}.arguments.{name}", "placeholder_value", f"{value!r} reads like a placeholder")


def _iter_turn_findings(row: ParsedRow) -> Iterator[RowWarning]:
    messages = row.conversation.messages
    before: str | None = None
    for message, pointer in zip(messages, row.message_pointers, strict=True):
        if not message.calls and not (message.content or "").strip():
            yield RowWarning(pointer, "empty_turn", f"the {message.role}'s message is empty")
        if message.role == "system":
            if before is not None:
                yield RowWarning(pointer, "turn_order", f"a system message after the {before}'s")
            continue
        if before is None and message.role != "user":
            yield RowWarning(pointer, "turn_order", f"the {message.role} speaks first; expected the user")
        elif before is not None and message.role not in _AFTER[before]:
            expected = " or ".join(_AFTER[before])
            yield RowWarning(pointer, "turn_order", f"{message.role} after {before}; expected {expected}")
        before = message.role
    if before == "user":
        yield RowWarning(row.message_pointers[-1], "ends_on_user", "the last turn is the user's, which nobody answers")
    elif before == "tool":
        yield RowWarning(row.message_pointers[-1], "ends_on_result", "the last turn is a result, which nobody answers")
    if all(message.weight == 0 for message in messages if message.role == "assistant"):
        yield RowWarning("", "no_supervision", "no assistant message has a weight above 0")


def classify(conversation: Conversation) -> str:
    """One of ``CLASSES``: by the calls that the conversation teaches."""
    turns = [len(message.calls) for message in conversation.messages if message.calls]
    if not turns:
        return "no_call" if conversation.tools else "no_tools"
    if max(turns) > 1:
        return "parallel"
    return "one_call" if len(turns) == 1 else "multi_turn"


CLASSES: dict[str, str] = {
    "no_tools": "no tools and no call",
    "no_call": "tools, but no call",
    "one_call": "one call",
    "multi_turn": "calls in several turns, one a turn",
    "parallel": "several calls in a turn",
}
"""The classes of conversations, of which each has one, with what they mean."""
