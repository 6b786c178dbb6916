"""Rows of Gemini's API: ``contents`` of parts, or requests with their response.

https://ai.google.dev/api/generate-content. Keys are in camel case (REST) or snake case (the Python SDK). Calls and
results are parts ``functionCall`` and ``functionResponse``; they have an id only sometimes, and match by name.
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import TEXT_ONLY, RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_string
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.exchange import (
    ALL_SETTINGS,
    EXCHANGE_COLUMNS,
    AssistantTurn,
    decode,
    join,
    list_values,
    note_request,
    note_settings,
    open_exchange,
    peek,
    peek_request,
    require_finished,
    require_object,
)

_SYSTEM = ("systemInstruction", "system_instruction")
_CACHED = ("cachedContent", "cached_content")
_COLUMNS = ("contents", *_SYSTEM, "tools", *_CACHED)
# Settings among the keys of a config, as the SDKs' methods have it, that are no part of a conversation.
_CONFIG_SETTINGS = (
    *("response_mime_type", "responseMimeType", "response_modalities", "responseModalities", "http_options"),
    *("httpOptions", "media_resolution", "mediaResolution", "thinking_config", "thinkingConfig", "stopSequences"),
)
_MEDIA = ("inlineData", "inline_data", "fileData", "file_data")
# Keys of parts that only describe them.
_HARMLESS = ("thought", "thoughtSignature", "thought_signature", "partMetadata", "videoMetadata", "video_metadata")
_RESULT_KEYS = ("id", "name", "response", "willContinue", "will_continue", "scheduling")


def is_gemini_request(request: dict[str, Any]) -> bool:
    """Return True for a request of this API."""
    contents = peek(request.get("contents"))
    listed = contents if isinstance(contents, list) else [contents]
    return any(isinstance(content, dict) and "parts" in content for content in listed)


def is_gemini_response(response: Any) -> bool:
    """Return True for a response of this API."""
    return isinstance(response, dict) and ("candidates" in response or "promptFeedback" in response)


def read_gemini(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a request with its response, if the row has one."""
    exchange = open_exchange(row, _COLUMNS, builder)
    add_gemini_request(exchange.request, exchange.at, builder)
    if exchange.response is not None:
        add_gemini_response(exchange.response, exchange.response_at, builder)
    return builder.finish()


def add_gemini_request(request: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add the tools, system instruction and contents of a request."""
    note_request(request, (*_COLUMNS, "config"), at, builder)
    own = (*_SYSTEM, "tools", *_CACHED)
    places = dict.fromkeys(own, at)
    if isinstance(config := decode(request.get("config"), join(at, "config"), builder), dict):  # of the SDKs' methods
        where = join(at, "config")
        builder.note_unread(config, {*own, *ALL_SETTINGS, *_CONFIG_SETTINGS}, where)
        note_settings(config, where, builder)
        for key in own:
            if config.get(key) and request.get(key):
                raise RowError(join(where, key), "message_shape", f"also in {join(at, key)}; keep one of them")
        places |= {key: where for key in own if config.get(key)}
        request = {**request, **{key: config[key] for key in own if config.get(key)}}
    for key in _CACHED:
        if request.get(key):
            reason = "a context that the API's server holds, not the row; log the complete contents"
            raise RowError(join(places[key], key), "history_missing", reason)
    builder.set_tools(request.get("tools") or [], join(places["tools"], "tools"))
    for key in _SYSTEM:
        if request.get(key):
            pointer = join(places[key], key)
            builder.add("system", _read_system(decode(request[key], pointer, builder), pointer), pointer)
    contents, pointer = decode(request["contents"], join(at, "contents"), builder), join(at, "contents")
    if isinstance(contents, str):
        builder.add("user", contents, pointer)
    elif isinstance(contents, dict):
        _add_content(contents, pointer, builder)
    else:
        for content, where in list_values(contents, pointer, builder, "contents"):
            _add_content(content, where, builder)


def add_gemini_response(response: Any, at: str, builder: RowBuilder) -> None:
    """Add the answer of a response."""
    response = require_object(response, at)
    read = ("candidates", "promptFeedback", "prompt_feedback", "usageMetadata", "usage_metadata", "parsed")
    builder.note_unread(response, {*read, "modelVersion", "model_version", "responseId", "sdk_http_response"}, at)
    require_finished(response, at, builder)
    candidates = list_values(response.get("candidates") or [], f"{at}.candidates", builder, "candidates")
    if len(candidates) != 1:
        kind = "answer_failed" if not candidates else "message_shape"
        raise RowError(f"{at}.candidates", kind, f"expected one answer, got {len(candidates)}; keep one")
    candidate, pointer = require_object(*candidates[0]), candidates[0][1]
    for key in ("finishReason", "finish_reason"):
        require_finished(candidate, pointer, builder, key, ("STOP", "FINISH_REASON_UNSPECIFIED"))
    read = ("content", "finishReason", "citationMetadata", "safetyRatings", "citation_metadata", "safety_ratings")
    builder.note_unread(candidate, read, pointer)
    content = require_object(candidate.get("content"), f"{pointer}.content")
    _add_content({"role": "model", **{k: v for k, v in content.items() if v}}, f"{pointer}.content", builder)


def _read_system(value: Any, at: str) -> str:
    if isinstance(value, str):
        return value
    require_read_keys(require_object(value, at), ("role", "parts"), at)
    parts = value.get("parts")
    texts = []
    for i, part in enumerate(parts if isinstance(parts, list) else [parts]):
        where = f"{at}.parts[{i}]"
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise RowError(where, "content_not_text", f"expected a part of text, got {describe_value(part)}")
        require_read_keys(part if isinstance(part, dict) else {}, ("text",), where)
        texts.append(text)
    return "\n".join(texts)


def _add_content(content: Any, at: str, builder: RowBuilder) -> None:
    """Add a content, whose role may be missing for the user's."""
    content = require_object(content, at)
    builder.note_unread(content, ("role", "parts"), at)
    role = content.get("role") or "user"
    if role not in ("user", "model", "function", "system"):
        raise RowError(f"{at}.role", "unknown_role", f"expected user, model or function, got {describe_value(role)}")
    parts = content.get("parts")
    listed = list_values([parts] if isinstance(parts, dict) else parts or [], f"{at}.parts", builder, "parts")
    turn = AssistantTurn(at, builder)
    texts: list[str] = []
    for value, where in listed:
        part = {key: item for key, item in require_object(value, where).items() if item is not None}  # Arrow's filling
        kind = next((key for key in part if key not in _HARMLESS), "text")
        require_read_keys(part, (kind, *_HARMLESS), where)
        item = part.get(kind)
        if kind == "text":
            text = read_string(item, f"{where}.text") or ""
            if part.get("thought") and role == "model":
                turn.add_reasoning(text, where)
            elif role == "model":
                turn.add_text(text, where)
            else:
                texts.append(text)
        elif kind in ("functionCall", "function_call") and role == "model":
            call = require_object(item, f"{where}.{kind}")
            named = {"args": {}, **{key: given for key, given in call.items() if given is not None}}
            call_id = read_string(call.get("id"), f"{where}.{kind}.id")
            turn.add_call(builder.read_call(named, f"{where}.{kind}", call_id, "args"))
        elif kind in ("functionResponse", "function_response") and role != "model":
            _add_result(require_object(item, f"{where}.{kind}"), f"{where}.{kind}", texts, builder)
        elif kind in _MEDIA:
            raise RowError(where, "not_text_only", f"a part {kind}; {TEXT_ONLY}")
        else:
            raise RowError(where, "unknown_block", f"a part {kind} of the {role}, which is not read; leave the row out")
    if role == "model":
        turn.finish()
    elif texts or not listed:
        builder.notes["text_parts_joined"] += len(texts) > 1
        builder.add("system" if role == "system" else "user", "\n".join(texts), at)


def _add_result(result: dict[str, Any], at: str, texts: list[str], builder: RowBuilder) -> None:
    if texts:
        raise RowError(at, "result_without_call", "a result after text of the same content; results come first")
    if result.get("parts"):
        raise RowError(f"{at}.parts", "not_text_only", f"{describe_value(result['parts'])}; {TEXT_ONLY}")
    require_read_keys(result, _RESULT_KEYS, at)
    call_id, name = read_string(result.get("id"), f"{at}.id"), read_string(result.get("name"), f"{at}.name")
    response = result.get("response")
    builder.add_result(response, at, call_id, name, isinstance(response, dict) and bool(response.get("error")))


def _is_gemini(row: dict[str, Any]) -> bool:
    if "contents" not in row and "request" not in row:
        return False
    request = peek_request(row)
    return "contents" in request and (is_gemini_request(request) or is_gemini_response(peek(row.get("response"))))


ROW_FORMAT = RowFormat(
    name="gemini",
    keys="contents of parts[, systemInstruction, tools, response]",
    matches=_is_gemini,
    read=read_gemini,
    columns=(*_COLUMNS, "config", *EXCHANGE_COLUMNS),
    harmless=ALL_SETTINGS,
    is_log=True,
    priority=8,
)
