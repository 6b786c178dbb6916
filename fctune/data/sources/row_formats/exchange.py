"""Requests to model APIs with their responses: the parts that the formats of all APIs share.

A row is a request; a log has its response in a column ``response``, and often the request in ``request``. Each may be
an object or a string with its JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from fctune.data.conversation import Call
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import RowBuilder

EXCHANGE_COLUMNS = ("request", "response")

# Settings of requests, and keys of responses, that are no part of a conversation.
SETTINGS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_k"),
    *("stop", "stop_sequences", "stop_sequence", "stream", "stream_options", "seed", "n", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "top_logprobs", "service_tier", "store", "user", "parallel_tool_calls"),
    *("thinking", "reasoning", "include", "truncation", "background", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "betas", "anthropic_version", "container", "context_management", "speed", "inference_geo"),
    *("safetySettings", "safety_settings", "toolConfig", "tool_config", "labels", "object", "verbosity", "modalities"),
    *("extra_headers", "stop_details", "system_fingerprint", "diagnostics", "prompt_filter_results"),
    *("incomplete_details", "billing", "moderation"),
)
# Settings that are none if they hold a schema, because the model was shown it.
_SCHEMA_SETTINGS = (
    *("response_format", "text", "output_config", "output_format"),
    *("generationConfig", "generation_config"),
)
_SCHEMAS = ("schema", "json_schema", "responseSchema", "response_schema", "responseJsonSchema", "response_json_schema")

ALL_SETTINGS = (*SETTINGS, *_SCHEMA_SETTINGS)
FINISHED = frozenset(
    (
        *("", "stop", "tool_call", "tool_calls", "tool_use", "function_call", "end_turn", "stop_sequence"),
        *("complete", "completed", "eos", "eos_token", "finish_reason_unspecified"),
    )
)
"""Reasons of the end of a complete answer, in lower case; instrumentations write them as their provider does."""
_END_KEYS = ("finish_reason", "stop_reason", "done_reason", "finishReason", "stopReason")
UNFINISHED = frozenset({"failed", "failure", "error", "incomplete", "cancelled", "in_progress", "queued"})


class Exchange(NamedTuple):
    """A request and its response, None if the row has none, with their locations (that of the row is empty)."""

    request: dict[str, Any]
    at: str
    response: Any
    response_at: str


def peek(value: Any) -> Any:
    """Return a value, decoded if it is a string with an object or a list of JSON; what can't be decoded is None."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def decode(value: Any, pointer: str, builder: RowBuilder) -> Any:
    """Return a value of a log, decoded strictly if it is a string with an object or a list of JSON."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return builder.decode(value, pointer)
    except RowError as error:
        if error.kind != "not_json":
            raise
        return value


def peek_request(row: dict[str, Any]) -> dict[str, Any]:
    """Return the request of a row, or the row itself if it has no column of that name."""
    request = peek(row["request"]) if "request" in row else row
    return request if isinstance(request, dict) else {}


def open_exchange(row: dict[str, Any], columns: Collection[str], builder: RowBuilder, key: str = "request") -> Exchange:
    """Return the request and the response of a row.

    Args:
        row: The row.
        columns: Keys of a request that its format reads; they are unread in a row that has them beside its request.
        builder: Builder of the row's conversation.
        key: Column of the request; the row is the request if it has none.

    Raises:
        RowError: ``answer_failed`` if the row says so; ``message_shape`` if the request is no object.
    """
    require_finished(row, "", builder)
    response = decode(row.get("response"), "response", builder)
    if key not in row:
        return Exchange(row, "", response, "response")
    builder.unread |= {name: row[name] for name in columns if row.get(name)}
    note_settings(row, "", builder)
    return Exchange(require_object(decode(row[key], key, builder), key), key, response, "response")


def join(at: str, key: str) -> str:
    """Return the location of a key."""
    return f"{at}.{key}" if at else key


def note_request(request: dict[str, Any], read: Collection[str], at: str, builder: RowBuilder) -> None:
    """Note the keys of a request that are neither read nor settings; those of a row are columns, checked elsewhere."""
    if at:
        builder.note_unread(request, {*read, *ALL_SETTINGS}, at)
    note_settings(request, at, builder)


def note_settings(request: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Note settings that are sentences, so that the key means something else, and those that hold a schema."""
    for name in SETTINGS:
        setting = request.get(name)
        if isinstance(setting, str) and " " in setting.strip():
            builder.unread[join(at, name)] = setting
    for name in _SCHEMA_SETTINGS:
        setting = request.get(name)
        nested = setting.get("format") if isinstance(setting, dict) else None
        has_schema = any(isinstance(part, dict) and any(map(part.get, _SCHEMAS)) for part in (setting, nested))
        if has_schema or isinstance(setting, str):
            builder.unread[join(at, name)] = setting


def set_api_tools(value: Any, pointer: str, builder: RowBuilder) -> None:
    """Read the tools of a request.

    Raises:
        RowError: ``tool_shape`` for a tool of the API's provider, whose schema is not in the row; or what
            ``RowBuilder.set_tools`` raises.
    """
    tools = peek(value)
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function" and "input_schema" not in tool:
            reason = f"a tool of type {kind!r}, which the API defines, not the row; only functions are read"
            raise RowError(f"{pointer}[{i}].type", "tool_shape", reason)
    if value:
        builder.set_tools(value, pointer)


def list_values(value: Any, pointer: str, builder: RowBuilder, what: str = "messages") -> list[tuple[Any, str]]:
    """Return the values of a list, which may be a string with its JSON, with their locations."""
    value = decode(value, pointer, builder)
    if not isinstance(value, list):
        raise RowError(pointer, "message_shape", f"expected a list of {what}, got {describe_value(value)}")
    return [(item, f"{pointer}[{i}]") for i, item in enumerate(value)]


def require_object(value: Any, pointer: str) -> dict[str, Any]:
    """Return a value that must be an object."""
    if isinstance(value, dict):
        return value
    raise RowError(pointer, "message_shape", f"expected an object, got {describe_value(value)}")


def require_finished(
    response: dict[str, Any], at: str, builder: RowBuilder, key: str = "", finished: Collection[str] = ()
) -> None:
    """Check that a response is an answer to learn from: no error, and ended by the model.

    Args:
        response: The response, or the part of it that says how it ended.
        at: Its location.
        builder: Builder of the row's conversation.
        key: The key that says how it ended, if any.
        finished: Values of that key for an answer that is complete.

    Raises:
        RowError: ``answer_failed``.
    """
    failed = "a failed or unfinished answer"
    if error := response.get("error"):
        builder.reject_answer(join(at, "error"), f"{describe_value(error)}: {failed}")
    status = response.get("status")
    if isinstance(status, str) and status.lower() in UNFINISHED:
        builder.reject_answer(join(at, "status"), f"{status!r}: {failed}")
    ended = response.get(key)
    if ended is not None and ended not in finished:
        builder.reject_answer(join(at, key), f"{describe_value(ended)}: {failed}")


def require_ended(answer: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Check that the model ended an answer, by the key that any provider says it with.

    Raises:
        RowError: ``answer_failed``.
    """
    for key in _END_KEYS:
        value = answer.get(key)
        for reason in value if isinstance(value, list) else (value,):  # Bedrock's streams have a list
            if not is_finished(reason):
                builder.reject_answer(join(at, key), f"{describe_value(reason)}: an answer that was cut off or failed")


def is_finished(reason: Any) -> bool:
    """Return True for the reason of a complete answer's end, or for none."""
    return reason is None or (isinstance(reason, str) and reason.lower() in FINISHED)


class AssistantTurn:
    """An assistant's turn, gathered from the blocks of a message in their order."""

    def __init__(self, pointer: str, builder: RowBuilder) -> None:
        self._pointer = pointer
        self._builder = builder
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []
        self._is_calling = False

    def add_text(self, text: str, pointer: str) -> None:
        """Add text, which no template can render after a call."""
        if self._is_calling and text.strip():
            raise RowError(pointer, "text_around_call", f"text after a call: {text[:40]!r}")
        if text:
            self._texts.append(text)

    def add_reasoning(self, text: Any, pointer: str) -> None:
        """Add reasoning; an empty one is what providers return in place of a hidden one."""
        if text is not None and not isinstance(text, str):
            raise RowError(pointer, "reasoning_not_text", f"expected text, got {describe_value(text)}")
        if not text:
            self._builder.notes["reasoning_hidden"] += 1
        elif self._texts or self._is_calling:
            reason = "reasoning after the text or calls of its turn; chat templates render it before them"
            raise RowError(pointer, "message_shape", reason)
        else:
            self._thoughts.append(text)

    def begin_calls(self) -> None:
        """Say that calls stand here, which are added later."""
        self._is_calling = True

    def add_call(self, call: Call) -> None:
        """Add a call to the turn of the assistant."""
        self._is_calling = True
        self._calls.append(call)

    def finish(self) -> None:
        """Add the turn to the conversation."""
        self._builder.notes["text_parts_joined"] += len(self._texts) > 1
        given = "\n".join(self._thoughts) or None
        text, reasoning = self._builder.take_reasoning("\n".join(self._texts), self._pointer, given)
        content = text or (None if self._calls else "")
        self._builder.add("assistant", content, self._pointer, tuple(self._calls), reasoning=reasoning)
