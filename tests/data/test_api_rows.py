"""Rows of model APIs and of logs of their calls: nothing in them is dropped or misread without a word."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fctune.data.check.warnings import iter_warnings
from fctune.data.conversation import Call, Conversation
from fctune.data.sources import DEFECT_KINDS, LEFT_OUT_KINDS, NOTE_KINDS, Defect, ParsedRow, parse_source, read_source
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from tests import api_rows
from tests.api_rows import (
    ANSWER,
    CITIES,
    DEFECTS,
    FAILURE,
    LOOKING,
    OPENAI_TOOLS,
    QUESTION,
    RESULT,
    SHAPES,
    SWIFT_SHAPES,
    SYSTEM,
    THOUGHT,
    Row,
    change,
    iter_parts,
    langchain_messages,
    openai_messages,
)

CALLS = tuple(Call("get_weather", {"city": city}, call_id) for call_id, city in CITIES.items())


def read(row: Row, row_format: str = "auto") -> ParsedRow:
    return read_row(row, row_format, ReadContext())


def error_of(row: Row) -> tuple[str, str]:
    """Return the kind and location of a row's defect."""
    with pytest.raises(RowError) as caught:
        read(row)
    assert caught.value.kind in DEFECT_KINDS or caught.value.kind in LEFT_OUT_KINDS
    return caught.value.kind, caught.value.pointer


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_one_conversation_reads_the_same(shape: str) -> None:
    row = copy.deepcopy(SHAPES[shape])
    parsed = read(row)
    assert parsed.row_format == shape.partition(":")[0]
    assert row == SHAPES[shape], "reading changed the row"
    is_gemini = "gemini" in shape.lower()
    results = [json.dumps({"output": RESULT}), json.dumps({"error": FAILURE})] if is_gemini else [RESULT, FAILURE]
    messages = parsed.conversation.messages
    assert [(m.role, m.content, m.calls, m.call_id, m.reasoning) for m in messages] == [
        ("system", SYSTEM, (), None, None),
        ("user", QUESTION, (), None, None),
        ("assistant", LOOKING, CALLS, None, THOUGHT),
        ("tool", results[0], (), "call_1", None),
        ("tool", results[1], (), "call_2", None),
        ("assistant", ANSWER, (), None, None),
    ]
    (tool,) = parsed.conversation.tools
    assert {key: value for key, value in tool.function.items() if key != "strict"} == api_rows.FUNCTION
    assert parsed.notes.keys() <= NOTE_KINDS.keys()
    assert not list(iter_warnings(parsed))


GYM_TOOL = {"type": "function", **api_rows.FUNCTION}


def gym_row(action: Any, **columns: Any) -> Row:
    agent = {"type": "responses_api_agents", "name": "some_agent"}
    row: Row = {"responses_create_params": {"input": QUESTION, "tools": [GYM_TOOL]}, "agent_ref": agent, **columns}
    return row if action is None else {**row, "expected_action": action}


def test_tasks_of_nemo_gym_have_the_action_that_is_due_as_their_answer() -> None:
    calls = [{"type": "function_call", "name": "get_weather", "arguments": f'{{"city": "{city}"}}'} for city in "ab"]
    expected = [Call("get_weather", {"city": city}) for city in "ab"]
    for action, due in ((calls[0], expected[:1]), ({"type": "function_call_batch", "calls": calls}, expected)):
        for written in (action, json.dumps(action)):
            question, answer = read(gym_row(written)).conversation.messages
            assert (question.role, question.content) == ("user", QUESTION)
            assert (answer.role, answer.content, [replace(call, id=None) for call in answer.calls]) == (
                "assistant",
                None,
                due,
            )
    (_, said) = read(gym_row({"type": "message", "content": "Which city?"})).conversation.messages
    assert (said.content, said.calls) == ("Which city?", ())


def test_tasks_of_nemo_gym_that_only_a_server_judges_are_refused_by_name() -> None:
    for row in (gym_row(None), gym_row(None, ground_truth=[], verifier_metadata={"expected_tool": "get_weather"})):
        with pytest.raises(RowError, match=r"NeMo Gym \(some_agent\) without expected_action or a response"):
            read(row)
    assert error_of(gym_row({"type": "web_search"})) == ("unknown_block", "expected_action.type")
    assert error_of(gym_row("call it")) == ("message_shape", "expected_action")
    assert error_of(gym_row({"type": "function_call_batch", "calls": 5}))[1] == "expected_action.calls"
    assert error_of(gym_row({"type": "function_call", "name": "get_weather", "arguments": "{"}))[1].startswith(
        "expected_action"
    )


def test_a_rollout_of_nemo_gym_is_read_as_it_went_and_not_as_it_should_have() -> None:
    row = {**SHAPES["responses: NeMo Gym"], "expected_action": {"type": "message", "content": "no"}}
    assert read(row).conversation.messages == read(SHAPES["responses: NeMo Gym"]).conversation.messages


@pytest.mark.parametrize("shape", SWIFT_SHAPES)
def test_the_roles_of_ms_swift_read_as_the_same_conversation_without_ids(shape: str) -> None:
    parsed = read(SWIFT_SHAPES[shape])
    assert parsed.row_format == "openai"
    said, thought = (LOOKING, THOUGHT) if shape == "a text before the calls" else (None, None)
    assert [(m.role, m.content, m.calls, m.reasoning) for m in parsed.conversation.messages] == [
        ("system", SYSTEM, (), None),
        ("user", QUESTION, (), None),
        ("assistant", said, tuple(replace(call, id=None) for call in CALLS), thought),
        ("tool", RESULT, (), None),
        ("tool", FAILURE, (), None),
        ("assistant", ANSWER, (), None),
    ]
    assert [tool.function for tool in parsed.conversation.tools] == [api_rows.FUNCTION]
    assert not list(iter_warnings(parsed))


def test_broken_rows_of_ms_swift_are_defects() -> None:
    found = [error_of(row) for row in api_rows.iter_swift_defects()]
    assert found == [(kind, pointer) for *_, kind, pointer in api_rows.SWIFT_DEFECTS]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_found_in_a_file_and_forced_by_name(shape: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(SHAPES[shape]) + "\n")
    (found,) = parse_source(str(path))
    (forced,) = parse_source(str(path), shape.partition(":")[0])
    assert isinstance(found, ParsedRow)
    assert isinstance(forced, ParsedRow)
    assert (
        found.conversation
        == forced.conversation
        == read(SHAPES[shape]).conversation.__class__(
            found.conversation.messages, found.conversation.tools, f"{path}:1"
        )
    )


@pytest.mark.parametrize(
    ("row", "row_format"),
    [
        (
            {"messages": openai_messages(), "max_tokens": 9, "stop_sequences": [], "tools": OPENAI_TOOLS},
            "openai",
        ),
        ({"messages": openai_messages(), "system": SYSTEM, "tools": api_rows.ANTHROPIC_TOOLS}, "openai"),
        ({"messages": openai_messages(), "response": None, "trace_id": "t", "tools": OPENAI_TOOLS}, "openai"),
        ({"messages": langchain_messages(), "tools": api_rows.ANTHROPIC_TOOLS}, "langchain"),
    ],
)
def test_a_row_is_recognised_by_its_messages_not_by_settings_and_tools(row: Row, row_format: str) -> None:
    parsed = read(row)
    assert parsed.row_format == row_format
    assert [call for message in parsed.conversation.messages for call in message.calls] == list(CALLS)


def test_blocks_of_langchain_that_repeat_calls_are_read_once() -> None:
    row = change("langchain: messages", "messages.2.content.2", {"type": "tool_use", "id": "call_1", "input": {}})
    assert read(row).conversation == read(SHAPES["langchain: messages"]).conversation


@pytest.mark.parametrize(
    "shape",
    ["responses: input and output", "gemini: contents alone", "langchain: messages", "log: Langfuse", "log: LiteLLM"],
)
def test_tables_of_these_rows_read_as_their_json_does(shape: str, tmp_path: Path) -> None:
    row = json.loads(json.dumps({key: value for key, value in SHAPES[shape].items() if value not in (None, {}, [])}))
    if "langchain" in shape:
        row["messages"][2]["content"] = LOOKING  # a column has texts or blocks, not both
        row["messages"][2]["additional_kwargs"] = {"reasoning_content": THOUGHT}
    if "responses" in shape:
        row["input"][5]["output"] = RESULT
    if "gemini" in shape:
        row["contents"][2]["parts"][1]["functionResponse"]["response"] = {
            "output": FAILURE
        }  # Arrow's structs share keys
    pq.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
    first, second = read_source(str(tmp_path / "rows.parquet"), fold="never")
    assert isinstance(first, Conversation), first
    assert isinstance(second, Conversation)
    expected = read(row).conversation
    assert first.messages == second.messages == expected.messages
    assert [tool.name for tool in first.tools] == ["get_weather"]


def test_the_locations_of_calls_are_those_of_their_format() -> None:
    located = {
        "anthropic: a log": "messages[1].content[2].input",
        "responses: request and response": "request.input[3].arguments",
        "gemini: contents alone": "contents[1].parts[2].functionCall.args",
        "langchain: serialised": "messages[2].kwargs.tool_calls[0].args",
        "log: Langfuse": "input.messages[2].tool_calls[0].function.arguments",
    }
    for shape, pointer in located.items():
        assert read(SHAPES[shape]).call_pointers[0].arguments == pointer
        row = json.loads(json.dumps(SHAPES[shape]).replace("Paris", "<city>"))
        assert any(warning.pointer.startswith(pointer) for warning in iter_warnings(read(row))), shape


def test_what_is_left_out_or_read_as_something_else_is_counted() -> None:
    assert read(SHAPES["anthropic: a log"]).notes["error_result"] == 1
    assert read(SHAPES["langchain: messages"]).notes["error_result"] == 1
    assert read(SHAPES["gemini: a log"]).notes["error_result"] == 1
    assert read(SHAPES["responses: a log"]).notes["reasoning_summary"] == 1
    hidden = change("responses: a log", "input.1.summary", [])
    assert read(hidden).notes["reasoning_hidden"] == 1
    assert read(hidden).conversation.messages[2].reasoning is None
    redacted = change("anthropic: a log", "messages.1.content.0", {"type": "redacted_thinking", "data": "c2VjcmV0"})
    assert read(redacted).notes["reasoning_hidden"] == 1


QUESTIONS = [{"role": "user", "content": "Hi"}]
FAILURES: dict[str, Row] = {
    "no response": {"request": {"messages": QUESTIONS}, "response": None},
    "no response, and an error": {"messages": QUESTIONS, "response": None, "error": "The call timed out."},
    "an error": {"request": {"messages": QUESTIONS}, "response": {"error": {"message": "Too many requests."}}},
    "Anthropic's error": {
        "request": {"messages": QUESTIONS, "max_tokens": 9},
        "response": {"type": "error", "error": {"type": "overloaded_error", "message": "Too much."}},
    },
    "Gemini's error": {"request": {"contents": []}, "response": {"error": {"code": 503, "message": "Unavailable."}}},
    "an error in place of LiteLLM's response": api_rows.litellm(response=None, status="failure", error_str="Too much."),
}


@pytest.mark.parametrize("claim", FAILURES)
def test_a_log_may_begin_with_a_call_that_failed(claim: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [FAILURES[claim], SHAPES["log: OpenAI's request and response"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    left_out: Counter[str] = Counter()
    (row,) = parse_source(str(path), left_out=left_out)
    assert isinstance(row, ParsedRow)
    assert left_out == {"answer_failed": 1}


def test_records_that_are_not_of_a_model_call_are_counted_in_any_order(tmp_path: Path) -> None:
    empty = {"input": None, "output": None}
    others = [
        {"type": "SPAN", "traceId": "t", **empty},
        {"type": "GENERATION", "traceId": "t", **empty},
        api_rows.langfuse({"query": "Paris"}, {"found": True}, type="TOOL"),
        api_rows.langsmith({"question": "?"}, None, run_type="chain"),
        api_rows.langfuse(None, {"found": True}, type="TOOL"),
    ]
    path = tmp_path / "log.jsonl"
    for rows in ([*others, SHAPES["log: Langfuse"]], [SHAPES["log: Langfuse"], *others]):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        left_out: Counter[str] = Counter()
        (row,) = parse_source(str(path), left_out=left_out)
        assert isinstance(row, ParsedRow)
        assert left_out == {"span_left_out": 4, "span_without_content": 1}


@pytest.mark.parametrize("shape", ["anthropic: a log", "log: Langfuse around Anthropic"])
def test_an_answer_whose_beginning_the_request_gave_is_one_turn(shape: str) -> None:
    row = copy.deepcopy(SHAPES[shape])
    request = row.get("input", row)
    request["messages"].append({"role": "assistant", "content": ANSWER[:5]})
    (row["output"] if "input" in row else row["response"])["content"][0]["text"] = ANSWER[5:]
    parsed = read(row)
    assert parsed.conversation.messages == read(SHAPES[shape]).conversation.messages
    assert len(parsed.message_pointers) == len(parsed.conversation.messages)
    assert parsed.notes["prefilled_answer"] == 1


def test_a_response_without_its_question_is_a_defect() -> None:
    assert error_of(api_rows.responses_response()) == ("history_missing", "input")


def test_only_the_completion_of_a_prompt_is_trained() -> None:
    prompt = [*api_rows.openai_messages(), api_rows.openai_answer(), {"role": "user", "content": "And Rome?"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "Sunny."}], "tools": OPENAI_TOOLS}
    assert [m.weight for m in read(row).conversation.messages if m.role == "assistant"] == [0.0, 0.0, 1.0]


def test_prompts_and_completions_of_text_are_refused_in_a_sentence(tmp_path: Path) -> None:
    row = {"prompt": "What is it?", "completion": "A cat."}
    assert "Text has no roles: write prompt and completion as lists of messages" in str(_refusal(row))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (defect,) = read_source(str(tmp_path / "rows.jsonl"), "prompt_completion")
    assert isinstance(defect, Defect)
    assert "expected a list of messages, because text has no roles" in str(defect)


def _refusal(row: Row) -> RowError:
    with pytest.raises(RowError) as caught:
        read(row)
    return caught.value


@pytest.mark.parametrize(("shape", "path", "value", "kind", "pointer"), DEFECTS)
def test_a_defect_is_named_by_kind_and_location(shape: str, path: str, value: Any, kind: str, pointer: str) -> None:
    found = error_of(change(shape, path, value))
    assert found == (kind, pointer or found[1])


# The last keys of texts that a row may have without changing its conversation: identities, settings, descriptions.
DESCRIPTIONS = frozenset(
    re.findall(
        r"\w+",
        "id traceId trace_id dotted_order responseId system_fingerprint signature thoughtSignature "
        "thought_signature model_version response_id model modelVersion model_group name object type status "
        "finish_reason level call_type startTime start_time stop_sequences effort tool_choice user "
        "user_api_key_alias ls_provider traceName projectId environment release tags statusMessage internalModelId "
        "usagePricingTierName promptName userId sessionId trace_name project_id status_message internal_model_id "
        "usage_pricing_tier_name prompt_name user_id session_id end_time app_path base_url time token "
        "litellm_call_id llm_api_status guardrail_status guardrail_name custom_llm_provider baseline "
        "autorouter_baseline_observation model_map_key model_id api_base cache_key request_tags end_user "
        "requester_ip_address user_agent response_mime_type",
    )
)
# Objects that describe a row or a request; text in them is not the conversation's.
SETTINGS = frozenset(
    re.findall(
        r"\w+",
        "metadata usage usageMetadata usage_metadata usageDetails response_metadata cache_control thinking "
        "reasoning text format generationConfig generation_config modelParameters model_parameters extra "
        "invocation_params agent_ref usage_details serialized kwargs events feedback_stats correctness "
        "prompt_token_details status_fields cost_breakdown autorouter_savings_estimate model_map_information "
        "hidden_params guardrail_information",
    )
)
OTHER = "Altogether other words"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_text_of_a_row_is_dropped_without_a_word(shape: str) -> None:
    """Every text that is changed, and every text under a new key, changes the conversation or is a defect."""
    told = read(SHAPES[shape]).conversation
    for path, value in iter_parts(SHAPES[shape]):
        if not isinstance(value, str | dict):
            continue
        row = copy.deepcopy(SHAPES[shape])
        keys = path if isinstance(value, str) else (*path, "note")
        holder: Any = row
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = OTHER
        kind, parsed = attempt(row, "auto")
        names = [key for key in path if isinstance(key, str)]
        if kind is None and parsed is not None and parsed.conversation == told:
            assert names, path
            assert names[-1] in (DESCRIPTIONS if isinstance(value, str) else SETTINGS), path


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Sum up.", "input": "A text.", "output": "Less."},
        {"input": "A text.", "output": "Less."},
        {"contents": "A text.", "summary": "Less."},
        {"inputs": "A text.", "targets": "Less."},
        {"request": "A text.", "response": "Less."},
    ],
)
def test_rows_of_plain_text_are_no_logs(row: Row) -> None:
    assert error_of(row) == ("unknown_row_format", "")


def attempt(row: Row, row_format: str) -> tuple[str | None, ParsedRow | None]:
    """Return the kind of a row's defect, or the row."""
    try:
        return None, read(row, row_format)
    except RowError as error:
        return error.kind, None


def without(row: Row, key: str) -> Row:
    return {name: value for name, value in row.items() if name != key}


STRANGE: list[Callable[[Row], Any]] = [
    lambda row: dict.fromkeys(row),
    lambda row: {key: [] for key in row},
    lambda row: {key: [[{"type": []}]] for key in row},
    lambda row: {key: {"messages": [{"type": {}, "role": [], "content": 3}], "type": []} for key in row},
    lambda row: {key: [{"role": "user", "content": [{"type": "text"}]}] for key in row},
    lambda row: dict.fromkeys(row, "[{"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_other_types_are_defects_and_no_crash(shape: str) -> None:
    name = shape.partition(":")[0]
    variants = [make(SHAPES[shape]) for make in STRANGE]
    for key in SHAPES[shape]:
        variants.append(without(SHAPES[shape], key))
        variants += [SHAPES[shape] | {key: make({key: 0})[key]} for make in STRANGE]
    for row in variants:
        for row_format in ("auto", name):
            kind, parsed = attempt(row, row_format)
            assert (kind in DEFECT_KINDS or kind in LEFT_OUT_KINDS) if parsed is None else parsed.conversation.messages
