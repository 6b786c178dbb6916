"""Chat templates that report which text they print for which message.

A marker is inserted into the Jinja tree at the head of every loop over messages, so one rendering gives the text and
the spans of its messages without knowledge of the strings that a model family uses.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jinja2
from jinja2 import nodes

from fctune.data.conversation import Conversation
from fctune.errors import DataError


@dataclass(frozen=True, slots=True)
class Span:
    """The text ``[start, stop)`` of a rendering that belongs to one message."""

    message: int
    start: int
    stop: int


class _IndexedMessage(dict[str, Any]):
    """A message with its index, which is an attribute so that a template that dumps the mapping does not print it."""

    def __init__(self, message: dict[str, Any], index: int):
        super().__init__(message)
        self._index = index  # the sandbox hides names that begin with an underscore


class TracedTemplate:
    """A chat template in Jinja, rendered as transformers renders it.

    Args:
        source: The template's text.
        variables: Variables in addition to messages and tools, such as the special tokens.

    Raises (at construction):
        DataError: The template is not valid Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any]):
        self._source, self._variables = source, variables
        self._nonce = secrets.token_hex(8)
        self._marker = re.compile(rf"\[{self._nonce}:(\d+):(\d*)\]")
        self._template = self._instrument(source)

    def __reduce__(self) -> tuple[type[TracedTemplate], tuple[str, dict[str, Any]]]:
        return TracedTemplate, (self._source, self._variables)  # compiled templates do not pickle

    def render(
        self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans of its messages, outer spans before inner ones.

        Raises:
            DataError: The template rejects the conversation; the error quotes the template's message.
        """
        # transformers drops keys without a value too.
        messages = [
            _IndexedMessage({k: v for k, v in message.to_openai().items() if v is not None}, index)
            for index, message in enumerate(conversation.messages)
        ]
        tools = [tool.to_openai() for tool in conversation.tools] or None
        try:
            marked = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **variables, _OPENED: set()},
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template rejects it: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the chat template fails on it: {type(error).__name__}: {error}") from None
        return self._take_markers(marked)

    def _instrument(self, source: str) -> jinja2.Template:
        """Compile the template with a marker where a loop reaches a message and another where that loop ends."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            # A copy: transformers keeps its environment for its own renderings.
            environment: jinja2.Environment = _compile_jinja_template(source).environment.overlay()
            environment.getattr = partial(_get_attribute, environment, environment.getattr)  # type: ignore[method-assign]
            environment.filters = environment.filters | {"fctune_turn": self._mark_turn, "fctune_end": self._mark_end}
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise DataError(f"its chat template is not valid Jinja ({error}).") from None
        bodies = [body for node in (tree, *tree.find_all(nodes.Node)) for body in _bodies(node)]
        loops = [
            (body, n) for body in bodies for n in body if isinstance(n, nodes.For) and isinstance(n.target, nodes.Name)
        ]
        for number, (body, loop) in enumerate(loops):
            name = loop.target.name  # type: ignore[attr-defined]
            loop.body[:0] = environment.parse(f"{{{{ {name} | fctune_turn({number}) }}}}").body
            index = next(i for i, statement in enumerate(body) if statement is loop)
            body[index + 1 : index + 1] = environment.parse(f"{{{{ {number} | fctune_end }}}}").body
        return environment.from_string(tree)

    @jinja2.pass_context
    def _mark_turn(self, context: jinja2.runtime.Context, item: Any, loop: int) -> str:
        """Return a loop's marker for an item; empty unless it is a message, since macros trim and compare text."""
        if type(item) is not _IndexedMessage:
            return ""
        context.parent[_OPENED].add(loop)
        return f"[{self._nonce}:{loop}:{item._index}]"

    @jinja2.pass_context
    def _mark_end(self, context: jinja2.runtime.Context, loop: int) -> str:
        opened = context.parent[_OPENED]
        if loop not in opened:
            return ""
        opened.remove(loop)
        return f"[{self._nonce}:{loop}:]"

    def _take_markers(self, marked: str) -> tuple[str, list[Span]]:
        parts = self._marker.split(marked)
        plain = "".join(parts[::3])
        spans: list[Span] = []
        length = 0
        # Open loops over messages, outermost first: loop number, current message, start of its text.
        stack: list[tuple[str, int, int]] = []

        def close(message: int, start: int) -> None:
            if not plain[start:length].isspace() and length > start:
                spans.append(Span(message, start, length))

        for text, number, index in itertools.zip_longest(parts[::3], parts[1::3], parts[2::3]):
            length += len(text)
            if number is None:
                break
            if stack and stack[-1][0] == number:
                close(*stack.pop()[1:])
            if index:
                stack.append((number, int(index), length))
        return plain, sorted(spans, key=lambda span: (span.start, -span.stop))


_OPENED = "fctune_opened"  # template variable: the loops that are at a message
_NOT_KEYS = frozenset(dir(dict))


def _get_attribute(environment: jinja2.Environment, fallback: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """Return ``value.name`` in a template; keys of messages and tools need no check by the sandbox."""
    if type(value) in (dict, _IndexedMessage) and name not in _NOT_KEYS:
        return value[name] if name in value else environment.undefined(obj=value, name=name)
    return fallback(value, name)


def _bodies(node: nodes.Node) -> list[list[nodes.Node]]:
    """Return the lists of statements of a node of the Jinja tree."""
    return [body for field in ("body", "else_") if isinstance(body := getattr(node, field, None), list)]
