"""Conversations, the common form of all dataset rows: tools, messages, calls and results.

These words are used throughout the project: a *tool* is a function's schema, a *call* is a name with arguments, a
*result* is a tool's output, a *conversation* is the messages of one row with the tools they may use.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    ``function`` is the function object exactly as in the row (``name``, ``description``, ``parameters`` as JSON Schema,
    anything else), since templates render it verbatim, key order included.
    """

    function: dict[str, Any]
    # Rows share tools, so the text that enters their digests is kept.
    _json: str | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name under which calls refer to the tool."""
        name: str = self.function["name"]
        return name

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments; empty if the row has none."""
        return self.function.get("parameters") or {}

    def to_openai(self) -> dict[str, Any]:
        """Return the tool as OpenAI writes it, which chat templates expect."""
        return {"type": "function", "function": self.function}

    def to_json(self) -> str:
        """Return the tool as OpenAI writes it, as JSON without spaces."""
        if self._json is None:
            object.__setattr__(self, "_json", _COMPACT.encode(self.to_openai()))
        assert self._json is not None
        return self._json


@dataclass(frozen=True, slots=True)
class Call:
    """A function call; the arguments are typed values in the order of the row."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return the call as OpenAI writes it, but with ``arguments`` as an object, which chat templates serialise."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    ``content`` is None only if there are calls. A ``tool`` message is a result; ``call_id`` and ``name`` identify its
    call if the row does. ``weight`` scales the loss of an assistant message (0: context only). ``reasoning`` is what an
    assistant thought before its content and calls; None if the row has none, never empty.
    """

    role: Role
    content: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None
    weight: float = 1.0
    reasoning: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return the message as OpenAI writes it, without empty keys, since templates test for their presence."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_openai() for call in self.calls]
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.name is not None:
            message["name"] = self.name
        return message


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one row and the tools available in it; ``source`` is where it came from (``file:line``).

    ``template_args`` are switches of the chat template for this row, such as ``enable_thinking``; they are merged over
    the config's ``model.template_args``.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    source: str = ""
    template_args: dict[str, Any] = field(default_factory=dict)

    @property
    def has_reasoning(self) -> bool:
        """True if a message has reasoning."""
        return any(message.reasoning for message in self.messages)

    def to_openai(self) -> dict[str, Any]:
        """Return the row as OpenAI writes it, with arguments as objects."""
        row: dict[str, Any] = {"messages": [message.to_openai() for message in self.messages]}
        if self.tools:
            row["tools"] = [tool.to_openai() for tool in self.tools]
        if self.template_args:
            row["chat_template_kwargs"] = self.template_args
        return row

    def to_json(self) -> str:
        """Return the row as JSON without spaces."""
        messages = _COMPACT.encode([message.to_openai() for message in self.messages])
        tools = f',"tools":[{",".join([tool.to_json() for tool in self.tools])}]' if self.tools else ""
        template_args = f',"chat_template_kwargs":{_COMPACT.encode(self.template_args)}' if self.template_args else ""
        return f'{{"messages":{messages}{tools}{template_args}}}'

    def digest(self) -> str:
        """Return a digest of the content, 16 hex digits, which does not depend on the source."""
        weights = _COMPACT.encode([message.weight for message in self.messages])
        text = f"[{self.to_json()},{weights}]"
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def to_encodable(value: Any) -> Any:
    """Return a JSON value with half surrogate pairs replaced, which UTF-8 cannot encode and no prompt can hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {to_encodable(key): to_encodable(item) for key, item in value.items()}
    return [to_encodable(item) for item in value] if isinstance(value, list) else value
