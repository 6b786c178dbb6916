"""One conversation in the form of each API and log, written by hand to the published schemas.

The requests and responses were validated once with the types of anthropic 2.13, openai 3.57, google-genai 3.6 and
langchain-core 1.8, which are no dependencies of the tests.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

SYSTEM, QUESTION = "You report the weather.", "What is the weather in Paris and in Atlantis?"
THOUGHT, LOOKING, ANSWER = "Two cities, so two calls.", "Let me look.", "Paris has 18 degrees; Atlantis is unknown."
RESULT, FAILURE = "18 degrees", "no such city"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
OPENAI_TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}]
FLAT_TOOLS = [{"type": "function", **FUNCTION, "strict": True}]
GEMINI_TOOLS = [
    {
        "functionDeclarations": [
            {
                "name": "get_weather",
                "description": "Weather of a city",
                "parameters": {
                    "type": "OBJECT",
                    "properties": {"city": {"type": "STRING", "description": "Its name"}},
                    "required": ["city"],
                },
            }
        ]
    }
]
CITIES = {"call_1": "Paris", "call_2": "Atlantis"}


def anthropic_request() -> Row:
    blocks = [{"type": "tool_use", "id": i, "name": "get_weather", "input": {"city": c}} for i, c in CITIES.items()]
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": RESULT}]},
        {"type": "tool_result", "tool_use_id": "call_2", "content": FAILURE, "is_error": True},
    ]
    thinking = [{"type": "thinking", "thinking": THOUGHT, "signature": "c2lnbmVk"}, {"type": "text", "text": LOOKING}]
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 1024,
        "stop_sequences": ["the end"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "tools": ANTHROPIC_TOOLS,
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [*thinking, *blocks]},
            {"role": "user", "content": results},
        ],
    }


def anthropic_response() -> Row:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [{"type": "text", "text": ANSWER, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 90, "output_tokens": 12},
    }


def responses_items() -> list[Row]:
    calls = [
        {"type": "function_call", "call_id": i, "name": "get_weather", "arguments": json.dumps({"city": c})}
        for i, c in CITIES.items()
    ]
    return [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": THOUGHT}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": LOOKING, "annotations": []}],
        },
        *({**call, "id": f"fc_{call['call_id']}", "status": "completed"} for call in calls),
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": RESULT}]},
        {"type": "function_call_output", "call_id": "call_2", "output": FAILURE},
    ]


def responses_request() -> Row:
    settings = {"model": "gpt-5", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}, "store": False}
    return {**settings, "instructions": SYSTEM, "input": responses_items(), "tools": FLAT_TOOLS}


def responses_response() -> Row:
    content = [{"type": "output_text", "text": ANSWER, "annotations": []}]
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1790000000.0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": SYSTEM,
        "metadata": {},
        "model": "gpt-5",
        "output": [
            {"type": "message", "id": "msg_2", "role": "assistant", "status": "completed", "content": content},
        ],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": FLAT_TOOLS,
        "top_p": 1.0,
    }


def gemini_request() -> Row:
    calls = [{"functionCall": {"id": i, "name": "get_weather", "args": {"city": c}}} for i, c in CITIES.items()]
    results = [
        {"functionResponse": {"id": "call_1", "name": "get_weather", "response": {"output": RESULT}}},
        {"functionResponse": {"id": "call_2", "name": "get_weather", "response": {"error": FAILURE}}},
    ]
    said = [{"text": THOUGHT, "thought": True}, {"text": LOOKING, "thoughtSignature": "c2lnbmVk"}]
    return {
        "systemInstruction": {"parts": [{"text": SYSTEM}]},
        "tools": GEMINI_TOOLS,
        "generationConfig": {"temperature": 0.5},
        "contents": [
            {"role": "user", "parts": [{"text": QUESTION}]},
            {"role": "model", "parts": [*said, *calls]},
            {"role": "user", "parts": results},
        ],
    }


def gemini_response() -> Row:
    content = {"role": "model", "parts": [{"text": ANSWER}]}
    return {
        "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {"totalTokenCount": 120},
        "modelVersion": "gemini-3-pro",
        "responseId": "r1",
    }


def gemini_arguments() -> Row:
    """The arguments of the SDK's method, which has most of a request in its config."""
    request = snake_case(gemini_request())
    config = {"response_mime_type": "text/plain", **{key: request[key] for key in ("system_instruction", "tools")}}
    return {"model": "gemini-3-pro", "contents": request["contents"], "config": config}


def snake_case(value: Any) -> Any:
    """Return a value with the keys of Gemini's Python SDK, which leaves none out."""
    if isinstance(value, list):
        return [snake_case(item) for item in value]
    if not isinstance(value, dict):
        return value
    keys = {key: re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key) for key in value}
    filling = {"inline_data": None, "file_data": None} if "text" in value or "functionCall" in value else {}
    return filling | {keys[key]: snake_case(item) for key, item in value.items()}


def openai_messages() -> list[Row]:
    calls = [
        {"id": i, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": c})}}
        for i, c in CITIES.items()
    ]
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": LOOKING, "reasoning_content": THOUGHT, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
        {"role": "tool", "tool_call_id": "call_2", "content": FAILURE},
    ]


def openai_answer() -> Row:
    return {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []}


def openai_response() -> Row:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "gpt-5",
        "system_fingerprint": "fp_ab",
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None, "message": openai_answer()}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 12, "total_tokens": 102},
    }


def langchain_messages() -> list[Row]:
    calls = [{"name": "get_weather", "args": {"city": c}, "id": i, "type": "tool_call"} for i, c in CITIES.items()]
    blocks = [{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": LOOKING}]
    return [
        {"type": "system", "content": SYSTEM, "additional_kwargs": {}},
        {"type": "human", "content": QUESTION, "example": False},
        {
            "type": "ai",
            "content": blocks,
            "tool_calls": calls,
            "invalid_tool_calls": [],
            "response_metadata": {"finish_reason": "tool_calls"},
        },
        {"type": "tool", "content": RESULT, "tool_call_id": "call_1", "name": "get_weather", "status": "success"},
        {"type": "tool", "content": FAILURE, "tool_call_id": "call_2", "name": "get_weather", "status": "error"},
        {
            "type": "ai",
            "content": ANSWER,
            "usage_metadata": {"input_tokens": 90, "output_tokens": 12, "total_tokens": 102},
        },
    ]


def serialise(message: Row) -> Row:
    """Return a message of LangChain's as its serialised constructor."""
    names = {"system": "SystemMessage", "human": "HumanMessage", "ai": "AIMessage", "tool": "ToolMessage"}
    path = ["langchain", "schema", "messages", names[message["type"]]]
    return {"lc": 1, "type": "constructor", "id": path, "kwargs": message}


def langfuse(request: Any, output: Any, **changes: Any) -> Row:
    return {
        "id": "obs-1",
        "traceId": "trace-1",
        "traceName": "weather agent",
        "projectId": "project-1",
        "type": "GENERATION",
        "name": "OpenAI generation",
        "environment": "default environment",
        "release": "weather agent 2",
        "tags": ["weather agent"],
        "startTime": "2026-11-01T10:00:00.000Z",
        "level": "DEFAULT",
        "statusMessage": "served by the weather agent",
        "model": "gpt-5",
        "modelParameters": {"temperature": 1},
        "internalModelId": "gpt five",
        "input": request,
        "output": output,
        "metadata": {"user": "tester"},
        "usageDetails": {"total": 102},
        "usagePricingTierName": "standard tier",
        "promptName": "weather prompt",
        "userId": "weather user",
        "sessionId": "weather session",
        **changes,
    }


def spell(record: Row) -> Row:
    """Return a record with its columns in snake case."""
    return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in record.items()}


def langsmith(inputs: Row, outputs: Row | None, **changes: Any) -> Row:
    return {
        "id": "0b8f0a52-8e4c-4c11-9c5e-54a6a4b0a001",
        "name": "ChatOpenAI",
        "run_type": "llm",
        "trace_id": "0b8f0a52-8e4c-4c11-9c5e-54a6a4b0a000",
        "dotted_order": "20261101T100000000000Z0b8f0a52-8e4c-4c11-9c5e-54a6a4b0a000",
        "start_time": "2026-11-01T10:00:00",
        "end_time": "2026-11-01T10:00:01",
        "error": None,
        "status": "success",
        "serialized": {"name": "ChatOpenAI", "kwargs": {"base_url": "the API's"}},
        "events": [{"name": "new token", "time": "2026-11-01T10:00:01", "kwargs": {"token": "of the answer"}}],
        "tags": ["weather agent"],
        "feedback_stats": {"correctness": {"n": 1, "avg": 1.0}},
        "prompt_token_details": {"cache_read": 3},
        "app_path": "/o/the organisation/projects",
        "total_cost": 0.1,
        "inputs": inputs,
        "outputs": outputs,
        "extra": {
            "invocation_params": {"model": "gpt-5", "tools": OPENAI_TOOLS},
            "metadata": {"ls_provider": "openai"},
        },
        **changes,
    }


def langsmith_generation() -> Row:
    messages = [serialise(message) for message in langchain_messages()]
    generation = {"type": "ChatGeneration", "text": ANSWER, "message": messages[-1], "generation_info": None}
    return langsmith({"messages": [messages[:-1]]}, {"generations": [[generation]], "llm_output": None})


def litellm(**changes: Any) -> Row:
    return {
        "id": "chatcmpl-1",
        "trace_id": "trace-1",
        "session_id": "session-1",
        "litellm_call_id": "call-1",
        "call_type": "acompletion",
        "stream": False,
        "status": "success",
        "status_fields": {"llm_api_status": "success", "guardrail_status": "not_run"},
        "custom_llm_provider": "openai",
        "response_cost": 0.1,
        "cost_breakdown": {"input_cost": 0.05},
        "autorouter_savings": None,
        "autorouter_savings_estimate": {"baseline": "a larger model"},
        "autorouter_baseline_observation": "a larger model",
        "response_cost_failure_debug_info": None,
        "total_tokens": 102,
        "prompt_tokens": 90,
        "completion_tokens": 12,
        "startTime": 1790000000.0,
        "endTime": 1790000001.0,
        "completionStartTime": 1790000000.5,
        "response_time": 1.0,
        "model_map_information": {"model_map_key": "gpt-5", "model_map_value": None},
        "model_id": "model-1",
        "api_base": "https://api.openai.com",
        "cache_hit": False,
        "cache_key": "key of the cache",
        "saved_cache_cost": 0.0,
        "request_tags": ["weather agent"],
        "end_user": "weather user",
        "requester_ip_address": "127.0.0.1",
        "user_agent": "the agent of the user",
        "error_information": None,
        "hidden_params": {"litellm_overhead_time_ms": 3.0},
        "guardrail_information": [{"guardrail_name": "harmless words"}],
        "standard_built_in_tools_params": None,
        "model": "gpt-5",
        "model_group": "team-model",
        "model_parameters": {"tools": OPENAI_TOOLS, "temperature": 1},
        "messages": openai_messages(),
        "response": openai_response(),
        "metadata": {"user_api_key_alias": "team"},
        "error_str": None,
        **changes,
    }


SHAPES: dict[str, Row] = {
    "anthropic: a log": {**anthropic_request(), "response": anthropic_response()},
    "anthropic: request and response": {"request": anthropic_request(), "response": anthropic_response()},
    "anthropic: both as JSON": {
        "request": json.dumps(anthropic_request()),
        "response": json.dumps(anthropic_response()),
    },
    "anthropic: messages alone": {
        **anthropic_request(),
        "system": SYSTEM,
        "messages": [*anthropic_request()["messages"], {"role": "assistant", "content": ANSWER}],
    },
    "responses: a log": {**responses_request(), "response": responses_response()},
    "responses: request and response": {"request": responses_request(), "response": responses_response()},
    "responses: input and output": {**responses_request(), "output": responses_response()["output"]},
    "responses: NeMo Gym": {
        "id": 7,
        "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
        "responses_create_params": responses_request(),
        "response": responses_response(),
        "reward": 1.0,
    },
    "gemini: a log": {**gemini_request(), "response": gemini_response()},
    "gemini: request and response": {"request": gemini_request(), "response": gemini_response()},
    "gemini: in the SDK's spelling": snake_case({**gemini_request(), "response": gemini_response()}),
    "gemini: the arguments of the SDK's method": {"request": gemini_arguments(), "response": gemini_response()},
    "gemini: contents alone": {
        **gemini_request(),
        "contents": [*gemini_request()["contents"], gemini_response()["candidates"][0]["content"]],
    },
    "langchain: messages": {"messages": langchain_messages(), "tools": OPENAI_TOOLS},
    "langchain: messages_to_dict": {
        "messages": [{"type": m["type"], "data": m} for m in langchain_messages()],
        "tools": OPENAI_TOOLS,
    },
    "langchain: serialised": {"messages": [serialise(m) for m in langchain_messages()], "tools": OPENAI_TOOLS},
    "log: Langfuse": langfuse({"messages": openai_messages(), "tools": OPENAI_TOOLS}, openai_answer()),
    "log: Langfuse with JSON in strings": langfuse(
        json.dumps({"messages": openai_messages(), "tools": OPENAI_TOOLS}), json.dumps(openai_answer())
    ),
    "log: Langfuse with a text": langfuse(openai_messages(), ANSWER, metadata={"tools": OPENAI_TOOLS}),
    "log: Langfuse in the SDK's spelling": spell(
        langfuse({"messages": openai_messages(), "tools": OPENAI_TOOLS}, openai_answer())
    ),
    "log: Langfuse around Anthropic": langfuse(anthropic_request(), anthropic_response()),
    "log: Langfuse around Responses": langfuse(responses_request(), responses_response()["output"]),
    "log: Langfuse around Gemini": langfuse(gemini_request(), gemini_response()),
    "log: LangSmith around OpenAI": langsmith({"messages": openai_messages()}, openai_response()),
    "log: LangSmith around LangChain": langsmith_generation(),
    "log: LangSmith with all messages in the output": langsmith(
        {"messages": langchain_messages()[:2]}, {"messages": langchain_messages()}
    ),
    "log: LangSmith dataset": {
        "inputs": {"messages": openai_messages(), "tools": OPENAI_TOOLS},
        "outputs": {"messages": [openai_answer()]},
    },
    "log: LiteLLM": litellm(),
    "log: OpenAI's request and response": {
        "request": {"model": "gpt-5", "messages": openai_messages(), "tools": OPENAI_TOOLS},
        "response": openai_response(),
    },
    "prompt_completion: TRL": {
        "prompt": openai_messages()[:2],
        "completion": [*openai_messages()[2:], openai_answer()],
        "tools": OPENAI_TOOLS,
    },
}
"""The conversation in each shape; the word before the colon is its row format."""


def swift_messages(thinks: bool) -> list[Row]:
    """Return the messages in ms-swift's roles, which have no ids; ``thinks``: a text before the calls."""
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in CITIES.values()]
    said = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{LOOKING}", "loss": True}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        *([said] if thinks else []),
        *({"role": "tool_call", "content": json.dumps(call)} for call in calls),
        *({"role": "tool_response", "content": text} for text in (RESULT, FAILURE)),
        {"role": "assistant", "content": ANSWER},
    ]


SWIFT_SHAPES: dict[str, Row] = {
    "calls alone": {"messages": swift_messages(thinks=False), "tools": json.dumps(OPENAI_TOOLS)},
    "a text before the calls": {"messages": swift_messages(thinks=True), "tools": json.dumps(OPENAI_TOOLS)},
    "tools as a list": {"messages": swift_messages(thinks=False), "tools": OPENAI_TOOLS},
}
"""The conversation in the roles of ms-swift, which are of the row format ``openai``."""
# Key of "calls alone" or index of its message, what takes its place, kind of the defect, its location.
SWIFT_DEFECTS: list[tuple[str | int, Any, str, str]] = [
    (2, {"role": "tool_call", "content": '{"name": "get_weather"'}, "call_not_json", "messages[2].content"),
    (2, {"role": "user", "content": "In metric units."}, "result_without_call", "messages[5]"),
    (2, {"role": "tool_calls", "content": "[]"}, "unknown_role", "messages[2].role"),
    ("tools", [], "call_without_tools", "messages[3]"),
    ("notes", "Asked on a Monday.", "unread_text", "notes"),
]


def iter_swift_defects() -> Iterator[Row]:
    """Yield a row for each of ``SWIFT_DEFECTS``."""
    for place, value, *_ in SWIFT_DEFECTS:
        row = copy.deepcopy(SWIFT_SHAPES["calls alone"])
        holder: Any = row if isinstance(place, str) else row["messages"]
        holder[place] = value
        yield row


def iter_parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and value of each part of a row."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from iter_parts(item, (*path, key))


def change(shape: str, path: str, value: Any) -> Row:
    """Return a shape with a value at a path of keys and indices put in place, or taken out if it is ``...``."""
    row = copy.deepcopy(SHAPES[shape])
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    holder: Any = row
    for key in parents:
        holder = holder[key]
    if value is ...:
        del holder[last]
    elif isinstance(holder, list) and last == len(holder):
        holder.append(value)
    else:
        holder[last] = value
    return row


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
FAILED = "answer_failed"
# Shape, path, value at it, kind of the defect, its location.
DEFECTS: list[tuple[str, str, Any, str, str]] = [
    # Results without calls.
    ("anthropic: a log", "messages.2.content.0.tool_use_id", "x", "result_without_call", "messages[2].content[0]"),
    ("anthropic: a log", "messages.1", ..., "result_without_call", "messages[1].content[0]"),
    ("responses: a log", "input.5.call_id", "x", "result_without_call", "input[5].output"),
    ("gemini: a log", "contents.2.parts.0.functionResponse.id", "x", "result_without_call", ""),
    ("langchain: messages", "messages.3.tool_call_id", "x", "result_without_call", "messages[3].content"),
    ("log: LiteLLM", "messages.3.tool_call_id", "x", "result_without_call", "messages[3]"),
    ("prompt_completion: TRL", "completion.1.tool_call_id", "x", "result_without_call", "completion[1]"),
    # Calls without any tools.
    ("anthropic: a log", "tools", ..., "call_without_tools", "messages[1]"),
    ("responses: input and output", "tools", ..., "call_without_tools", "input[4]"),
    ("gemini: a log", "tools", [], "call_without_tools", "contents[1]"),
    (
        "gemini: the arguments of the SDK's method",
        "request.config.cached_content",
        "cachedContents/a",
        "history_missing",
        "request.config.cached_content",
    ),
    (
        "gemini: the arguments of the SDK's method",
        "request.tools",
        GEMINI_TOOLS,
        "message_shape",
        "request.config.tools",
    ),
    ("langchain: messages", "tools", ..., "call_without_tools", "messages[2]"),
    ("log: LiteLLM", "model_parameters", {}, "call_without_tools", "messages[2]"),
    ("log: Langfuse", "input.tools", ..., "call_without_tools", "input.messages[2]"),
    ("prompt_completion: TRL", "tools", ..., "call_without_tools", "completion[0]"),
    # Tools that are not in the row.
    (
        "anthropic: a log",
        "tools.1",
        {"type": "web_search_20250305", "name": "web_search"},
        "tool_shape",
        "tools[1].type",
    ),
    ("responses: a log", "tools.1", {"type": "file_search", "vector_store_ids": []}, "tool_shape", "tools[1].type"),
    ("gemini: a log", "tools.1", {"googleSearch": {}}, "tool_shape", "tools[1].name"),
    # Blocks, parts and items of unknown types, and media.
    (
        "anthropic: a log",
        "messages.1.content.1",
        {"type": "server_tool_use", "id": "s", "name": "web_search"},
        "unknown_block",
        "",
    ),
    ("anthropic: a log", "messages.2.content.2", {"type": "hologram"}, "unknown_block", "messages[2].content[2]"),
    ("anthropic: a log", "messages.2.content.2", IMAGE, "not_text_only", "messages[2].content[2]"),
    ("anthropic: a log", "messages.2.content.0.content.0", IMAGE, "not_text_only", "messages[2].content[0].content[0]"),
    ("responses: a log", "input.2", {"type": "web_search_call", "id": "ws"}, "unknown_block", "input[2]"),
    ("responses: a log", "input.0.content.0", {"type": "input_image"}, "not_text_only", "input[0].content[0]"),
    ("gemini: a log", "contents.1.parts.1", {"executableCode": {"code": "1"}}, "unknown_block", "contents[1].parts[1]"),
    ("gemini: a log", "contents.0.parts.0", {"inlineData": {"data": "aGk="}}, "not_text_only", "contents[0].parts[0]"),
    ("langchain: messages", "messages.2.content.1", {"type": "widget"}, "unknown_block", "messages[2].content[1]"),
    ("langchain: messages", "messages.2.content.1", {"type": "tool_use", "id": "x"}, "unknown_block", ""),
    # Text in keys that are not read.
    ("anthropic: a log", "prefill", "Sure, here", "unread_text", "prefill"),
    ("anthropic: request and response", "request.prefill", "Sure, here", "unread_text", "request.prefill"),
    ("anthropic: request and response", "messages", "Other words", "unread_text", "messages"),
    ("anthropic: a log", "messages.0.note", "Be brief", "unread_text", "messages[0].note"),
    ("anthropic: a log", "messages.1.content.2.note", "Be brief", "unread_text", "messages[1].content[2].note"),
    ("anthropic: a log", "messages.2.content.0.note", "Be brief", "unread_text", "messages[2].content[0].note"),
    ("responses: a log", "input.3.note", "Be brief", "unread_text", "input[3].note"),
    ("responses: a log", "response.instructions", "Be brief", "unread_text", "response.instructions"),
    (
        "responses: a log",
        "text",
        {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "unread_text",
        "text",
    ),
    ("gemini: a log", "contents.0.parts.0.note", "Be brief", "unread_text", "contents[0].parts[0].note"),
    ("gemini: a log", "generationConfig", {"responseSchema": {"type": "OBJECT"}}, "unread_text", "generationConfig"),
    ("langchain: messages", "messages.1.note", "Be brief", "unread_text", "messages[1].note"),
    ("langchain: messages", "messages.2.additional_kwargs", {"note": "Be brief"}, "unread_text", ""),
    ("langchain: messages", "reasoning", "Because of the sun", "unread_text", "reasoning"),
    ("anthropic: request and response", "text", "Be brief", "unread_text", "text"),
    ("log: Langfuse around Gemini", "thinking", "Because of the sun", "unread_text", "thinking"),
    ("log: Langfuse", "comment", "Be brief", "unread_text", "comment"),
    ("log: Langfuse", "messages", [{"role": "user", "content": "Other words"}], "unread_text", "messages"),
    ("log: LangSmith around OpenAI", "inputs.note", "Be brief", "unread_text", "inputs.note"),
    ("log: LangSmith around LangChain", "outputs.generations.0.0.text", "Other words", "unread_text", ""),
    ("prompt_completion: TRL", "note", "Be brief", "unread_text", "note"),
    # Turns that the row does not hold.
    ("responses: a log", "previous_response_id", "resp_0", "history_missing", "previous_response_id"),
    ("responses: a log", "input.0", {"type": "item_reference", "id": "msg_0"}, "history_missing", "input[0]"),
    ("responses: a log", "prompt", {"id": "pmpt_1"}, "history_missing", "prompt"),
    ("gemini: a log", "cachedContent", "cachedContents/1", "history_missing", "cachedContent"),
    ("log: Langfuse", "input", None, "history_missing", ""),
    # Answers that must not be imitated.
    ("anthropic: a log", "response.stop_reason", "max_tokens", FAILED, "response.stop_reason"),
    ("anthropic: a log", "response", {"type": "error", "error": {"message": "Overloaded"}}, FAILED, "response.error"),
    ("responses: a log", "response.status", "incomplete", FAILED, "response.status"),
    ("responses: a log", "input.3.status", "incomplete", FAILED, "input[3].status"),
    (
        "gemini: a log",
        "response.candidates.0.finishReason",
        "MAX_TOKENS",
        FAILED,
        "response.candidates[0].finishReason",
    ),
    ("gemini: a log", "response.candidates", [], FAILED, "response.candidates"),
    ("log: LiteLLM", "status", "failure", FAILED, "status"),
    ("log: LiteLLM", "response.choices.0.finish_reason", "length", FAILED, "response.choices[0].finish_reason"),
    ("log: Langfuse", "level", "ERROR", FAILED, "level"),
    ("log: Langfuse", "output", None, FAILED, "output"),
    ("log: LangSmith around OpenAI", "error", "RateLimitError('slow down')", FAILED, "error"),
    *(
        ("langchain: messages", "messages.5.response_metadata", {key: reason}, FAILED, "")
        for key, reason in (
            *(("finish_reason", "length"), ("finish_reason", "MAX_TOKENS"), ("stop_reason", "max_tokens")),
            *(("done_reason", "length"), ("stopReason", ["max_tokens"]), ("status", "incomplete")),
        )
    ),
    (
        "langchain: serialised",
        "messages.5.kwargs.response_metadata",
        {"finish_reason": "length"},
        FAILED,
        "messages[5].kwargs.response_metadata.finish_reason",
    ),
    ("log: LangSmith with all messages in the output", "outputs.stop_reason", "max_tokens", FAILED, ""),
    ("log: LangSmith with all messages in the output", "outputs.messages.5.stop_reason", "max_tokens", FAILED, ""),
    ("log: LangSmith dataset", "outputs.messages.0.finish_reason", "length", FAILED, ""),
    ("prompt_completion: TRL", "label", False, FAILED, "label"),
    # Records that are not of a model call.
    ("log: Langfuse", "type", "SPAN", "span_left_out", "type"),
    ("log: LangSmith around OpenAI", "run_type", "chain", "span_left_out", "run_type"),
    # Rows of another shape than their format's.
    ("log: LiteLLM", "response.choices.1", {"message": {}}, "message_shape", "response.choices"),
    ("log: LangSmith with all messages in the output", "outputs.messages.1.content", "Else?", "message_shape", ""),
    ("anthropic: a log", "messages.0.role", "critic", "unknown_role", "messages[0].role"),
    ("anthropic: a log", "messages.1.content.4", {"type": "text", "text": "Wait."}, "text_around_call", ""),
    (
        "langchain: messages",
        "messages.2.content",
        [{"type": "tool_use", "id": "call_1"}, {"type": "text", "text": "Done."}],
        "text_around_call",
        "messages[2].content[1]",
    ),
    (
        "langchain: messages",
        "messages.2.content",
        [{"type": "tool_use", "id": "call_1"}, {"type": "thinking", "thinking": "Hm."}],
        "message_shape",
        "messages[2].content[1]",
    ),
    ("langchain: messages", "messages.2.invalid_tool_calls", [{"args": "{"}], "arguments_not_json", ""),
    ("responses: a log", "input.3.arguments", "{", "arguments_not_json", "input[3].arguments"),
    ("anthropic: a log", "messages.1.content.2.input", "x", "arguments_not_json", "messages[1].content[2].input"),
]
