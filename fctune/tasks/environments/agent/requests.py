"""Requests of OpenAI's chat API, read as conversations, and the replies to them, whole or streamed.

https://platform.openai.com/docs/api-reference/chat. Only text can be asked. What would change the distribution of the
policy's tokens, such as a temperature, is ignored and listed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_content import read_content, read_result_content

# Fields with which every answer complies, or that have no effect on it.
_HEEDED = frozenset({"messages", "tools", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens"})
_HARMLESS = frozenset(
    {"user", "metadata", "store", "n", "stop", "service_tier", "prompt_cache_key", "safety_identifier"}
)


class RefusedRequest(Exception):
    """A request that gets no answer, with what its client is told.

    Attributes:
        status: HTTP status.
        code: Kind of the error, as OpenAI's API names it.
    """

    def __init__(self, reason: str, status: int = 400, code: str = "invalid_request"):
        super().__init__(reason)
        self.status, self.code = status, code

    def to_json(self) -> dict[str, Any]:
        """Return the error as OpenAI's API writes it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an answer.

    Attributes:
        conversation: Messages up to where the model is to act, and the tools on offer.
        model: Name of the model that is asked for; None: any.
        max_new_tokens: Limit of the answer; None: the proxy's alone.
        stops: Texts at which the answer ends.
        is_stream: The reply is streamed.
        has_usage: A stream ends with the number of tokens.
        ignored: Fields that have no effect, such as ``temperature``.
        digest: Digest of the request; a client that repeats it sends an equal one.
    """

    conversation: Conversation
    model: str | None
    max_new_tokens: int | None
    stops: tuple[str, ...]
    is_stream: bool
    has_usage: bool
    ignored: tuple[str, ...]
    digest: str


def read_chat_request(body: Any, source: str = "request") -> ChatRequest:
    """Read the body of a request.

    Args:
        body: The decoded body.
        source: Name of the conversation.

    Raises:
        RefusedRequest: It has another form, or asks for what a policy that reads and writes text cannot do.
    """
    if not isinstance(body, dict):
        raise RefusedRequest(f"expected an object, got {describe_value(body)}")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest(f"messages: expected a list of messages, got {describe_value(messages)}")
    try:
        tools = tuple(_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(_read_list(body, "tools")))
        read = tuple(read_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    except RowError as error:
        raise RefusedRequest(f"{error.pointer}: {error.reason}") from None
    if body.get("n") not in (None, 1):
        raise RefusedRequest(f"n={body['n']}: each request gets one answer; send several requests")
    model, options = body.get("model"), body.get("stream_options")
    stops = body.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RefusedRequest(f"stop: expected texts, got {describe_value(body['stop'])}")
    is_default = {"tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    ignored = [
        name
        for name, value in body.items()
        if name not in _HEEDED | _HARMLESS and value is not None and value != is_default.get(name)
    ]
    if body.get("tool_choice") == "none":
        tools, ignored = (), [name for name in ignored if name != "tool_choice"]
    text = json.dumps(to_encodable(body), sort_keys=True)
    return ChatRequest(
        Conversation(read, tools, source, _read_template_args(body)),
        model if isinstance(model, str) else None,
        _read_limit(body),
        tuple(stops),
        bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        tuple(sorted(name for name in ignored if name != "chat_template_kwargs")),
        hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )


def _read_list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if value is not None and not isinstance(value, list):
        raise RefusedRequest(f"{key}: expected a list, got {describe_value(value)}")
    return value or []


def _read_template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get("chat_template_kwargs")
    if value is not None and not isinstance(value, dict):
        raise RefusedRequest(f"chat_template_kwargs: expected an object, got {describe_value(value)}")
    return value or {}


def _read_limit(body: Mapping[str, Any]) -> int | None:
    limits = [body[key] for key in ("max_completion_tokens", "max_tokens") if body.get(key) is not None]
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise RefusedRequest(f"max_tokens: expected a number of 1 or more, got {describe_value(limit)}")
    return min(limits, default=None)


def _read_tool(tool: Any, pointer: str) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RowError(pointer, "tool", f"expected a function, got {describe_value(kind)}")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(
            f"{pointer}.function.name", "tool", f"expected a name, got {describe_value(function.get('name'))}"
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise RowError(f"{pointer}.function.parameters", "tool", "expected a JSON Schema")
    return Tool(to_encodable(function))


def read_message(message: Any, pointer: str) -> Message:
    """Return a message of OpenAI's API; ``pointer`` names it in errors.

    Raises:
        RowError: It has another form, or holds more than text.
    """
    if not isinstance(message, dict):
        raise RowError(pointer, "message_shape", f"expected an object, got {describe_value(message)}")
    role, where = message.get("role"), f"{pointer}.content"
    if role == "tool":
        result = to_encodable(read_result_content(message.get("content"), where, Counter()))
        return Message("tool", result, call_id=_read_text(message, "tool_call_id"), name=_read_text(message, "name"))
    content = to_encodable(read_content(message.get("content"), where, Counter()))
    match role:
        case "system" | "developer":
            return Message("system", content or "")
        case "user":
            return Message("user", content or "")
        case "assistant":
            calls = message.get("tool_calls")
            if not isinstance(calls, list | None):
                raise RowError(f"{pointer}.tool_calls", "calls", f"expected a list, got {describe_value(calls)}")
            read = tuple(_read_call(call, f"{pointer}.tool_calls[{i}]") for i, call in enumerate(calls or ()))
            reasoning = _read_text(message, "reasoning_content") or _read_text(message, "reasoning")
            return Message("assistant", content or (None if read else ""), read, reasoning=reasoning or None)
    reason = f"expected system, developer, user, assistant or tool, got {describe_value(role)}"
    raise RowError(f"{pointer}.role", "unknown_role", reason)


def _read_text(message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    return to_encodable(value) if isinstance(value, str) else None


def _read_call(call: Any, pointer: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(pointer, "calls", f"expected a call of a function, got {describe_value(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RowError(f"{pointer}.function.arguments", "not_json", f"not JSON ({error})") from None
    if not isinstance(arguments, dict):
        reason = f"expected an object as JSON, got {describe_value(arguments)}"
        raise RowError(f"{pointer}.function.arguments", "not_json", reason)
    return Call(to_encodable(function["name"]), to_encodable(arguments), _read_text(call, "id"))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as the client gets it.

    Attributes:
        id: Id of the reply; one that is sent again has the same.
        model: Name of the model.
        message: The answer.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        num_prompt_tokens: Tokens of the prompt.
        num_tokens: Tokens of the answer.
    """

    id: str
    model: str
    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return the reply to a request that is not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": self.message.content}
        if self.message.reasoning is not None:
            message["reasoning_content"] = self.message.reasoning
        if self.message.calls:
            message["tool_calls"] = self._list_calls()
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._count()}

    def iter_chunks(self, has_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed reply, which has the complete text in one piece."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if self.message.reasoning is not None:
            deltas.append({"reasoning_content": self.message.reasoning})
        if self.message.content:
            deltas.append({"content": self.message.content})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(self._list_calls())]
        head = self._head("chat.completion.chunk") | ({"usage": None} if has_usage else {})
        for delta in deltas:
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]}
        if has_usage:
            yield {**head, "choices": [], "usage": self._count()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _count(self) -> dict[str, int]:
        prompt, answer = self.num_prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}

    def _list_calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in self.message.calls
        ]
