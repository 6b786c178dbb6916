"""Control tokens in the content of rows: found, or hidden from template and tokenizer to be encoded as plain text.

A special token that is spelled in a message, a tool or an argument would be encoded as the control token itself: the
model would see, or learn to produce, the end of a turn in the middle of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fctune.data.conversation import Call, Conversation, Tool
from fctune.data.value_bytes import dump_value
from fctune.errors import DataError

# Hidden characters are shifted from the Basic Multilingual Plane to the private-use plane 15: one for one, so offsets
# in a rendering stay valid, and no template or tokenizer gives them a meaning.
_SHIFT = 0xF0000
_MAX_TOOLS = 2_000  # of which the result of a search is kept
_HIDDEN = re.compile("[\U000f0000-\U000ffffd]+")

# The spellings of the control tokens of public chat models, for rows that are checked without a tokenizer.
_COMMON_SPELLINGS = re.compile(
    r"<[|｜][\w▁/-]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
_COMMON_IN_BYTES = re.compile("<[|]|<｜|_of_turn>|INST]|TOOL_|AVAILABLE_TOOLS".encode())


class ControlTokens:
    """The special tokens of a tokenizer.

    Args:
        contents: Their spellings.
    """

    def __init__(self, contents: Iterable[str]):
        self._contents = frozenset(filter(str.strip, contents))
        self._in_text = _match_any(self._contents)
        self._in_bytes = re.compile(self._in_text.pattern.encode())
        self._tools: dict[int, tuple[Tool, bool]] = {}  # by id; holds the tools, so no id is used again

    def __reduce__(self) -> tuple[type[ControlTokens], tuple[frozenset[str]]]:
        return ControlTokens, (self._contents,)

    def find(self, conversation: Conversation) -> str | None:
        """Return where the first control token is spelled in a conversation and its spelling, or None."""
        return next(iter_spelled(conversation, self._in_text), None) if self._is_spelled(conversation) else None

    def hide(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the characters of its control tokens shifted; ``restore_hidden`` undoes it.

        Raises:
            DataError: The conversation holds characters of the private-use plane that hidden ones are shifted to.
        """
        if not self._is_spelled(conversation):
            return conversation
        if _HIDDEN.search(conversation.to_json()) is not None:
            raise DataError(
                "contains the text of a special token and characters of Unicode's private-use plane 15, so the token "
                "cannot be encoded as plain text; remove either from the row"
            )
        return map_strings(conversation, lambda text: self._in_text.sub(lambda match: _shift(match[0]), text))

    def _is_spelled(self, conversation: Conversation) -> bool:
        messages = [message.to_openai() for message in conversation.messages]
        if self._in_bytes.search(_dump([messages, conversation.template_args])) is not None:
            return True
        return any(map(self._is_spelled_in_tool, conversation.tools))

    def _is_spelled_in_tool(self, tool: Tool) -> bool:
        """Search a tool; rows share tools, so the result is kept."""
        known = self._tools.get(id(tool))
        if known is None:
            if len(self._tools) >= _MAX_TOOLS:
                self._tools.clear()
            known = self._tools[id(tool)] = tool, self._in_bytes.search(_dump(tool.function)) is not None
        return known[1]


def find_common_spelling(conversation: Conversation) -> str | None:
    """Return the place and spelling of a public chat model's control token in a conversation, or None."""
    if _COMMON_IN_BYTES.search(_dump(conversation.to_openai())) is None:
        return None
    return next(iter_spelled(conversation, _COMMON_SPELLINGS), None)


def iter_spelled(conversation: Conversation, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the place and spelling of each match in the strings of a conversation: messages first, then tools."""
    for index, message in enumerate(conversation.messages):
        calls = [(call.name, call.arguments) for call in message.calls]
        for part in (message.reasoning or "", message.content or "", calls):
            for text in _iter_strings(part):
                yield from (
                    f"messages[{index}] ({message.role}) holds {match[0]!r}" for match in pattern.finditer(text)
                )
    for tool in conversation.tools:
        for text in _iter_strings(tool.function):
            yield from (f"the tool {tool.name[:80]} holds {match[0]!r}" for match in pattern.finditer(text))


def map_strings(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    """Return the conversation with every string changed: contents, reasoning, names, arguments and tools."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    messages = [
        replace(
            message,
            content=walk(message.content),
            calls=tuple(Call(change(call.name), walk(call.arguments), call.id) for call in message.calls),
            name=walk(message.name),
            reasoning=walk(message.reasoning),
        )
        for message in conversation.messages
    ]
    tools = tuple(Tool(walk(tool.function)) for tool in conversation.tools)
    return replace(conversation, messages=tuple(messages), tools=tools)


def has_hidden(text: str) -> bool:
    """Return True if a text holds hidden characters."""
    return _HIDDEN.search(text) is not None


def restore_hidden(text: str) -> str:
    """Return the text with its hidden characters restored; the length stays the same."""
    return _HIDDEN.sub(lambda match: "".join(chr(ord(char) - _SHIFT) for char in match[0]), text)


def _dump(value: Any) -> bytes:
    """Return all strings of a value in UTF-8, among other bytes."""
    dumped = dump_value(value)
    return repr(value).encode("utf-8", "surrogatepass") if dumped is None else dumped


def _shift(text: str) -> str:
    return "".join(chr(ord(char) + _SHIFT) if ord(char) < 0xFFFE else char for char in text)


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    escaped = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(escaped) or r"(?!)")


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_strings(item)
