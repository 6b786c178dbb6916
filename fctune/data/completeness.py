"""The check that a chat template prints every call, result and piece of content of a row.

Some templates print the first call of a turn only, or no text next to a call, without an error. Two checks find it:

- by structure: the row is rendered once more with a unique word in each part, and every word must be in the text.
  Templates decide by the presence of parts, so rows of equal structure share the result.
- by value: the row's own texts, names and arguments must be in its rendering.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.data.conversation import Call, Conversation
from fctune.data.structure import describe_structure, mark_parts
from fctune.data.tracing import TracedTemplate

_MAX_STRUCTURES = 20_000
_END_OF_REASONING = "</think>"  # templates drop the reasoning of earlier turns, as they do when the model answers


REASONING = -1
# Python's texts between single quotes, where repr would take double ones: LFM's templates write them.
_SINGLE_QUOTED = str.maketrans({"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r"})


class Missing(NamedTuple):
    """A part of a message that the rendering lacks: its content if ``call`` is None, else the call of that index.

    The index of its reasoning is -1.
    """

    message: int
    call: int | None

    @property
    def is_call(self) -> bool:
        """True for a call, False for content and reasoning."""
        return self.call is not None and self.call != REASONING


class UnprintedError(DataError):
    """A chat template does not print some parts of a conversation, the first of which is ``first``."""

    def __init__(self, reason: str, first: Missing | None = None):
        super().__init__(reason)
        self.first = first


class CompletenessCheck:
    """Finds the parts of conversations that a chat template does not print."""

    def __init__(self, template: TracedTemplate):
        self._template = template
        self._by_structure: dict[Any, tuple[Missing, ...]] = {}

    def __reduce__(self) -> tuple[type[CompletenessCheck], tuple[TracedTemplate]]:
        return CompletenessCheck, (self._template,)

    def find_missing(
        self, conversation: Conversation, text: str, render: Callable[[Conversation], str] | None = None
    ) -> list[Missing]:
        """Return the parts of a conversation that its rendering lacks, in order.

        Args:
            conversation: Conversation.
            text: Its rendering.
            render: Renders conversations of the same structure alike; None renders with the template.
        """
        structure = (render is None, describe_structure(conversation))
        found = self._by_structure.get(structure)
        if found is None:
            if len(self._by_structure) >= _MAX_STRUCTURES:
                self._by_structure.clear()
            found = self._by_structure[structure] = tuple(self._probe(conversation, render))
        missing = set(found)
        missing.update(_iter_missing(conversation, text))
        return sorted(missing, key=lambda part: (part.message, -2 if part.call is None else part.call))

    def _probe(self, conversation: Conversation, render: Callable[[Conversation], str] | None) -> Iterator[Missing]:
        """Yield the parts that are missing from a rendering of the conversation with a unique word in each part."""
        probe = mark_parts(conversation)
        try:
            text = self._template.render(probe)[0] if render is None else render(probe)
        except DataError:
            return  # it depends on the values, which the other check compares
        yield from _iter_missing(probe, text)


def _iter_missing(conversation: Conversation, text: str) -> Iterator[Missing]:
    for index, message in enumerate(conversation.messages):
        for part, value in ((None, message.content), (REASONING, message.reasoning)):
            words = value and value.strip()
            if words and words not in text and not _is_printed_content(words, text):
                yield Missing(index, part)
        for number, call in enumerate(message.calls):
            if call.name not in text or not _has_arguments(call.arguments, text):
                yield Missing(index, number)


def describe_missing(missing: list[Missing], conversation: Conversation) -> str:
    """Return an error message: the parts that the rendering lacks, and the remedy."""
    parts, remedies = [], []
    for index, number in missing:
        message = conversation.messages[index]
        if number == REASONING:
            parts.append(f"the reasoning of messages[{index}]")
            remedies.append("set data.reasoning=keep_printed to train without reasoning that it does not print")
        elif number is not None:
            name = message.calls[number].name
            parts.append(f"call {number + 1} of {len(message.calls)} of messages[{index}] ({name[:80]})")
            remedies.append(
                "set data.parallel_calls=split to make a turn of each call" if len(message.calls) > 1 else ""
            )
        elif message.calls:
            parts.append(f"the text next to a call in messages[{index}]")
            remedies.append("set data.content_with_calls=drop to train without such text")
        else:
            parts.append(f"the content of messages[{index}] ({message.role})")
            remedies.append("")
    steps = [*dict.fromkeys(filter(None, remedies)), "change the row", "use another template"]
    return f"the chat template does not print {', '.join(parts)}; {', or '.join(steps)}"


def find_unescaped(calls: tuple[Call, ...], text: str) -> str | None:
    """Return the path of an argument that ``text`` quotes without escaping, so that no parser can read it; or None."""
    for call in calls:
        for path, value in _iter_texts(call.arguments, ""):
            for quote in ("'", '"'):
                is_special = quote in value or "\\" in value or "\n" in value
                if is_special and f"{quote}{value}{quote}" in text:
                    return f"{call.name[:80]}{path}"
    return None


def _is_printed_content(content: str, text: str) -> bool:
    """Return True if a content is printed escaped, without its reasoning, or with other whitespace."""
    if _END_OF_REASONING in content:
        answer = content.rpartition(_END_OF_REASONING)[2].strip()
        if answer in text:
            return True
    if any(json.dumps(content, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (False, True)):
        return True
    return "".join(content.split()) in "".join(text.split())


def _has_arguments(value: Any, text: str) -> bool:
    """Return True if the keys and values of arguments are in a text, in any of the usual spellings."""
    if isinstance(value, dict):
        return all(_has_text(key, text) and _has_arguments(item, text) for key, item in value.items())
    if isinstance(value, list):
        return all(_has_arguments(item, text) for item in value)
    if isinstance(value, str):
        return _has_text(value, text)
    return True if value is None else str(value) in text or json.dumps(value) in text


def _has_text(value: str, text: str) -> bool:
    if value in text or _is_printed_content(value.strip(), text):
        return True
    return repr(value)[1:-1] in text or value.translate(_SINGLE_QUOTED) in text


def _iter_texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _iter_texts(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _iter_texts(item, f"{path}[{index}]")
