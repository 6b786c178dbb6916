"""The structure of conversations: which parts their messages have, apart from the values.

Chat templates decide by the presence of parts, so a property of a rendering that holds with unique words for values
holds for all conversations of the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fctune.data.conversation import Call, Conversation, Message

_WORD = "fctprobe"


def describe_structure(conversation: Conversation) -> tuple[Any, ...]:
    """Return a hashable description of the parts that a conversation has."""
    switches = repr(conversation.template_args) if conversation.template_args else None
    return bool(conversation.tools), switches, *map(_describe_message, conversation.messages)


def mark_parts(conversation: Conversation) -> Conversation:
    """Return the conversation with a unique word as each content, reasoning, call name, argument name and argument."""
    return replace(conversation, messages=tuple(_mark_messages(conversation.messages)))


def _describe_message(message: Message) -> tuple[Any, ...]:
    calls = tuple([bool(call.arguments) for call in message.calls])
    names = message.call_id is None, message.name is None
    return message.role, _describe_text(message.content), _describe_text(message.reasoning), calls, names


def _describe_text(text: str | None) -> Any:
    """Return whether there is a text and if so, the whitespace around it, which templates strip."""
    if not text:
        return text
    words = text.strip()
    if len(words) == len(text):
        return True
    return text.partition(words)[::2] if words else text


def _mark_messages(messages: tuple[Message, ...]) -> Iterator[Message]:
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.calls):
            word = f"{_WORD}{index}call{number}"
            names[call.name] = f"{word}name"
            arguments = {f"{word}key": f"{word}value"} if call.arguments else {}
            calls.append(Call(f"{word}name", arguments, call.id))
        yield replace(
            message,
            content=_mark_text(message.content, f"{_WORD}{index}content"),
            reasoning=_mark_text(message.reasoning, f"{_WORD}{index}reasoning"),
            calls=tuple(calls),
            name=message.name and names.get(message.name, message.name),
        )


def _mark_text(text: str | None, word: str) -> str | None:
    words = text.strip() if text else ""
    if not text or not words:
        return text
    before, _, after = text.partition(words)
    return f"{before}{word}{after}"
