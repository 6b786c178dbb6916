"""A chat template that tells which text it printed for which message.

Its Jinja tree is given a marker at the head of every loop over messages, so one rendering gives the text and its
division; nothing is guessed from the strings a family of models happens to use.
"""

from __future__ import annotations

import itertools
import re
import secrets
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

from fctune.data.conversation import Conversation
from fctune.errors import DataError


@dataclass(frozen=True, slots=True)
class Span:
    """Text ``[start, stop)`` of a rendering that belongs to one message."""

    message: int
    start: int
    stop: int


class _Tagged(dict[str, Any]):
    """A message that knows its place; an attribute, so that a template which dumps the mapping does not see it."""

    def __init__(self, message: dict[str, Any], place: int):
        super().__init__(message)
        self.place = place


class TracedTemplate:
    """A chat template in Jinja, rendered as transformers renders it.

    Args:
        source: the template.
        variables: what it may use beside messages and tools, such as the special tokens.

    Raises (at construction):
        DataError: not valid Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any]):
        self._variables = variables
        self._nonce = secrets.token_hex(8)
        self._marker = re.compile(rf"\[{self._nonce}:(\d+):(\d*)\]")
        self._template = self._instrument(source)

    def render(
        self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and its spans: outer ones before those within them.

        Raises:
            DataError: when the template refuses it, with the template's own words.
        """
        # Keys without a value are left out, as transformers leaves them out.
        messages = [
            _Tagged({k: v for k, v in message.to_openai().items() if v is not None}, place)
            for place, message in enumerate(conversation.messages)
        ]
        tools = [tool.to_openai() for tool in conversation.tools] or None
        try:
            marked = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **variables},
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template refuses it: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"the chat template fails on it: {type(error).__name__}: {error}") from None
        return self._take_markers(marked)

    def _instrument(self, source: str) -> jinja2.Template:
        """The template with a marker wherever a loop turns to a message, and one where that loop ends."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment: jinja2.Environment = _compile_jinja_template(source).environment
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise DataError(f"its chat template is not valid Jinja ({error}).") from None
        bodies = [body for node in (tree, *tree.find_all(nodes.Node)) for body in _bodies(node)]
        loops = [
            (body, n) for body in bodies for n in body if isinstance(n, nodes.For) and isinstance(n.target, nodes.Name)
        ]
        for number, (body, loop) in enumerate(loops):
            # A flag per loop: loops over anything but messages must print nothing, as macros trim and compare text.
            name, flag = loop.target.name, f"fctune_loop_{number}"  # type: ignore[attr-defined]
            before = f"{{% set {flag} = namespace(opened=false) %}}"
            head = (
                f"{{% if {name}.place is defined %}}{{% set {flag}.opened = true %}}"
                f"{{{{ '[{self._nonce}:{number}:' ~ {name}.place ~ ']' }}}}{{% endif %}}"
            )
            after = f"{{% if {flag}.opened %}}[{self._nonce}:{number}:]{{% endif %}}"
            loop.body[:0] = environment.parse(head).body
            place = next(i for i, statement in enumerate(body) if statement is loop)
            body[place : place + 1] = [*environment.parse(before).body, loop, *environment.parse(after).body]
        return environment.from_string(tree)

    def _take_markers(self, marked: str) -> tuple[str, list[Span]]:
        parts = self._marker.split(marked)
        plain = "".join(parts[::3])
        spans: list[Span] = []
        length = 0
        # Loops over messages that we are in, outermost first: their number, the message they are at, where it began.
        stack: list[tuple[str, int, int]] = []

        def close(message: int, start: int) -> None:
            if not plain[start:length].isspace() and length > start:
                spans.append(Span(message, start, length))

        for text, number, place in itertools.zip_longest(parts[::3], parts[1::3], parts[2::3]):
            length += len(text)
            if number is None:
                break
            if stack and stack[-1][0] == number:
                close(*stack.pop()[1:])
            if place:
                stack.append((number, int(place), length))
        return plain, sorted(spans, key=lambda span: (span.start, -span.stop))


def _bodies(node: nodes.Node) -> list[list[nodes.Node]]:
    """Every list of statements of a node of the Jinja tree."""
    return [body for field in ("body", "else_") if isinstance(body := getattr(node, field, None), list)]
