"""Control tokens in the text of rows: found, or hidden from template and tokenizer to be encoded as plain text.

A special token that is spelled in a row would be encoded as the control token itself: the model would see, or learn to
produce, the end of a turn in the middle of a text. All that a template can print is searched: messages with their
names, ids and calls, tools, and the row's switches of the template. A template could also join the end of one text with
the beginning of another, or change the case of a text, so that a token results; what such a token would be made of is
hidden too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fctune.base.errors import DataError
from fctune.data.conversation import Call, Conversation, Message, Tool
from fctune.data.value_bytes import dump_value

# Hidden characters are shifted one for one, so offsets in a rendering stay valid: ASCII to rare ideographs, which
# Python's repr and JSON print as they are, other characters to the private-use plane 15.
_ASCII_SHIFT, _SHIFT = 0x20000, 0xF0000
_MAX_TOOLS = 2_000  # of which the result of a search is kept
_HIDDEN = re.compile("[\U00020000-\U0002007f\U000f0000-\U000ffffd]+")

# The spellings of the control tokens of public chat models, for rows that are checked without a tokenizer.
_COMMON_SPELLINGS = re.compile(
    r"<[|｜][\w▁/-]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]"
)
_COMMON_IN_BYTES = re.compile("<[|]|<｜|_of_turn>|INST]|TOOL_|AVAILABLE_TOOLS".encode())


class ControlTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, contents: Iterable[str]):
        self._contents = frozenset(filter(str.strip, contents))
        self._spelled = _match_any(self._contents)
        self._in_any_case = re.compile(self._spelled.pattern, re.IGNORECASE)
        self._starts = {token[:size] for token in self._contents for size in range(2, len(token))}
        self._ends = {token[-size:] for token in self._contents for size in range(2, len(token))}
        self._longest = max(map(len, self._contents), default=0)
        # What a row must hold if any of it is to be hidden, in bytes.
        pieces = {piece.encode() for token in self._contents for piece in (token[:2], token[-2:])}
        self._in_bytes = re.compile(b"|".join(sorted(map(re.escape, pieces))) or b"(?!)", re.IGNORECASE)
        self._tools: dict[int, tuple[Tool, Tool]] = {}  # by id; holds the tools, so no id is used again

    def __reduce__(self) -> tuple[type[ControlTokens], tuple[frozenset[str]]]:
        return ControlTokens, (self._contents,)

    def find(self, conversation: Conversation) -> str | None:
        """Return where the first control token is spelled in a conversation and its spelling, or None."""
        return next(_iter_spelled(conversation, self._spelled), None) if self._is_suspect(conversation) else None

    def find_piece(self, conversation: Conversation) -> str:
        """Return where the first text is that ``hide`` changes, and the piece of a control token in it."""
        for path, text in _iter_texts(conversation):
            hidden = self._hide_text(text)
            if hidden != text:
                piece = "".join(a for a, b in zip(text, hidden, strict=True) if a != b)
                return f"{path} holds {piece[:80]!r}"
        raise AssertionError("nothing was hidden")

    def hide(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the characters of its control tokens shifted; ``restore_hidden`` undoes it.

        So are those that could become a control token together with other text. The conversation itself if there are
        none.

        Raises:
            DataError: The conversation holds characters that hidden ones are shifted to.
        """
        if not self._is_suspect(conversation):
            return conversation
        messages = tuple(map(self._hide_message, conversation.messages))
        tools = tuple(map(self._hide_tool, conversation.tools))
        hidden = replace(
            conversation, messages=messages, tools=tools, template_args=self._hide_value(conversation.template_args)
        )
        if hidden == conversation:
            return conversation
        if any(has_hidden(text) for _, text in _iter_texts(conversation)):
            raise DataError(
                "contains the text of a special token and characters that stand for it while it is encoded as plain "
                "text (U+20000 to U+2007F and the private-use plane 15); remove either from the row"
            )
        return hidden

    def has_formed(self, text: str) -> bool:
        """Return True if the rendering of a conversation with hidden characters would have other control tokens."""
        return self._spelled.findall(text) != self._spelled.findall(restore_hidden(text))

    def _is_suspect(self, conversation: Conversation) -> bool:
        """Return True if a conversation may hold what is to be hidden; rows share tools, so those are kept."""
        messages = [message.to_openai() for message in conversation.messages]
        if self._in_bytes.search(_dump([messages, conversation.template_args])) is not None:
            return True
        return any(self._hide_tool(tool) is not tool for tool in conversation.tools)

    def _hide_message(self, message: Message) -> Message:
        hide = self._hide_value
        calls = tuple(Call(hide(call.name), hide(call.arguments), hide(call.id)) for call in message.calls)
        return replace(
            message,
            content=hide(message.content),
            calls=calls,
            call_id=hide(message.call_id),
            name=hide(message.name),
            reasoning=hide(message.reasoning),
        )

    def _hide_tool(self, tool: Tool) -> Tool:
        """Return a tool with what is to be hidden shifted; the same object if that is nothing."""
        known = self._tools.get(id(tool))
        if known is None:
            if len(self._tools) >= _MAX_TOOLS:
                self._tools.clear()
            hidden = Tool(self._hide_value(tool.function)) if self._in_bytes.search(_dump(tool.function)) else tool
            known = self._tools[id(tool)] = tool, tool if hidden == tool else hidden
        return known[1]

    def _hide_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self._hide_value(key): self._hide_value(item) for key, item in value.items()}
        return [self._hide_value(item) for item in value] if isinstance(value, list | tuple) else value

    def _hide_text(self, text: str) -> str:
        text = self._in_any_case.sub(lambda match: _shift(match[0]), text)
        # Templates strip texts, so the ends are those of the words.
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        for size in range(min(self._longest, end - start) - 1, 1, -1):
            if text[end - size : end] in self._starts:
                text = text[: end - size] + _shift(text[end - size : end]) + text[end:]
                break
        for size in range(min(self._longest, end - start) - 1, 1, -1):
            if text[start : start + size] in self._ends:
                return text[:start] + _shift(text[start : start + size]) + text[start + size :]
        return text


def find_common_spelling(conversation: Conversation) -> str | None:
    """Return the place and spelling of a public chat model's control token in a conversation, or None."""
    if _COMMON_IN_BYTES.search(_dump(conversation.to_openai())) is None:
        return None
    return next(_iter_spelled(conversation, _COMMON_SPELLINGS), None)


def has_hidden(text: str) -> bool:
    """Return True if a text holds hidden characters."""
    return _HIDDEN.search(text) is not None


def restore_hidden(text: str) -> str:
    """Return the text with its hidden characters restored; the length stays the same."""
    return _HIDDEN.sub(lambda match: "".join(map(_restore, match[0])), text)


def _restore(char: str) -> str:
    return chr(ord(char) - (_SHIFT if ord(char) >= _SHIFT else _ASCII_SHIFT))


def _shift(text: str) -> str:
    return "".join(
        chr(ord(char) + (_ASCII_SHIFT if char.isascii() else _SHIFT)) if ord(char) < 0xFFFE else char for char in text
    )


def _dump(value: Any) -> bytes:
    """Return all strings of a value in UTF-8, among other bytes."""
    dumped = dump_value(value)
    return repr(value).encode("utf-8", "surrogatepass") if dumped is None else dumped


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    escaped = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile("|".join(escaped) or r"(?!)")


def _iter_spelled(conversation: Conversation, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the place and spelling of each match in the texts of a conversation."""
    for path, text in _iter_texts(conversation):
        yield from (f"{path} holds {match[0]!r}" for match in pattern.finditer(text))


def _iter_texts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each string of a row that a template can print: messages, tools, then switches."""
    for index, message in enumerate(conversation.messages):
        path = f"messages[{index}]"
        yield from _iter_strings(message.reasoning, f"{path}.reasoning_content")
        yield from _iter_strings(message.content, f"{path}.content")
        for number, call in enumerate(message.calls):
            for part in ("name", "arguments", "id"):
                yield from _iter_strings(getattr(call, part), f"{path}.tool_calls[{number}].{part}")
        yield from _iter_strings(message.call_id, f"{path}.tool_call_id")
        yield from _iter_strings(message.name, f"{path}.name")
    for index, tool in enumerate(conversation.tools):
        yield from _iter_strings(tool.function, f"tools[{index}].function")
    yield from _iter_strings(conversation.template_args, "chat_template_kwargs")


def _iter_strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _iter_strings(key, f"a key of {path}")
            yield from _iter_strings(item, f"{path}.{key!s:.40}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _iter_strings(item, f"{path}[{index}]")
