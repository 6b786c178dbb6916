"""Spans of model calls, with the GenAI attributes of OpenTelemetry's semantic conventions.

https://github.com/open-telemetry/semantic-conventions-genai. Read are OTLP's JSON (``resourceSpans``, or
``resourceLogs`` with the same attributes in events), and spans with ``attributes`` as an object. Every span of a model
call is a row; others are left out. Messages and tools are strings of JSON or structured values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fctune.data.sources.columns import require_read_keys
from fctune.data.sources.defects import TEXT_ONLY, RowError, describe_value
from fctune.data.sources.row_builder import ParsedRow, RowBuilder
from fctune.data.sources.row_content import read_string
from fctune.data.sources.row_formats.base import FileRow, LeftOut, LogRow, RowFormat
from fctune.data.sources.row_formats.exchange import AssistantTurn, is_finished, peek

_INPUT, _OUTPUT = "gen_ai.input.messages", "gen_ai.output.messages"
_SYSTEM, _TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
_READ = (_INPUT, _OUTPUT, _SYSTEM, _TOOLS)
_OPERATION = "gen_ai.operation.name"
_SPAN_IDS = ("spanId", "span_id")
# Attributes that describe a call; spans of agents and tools repeat the messages of the calls in them.
_DESCRIBING = re.compile(
    r"gen_ai\.(?:operation|provider|request|response|usage|conversation|output\.type|agent|data_source|token|tool|"
    r"workflow|server|prompt\.name|system$).*"
)
_CALLS = (None, "chat", "generate_content", "text_completion")
_DETAILS = "gen_ai.client.inference.operation.details"  # an event that may have the messages in place of its span
_MEDIA = ("blob", "file", "uri")
_ENDED = "gen_ai.response.finish_reasons"  # of the answers, in place of their own
_CUT_OFF = "an answer that was cut off or failed"
# Attributes and events of other instrumentations, or of earlier versions of the conventions, that hold messages.
_OTHER_MESSAGES = re.compile(
    r"gen_ai\.(?:prompt|completion)(?:\.\d+\..+)?|llm\.(?:input|output)_messages\..+"
    r"|gen_ai\.(?:(?:system|user|assistant|tool)\.message|choice|content\.(?:prompt|completion))"
)
_SPAN_KEYS = ("name", "status")
_OTHER = "other messages"  # key of the name of such an attribute or event
_RESOURCES = {"resourceSpans": ("scopeSpans", "spans"), "resourceLogs": ("scopeLogs", "logRecords")}


def _is_span(row: dict[str, Any]) -> bool:
    attributes = row.get("attributes")
    if not isinstance(attributes, dict):
        return any(key in row for key in _RESOURCES)
    context = row.get("context")
    holders = (row, context) if isinstance(context, dict) else (row,)
    is_span = any(key in holder for key in _SPAN_IDS for holder in holders)
    return is_span or any(key in attributes for key in (*_READ, _OPERATION)) or any(key in row for key in _RESOURCES)


def _expand(rows: Iterator[FileRow]) -> Iterator[LogRow]:
    """Yield each span of a model call in place of OTLP's documents."""
    for line, row in rows:
        key = next((key for key in _RESOURCES if key in row), None) if isinstance(row, dict) else None
        if isinstance(row, RowError) or key is None:
            is_span = isinstance(row, dict) and _is_span(row)
            yield line, _sort_out(_open_span(row)) if is_span and isinstance(row, dict) else row
            continue
        try:
            require_read_keys(row, (key,), "document")
            spans = list(_iter_spans(row[key], *_RESOURCES[key]))
        except RowError as error:
            yield line, error
            continue
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"not OTLP's JSON of spans or events ({type(error).__name__}: {error})"
            yield line, RowError(key, "message_shape", reason)
            continue
        for span in spans:
            yield line, _sort_out(span)


def _sort_out(span: dict[str, Any]) -> dict[str, Any] | RowError | LeftOut:
    """Return a span of a model call, or its defect, or why it is left out."""
    attributes = span["attributes"]
    other = span.pop(_OTHER, None)
    if other is not None and not any(attributes.get(key) for key in (_INPUT, _OUTPUT)):
        reason = f"messages in {other}, which is not read; record them in {_INPUT} and {_OUTPUT}"
        return RowError(f"attributes.{other}" if other in attributes else "attributes", "message_shape", reason)
    kind = _find_unread(attributes)
    return span if kind is None else LeftOut(kind)


def _find_unread(attributes: dict[str, Any]) -> str | None:
    """Return the kind of ``LEFT_OUT_KINDS`` of a span that is no row; None for one of a model call with messages."""
    operation, has_messages = attributes.get(_OPERATION), any(attributes.get(key) for key in (_INPUT, _OUTPUT))
    is_call = operation in _CALLS and (operation is not None or any(key in attributes for key in (_INPUT, _OUTPUT)))
    if is_call and has_messages:
        return None
    return "span_without_content" if is_call else "span_left_out"


def _iter_spans(resources: Any, scopes: str, spans: str) -> Iterator[dict[str, Any]]:
    for resource in resources:
        require_read_keys(resource, ("resource", scopes, "schemaUrl"), "document")
        for scope in resource.get(scopes) or []:
            require_read_keys(scope, ("scope", spans, "schemaUrl"), "document")
            for span in scope.get(spans) or []:
                attributes = _read_attributes(span.get("attributes"))
                names = [*attributes, str(span.get("eventName")), str(attributes.get("event.name"))]
                for event in span.get("events") or []:
                    names.append(str(event.get("name")))
                    if event.get("name") == _DETAILS:
                        attributes = _read_attributes(event.get("attributes")) | attributes
                kept = {key: span[key] for key in _SPAN_KEYS if key in span} | {"attributes": attributes}
                other = next((name for name in names if _OTHER_MESSAGES.fullmatch(name)), None)
                yield kept if other is None else {**kept, _OTHER: other}


def _open_span(row: dict[str, Any]) -> dict[str, Any]:
    """Return a span whose attributes are an object with those of the event that may hold its messages."""
    attributes, names = row["attributes"], [*row["attributes"]]
    events = row.get("events")
    for event in events if isinstance(events, list) else ():
        if isinstance(event, dict):
            names.append(str(event.get("name")))
            if event.get("name") == _DETAILS and isinstance(details := event.get("attributes"), dict):
                attributes = details | attributes
    other = next((name for name in names if _OTHER_MESSAGES.fullmatch(name)), None)
    opened = row if attributes is row["attributes"] else {**row, "attributes": attributes}
    return opened if other is None else {**opened, _OTHER: other}


def _read_attributes(attributes: Any) -> dict[str, Any]:
    read = {item["key"]: _read_value(item["value"]) for item in attributes or []}
    if not all(isinstance(key, str) for key in read):
        raise TypeError("a key that is no string")
    return read


def _read_value(value: dict[str, Any]) -> Any:
    """Return the value of OTLP's AnyValue."""
    for key, item in value.items():
        match key:
            case "intValue":
                return int(item)
            case "arrayValue":
                return [_read_value(entry) for entry in item.get("values") or []]
            case "kvlistValue":
                return _read_attributes(item.get("values"))
            case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
                return item
            case _:
                raise ValueError(f"a value of type {key}")
    return None


def _read(row: dict[str, Any], builder: RowBuilder) -> ParsedRow:
    """Read a span: its input messages, and its answer."""
    attributes = row["attributes"]
    if (kind := _find_unread(attributes)) is not None:  # of a file that begins with rows of another format
        raise RowError("attributes", kind, "a span that is not of a model call, or has none of its messages")
    _require_success(row.get("status"), attributes, builder)
    for name, value in attributes.items():
        if name.startswith("gen_ai.") and name not in _READ and not _DESCRIBING.fullmatch(name):
            builder.unread[f"attributes.{name}"] = value
    builder.set_tools(attributes.get(_TOOLS) or [], f"attributes.{_TOOLS}")
    at = f"attributes.{_SYSTEM}"
    system: str | None = None
    if instructions := _decode(attributes.get(_SYSTEM), at, builder):
        system = instructions if isinstance(instructions, str) else "\n".join(_read_texts(instructions, at))
        builder.add("system", system, at)
    messages = [
        (message, False, f"attributes.{_INPUT}[{i}]") for i, message in enumerate(_list(attributes, _INPUT, builder))
    ]
    answers = _list(attributes, _OUTPUT, builder)
    if len(answers) > 1:
        reason = f"{len(answers)} alternative answers; keep one"
        raise RowError(f"attributes.{_OUTPUT}", "message_shape", reason)
    messages += [(message, True, f"attributes.{_OUTPUT}[{i}]") for i, message in enumerate(answers)]
    for message, is_answer, at in messages:
        _add_message(message, is_answer, at, system, builder)
    if not answers:
        raise RowError(f"attributes.{_OUTPUT}", "no_assistant", "the span has no answer of the model")
    return builder.finish()


def _require_success(status: Any, attributes: dict[str, Any], builder: RowBuilder) -> None:
    code = status.get("code", status.get("status_code")) if isinstance(status, dict) else status
    if code in (2, "2", "STATUS_CODE_ERROR", "ERROR"):
        message = status.get("message", status.get("description")) if isinstance(status, dict) else None
        builder.reject_answer("status", f"{describe_value(message or code)}: a failed call")
    if error := attributes.get("error.type"):
        builder.reject_answer("attributes.error.type", f"{describe_value(error)}: a failed call")
    reasons = attributes.get(_ENDED)
    listed = peek(reasons) or [reasons]
    for reason in listed if isinstance(listed, list) else [listed]:
        if not is_finished(reason):
            builder.reject_answer(f"attributes.{_ENDED}", f"{describe_value(reason)}: {_CUT_OFF}")


def _decode(value: Any, pointer: str, builder: RowBuilder) -> Any:
    """Return a structured value, or that of a string which holds an object or a list of JSON."""
    is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
    return builder.decode(value, pointer) if is_json else value


def _list(attributes: dict[str, Any], name: str, builder: RowBuilder) -> list[Any]:
    value = _decode(attributes.get(name), f"attributes.{name}", builder)
    if value is None:
        return []
    if not isinstance(value, list):
        reason = f"expected a list of messages, got {describe_value(value)}"
        raise RowError(f"attributes.{name}", "message_shape", reason)
    return value


def _add_message(message: Any, is_answer: bool, at: str, system: str | None, builder: RowBuilder) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("parts"), list):
        reason = f"expected an object with role and parts, got {describe_value(message)}"
        raise RowError(at, "message_shape", reason)
    builder.note_unread(message, ("role", "parts", "finish_reason", "name"), at)
    role = message.get("role")
    if is_answer and not is_finished(message.get("finish_reason")):
        builder.reject_answer(f"{at}.finish_reason", f"{describe_value(message['finish_reason'])}: {_CUT_OFF}")
    match role:
        case "assistant":
            _add_turn(message["parts"], at, builder)
        case "system" | "developer" | "user" | "tool":
            texts: list[str] = []
            for i, part in enumerate(message["parts"]):
                where = f"{at}.parts[{i}]"
                if _type_of(part) == "tool_call_response" and texts:
                    reason = "a result after text of the same message; results come first"
                    raise RowError(where, "result_without_call", reason)
                if _type_of(part) == "tool_call_response":
                    _add_result(part, where, builder)
                elif role == "tool":
                    raise _make_part_error(part, where)
                else:
                    texts += _read_texts([part], f"{at}.parts", i)
            text = "\n".join(texts)
            builder.notes["text_parts_joined"] += len(texts) > 1
            if texts and role == "user":
                builder.add("user", text, at)
            elif texts and text != system:
                builder.notes["developer_as_system"] += role == "developer"
                builder.add("system", text, at)
        case _:
            reason = f"expected system, user, assistant or tool, got {describe_value(role)}"
            raise RowError(f"{at}.role", "unknown_role", reason)


def _add_turn(parts: list[Any], at: str, builder: RowBuilder) -> None:
    turn = AssistantTurn(at, builder)
    for i, part in enumerate(parts):
        where = f"{at}.parts[{i}]"
        match _type_of(part):
            case "text":
                for text in _read_texts([part], f"{at}.parts", i):
                    turn.add_text(text, where)
            case "reasoning":
                for text in _read_texts([part], f"{at}.parts", i):
                    turn.add_reasoning(text, where)
            case "tool_call":
                call = {key: value for key, value in part.items() if key != "type"}
                if call.get("arguments") is None:
                    call["arguments"] = {}
                turn.add_call(builder.read_call(call, where, read_string(part.get("id"), f"{where}.id")))
            case "tool_call_response":
                raise RowError(where, "message_shape", "a result in the assistant's message")
            case _:
                raise _make_part_error(part, where)
    turn.finish()


def _add_result(part: dict[str, Any], at: str, builder: RowBuilder) -> None:
    key = "response" if "response" in part else "result"  # the name in earlier versions
    require_read_keys(part, ("type", "id", "name", key), at)
    call_id, name = read_string(part.get("id"), f"{at}.id"), read_string(part.get("name"), f"{at}.name")
    builder.add_result(part.get(key), f"{at}.{key}", call_id, name)


def _type_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _read_texts(parts: Any, at: str, start: int = 0) -> list[str]:
    """Return the texts of parts, the first of which is number ``start`` of the list at ``at``."""
    if not isinstance(parts, list):
        raise RowError(at, "message_shape", f"expected a list of parts, got {describe_value(parts)}")
    texts = []
    for i, part in enumerate(parts, start):
        content = part.get("content") if isinstance(part, dict) else None
        if _type_of(part) not in ("text", "reasoning") or not isinstance(content, str):
            raise _make_part_error(part, f"{at}[{i}]")
        require_read_keys(part, ("type", "content"), f"{at}[{i}]")
        texts.append(content)
    return texts


def _make_part_error(part: Any, at: str) -> RowError:
    kind = _type_of(part)
    if kind in _MEDIA:
        return RowError(at, "not_text_only", f"a part of type {kind!r}; {TEXT_ONLY}")
    if isinstance(kind, str):
        return RowError(at, "unknown_block", f"a part of type {kind!r}, which is not read here; leave the row out")
    return RowError(at, "message_shape", f"expected a part with a type, got {describe_value(part)}")


ROW_FORMAT = RowFormat(
    name="otel",
    keys="resourceSpans or resourceLogs of OTLP, or attributes with gen_ai.input.messages and gen_ai.output.messages",
    matches=_is_span,
    read=_read,
    expand=_expand,
    columns=("attributes", "status"),
    harmless=(
        *("name", "context", "kind", "parent_id", "start_time", "end_time", "events", "links", "resource"),
        *("traceId", "spanId", "parentSpanId", "traceState", "flags", "startTimeUnixNano", "endTimeUnixNano"),
    ),
    is_log=True,
    priority=12,
)
