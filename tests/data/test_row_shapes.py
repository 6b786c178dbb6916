"""Rows as people's exports and public sets spell them: nothing in them is dropped or misread without a word."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.cli import main
from fctune.config.loading import load_config
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.check import check_sources
from fctune.data.conversation import Call, Conversation
from fctune.data.conversion import convert_source
from fctune.data.fingerprint import fingerprint_inputs
from fctune.data.sources import Defect, ParsedRow, has_reasoning_rows, parse_source, read_source
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from fctune.tasks.suite_files import read_cases
from tests.conftest import ROOT, TINY_BASE

NUM_ROWS = 12
CITIES = ("Paris", "Rome", "Zürich", "L'Aquila", "Oslo", "Lima", "Cairo", "Quito", "Dakar", "Hanoi", "Perth", "Minsk")
FUNCTION = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "is_metric": {"type": "boolean"}},
        "required": ["city"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
GEMINI = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "OBJECT",
                "properties": {"city": {"type": "STRING"}, "is_metric": {"type": "BOOLEAN"}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = "You are the assistant of a weather station."
QWEN_PROMPT = (
    f"{SYSTEM}\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + json.dumps(TOOLS[0])
    + "\n</tools>\n\nFor each "
    "function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
KIMI_PROMPT = f"<|im_system|>tool_declare<|im_middle|>{json.dumps(TOOLS)}<|im_end|>"

Row = dict[str, Any]


def call_of(index: int) -> Row:
    return {"name": "get_weather", "arguments": {"city": CITIES[index], "is_metric": index % 2 == 0}}


def question_of(index: int) -> str:
    return f"What is the weather in {CITIES[index]}?"


def answer_of(index: int) -> str:
    return f"It is {index} degrees in {CITIES[index]}."


def openai_call(index: int) -> Row:
    call = call_of(index)
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def messages_of(index: int, **changes: Any) -> list[Row]:
    """The messages of a row, some of them in another spelling; one that is None is left out."""
    made: dict[str, Any] = {
        "system": {"role": "system", "content": SYSTEM},
        "user": {"role": "user", "content": question_of(index)},
        "call": openai_call(index),
        "result": {"role": "tool", "tool_call_id": "c", "content": json.dumps({"degrees": index})},
        "answer": {"role": "assistant", "content": answer_of(index)},
    }
    return [message for message in {**made, **changes}.values() if message is not None]


def tagged(index: int) -> Row:
    text = f"<tool_call>\n{json.dumps(call_of(index), ensure_ascii=False)}\n</tool_call>"
    return {"role": "assistant", "content": text}


def said(text: str | list[Row]) -> Row:
    return {"role": "system", "content": text}


def result_from(role: str, index: int) -> Row:
    return {"role": role, "content": f'<tool_response>\n{{"degrees": {index}}}\n</tool_response>'}


def own_roles(index: int) -> Row:
    changes = {
        "call": {"role": "tool_call", "content": json.dumps(call_of(index), ensure_ascii=False)},
        "result": {"role": "tool_response", "content": json.dumps({"degrees": index})},
        "answer": {"role": "answer", "content": answer_of(index)},
    }
    return {"messages": messages_of(index, **changes), "tools": json.dumps(TOOLS)}


def toucan(index: int) -> Row:
    changes = {
        "call": {
            "role": "tool_call",
            "content": repr({**call_of(index), "arguments": json.dumps(call_of(index)["arguments"])}),
        },
        "result": {"role": "tool_output", "content": json.dumps({"degrees": index})},
    }
    return {
        "uuid": f"{index:032x}",
        "subset_name": "single-turn",
        "question": question_of(index),
        "target_tools": "get_weather",
        "available_tools": json.dumps(TOOLS),
        "messages": json.dumps(messages_of(index, **changes)),
        "response_quality_assessment": '{"reasoning": "good"}',
    }


def turns_of(index: int, **changes: Any) -> list[Row]:
    made: dict[str, Any] = {
        "user": {"from": "human", "value": question_of(index)},
        "call": {"from": "function_call", "value": json.dumps(call_of(index), ensure_ascii=False)},
        "result": {"from": "observation", "value": json.dumps({"degrees": index})},
        "answer": {"from": "gpt", "value": answer_of(index)},
    }
    return [turn for turn in {**made, **changes}.values() if turn is not None]


def hermes(index: int) -> Row:
    prompt = f"You are a function calling AI model. You are provided with <tools> {TOOLS} </tools>"
    changes = {
        "call": {"from": "gpt", "value": f"<tool_call>\n{call_of(index)}\n</tool_call>\n"},
        "result": {"from": "tool", "value": f'<tool_response>\n{{"degrees": {index}}}\n</tool_response>'},
    }
    turns = [{"from": "system", "value": f"{SYSTEM}\n{prompt}"}, *turns_of(index, **changes)]
    return {
        "id": f"row-{index}",
        "conversations": turns,
        "tools": json.dumps(TOOLS),
        "category": "Weather",
        "task": "t",
    }


def parts(index: int) -> Row:
    first, last = question_of(index).rsplit(" ", 1)
    changes = {
        "system": {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        "user": {"role": "user", "content": [{"type": "text", "text": first}, {"type": "input_text", "text": last}]},
        "call": {**openai_call(index), "content": []},
        "result": {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": f'{{"degrees": {index}}}'}],
        },
    }
    return {"messages": messages_of(index, **changes), "tools": TOOLS}


def untag_results(index: int) -> Row:
    row = hermes(index)
    turns = [
        {**turn, "value": f'{{"degrees": {index}}}'} if turn["from"] == "tool" else turn
        for turn in row["conversations"]
    ]
    return {**row, "conversations": turns}


def noted_call(key: str) -> Row:
    """Return a call whose wrapper has another key."""
    message = openai_call(0)
    return {**message, "tool_calls": [{**message["tool_calls"][0], key: "The city is given."}]}


def object_result(index: int) -> Row:
    result = {"role": "tool", "tool_call_id": "c", "content": {"degrees": index}}
    return {"messages": messages_of(index, result=result), "tools": TOOLS}


SHAPES: dict[str, Callable[[int], Row]] = {
    "a system column beside messages": lambda i: {
        "system": SYSTEM,
        "messages": messages_of(i, system=None),
        "tools": TOOLS,
    },
    "a system column of blocks": lambda i: {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": messages_of(i, system=None),
        "tools": TOOLS,
    },
    "a system column beside conversations of roles": lambda i: {
        "system": SYSTEM,
        "conversations": messages_of(i, system=None),
        "tools": TOOLS,
    },
    "a system column beside turns": lambda i: {
        "system": SYSTEM,
        "conversations": turns_of(i),
        "tools": json.dumps(TOOLS),
    },
    "tagged calls": lambda i: {
        "messages": messages_of(i, call=tagged(i), result=result_from("tool", i)),
        "tools": TOOLS,
    },
    "a rendered Qwen conversation": lambda i: {
        "messages": messages_of(i, system=said(QWEN_PROMPT), call=tagged(i), result=result_from("user", i))
    },
    "Hermes' Python literals": hermes,
    "content parts": parts,
    "a result as an object": object_result,
    "a result as an object in turns": lambda i: {
        "system": SYSTEM,
        "conversations": turns_of(i, result={"from": "observation", "value": {"degrees": i}}),
        "tools": json.dumps(TOOLS),
    },
    "available_tools": lambda i: {"messages": messages_of(i), "available_tools": json.dumps(TOOLS)},
    "tools_json": lambda i: {"messages": messages_of(i), "tools_json": json.dumps(TOOLS), "tools": []},
    "metadata.tools": lambda i: {"messages": messages_of(i), "metadata": {"tools": TOOLS, "note": "of the row"}},
    "extra_info.tools": lambda i: {"messages": messages_of(i), "extra_info": {"index": i, "tools": TOOLS}},
    "Hermes' calls with results outside tags": untag_results,
    "metadata as JSON": lambda i: {"messages": messages_of(i), "metadata": json.dumps({"tools": TOOLS})},
    "Kimi's raw tool_declare": lambda i: {"messages": [said(KIMI_PROMPT), *messages_of(i)]},
    "Gemini's types in OpenAI's wrapper": lambda i: {"messages": messages_of(i), "tools": GEMINI},
    "ms-swift's roles": own_roles,
    "ms-swift's roles in turns": lambda i: {
        "system": SYSTEM,
        "conversations": turns_of(
            i,
            call={"from": "tool_call", "value": json.dumps(call_of(i), ensure_ascii=False)},
            result={"from": "tool_response", "value": json.dumps({"degrees": i})},
        ),
        "tools": json.dumps(TOOLS),
    },
    "Toucan": toucan,
}


def write_rows(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def plain(source: str, **options: Any) -> list[Any]:
    """Return the conversations of a source without the ids of calls, or its defects."""
    found = []
    for item in read_source(source, **options):
        if not isinstance(item, Conversation):
            found.append(str(item))
            continue
        messages = [
            (m.role, m.content, [Call(c.name, c.arguments) for c in m.calls], m.reasoning, m.weight)
            for m in item.messages
        ]
        found.append((messages, [tool.function for tool in item.tools]))
    return found


def expected_of(index: int, question: str | None = None) -> Any:
    call = call_of(index)
    result = json.dumps({"degrees": index})
    messages: list[Any] = [
        ("system", SYSTEM, [], None, 1.0),
        ("user", question or question_of(index), [], None, 1.0),
        ("assistant", None, [Call(call["name"], call["arguments"])], None, 1.0),
        ("tool", result, [], None, 1.0),
        ("assistant", answer_of(index), [], None, 1.0),
    ]
    return messages, [FUNCTION]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_spelling_of_a_conversation_reads_and_converts_to_the_same(shape: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [SHAPES[shape](index) for index in range(NUM_ROWS)])
    read = plain(source)
    for index, row in enumerate(read):
        question = question_of(index)
        if shape == "content parts":
            question = "\n".join(question.rsplit(" ", 1))
        assert row == expected_of(index, question)
    report = convert_source(source, tmp_path / "out.jsonl")
    assert (report.converted, report.num_skipped) == (NUM_ROWS, 0)
    assert plain(str(tmp_path / "out.jsonl")) == read
    checked = check_sources([source, str(tmp_path / "out.jsonl")])
    assert checked.defects == checked.warnings == 0


@pytest.mark.parametrize("shape", ["a system column beside messages", "metadata.tools", "ms-swift's roles", "Toucan"])
def test_tables_of_these_rows_read_as_their_json_does(shape: str, tmp_path: Path) -> None:
    rows = [SHAPES[shape](index) for index in range(NUM_ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert plain(str(tmp_path / "rows.parquet")) == [expected_of(index) for index in range(NUM_ROWS)]


def read(row: Row, **options: Any) -> ParsedRow:
    return read_row(row, "auto", ReadContext(**options))


def kind_of(row: Row, **options: Any) -> str:
    with pytest.raises(RowError) as caught:
        read(row, **options)
    return caught.value.kind


def test_a_system_column_and_a_system_message_must_agree() -> None:
    for key, turns in (
        ("messages", messages_of(0)),
        ("conversations", [{"from": "system", "value": SYSTEM}, *turns_of(0)]),
    ):
        row = {key: turns, "tools": TOOLS}
        both = read({**row, "system": SYSTEM}).conversation.messages
        assert [message.content for message in both if message.role == "system"] == [SYSTEM]
        assert kind_of({**row, "system": "Answer in French."}) == "system_conflict"


def test_calls_in_tags_are_read_only_where_their_tools_are_offered() -> None:
    row = {"messages": messages_of(0, call=tagged(0), result=result_from("tool", 0)), "tools": TOOLS}
    parsed = read(row)
    assert parsed.notes["tagged_calls"] == parsed.notes["tagged_results"] == 1
    assert kind_of({**row, "tools": [{"name": "get_time"}]}) == "call_in_text"
    assert kind_of({"messages": row["messages"]}) == "call_without_tools"
    for text in ("<tool_call>\n<function=get_weather>\n</function>\n</tool_call>", "<tool_call>{broken</tool_call>"):
        changed = messages_of(0, call={"role": "assistant", "content": text}, result=None)
        assert kind_of({"messages": changed, "tools": TOOLS}) == "call_not_json"
    for text in (
        '[TOOL_CALLS][{"name": "f"}]',
        '<|python_tag|>{"name": "f"}',
        "<function=f>{}</function>",
        "</tool_call>",
    ):
        changed = messages_of(0, call={"role": "assistant", "content": text}, result=None)
        assert kind_of({"messages": changed, "tools": TOOLS}) == "call_in_text"
    both = messages_of(0, call={**openai_call(0), "content": tagged(0)["content"]})
    assert kind_of({"messages": both, "tools": TOOLS}) == "call_in_text"


def test_several_calls_with_a_role_of_their_own_are_one_turn() -> None:
    calls = [{"role": "tool_call", "content": json.dumps(call_of(index))} for index in (0, 1)]
    results = [{"role": "tool_response", "content": str(index)} for index in (0, 1)]
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Looking."}]
    end = {"role": "assistant", "content": "Done."}
    parsed = read({"messages": [*start, *calls, *results, calls[0], results[0], end], "tools": TOOLS})
    messages = parsed.conversation.messages
    assert [message.role for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (messages[1].content, len(messages[1].calls)) == ("Looking.", 2)
    assert parsed.notes["calls_joined"] == 2
    assert parsed.notes["content_with_call"] == 1


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "[]"),
        ({}, "{}"),
        ([1, None, "é"], '[1, null, "é"]'),
        ({"a": {"b": None}}, '{"a": {"b": null}}'),
        ([{"name": "x"}], '[{"name": "x"}]'),
        (42, "42"),
        (False, "false"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ({"content": [{"type": "text", "text": "a"}], "isError": False}, None),
    ],
)
def test_a_result_of_any_json_value_is_its_text(content: Any, text: str | None) -> None:
    expected = json.dumps(content) if text is None else text
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    assert (
        read({"messages": messages_of(0, result=result), "tools": TOOLS}).conversation.messages[3].content == expected
    )
    turn = {"from": "observation", "value": content}
    assert (
        read({"conversations": turns_of(0, result=turn), "tools": TOOLS}).conversation.messages[2].content == expected
    )


@pytest.mark.parametrize("key", ["weight", "loss", "train", "training"])
def test_messages_that_are_marked_as_context_are_not_trained(key: str) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", key: 0}]
    assert read({"messages": messages}).conversation.messages[1].weight == 0
    if key != "weight":
        switched = [{**message, key: False} if key in message else message for message in messages]
        assert read({"messages": switched}).conversation.messages[1].weight == 0
    assert kind_of({"messages": [messages[0], {**messages[1], key: "no"}]}) == "bad_weight"
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a", key: 0}]
    assert kind_of({"conversations": turns}) == "bad_weight"
    assert read({"conversations": [{**turns[0], key: 0}, {**turns[1], key: 1}]})


def test_media_and_nulls_are_no_results() -> None:
    for content, kind in (
        ([{"type": "image", "data": "x"}], "not_text_only"),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}], "not_text_only"),
        (None, "content_not_text"),
    ):
        result = {"role": "tool", "tool_call_id": "c", "content": content}
        assert kind_of({"messages": messages_of(0, result=result), "tools": TOOLS}) == kind
    blocks = [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]
    assert kind_of({"messages": messages_of(0, call={"role": "assistant", "content": blocks})}) == "content_not_text"


def test_columns_of_tools_must_agree() -> None:
    row = {"messages": messages_of(0), "tools": TOOLS}
    assert read({**row, "available_tools": json.dumps(TOOLS)}).conversation.tools
    assert kind_of({**row, "available_tools": [{"name": "get_time"}]}) == "tools_disagree"
    assert read({**row, "metadata": {"tools": ["get_weather"]}}).conversation.tools[0].name == "get_weather"
    assert kind_of({"messages": messages_of(0), "metadata": {"tools": ["get_weather"]}}) == "call_without_tools"


def xlam(index: int, answers: list[Any], **columns: Any) -> Row:
    return {
        "id": index,
        "query": question_of(index),
        "answers": json.dumps(answers),
        "tools": json.dumps([FUNCTION]),
        **columns,
    }


def test_an_xlam_row_without_calls_needs_a_reply_to_train_on_and_none_to_test_with(tmp_path: Path) -> None:
    assert kind_of(xlam(0, [])) == "no_answer_text"
    parsed = read(xlam(0, [], response="No tool does that."))
    assert [(m.role, m.content) for m in parsed.conversation.messages][1] == ("assistant", "No tool does that.")
    assert kind_of(xlam(0, [call_of(0)], response="No tool does that.")) == "unread_text"

    rows = [xlam(index, [] if index % 2 else [call_of(index)]) for index in range(NUM_ROWS)]
    source, cases = write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "cases.jsonl"
    assert main(["data", "cases", source, "--out", str(cases)]) == 0
    made = [json.loads(line) for line in cases.read_text().splitlines()]
    assert [case["kind"] for case in made] == ["call", "no_call"] * 6
    assert all(case["expected_calls"] == [] for case in made if case["kind"] == "no_call")
    assert [bool(case.expected) for case in read_cases(cases)] == [True, False] * 6


UNREAD: dict[str, Any] = {
    "notes": "Answer in French.",
    "context": ["a passage", "another one"],
    "few_shot": {"examples": [{"q": "a question"}]},
    "instruction": "Be brief.",
    "output": "Sunny.",
    "thinking": "The user asks about the weather.",
}
HARMLESS: dict[str, Any] = {
    "id": "row-a",
    "conversation_id": "abc",
    "source": "our logs",
    "data_source": "logs of May",
    "license": "cc-by-4.0",
    "category": "Weather and climate",
    "difficulty": "hard",
    "created_at": "yesterday evening",
    "timestamp": "2026-05-01T10:00:00Z",
    "model": "gpt-x",
    "llm_model": "gpt-x",
    "quality_score": "very good",
    "tags": ["weather", "city"],
    "metadata": {"note": "from the second import"},
    "num_turns": 3,
    "passed": True,
    "price": "3.50",
    "day": "2026-05-01",
    "page": "https://example.com/a",
    "empty": "",
    "nothing": [],
    "question": question_of(0),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_column_with_text_that_is_not_read_is_a_defect_in_every_format(name: str) -> None:
    for row in (
        {"messages": messages_of(0), "tools": TOOLS},
        {"conversations": turns_of(0), "tools": TOOLS},
        hermes(0),
        xlam(0, [call_of(0)]),
        {"system": "", "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>"},
        {
            "system": "list of functions in JSON format that you can invoke: []",
            "conversations": turns_of(0, call=None, result=None),
        },
    ):
        if name == "thinking" and "query" in row:
            continue  # the reasoning of such a row
        assert read(row)
        with pytest.raises(RowError, match=f"{name}.*{name}=ignore") as caught:
            read({**row, name: UNREAD[name]})
        assert (caught.value.kind, caught.value.pointer) == ("unread_text", name)
        assert read({**row, name: UNREAD[name]}, columns={name: "ignore"})


@pytest.mark.parametrize("name", HARMLESS)
def test_columns_that_describe_a_row_are_left_unread(name: str) -> None:
    for row in ({"messages": messages_of(0), "tools": TOOLS}, {"conversations": turns_of(0), "tools": TOOLS}):
        assert read({**row, name: HARMLESS[name]})


def test_keys_of_messages_and_calls_with_text_that_is_not_read_are_defects() -> None:
    message = {"role": "assistant", "content": "Hi", "explanation": "It greets the user."}
    with pytest.raises(RowError, match="not read") as caught:
        read({"messages": [{"role": "user", "content": "?"}, message]})
    assert (caught.value.kind, caught.value.pointer) == ("unread_text", "messages[1].explanation")
    assert read({"messages": [{"role": "user", "content": "?"}, {**message, "explanation": None, "model": "gpt-x"}]})
    call = {"name": "get_weather", "arguments": {}, "explanation": "The city is given."}
    turns = [{"from": "human", "value": "?"}, {"from": "function_call", "value": json.dumps(call)}]
    assert kind_of({"conversations": turns, "tools": TOOLS}) == "unread_text"
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "Hi", "comment": "a greeting"}]
    assert kind_of({"conversations": turns}) == "unread_text"


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"conversations": [{"from": "human", "value": "Another question"}]}, "conversations"),
        ({"tools": [{**TOOLS[0], "instructions": "Never call it twice."}]}, "tools[0].instructions"),
        ({"metadata": {"system": "Answer in French."}}, "metadata.system"),
        ({"extra_info": json.dumps({"system_prompt": "Answer in French."})}, "extra_info.system_prompt"),
        (
            {"messages": messages_of(0, call=noted_call("explanation"))},
            "messages[2].tool_calls[0].explanation",
        ),
        (
            {"messages": messages_of(0, system=said([{"type": "text", "text": SYSTEM, "note": "Answer in French."}]))},
            "messages[0].content[0].note",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_that_is_not_read_is_found_wherever_it_stands(changes: dict[str, Any], pointer: str) -> None:
    row = {"messages": messages_of(0), "tools": TOOLS}
    with pytest.raises(RowError, match="not read") as caught:
        read({**row, **changes})
    assert (caught.value.kind, caught.value.pointer) == ("unread_text", pointer)
    if pointer in row or pointer in changes:
        assert read({**row, **changes}, columns={pointer: "ignore"})


def test_what_repeats_or_describes_a_part_of_a_row_is_no_defect() -> None:
    row = {
        "messages": messages_of(0, call=noted_call("source")),
        "tools": [{**TOOLS[0], "strict": True, "source": "our server"}],
        "metadata": {"system": SYSTEM},
        "conversations": [],
    }
    assert read(row).conversation.messages[0].content == SYSTEM


def test_columns_of_other_names_are_mapped_in_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": question_of(i), "calls": [call_of(i)], "functions": [FUNCTION], "notes": "Hm."}
        for i in range(NUM_ROWS)
    ]
    mapping = "question=query,calls=answers,functions=tools,notes=ignore"
    source = write_rows(tmp_path / "rows.jsonl", rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows({key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows)
    (tmp_path / "rows.csv").write_text(out.getvalue())
    columns = dict(pair.split("=") for pair in mapping.split(","))
    same = write_rows(tmp_path / "same.jsonl", [xlam(i, [call_of(i)]) for i in range(NUM_ROWS)])
    assert plain(source, columns=columns) == plain(str(tmp_path / "rows.csv"), columns=columns) == plain(same)

    with_columns = ["--columns", mapping.rpartition(",")[0], "--columns", "notes=ignore"]
    assert main(["data", "check", source, *with_columns]) == 0
    assert main(["data", "show", source, "--row", "2", *with_columns]) == 0
    assert "What is the weather in Rome?" in capsys.readouterr().out
    assert main(["data", "convert", source, str(tmp_path / "out.jsonl"), *with_columns]) == 0
    assert plain(str(tmp_path / "out.jsonl")) == plain(same)
    assert main(["data", "cases", source, "--out", str(tmp_path / "cases.jsonl"), *with_columns]) == 0
    assert len((tmp_path / "cases.jsonl").read_text().splitlines()) == NUM_ROWS


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "qurey"}, r"question=qurey: no row format reads a column qurey; did you mean query\?"),
        ({"question": "nothing like it"}, "Expected ignore, or one of .*query"),
        ({"question": "query", "calls": "query"}, "question and calls are both mapped to query"),
        ({"qestion": "query", "calls": "answers"}, r"maps qestion \(did you mean question\?\), which no row has"),
        ({"question": "query", "calls": "answers", "nots": "ignore"}, "maps nots, which no row has"),
    ],
)
def test_a_wrong_mapping_is_refused(columns: dict[str, str], message: str, tmp_path: Path) -> None:
    rows = [{"question": question_of(i), "calls": [call_of(i)], "tools": [FUNCTION]} for i in range(3)]
    with pytest.raises(DataError, match=message):
        list(read_source(write_rows(tmp_path / "rows.jsonl", rows), columns=columns))


def test_a_column_that_is_mapped_to_one_the_row_has_is_a_defect(tmp_path: Path) -> None:
    rows = [{"question": "?", "query": "!", "answers": [call_of(0)], "tools": [FUNCTION]}]
    (defect,) = read_source(write_rows(tmp_path / "rows.jsonl", rows), columns={"question": "query"})
    assert isinstance(defect, Defect)
    assert defect.kind == "column_conflict"


def test_reasoning_in_a_mapped_column_is_found(tmp_path: Path) -> None:
    rows = [xlam(0, [call_of(0)], cot="The city is given.")]
    columns = {"cot": "reasoning_content"}
    source = write_rows(tmp_path / "rows.jsonl", rows)
    assert has_reasoning_rows([(source, "auto")], columns=columns)
    (row,) = parse_source(source, columns=columns)
    assert isinstance(row, ParsedRow)
    assert row.conversation.messages[1].reasoning == "The city is given."


def test_the_mapping_is_part_of_the_prepared_sets_name(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [xlam(0, [call_of(0)])])
    names = {
        fingerprint_inputs(DataConfig(sources=[SourceConfig(path=source, columns=columns)]), TINY_BASE)[0]
        for columns in ({}, {"notes": "ignore"}, {"notes": "response"})
    }
    assert len(names) == 3


def test_a_config_maps_columns_and_refuses_a_wrong_mapping(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [xlam(0, [call_of(0)])])
    config = ROOT / "configs" / "tiny_lora.yaml"
    overrides = [f"data.sources=[{{path: {rows}, columns: {{question: query}}}}]"]
    assert load_config(config, overrides).data.sources[0].columns == {"question": "query"}
    for mapping, message in (
        ("{a: query, b: query}", "a and b are both mapped to query"),
        ("{a: null}", "columns.a=None: expected a column"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(config, [f"data.sources=[{{path: {rows}, columns: {mapping}}}]"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["data", "check", "NousResearch/hermes-function-calling-v1"], "hf:NousResearch/hermes-function-calling-v1"),
        (["data", "show", "a/b:config:train@main"], "hf:a/b:config:train@main"),
        (["data", "check", str(ROOT / "README.md"), "--tokenizer", "Qwen/Qwen3-8B"], "hf:Qwen/Qwen3-8B"),
        (["train", "tiny_lora", "model.path=Qwen/Qwen3-8B"], "hf:Qwen/Qwen3-8B"),
        (["train", "tiny_lora", "data.sources.0.path=Team-ACE/ToolACE"], "hf:Team-ACE/ToolACE"),
        (["eval", "--model", "Qwen/Qwen3-8B", "--suite", "smoke"], "hf:Qwen/Qwen3-8B"),
        (["chat", "Qwen/Qwen3-8B"], "hf:Qwen/Qwen3-8B"),
    ],
)
def test_a_name_of_the_hub_without_its_prefix_gets_the_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"did you mean {hint}?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("path", ["rows/mine.jsonl", "tests/nothing", "/no/such", "rows.jsonl", "a/b/c"])
def test_other_paths_get_no_hint_of_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DataError) as caught:
        list(read_source(path))
    assert "did you mean" not in str(caught.value)
