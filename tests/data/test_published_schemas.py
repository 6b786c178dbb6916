"""The fixtures of rows are what the packages that publish their schemas accept.

The packages are no dependencies: a test without its package is skipped. To run all of them, install anthropic, openai,
google-genai, langchain-core, langsmith, langfuse, litellm and opentelemetry-proto (Python 3.11), and harbor (3.12), and
run pytest with ``--noconftest``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests import api_rows, trace_rows

Row = dict[str, Any]


def require(package: str) -> Any:
    return pytest.importorskip(package, reason=f"validates with the types of {package}, which is not installed")


def validate(schema: Any, value: Any) -> None:
    """Validate a value with a type; lists that pydantic would validate when they are iterated are validated, too."""
    pydantic = require("pydantic")

    def consume(item: Any) -> None:
        if isinstance(item, Mapping):
            for part in item.values():
                consume(part)
        elif isinstance(item, Iterable) and not isinstance(item, str | bytes):
            for part in item:
                consume(part)

    adapter = pydantic.TypeAdapter(schema)  # its validators must outlive the iterators
    consume(adapter.validate_python(value))


def require_known(value: Row, known: Iterable[str]) -> None:
    """Require that a row has no key that its schema does not have; types of dictionaries accept any."""
    assert set(value) <= set(known)


def test_anthropic() -> None:
    types = require("anthropic.types")
    request, response = api_rows.anthropic_request(), api_rows.anthropic_response()
    validate(types.message_create_params.MessageCreateParamsNonStreaming, request)
    require_known(request, types.message_create_params.MessageCreateParamsBase.__annotations__)
    validate(types.Message, response)
    require_known(response, types.Message.model_fields)
    for message in trace_rows.SESSION[1:]:
        validate(types.MessageParam, {key: message["message"][key] for key in ("role", "content")})


def test_openai_responses() -> None:
    types = require("openai.types.responses")
    request, response = api_rows.responses_request(), api_rows.responses_response()
    params = types.response_create_params
    validate(params.ResponseCreateParamsNonStreaming, request)
    require_known(request, params.ResponseCreateParamsBase.__annotations__)
    validate(types.Response, response)
    require_known(response, types.Response.model_fields)
    for line in trace_rows.ROLLOUT:
        if line["type"] == "response_item":
            item = {"id": "x", "status": "completed", **line["payload"]}  # which Codex leaves out, and annotations
            if item.get("role") == "assistant":
                item["content"] = [{"annotations": [], **part} for part in item["content"]]
            validate(types.ResponseInputItemParam, item)


def test_openai_chat_completions() -> None:
    types = require("openai.types.chat")
    for message in [*api_rows.openai_messages(), *trace_rows.TRAJECTORY]:
        validate(types.ChatCompletionMessageParam, message)
    for tool in api_rows.OPENAI_TOOLS:
        validate(types.ChatCompletionToolParam, tool)
    validate(types.ChatCompletion, api_rows.openai_response())
    require_known(api_rows.openai_response(), types.ChatCompletion.model_fields)


def test_gemini() -> None:
    types = require("google.genai.types")
    request, response = api_rows.gemini_request(), api_rows.gemini_response()
    for content in request["contents"]:
        types.Content.model_validate(content)
    types.Content.model_validate(request["systemInstruction"])
    for tool in request["tools"]:
        types.Tool.model_validate(tool)
    types.GenerationConfig.model_validate(request["generationConfig"])
    types.GenerateContentResponse.model_validate(response)
    types.GenerateContentResponse.model_validate(api_rows.snake_case(response))


def test_langchain() -> None:
    messages = require("langchain_core.messages")
    load = require("langchain_core.load")
    kinds = [message["type"] for message in api_rows.langchain_messages()]
    as_dicts = [{"type": message["type"], "data": message} for message in api_rows.langchain_messages()]
    assert [message.type for message in messages.messages_from_dict(as_dicts)] == kinds
    serialised = [api_rows.serialise(message) for message in api_rows.langchain_messages()]
    assert [load.load(message, allowed_objects="messages").type for message in serialised] == kinds


def test_langsmith() -> None:
    schemas = require("langsmith.schemas")
    for run in (
        api_rows.langsmith({"messages": api_rows.openai_messages()}, api_rows.openai_response()),
        api_rows.langsmith_generation(),
    ):
        schemas.Run.model_validate(run)
        require_known(run, schemas.Run.model_fields)


def test_langfuse() -> None:
    module = require("langfuse.api.commons.types.observation_v2")
    record = api_rows.spell(api_rows.langfuse(api_rows.openai_messages(), api_rows.openai_answer()))
    module.ObservationV2.model_validate(record)
    require_known(record, module.ObservationV2.model_fields)


def test_litellm() -> None:
    types = require("litellm.types.utils")
    require_known(api_rows.litellm(), types.StandardLoggingPayload.__annotations__)


def test_opentelemetry() -> None:
    trace = require("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    logs = require("opentelemetry.proto.collector.logs.v1.logs_service_pb2")
    names = require("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    parse = require("google.protobuf.json_format").Parse
    for is_text in (True, False):
        document = trace_rows.otlp(trace_rows.span(), is_text=is_text)
        assert parse(json.dumps(document), trace.ExportTraceServiceRequest()).resource_spans
    document = trace_rows.otlp_logs(trace_rows.span())
    assert parse(json.dumps(document), logs.ExportLogsServiceRequest()).resource_logs
    known = {value for value in vars(names).values() if isinstance(value, str)}
    assert {key for key in trace_rows.span() if key.startswith("gen_ai.")} <= known


@pytest.mark.parametrize("version", ["1.4", "1.5", "1.6", "1.7", "1.8"])
def test_atif(version: str) -> None:
    models = require("harbor.models.trajectories")
    models.Trajectory.model_validate(trace_rows.atif(version))
    child = trace_rows.atif(version, trajectory_id="sub")
    models.Trajectory.model_validate(trace_rows.atif(version, subagent_trajectories=[child]))
