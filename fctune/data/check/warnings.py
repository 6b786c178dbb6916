"""Warnings about conversations that can be trained on; a warning never rejects a row."""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Iterator

from fctune.data.control_tokens import find_common_spelling
from fctune.data.conversation import Call, Conversation, Tool
from fctune.data.sources import ParsedRow, RowWarning
from fctune.data.sources.row_builder import CallPointer
from fctune.data.tool_schema import ToolSchema, load_schema

WARNING_KINDS: dict[str, str] = {
    "call_without_result": "the conversation continues without the result of a call",
    "empty_turn": "an empty message",
    "ends_on_result": "the last message is a result that is not answered",
    "ends_on_user": "the last message is the user's and is not answered",
    "missing_argument": "a call without an argument that its tool requires",
    "no_supervision": "no assistant message has a weight above 0",
    "not_in_enum": "an argument outside the values that its tool allows",
    "parallel_not_allowed": "several calls in one turn although the row sets parallel_tool_calls to false",
    "personal_data": "an email address, phone number or home directory, with --secrets",
    "placeholder_value": "an argument that looks like a placeholder",
    "reasoning_switched_off": "reasoning in a row that switches thinking off",
    "repeated_call": "the same call twice in one turn",
    "repeated_tool": "a tool declared twice, identically",
    "schema_allows_nothing": "a tool's parameters allow no arguments at all, so that no call of it is valid",
    "schema_invalid": "a tool's parameters are not valid JSON Schema",
    "schema_unusable": "a tool's parameters refer to themselves endlessly, or to another document",
    "schema_violation": "arguments that violate another rule of the tool's schema",
    "secret": "a text that looks like a credential; `fctune data convert --redact` replaces it",
    "spelled_control_token": "text of a special token in a row, which a tokenizer may encode as that token",
    "think_tag_in_content": "an assistant's text with a think tag after its start, which stays in the text",
    "tools_changed": "a record that another one continues with other tools; both are kept",
    "tools_in_prompt": "the system prompt lists tools in its own wording",
    "turn_order": "turns in an order that chat templates may reject",
    "undeclared_tool": "a call to a tool that the row does not declare",
    "unknown_argument": "an argument that the tool does not declare",
    "wrong_type": "an argument of a different type from the one that its tool declares",
}
"""The kinds of warnings about a row, and their meanings."""

BEGINS_ANOTHER = "begins_another"
PAIR_WARNING_KINDS: dict[str, str] = {
    BEGINS_ANOTHER: "a conversation that another row continues, so that its turns count twice; `--fold always` folds it"
}
"""The kinds of warnings that two rows give together."""

_PLACEHOLDER = re.compile(
    r"<[A-Za-z][\w .-]*>|\{\{.*\}\}|\[(?:insert|your|enter)\b.*\]|your[_ -]?(?:api[_ -]?key|token|password)\w*", re.I
)
_THINK_TAG = re.compile(r"</?think(?:ing)?>")
_MAX_REASON = 200
_FOLLOWING_ROLES = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}


# A schema with one of these may allow arguments that its properties do not list.
_OPENING_KEYS = frozenset({"additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf"})


def iter_warnings(row: ParsedRow) -> Iterator[RowWarning]:
    """Yield the warnings about a row: the reader's, then those about turns, tools and calls."""
    yield from row.warnings
    yield from _iter_turn_warnings(row)
    yield from _iter_reasoning_warnings(row)
    found = find_common_spelling(row.conversation)
    if found is not None:
        yield RowWarning("", "spelled_control_token", found)
    tools = {tool.name: tool for tool in row.conversation.tools}
    for i, tool in enumerate(row.conversation.tools):
        schema, pointer = _load(tool), f"{row.tools_pointer}[{i}]{row.tools_suffix}.parameters"
        if (problem := schema.problem) is not None:
            yield RowWarning(f"{pointer}{problem.path}", problem.kind, f"{tool.name}: {problem.reason}")
        elif schema.allows_nothing:
            yield RowWarning(pointer, "schema_allows_nothing", f"{tool.name}: allows no arguments at all")
    located = iter(row.call_pointers)
    for message, pointer in zip(row.conversation.messages, row.message_pointers, strict=True):
        pointers = [next(located) for _ in message.calls]
        for j, (call, at) in enumerate(zip(message.calls, pointers, strict=True)):
            if pointers.count(at) > 1:  # calls in one text
                at = CallPointer(f"{at.call}[{j}]", f"{at.call}[{j}].arguments")
            yield from _iter_call_warnings(call, at, tools)
        if len(message.calls) > 1:
            texts = [call.name + json.dumps(call.arguments, sort_keys=True) for call in message.calls]
            if len(set(texts)) < len(texts):
                yield RowWarning(pointer, "repeated_call", "the same call appears twice in one turn")


def _load(tool: Tool) -> ToolSchema:
    return load_schema(marshal.dumps(tool.parameters, 2))


def _iter_call_warnings(call: Call, pointer: CallPointer, tools: dict[str, Tool]) -> Iterator[RowWarning]:
    tool = tools.get(call.name)
    if tool is None:
        declared = ", ".join(list(tools)[:8]) or "none"
        reason = f"{call.name} is not declared (declared: {declared})"
        yield RowWarning(f"{pointer.call}.name", "undeclared_tool", reason)
    else:
        yield from _iter_schema_warnings(call, tool, pointer.arguments)
    for name, value in call.arguments.items():
        if isinstance(value, str) and len(value) < 100 and _PLACEHOLDER.fullmatch(value.strip()):
            yield RowWarning(f"{pointer.arguments}.{name}", "placeholder_value", f"{value!r} looks like a placeholder")


def _iter_schema_warnings(call: Call, tool: Tool, pointer: str) -> Iterator[RowWarning]:
    schema, properties = _load(tool), tool.parameters.get("properties")
    if schema.problem is not None:
        return
    if isinstance(properties, dict) and _OPENING_KEYS.isdisjoint(tool.parameters):
        for name in call.arguments:
            if name not in properties:
                known = ", ".join(sorted(properties)) or "none"
                reason = f"{call.name} declares no argument {name!r} (declared: {known})"
                yield RowWarning(f"{pointer}.{name}", "unknown_argument", reason[:_MAX_REASON])
    for finding in schema.find_errors(call.arguments):
        yield RowWarning(f"{pointer}{finding.path}", finding.kind, finding.reason)


def _iter_turn_warnings(row: ParsedRow) -> Iterator[RowWarning]:
    messages = row.conversation.messages
    before: str | None = None
    for message, pointer in zip(messages, row.message_pointers, strict=True):
        if not message.calls and not (message.content or "").strip():
            yield RowWarning(pointer, "empty_turn", f"the {message.role} message is empty")
        if message.role == "system":
            if before is not None:
                yield RowWarning(pointer, "turn_order", f"a system message after the {before}'s")
            continue
        if before is None and message.role != "user":
            yield RowWarning(pointer, "turn_order", f"the {message.role} speaks first; expected the user")
        elif before is not None and message.role not in _FOLLOWING_ROLES[before]:
            expected = " or ".join(_FOLLOWING_ROLES[before])
            yield RowWarning(pointer, "turn_order", f"{message.role} after {before}; expected {expected}")
        before = message.role
    if before == "user":
        yield RowWarning(row.message_pointers[-1], "ends_on_user", "the last turn is the user's and is not answered")
    elif before == "tool":
        yield RowWarning(row.message_pointers[-1], "ends_on_result", "the last turn is a result that is not answered")
    if all(message.weight == 0 for message in messages if message.role == "assistant"):
        yield RowWarning("", "no_supervision", "no assistant message has a weight above 0")


def _iter_reasoning_warnings(row: ParsedRow) -> Iterator[RowWarning]:
    switches = row.conversation.template_args
    off = next((name for name in ("enable_thinking", "thinking") if switches.get(name) is False), None)
    for message, pointer in zip(row.conversation.messages, row.message_pointers, strict=True):
        if message.reasoning is not None and off is not None:
            yield RowWarning(pointer, "reasoning_switched_off", f"has reasoning, and the row sets {off} to false")
        tag = _THINK_TAG.search(message.content) if message.role == "assistant" and message.content else None
        if tag is not None:
            yield RowWarning(pointer, "think_tag_in_content", f"{tag[0]} stays in the text, which is not reasoning")


def classify(conversation: Conversation) -> str:
    """Return the conversation's class (a key of ``CLASSES``), which depends on its calls."""
    turns = [len(message.calls) for message in conversation.messages if message.calls]
    if not turns:
        return "no_call" if conversation.tools else "no_tools"
    if max(turns) > 1:
        return "parallel"
    return "one_call" if len(turns) == 1 else "multi_turn"


CLASSES: dict[str, str] = {
    "no_tools": "no tools and no calls",
    "no_call": "tools, but no calls",
    "one_call": "one call",
    "multi_turn": "calls in several turns, one per turn",
    "parallel": "several calls in a turn",
}
"""The classes of conversations and their meanings; every conversation has exactly one."""
