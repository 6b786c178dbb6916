"""Records of model calls, as Langfuse, LangSmith, LiteLLM and the logs of proxies hold them.

A record has a request and its response: ``input`` and ``output`` (Langfuse), ``inputs`` and ``outputs`` (LangSmith),
``messages`` and ``response`` (LiteLLM), or ``request`` and ``response``. Each side is in the format of the API that was
called, or LangChain's, whatever the other one is.

https://langfuse.com/docs/api-and-data-platform/features/export-from-ui,
https://docs.langchain.com/langsmith/run-data-format, https://docs.litellm.ai/docs/proxy/logging_spec
"""

from __future__ import annotations

from typing import Any

from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_content
from fctune.data.sources.row_formats import anthropic, gemini, langchain, openai, responses
from fctune.data.sources.row_formats.base import RowFormat
from fctune.data.sources.row_formats.exchange import (
    ALL_SETTINGS,
    UNFINISHED,
    decode,
    join,
    list_values,
    note_request,
    note_settings,
    peek,
    require_ended,
    require_finished,
    require_object,
    set_api_tools,
)

_SIDES = (("input", "output"), ("inputs", "outputs"), ("request", "response"), ("messages", "response"))
_ANSWERS = frozenset({"output", "outputs", "response"})
# Columns that name the kind of a record, and the kinds that are calls of a model; other kinds hold functions' values.
_KIND_COLUMNS = ("run_type", "type", "observation_type")
_MODEL_CALLS = ("llm", "chat_model", "generation")
# Columns that only records have.
_MARKS = ("run_type", "traceId", "trace_id", "observation_type", "model_parameters", "call_type", "litellm_call_id")
# Where records hold the settings of the request, and in them its tools.
_SETTINGS = ("model_parameters", "modelParameters", "optional_params", "invocation_params")
_WRAPPERS = ("output", "message", "data")  # keys around a response
_ANSWER_KEYS = frozenset({*_WRAPPERS, "choices", "generations", "candidates", "content", "messages", "role"})
_READ = ("system", "messages", "tools", "functions")
_COLUMNS = (*dict.fromkeys(side for sides in _SIDES for side in sides), "system", "tools", "functions")


def _find_sides(row: dict[str, Any]) -> tuple[str, str] | None:
    """Return the columns of a row's request and response; of messages without a response, the answer is the last."""
    found = ((a, b) for a, b in _SIDES if row.get(a) is not None and b in row)
    return next(((a, b) for a, b in found if a != "messages" or row[b] is not None or _has_failed(row)), None)


def _has_failed(row: dict[str, Any]) -> bool:
    """Return True if a record says that its call failed, so that it has no answer of the API's form."""
    status = row.get("status")
    return bool(row.get("error")) or (isinstance(status, str) and status.lower() in UNFINISHED)


def _is_failure(response: Any) -> bool:
    """Return True for a response that is an error alone."""
    return isinstance(response, dict) and bool(response.get("error")) and _ANSWER_KEYS.isdisjoint(response)


def _is_log(row: dict[str, Any]) -> bool:
    """Return True for a record with columns that only records have, or whose request has messages of OpenAI's API."""
    if _ANSWERS.isdisjoint(row):  # nearly all rows
        return False
    sides = _find_sides(row)
    if sides is None:
        return _is_unrecorded(row)
    if any(mark in row for mark in _MARKS):
        return True
    request, response = peek(row[sides[0]]), peek(row[sides[1]])
    if sides[0] in ("messages", "request"):
        if _is_failure(response) or (not response and (_has_failed(row) or _is_request(request))):
            return True
        if not isinstance(response, dict) or anthropic.is_anthropic_response(response):
            return False
        return "choices" in response or response.get("role") == "assistant"
    messages = request.get("messages") if isinstance(request, dict) else request
    return isinstance(messages, list) and bool(messages) and _has_messages(messages) and response is not None


def _is_unrecorded(row: dict[str, Any]) -> bool:
    """Return True for a record whose request was not recorded, as that of many spans."""
    is_record = any(mark in row for mark in _MARKS) and any(isinstance(row.get(name), str) for name in _KIND_COLUMNS)
    return is_record and any(a in row and b in row for a, b in _SIDES) and not any(row.get(a) for a, _ in _SIDES)


def _is_request(request: Any) -> bool:
    """Return True for a request of any API, from a column of its own."""
    return isinstance(request, dict) and any(key in request for key in ("messages", "contents", "input"))


def _has_messages(messages: list[Any]) -> bool:
    first = messages[0][0] if isinstance(messages[0], list) and messages[0] else messages[0]
    has_role = isinstance(first, dict) and "role" in first
    return (has_role or langchain.is_langchain_message(first)) and not any(map(responses.is_responses_item, messages))


def read_log(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a record; a failed call, or a record that is none of a model call, is left out."""
    _require_model_call(row, builder)
    sides = _find_sides(row)
    if sides is None and _is_unrecorded(row):
        if any(row.get(answered) for _, answered in _SIDES):
            raise RowError("", "history_missing", "an answer without its request, so that no question is in the row")
        raise RowError("", "span_without_content", "null: the record has neither messages nor an answer")
    if sides is None:
        raise KeyError("response")
    note_settings(row, "", builder)
    require_finished(row, "", builder)
    asked, answered = sides
    request, response = decode(row[asked], asked, builder), decode(row[answered], answered, builder)
    if response is None:
        raise RowError(answered, "answer_failed", "null: the record has no answer of the model")
    if _is_failure(response):
        raise RowError(f"{answered}.error", "answer_failed", f"{describe_value(response['error'])}: a failed call")
    if asked == "messages":
        request = {key: row[key] for key in _READ if key in row}
    elif isinstance(request, list):
        request = {"messages": request}
        if asked == "input" and any(map(responses.is_responses_item, request["messages"])):
            request = {"input": request["messages"]}
    request, at = require_object(request, asked), "" if asked == "messages" else asked
    read = (*sides, *(_READ if asked == "messages" else ()))
    builder.unread |= {name: row[name] for name in _COLUMNS if name not in read and row.get(name)}
    if not request.get("tools"):
        _set_tools(row, builder)
    _add_request(request, at, builder)
    _add_response(response, answered, builder)
    return builder.finish()


def _require_model_call(row: dict[str, Any], builder: RowBuilder) -> None:
    for column in _KIND_COLUMNS:
        kind = row.get(column)
        if isinstance(kind, str) and kind.lower() not in _MODEL_CALLS and any(mark in row for mark in _MARKS):
            raise RowError(column, "span_left_out", f"a record of a {kind}, not of a model call")
    level = row.get("level")
    if isinstance(level, str) and level.upper() == "ERROR":
        builder.reject_answer("level", "'ERROR': a failed call")


def _set_tools(row: dict[str, Any], builder: RowBuilder) -> None:
    """Read the tools among the settings of a record, or beside its request."""
    for outer in ("", "extra", "metadata"):
        holder = peek(row.get(outer)) if outer else row
        if not isinstance(holder, dict):
            continue
        places = [(holder, outer), *((peek(holder.get(key)), join(outer, key)) for key in _SETTINGS)]
        for settings, at in places:
            tools = peek(settings.get("tools")) if isinstance(settings, dict) else None
            if tools and isinstance(tools, (list, dict)):
                set_api_tools(tools, join(at, "tools"), builder)
                builder.unread.pop(join(at, "tools"), None)
                return


def _add_request(request: dict[str, Any], at: str, builder: RowBuilder) -> None:
    """Add a request in the format that its keys show."""
    if gemini.is_gemini_request(request):
        gemini.add_gemini_request(request, at, builder)
    elif "messages" not in request and "input" in request:
        responses.add_responses_request(request, at, builder)
    elif anthropic.is_anthropic_request(request):
        anthropic.add_anthropic_request(request, at, builder)
    elif "messages" in request:
        note_request(request, (*_READ, "input"), at, builder)
        if request.get("input"):
            builder.unread[join(at, "input")] = request["input"]
        set_api_tools(request.get("tools") or request.get("functions"), join(at, "tools"), builder)
        if system := read_content(request.get("system"), join(at, "system"), builder.notes):
            builder.add("system", system, join(at, "system"))
        messages, pointer = decode(request["messages"], join(at, "messages"), builder), join(at, "messages")
        if isinstance(messages, list) and len(messages) == 1 and isinstance(messages[0], list):
            messages, pointer = messages[0], f"{pointer}[0]"  # LangChain's batch of one
        _add_messages(list_values(messages, pointer, builder), builder)
    else:
        keys = ", ".join(map(str, request)) or "none"
        raise RowError(at, "message_shape", f"expected messages, contents or items, got the keys {keys}")


def _add_messages(messages: list[tuple[Any, str]], builder: RowBuilder) -> None:
    """Add messages of one format, which may differ from that of their request."""
    values = [message for message, _ in messages]
    if any(map(langchain.is_langchain_message, values)):
        for message, at in messages:
            langchain.add_langchain_message(message, at, builder)
    elif any(map(responses.is_responses_item, values)):
        responses.add_items(messages, builder)
    elif any(map(anthropic.is_anthropic_message, values)):
        for message, at in messages:
            anthropic.add_anthropic_message(message, at, builder)
    else:
        openai.add_messages(messages, builder)


def _add_response(response: Any, at: str, builder: RowBuilder) -> None:
    """Add a response in the format that its keys show."""
    if isinstance(response, str):
        text, reasoning = builder.take_reasoning(response, at)
        builder.add("assistant", text, at, reasoning=reasoning)
    elif isinstance(response, list):
        messages = list_values(response, at, builder)
        for message, where in messages:
            if isinstance(message, dict):
                require_ended(message, where, builder)
        _add_list(messages, builder)
    elif not isinstance(response, dict):
        raise RowError(at, "message_shape", f"expected an answer, got {describe_value(response)}")
    elif "choices" in response:
        _add_one_of(response, "choices", at, builder)
    elif "generations" in response:
        _add_one_of(response, "generations", at, builder)
    elif gemini.is_gemini_response(response):
        gemini.add_gemini_response(response, at, builder)
    elif anthropic.is_anthropic_response(response):
        anthropic.add_anthropic_response(response, at, builder)
    elif responses.is_responses_response(response):
        responses.add_responses_response(response, at, builder)
    elif "role" in response or langchain.is_langchain_message(response):
        require_ended(response, at, builder)
        _add_messages([(response, at)], builder)
    elif "messages" in response:
        require_ended(response, at, builder)
        builder.note_unread(response, ("messages",), at)
        _add_response(response["messages"], f"{at}.messages", builder)
    elif (key := next((key for key in _WRAPPERS if response.get(key)), None)) is not None:
        require_ended(response, at, builder)
        builder.note_unread(response, (key,), at)
        _add_response(response[key], f"{at}.{key}", builder)
    else:
        keys = ", ".join(map(str, response)) or "none"
        raise RowError(at, "message_shape", f"expected an answer's message, choices or items, got the keys {keys}")


def _add_one_of(response: dict[str, Any], key: str, at: str, builder: RowBuilder) -> None:
    """Add the only choice of OpenAI's response, or the only generation of LangChain's."""
    require_finished(response, at, builder)
    builder.note_unread(response, (key, "llm_output", "run", "object", "type", *ALL_SETTINGS), at)
    choices = list_values(response[key], f"{at}.{key}", builder, key)
    if len(choices) == 1 and isinstance(choices[0][0], list):  # LangChain's batch of one
        choices = list_values(*choices[0], builder, key)
    if len(choices) != 1:
        raise RowError(f"{at}.{key}", "message_shape", f"expected one answer, got {len(choices)}; keep one")
    choice, where = require_object(*choices[0]), choices[0][1]
    details = require_object(choice.get("generation_info") or {}, f"{where}.generation_info")
    for part, place in ((choice, where), (details, f"{where}.generation_info")):
        require_finished(part, place, builder)
        require_ended(part, place, builder)
    builder.note_unread(choice, ("message", "text", "generation_info", "content_filter_results"), where)
    if not choice.get("message"):
        raise RowError(f"{where}.message", "message_shape", "expected the answer's message, got none")
    if choice.get("text"):
        builder.unread[f"{where}.text"] = choice["text"]
    _add_messages([(choice["message"], f"{where}.message")], builder)


def _add_list(messages: list[tuple[Any, str]], builder: RowBuilder) -> None:
    """Add an answer's messages, which may be the complete conversation: those of the request again, and new ones.

    Raises:
        RowError: ``message_shape`` if it starts with a turn of the user, but not with the request's messages.
    """
    if not messages or not _starts_conversation(messages[0][0]):
        _add_messages(messages, builder)
        return
    complete = RowBuilder(builder.context, builder.source)
    complete.tools = builder.tools
    _add_messages(messages, complete)
    if complete.messages[: len(builder.messages)] != builder.messages:
        raise RowError(messages[0][1], "message_shape", "an answer that starts with other turns than its request's")
    builder.messages, builder.pointers, builder.pending = complete.messages, complete.pointers, complete.pending
    builder.call_pointers = complete.call_pointers
    builder.failed_calls |= complete.failed_calls
    builder.unread |= complete.unread
    builder.notes |= complete.notes


def _starts_conversation(message: Any) -> bool:
    """Return True for a message of the user or the system."""
    if not isinstance(message, dict):
        return False
    path = message.get("id")
    name = path[-1] if "lc" in message and isinstance(path, list) and path else message.get("type")
    return str(message.get("role") or name).removesuffix("Message").lower() in ("user", "human", "system", "developer")


ROW_FORMAT = RowFormat(
    name="log",
    keys="input and output, inputs and outputs, or messages and response of a model call",
    matches=_is_log,
    read=read_log,
    columns=_COLUMNS,
    harmless=(
        *(*ALL_SETTINGS, *_SETTINGS, "extra", *_KIND_COLUMNS, "name", "level", "environment", "tags", "serialized"),
        *("events", "session_name", "inputs_preview", "outputs_preview", "proxy_server_request"),
        *("error", "statusMessage", "status_message", "dotted_order", "dottedOrder", "traceName", "userId", "traceId"),
        *("sessionId", "parentObservationId", "startTime", "endTime", "completionStartTime", "createdAt", "updatedAt"),
        *("promptName", "usageDetails", "costDetails", "modelId", "internalModelId", "projectId", "model_group"),
        *("request_tags", "end_user", "api_base", "cache_hit", "hidden_params", "model_map_information", "trace"),
        *("requester_ip_address", "cost_breakdown", "status_fields", "error_information", "api_key", "feedback_stats"),
        *("unpricedUsage", "usagePricingTierName", "usage_pricing_tier_name", "scores", "error_str", "app_path"),
        *("manifest_id", "bookmarked", "prompt_name", "trace_name", "release", "custom_llm_provider", "user_agent"),
        *("guardrail_information", "standard_built_in_tools_params", "response_cost_failure_debug_info"),
        *("zero_cost_diagnostic", "request_model_access_groups", "autorouter_savings_estimate"),
        "autorouter_baseline_observation",
    ),
    is_log=True,
    priority=12,
)
