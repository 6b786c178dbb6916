"""One conversation as a trace or session of each kind of agent, written by hand to the published schemas.

``tests/data/test_published_schemas.py`` validates them with the types of the packages that publish such schemas.
"""

from __future__ import annotations

import json
from typing import Any

Row = dict[str, Any]

FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


# One conversation, as each format writes it.
CALL = ("get_weather", {"city": "Oslo"})
EXPECTED = [
    ("system", "Be brief.", None, [], 1.0),
    ("user", "Weather in Oslo?", None, [], 1.0),
    ("assistant", None, "Ask the tool.", [CALL], 1.0),
    ("tool", "3 degrees", None, [], 1.0),
    ("assistant", "It is 3 degrees.", None, [], 1.0),
]


def text_part(text: str) -> Row:
    return {"type": "text", "content": text}


def span(question: str = "Weather in Oslo?", **changes: Any) -> Row:
    """The attributes of a call of the model, the second one of its conversation."""
    call = {"type": "tool_call", "id": "c1", "name": "get_weather", "arguments": {"city": "Oslo"}}
    attributes: Row = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.system_instructions": [text_part("Be brief.")],
        "gen_ai.tool.definitions": [{"type": "function", **FUNCTION}],
        "gen_ai.input.messages": [
            {"role": "user", "parts": [text_part(question)]},
            {"role": "assistant", "parts": [{"type": "reasoning", "content": "Ask the tool."}, call]},
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "3 degrees"}]},
        ],
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": [text_part("It is 3 degrees.")], "finish_reason": "stop"}
        ],
    }
    return {key: value for key, value in {**attributes, **changes}.items() if value is not None}


def any_value(value: Any) -> Row:
    """A value as OTLP's JSON writes it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    return {"kvlistValue": {"values": [{"key": key, "value": any_value(item)} for key, item in value.items()]}}


def otlp(*spans: Row, is_text: bool = True) -> Row:
    """A document of OTLP; messages are strings of JSON, or structured values."""

    def make(attributes: Row) -> Row:
        listed = {
            key: json.dumps(value) if is_text and not isinstance(value, str | int) else value
            for key, value in attributes.items()
            if key != "status"
        }
        pairs = [{"key": key, "value": any_value(value)} for key, value in listed.items()]
        made = {
            "name": "chat m",
            "traceId": "5b8efff798038103d269b633813fc60c",
            "spanId": "eee19b7ec3c1b174",
            "kind": 3,
            "attributes": pairs,
        }
        return {**made, **({"status": attributes["status"]} if "status" in attributes else {})}

    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": [*map(make, spans)]}]}]}


def step(number: int, source: str, message: str, **keys: Any) -> Row:
    return {"step_id": number, "source": source, "message": message, **keys}


def atif(version: str = "1.7", **changes: Any) -> Row:
    call = {"tool_call_id": "c1", "function_name": "get_weather", "arguments": {"city": "Oslo"}}
    observation = {"results": [{"source_call_id": "c1", "content": "3 degrees"}]}
    document = {
        "schema_version": f"ATIF-v{version}",
        "session_id": "s",
        "agent": {"name": "a", "version": "1", "tool_definitions": [{"type": "function", "function": FUNCTION}]},
        "steps": [
            step(1, "system", "Be brief."),
            step(2, "user", "Weather in Oslo?"),
            step(3, "agent", "", reasoning_content="Ask the tool.", tool_calls=[call], observation=observation),
            step(4, "agent", "It is 3 degrees.", metrics={"prompt_tokens": 3}),
        ],
        "final_metrics": {"total_steps": 4},
    }
    return {**document, **changes}


def event(uuid: str, parent: str | None, message: Row | None = None, **keys: Any) -> Row:
    """An event of a session; the type is the role of its message."""
    made = {"uuid": uuid, "parentUuid": parent, "isSidechain": False, "sessionId": "s", "cwd": "/x", **keys}
    made |= {"promptSource": "typed", "origin": {"kind": "human"}, "attributionSkill": "weather reports"}
    return {**made, "type": keys.get("type") or message["role"], "message": message} if message else made


def user(content: Any) -> Row:
    return {"role": "user", "content": content}


def assistant(*blocks: Row, **keys: Any) -> Row:
    return {"role": "assistant", "content": list(blocks), "model": "m", "usage": {"input_tokens": 3}, **keys}


def text_block(text: str) -> Row:
    return {"type": "text", "text": text}


def use(call_id: str, city: str = "Oslo") -> Row:
    return {"type": "tool_use", "id": call_id, "name": "get_weather", "input": {"city": city}}


def result(call_id: str, text: str = "3 degrees") -> Row:
    return {"type": "tool_result", "tool_use_id": call_id, "content": text}


THOUGHT = {"type": "thinking", "thinking": "Ask the tool.", "signature": "x"}
SESSION = [
    {"type": "summary", "summary": "Weather", "leafUuid": "e"},
    event("a", None, user("Weather in Oslo?")),
    event("b", "a", assistant(THOUGHT, id="m1")),
    event("c", "b", assistant(use("c1"), id="m1")),
    event("d", "c", user([result("c1")]), toolUseResult={"stdout": "3 degrees, in other words"}),
    event("e", "d", assistant(text_block("It is 3 degrees."), id="m2", stop_reason="end_turn")),
]


def item(**payload: Any) -> Row:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}


def said(role: str, text: str) -> Row:
    kind = "output_text" if role == "assistant" else "input_text"
    return item(type="message", role=role, content=[{"type": kind, "text": text}])


ROLLOUT = [
    {"type": "session_meta", "payload": {"id": "s", "cwd": "/x", "base_instructions": {"text": "Be brief."}}},
    {"type": "turn_context", "payload": {"cwd": "/x", "model": "m"}},
    said("user", "Weather in Oslo?"),
    {"type": "event_msg", "payload": {"type": "user_message", "message": "Weather in Oslo?"}},
    item(type="reasoning", summary=[{"type": "summary_text", "text": "Ask the tool."}], encrypted_content="x"),
    item(type="function_call", name="get_weather", arguments='{"city": "Oslo"}', call_id="c1"),
    item(type="function_call_output", call_id="c1", output="3 degrees"),
    said("assistant", "It is 3 degrees."),
]

OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
TRAJECTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "reasoning_content": "Ask the tool.", "tool_calls": [OPENAI_CALL]},
    {"role": "tool", "content": "3 degrees", "tool_call_id": "c1", "name": "get_weather"},
    {"role": "assistant", "content": "It is 3 degrees."},
]
SWE = {"instance_id": "x__1", "trajectory": TRAJECTORY, "tools": [{"type": "function", "function": FUNCTION}]}
AGENT = {"agent": "main"}
SWE_SMITH = {
    "messages": [
        {**TRAJECTORY[0], **AGENT, "message_type": "system_prompt"},
        {**TRAJECTORY[1], **AGENT, "message_type": "observation"},
        {
            **TRAJECTORY[2],
            **AGENT,
            "content": "",
            "thought": "",
            "action": "get_weather Oslo",
            "thinking_blocks": [],
            "message_type": "action",
        },
        {"role": "tool", "content": "3 degrees", **AGENT, "message_type": "observation", "tool_call_ids": ["c1"]},
        {**TRAJECTORY[4], **AGENT, "thought": "It is 3 degrees.", "action": "", "message_type": "action"},
    ],
    "instance_id": "x__1",
    "resolved": True,
    "model": "m",
    "traj_id": "x__1.ab",
    "patch": "diff --git a/x b/x",
}
"""A row as SWE-smith's ``collect_trajs.py`` writes it of SWE-agent's history."""


def otlp_logs(attributes: Row) -> Row:
    """A document of OTLP with the event of a model call."""
    (resource,) = otlp(attributes, is_text=False)["resourceSpans"]
    listed = resource["scopeSpans"][0]["spans"][0]["attributes"]
    event = {"eventName": "gen_ai.client.inference.operation.details", "timeUnixNano": "1", "attributes": listed}
    return {"resourceLogs": [{"resource": {"attributes": []}, "scopeLogs": [{"logRecords": [event]}]}]}


SHAPES: dict[str, tuple[list[Any], str]] = {
    "OTLP with messages as JSON": ([otlp(span())], "otel"),
    "OTLP with structured messages": ([otlp(span(), is_text=False)], "otel"),
    "OTLP with events in place of spans": ([otlp_logs(span())], "otel"),
    "a span with its attributes as an object": ([{"name": "chat m", "attributes": span()}], "otel"),
    "ATIF 1.4": ([atif("1.4")], "atif"),
    "ATIF 1.7": ([atif("1.7")], "atif"),
    "a session of Claude Code": (SESSION, "claude_code"),
    "a rollout of Codex": (ROLLOUT, "codex"),
    "a trajectory column": ([SWE], "swe_trajectory"),
    "a trajectory column as JSON": ([{**SWE, "trajectory": json.dumps(TRAJECTORY)}], "swe_trajectory"),
    "messages of SWE-smith": ([SWE_SMITH], "swe_trajectory"),
}


FAILED = {"code": 2, "message": "timeout"}
CUT_OFF = [{"role": "assistant", "parts": [text_part("It")], "finish_reason": "length"}]
BLOB = [{"role": "user", "parts": [{"type": "blob", "modality": "image", "content": "aaaa"}]}]
SERVER_CALL = [{"role": "assistant", "parts": [{"type": "server_tool_call", "name": "search", "server_tool_call": {}}]}]
TWO = [{"role": "assistant", "parts": [text_part(text)]} for text in "ab"]
LATE_RESULT = span()["gen_ai.input.messages"]
LATE_RESULT[2]["parts"].insert(0, text_part("Here it is."))
LATE_RESULT[2]["role"] = "user"
RESULT = {"results": [{"source_call_id": "c9", "content": "3"}]}
CITY_CALL = atif()["steps"][2]["tool_calls"][0]
DELEGATED = {"results": [{"source_call_id": "c1", "subagent_trajectory_ref": [{"trajectory_path": "sub.json"}]}]}
DEFECTS: dict[str, tuple[list[Any], str, str]] = {
    "two alternative answers": (
        [otlp(span(**{"gen_ai.output.messages": TWO}))],
        "message_shape",
        "attributes.gen_ai.output.messages",
    ),
    "an image": (
        [otlp(span(**{"gen_ai.input.messages": BLOB}))],
        "not_text_only",
        "attributes.gen_ai.input.messages[0].parts[0]",
    ),
    "a call that a server made": (
        [otlp(span(**{"gen_ai.output.messages": SERVER_CALL}))],
        "unknown_block",
        "attributes.gen_ai.output.messages[0].parts[0]",
    ),
    "an attribute with text": (
        [otlp(span(**{"gen_ai.prompt.extra_text": "Answer in French."}))],
        "unread_text",
        "attributes.gen_ai.prompt.extra_text",
    ),
    "a step with text under another key": (
        [atif(steps=[step(1, "user", "?"), step(2, "agent", "x", remark="Answer in French.")])],
        "unread_text",
        "steps[1].remark",
    ),
    "an observation of no call": (
        [atif(steps=[step(1, "user", "?"), step(2, "agent", "ls", observation=RESULT)])],
        "result_without_call",
        "steps[1].observation.results[0].content",
    ),
    "messages in OpenLLMetry's attributes": (
        [otlp({"gen_ai.system": "x", "llm.request.type": "chat", "gen_ai.prompt.0.content": "Hi"})],
        "message_shape",
        "attributes.gen_ai.prompt.0.content",
    ),
    "messages in OpenInference's attributes": (
        [otlp({"openinference.span.kind": "LLM", "llm.input_messages.0.message.content": "Hi"})],
        "message_shape",
        "attributes.llm.input_messages.0.message.content",
    ),
    "messages in events of an earlier version": (
        [otlp_logs({"event.name": "gen_ai.user.message", "gen_ai.system": "x"})],
        "message_shape",
        "attributes",
    ),
    "an attribute whose key is no string": (
        [otlp(span(**{"gen_ai.tool.definitions": {1: "x"}}), is_text=False)],
        "message_shape",
        "resourceSpans",
    ),
    "spans under a key of an earlier version": (
        [{"resourceSpans": [{"instrumentationLibrarySpans": otlp(span())["resourceSpans"][0]["scopeSpans"]}]}],
        "unread_text",
        "document.instrumentationLibrarySpans",
    ),
    "a result after text of its message": (
        [otlp(span(**{"gen_ai.input.messages": LATE_RESULT}))],
        "result_without_call",
        "attributes.gen_ai.input.messages[2].parts[1]",
    ),
    "a trace without tools": (
        [otlp(span(**{"gen_ai.tool.definitions": None}))],
        "call_without_tools",
        "attributes.gen_ai.input.messages[1]",
    ),
    "a trace whose beginning was cut off": (
        [otlp(span(**{"gen_ai.input.messages": span()["gen_ai.input.messages"][2:]}))],
        "result_without_call",
        "attributes.gen_ai.input.messages[0].parts[0].response",
    ),
    "a document that was cut off": (
        [otlp(span(**{"gen_ai.input.messages": json.dumps(span()["gen_ai.input.messages"])[:200]}))],
        "not_json",
        "attributes.gen_ai.input.messages",
    ),
    "a result that only a subagent's document has": (
        [atif(steps=[*atif()["steps"][:2], step(3, "agent", "", tool_calls=[CITY_CALL], observation=DELEGATED)])],
        "content_not_text",
        "steps[2].observation.results[0].content",
    ),
    "calls of the user": (
        [atif(steps=[step(1, "user", "?", tool_calls=[{}]), step(2, "agent", "x")])],
        "message_shape",
        "steps[0].tool_calls",
    ),
    "an event with text under another key": (
        [event("a", None, user("?"), note="Answer in French."), event("b", "a", assistant(text_block("x")))],
        "unread_text",
        "events[0].note",
    ),
    "a session without its beginning": (
        [event("b", "a", user("?")), event("c", "b", assistant(text_block("x")))],
        "history_missing",
        "parentUuid",
    ),
    "a rollout with a call that a server made": (
        [*ROLLOUT, item(type="web_search_call", action={"query": "Oslo"})],
        "unknown_block",
        "items[5]",
    ),
    "a trajectory with text under another key": (
        [{**SWE, "trajectory": [*TRAJECTORY[:2], {**TRAJECTORY[4], "plan": "Answer in French."}]}],
        "unread_text",
        "trajectory[2].plan",
    ),
    "a trajectory beside messages": ([{**SWE, "messages": [user("Another one?")]}], "unread_text", "messages"),
}
