"""Chat templates that report which text they print for which message.

A marker is inserted into the Jinja tree at the head of every loop over messages, so one rendering gives the text and
the spans of its messages without knowledge of the strings that a model family uses.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jinja2
from jinja2 import meta, nodes

from fctune.base.errors import DataError
from fctune.config.chat_templates import list_shipped_templates
from fctune.data.bounded_process import BoundedProcess, LimitError, ProcessDiedError, is_bounded, run_limited
from fctune.data.call_ids import write_names_into_ids
from fctune.data.conversation import Conversation, Tool

_MAX_TOOLS = 2_000  # of which the printed JSON is kept
# A rendering has at most so many characters, or so many times those of its row: tokenising costs memory too.
_MAX_CHARACTERS, _MAX_REPEATED = 2**22, 16

P = ParamSpec("P")
T = TypeVar("T")

IN_CONTENT = "content"  # reasoning key of templates that expect reasoning inside the content
IN_LAST_CONTENT = "last_content"  # likewise for templates that know of no reasoning, so that none is in the history


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


class _ToolJson:
    """The ``tojson`` filter, which keeps the JSON of tools, since rows share them.

    A tool that is read twice is one object (``fctune.data.sources.read_context.ReadContext``), and nothing changes it.
    """

    def __init__(self, dump: Callable[..., str]):
        self._dump = dump
        self._tools: dict[int, tuple[Tool, dict[str, Any]]] = {}  # by id; holds the objects, so no id is used again
        self._texts: dict[int, dict[Any, str]] = {}  # by id of a tool, its function or its parameters; then by options

    def to_openai(self, tool: Tool) -> dict[str, Any]:
        """Return the tool as templates read it; the same object for the same tool."""
        known = self._tools.get(id(tool))
        if known is None:
            if len(self._tools) >= _MAX_TOOLS:
                self._tools.clear()
                self._texts.clear()
            value = tool.to_openai()
            known = self._tools[id(tool)] = tool, value
            for part in (value, tool.function, tool.function.get("parameters")):
                if isinstance(part, dict):
                    self._texts[id(part)] = {}
        return known[1]

    def __call__(self, value: Any, *args: Any, **options: Any) -> str:
        """Return the JSON of a value."""
        texts = self._texts.get(id(value))
        if texts is None:
            return self._dump(value, *args, **options)
        key = (args, *sorted(options.items())) if args or options else None
        text = texts.get(key)
        if text is None:
            text = texts[key] = self._dump(value, *args, **options)
        return text


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Properties of a template's text.

    Attributes:
        variables: Names of the variables that the template reads and a caller may set.
        literals: Texts that the template prints or compares with.
        examined: Markup that the template looks for in texts.
        reads_tools: True if the template reads the tools.
    """

    variables: frozenset[str]
    literals: frozenset[str]
    examined: tuple[str, ...]
    reads_tools: bool


class TracedTemplate:
    """A chat template in Jinja, rendered as transformers renders it.

    A template that does not come with fctune is compiled and rendered within limits, in a bounded process
    (``fctune.data.bounded_process``): in this one, if it is such a process.

    Args:
        source: The template's text.
        variables: Variables in addition to messages and tools: the special tokens and the template's switches. A
            conversation's own ``template_args`` are merged over them.
        reasoning_key: Name under which the template reads a message's reasoning; ``IN_CONTENT`` writes it as a
            ``<think>`` block before the content, ``IN_LAST_CONTENT`` does so in the last message only.
        has_names_in_ids: Give calls ids that contain their names, for a template that prints ids in place of names.

    Attributes:
        facts: Properties of the template's text.
        is_remote: True if it is rendered in another process.

    Raises (at construction):
        DataError: The template is not valid Jinja.
        LimitError: Compiling it takes too much time or memory.
    """

    def __init__(
        self,
        source: str,
        variables: dict[str, Any],
        reasoning_key: str = "reasoning_content",
        has_names_in_ids: bool = False,
    ):
        self.source, self._variables = source, variables
        self.reasoning_key, self.has_names_in_ids = reasoning_key, has_names_in_ids
        self.is_remote = source not in read_own_templates() and not is_bounded()
        self._program = None if self.is_remote else _open_program(source)
        self.facts: TemplateFacts = self._program.facts if self._program else _call_renderer(_read_facts, source)

    def __reduce__(self) -> tuple[type[TracedTemplate], tuple[str, dict[str, Any], str, bool]]:
        # Compiled templates do not pickle.
        return TracedTemplate, (self.source, self._variables, self.reasoning_key, self.has_names_in_ids)

    def to_messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return the messages as the template reads them.

        Reasoning is under its name there, ids have names if the template needs them, and no key is without a value.
        """
        messages = []
        given = write_names_into_ids(conversation.messages) if self.has_names_in_ids else conversation.messages
        for index, message in enumerate(given):
            # transformers drops keys without a value too.
            value = {k: v for k, v in message.to_openai().items() if v is not None}
            if message.reasoning is not None:
                del value["reasoning_content"]
                is_last = index == len(conversation.messages) - 1
                if self.reasoning_key == IN_CONTENT or (self.reasoning_key == IN_LAST_CONTENT and is_last):
                    value["content"] = f"<think>\n{message.reasoning}\n</think>\n\n{message.content or ''}"
                elif self.reasoning_key != IN_LAST_CONTENT:
                    value[self.reasoning_key] = message.reasoning
            messages.append(value)
        return messages

    def render(
        self, conversation: Conversation, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans of its messages, outer spans before inner ones.

        Raises:
            DataError: The template rejects the conversation; the error quotes the template's message.
            LimitError: It takes too much time or memory, or prints too much.
        """
        variables = {**self._variables, **conversation.template_args, **variables}
        variables["add_generation_prompt"] = add_generation_prompt
        messages = self.to_messages(conversation)
        if self._program is not None:
            return self._program.render(messages, conversation.tools, variables)
        return _call_renderer(_render, self.source, messages, conversation.tools, variables)

    def render_with_transformers(self, conversation: Conversation) -> str:
        """Return the text of a conversation as transformers' ``apply_chat_template`` does, raising what it raises."""
        arguments = self.source, self.to_messages(conversation), conversation.tools, self._variables
        if self._program is not None:
            return _render_with_transformers(*arguments)
        return _call_renderer(_render_with_transformers, *arguments)

    def may_depend_on_values(self, conversation: Conversation) -> bool:
        """Return True if texts of a conversation hold a piece of markup that the template looks for, such as a tag."""
        texts = [text for m in conversation.messages for text in (m.content, m.reasoning) if text]
        together = "\0".join(texts)
        return any(piece in together for piece in self.facts.examined)


@cache
def read_own_templates() -> frozenset[str]:
    """Return the texts of the chat templates that come with fctune, which are rendered without limits."""
    base = json.loads((Path(__file__).parents[1] / "assets/tiny_base/tokenizer_config.json").read_text("utf-8"))
    return frozenset([base["chat_template"], *(p.read_text("utf-8") for p in list_shipped_templates().values())])


_renderer: BoundedProcess | None = None
_rendering = threading.Lock()


def _call_renderer(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of a function that a bounded process calls, which all templates of this process share."""
    global _renderer
    with _rendering:
        try:
            if _renderer is None or not _renderer.is_own:
                _renderer = BoundedProcess()
            return _renderer.call(function, *args, **kwargs)
        except ProcessDiedError as error:
            raise DataError(f"the chat template cannot be rendered: {error}") from None
        finally:
            if _renderer is not None and _renderer.is_busy:  # ended, or interrupted and with an answer under way
                _renderer.close()
                _renderer = None


def _read_facts(source: str) -> TemplateFacts:
    return _open_program(source).facts


def _render(
    source: str, messages: list[dict[str, Any]], tools: Sequence[Tool], variables: Mapping[str, Any]
) -> tuple[str, list[Span]]:
    return _open_program(source).render(messages, tools, variables)


def _render_with_transformers(
    source: str, messages: list[dict[str, Any]], tools: Sequence[Tool], variables: Mapping[str, Any]
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [tool.to_openai() for tool in tools] or None
    texts, _ = run_limited(render_jinja_template, [messages], given, chat_template=source, **variables)
    return str(texts[0])


@lru_cache(maxsize=32)
def _open_program(source: str) -> _Program:
    return _Program(source)


class _Program:
    """A compiled template with markers; what it does is limited if this is a bounded process.

    Attributes:
        facts: Properties of the template's text.

    Raises (at construction):
        DataError: The template is not valid Jinja.
        LimitError: Compiling it takes too much time or memory.
    """

    def __init__(self, source: str):
        self._nonce = secrets.token_hex(8)
        self._marker = re.compile(rf"\[{self._nonce}:(\d+):(\d*)\]")
        self._run = _run_unlimited if source in read_own_templates() else run_limited
        try:
            self._template, self.facts = self._run(self._compile, source)
            return
        except jinja2.TemplateError as error:
            reason = f"is not valid Jinja ({error})"
        except LimitError:
            raise
        except Exception as error:  # such as of recursion, or of a constant expression
            reason = f"cannot be used: {type(error).__name__}: {error}"
        raise DataError(f"its chat template {reason}.")

    def render(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], variables: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Return a text and the spans of its messages; see ``TracedTemplate.render``."""
        inputs = {
            **variables,
            "messages": [_IndexedMessage(message, i) for i, message in enumerate(messages)],
            "tools": [self._tool_json.to_openai(tool) for tool in tools] or None,
            "documents": None,
            _OPENED: set(),
        }
        try:
            marked = self._run(self._template.render, inputs)
        except LimitError:
            raise
        except jinja2.TemplateError as error:
            reason = str(error).replace(f"{__name__}.{_IndexedMessage.__name__} object", "message")
            raise DataError(f"the chat template rejects it: {reason:.2000}") from None
        except Exception as error:  # a template can raise anything that its operators, filters and methods do
            raise DataError(f"the chat template fails on it: {type(error).__name__}: {error!s:.2000}") from None
        if len(marked) > _MAX_CHARACTERS:
            size = len(pickle.dumps((messages, tools, dict(variables))))
            if len(marked) > max(_MAX_CHARACTERS, _MAX_REPEATED * size):
                raise LimitError(f"it prints {len(marked):,} characters of a row of {size:,}")
        return self._take_markers(marked)

    def _compile(self, source: str) -> tuple[jinja2.Template, TemplateFacts]:
        """Compile a template with a marker where a loop reaches a message and another where that loop ends."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        # A copy: transformers keeps its environment for its own renderings.
        environment: jinja2.Environment = _compile_jinja_template("").environment.overlay()
        environment.getattr = partial(_get_attribute, environment, environment.getattr)  # type: ignore[method-assign]
        environment.filters = environment.filters | {"fctune_turn": self._mark_turn, "fctune_end": self._mark_end}
        environment.filters["tojson"] = self._tool_json = _ToolJson(environment.filters["tojson"])
        tree = environment.parse(source)
        facts = TemplateFacts(
            find_variables(tree),
            find_literals(tree),
            _find_examined(tree),
            "tools" in meta.find_undeclared_variables(tree),
        )
        bodies = [body for node in (tree, *tree.find_all(nodes.Node)) for body in _bodies(node)]
        loops = [
            (body, n) for body in bodies for n in body if isinstance(n, nodes.For) and isinstance(n.target, nodes.Name)
        ]
        for number, (body, loop) in enumerate(loops):
            name = loop.target.name  # type: ignore[attr-defined]
            loop.body[:0] = environment.parse(f"{{{{ {name} | fctune_turn({number}) }}}}").body
            index = next(i for i, statement in enumerate(body) if statement is loop)
            body[index + 1 : index + 1] = environment.parse(f"{{{{ {number} | fctune_end }}}}").body
        return environment.from_string(tree), facts

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
        texts = parts[::3]
        plain = "".join(texts)
        spans: list[Span] = []
        length = 0
        # Open loops over messages, outermost first: loop number, current message, start of its text.
        stack: list[tuple[str, int, int]] = []

        def close(message: int, start: int) -> None:
            if not plain[start:length].isspace() and length > start:
                spans.append(Span(message, start, length))

        for text, number, index in itertools.zip_longest(texts, parts[1::3], parts[2::3]):
            length += len(text)
            if number is None:
                break
            if stack and stack[-1][0] == number:
                close(*stack.pop()[1:])
            if index:
                stack.append((number, int(index), length))
        return plain, sorted(spans, key=lambda span: (span.start, -span.stop))


def _run_unlimited(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


_OPENED = "fctune_opened"  # template variable: the loops that are at a message
_NOT_KEYS = frozenset(dir(dict))
# Attributes that the sandbox allows in any case, and that templates read most; its check takes longer than the reading.
_READS = frozenset({"get", "items", "keys", "values"})
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    dict: _READS,
    _IndexedMessage: _READS,
    str: frozenset({"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}),
    jinja2.runtime.LoopContext: frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem"}),
}
# What every rendering sets, and the functions of transformers' environment.
_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


def _get_attribute(environment: jinja2.Environment, fallback: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """Return ``value.name`` in a template; keys of messages and tools need no check by the sandbox."""
    if type(value) in (dict, _IndexedMessage) and name not in _NOT_KEYS:
        return value[name] if name in value else environment.undefined(obj=value, name=name)
    if name in _SAFE_ATTRIBUTES.get(type(value), ()):
        return getattr(value, name)
    return fallback(value, name)


def find_variables(tree: nodes.Template) -> frozenset[str]:
    """Return the names of the variables that a template reads and a caller may set, special tokens excepted."""
    read = meta.find_undeclared_variables(tree)
    stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    # A name that the template also sets is a switch only if it asks for the caller's value first.
    asks = {"defined", "undefined", "default", "d"}
    asked = {
        node.node.name
        for node in tree.find_all((nodes.Test, nodes.Filter))
        if isinstance(node.node, nodes.Name) and node.name in asks
    }
    switches = {name for name in read if name not in stored or name in asked} - _INPUTS
    return frozenset(name for name in switches if not name.endswith("_token"))


def find_literals(tree: nodes.Template) -> frozenset[str]:
    """Return the texts that a template prints or compares with; its comments are not among them."""
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(texts | {node.data for node in tree.find_all(nodes.TemplateData)})


def _find_examined(tree: nodes.Template) -> tuple[str, ...]:
    """Return the markup, such as ``</think>``, that a template compares, searches or replaces in texts."""
    places = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign)
    constants = [c.value for place in tree.find_all(places) for c in place.find_all(nodes.Const)]
    texts = [value for value in constants if isinstance(value, str) and len(value) <= _MAX_MARKUP]
    pieces = {text.strip() for text in texts if _MARKUP.search(text)}
    return tuple(sorted(piece for piece in pieces if not any(other != piece and other in piece for other in pieces)))


_MAX_MARKUP = 60  # longer texts are messages
_MARKUP = re.compile(r"[A-Za-z].*[]<>/|[]|[]<>/|[].*[A-Za-z]")


def _bodies(node: nodes.Node) -> list[list[nodes.Node]]:
    """Return the lists of statements of a node of the Jinja tree."""
    return [body for field in ("body", "else_") if isinstance(body := getattr(node, field, None), list)]
