"""Reasoning of rows in every shape becomes the message's reasoning, and never a part of its content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fctune.config.conditions import parse_conditions
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, RowReader, Selection, UnreadRow, has_reasoning_rows, parse_source, read_source
from fctune.data.sources.arrow import holds_text
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row

THOUGHT = "The city is given, so I can call <tool_call> now."
ANSWER = "It is sunny."
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
TAGGED = f"<think>\n{THOUGHT}\n</think>\n\n"


def read(row: dict[str, Any], row_format: str = "auto") -> Conversation:
    return read_row(row, row_format, ReadContext()).conversation


def openai(*messages: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Weather in Paris?"}, *messages], **row}


def said(content: Any = ANSWER, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def sharegpt(*turns: tuple[str, str], **row: Any) -> dict[str, Any]:
    return {"conversations": [{"from": f, "value": v} for f, v in (("human", "Weather in Paris?"), *turns)], **row}


TEXT_ROWS: dict[str, dict[str, Any]] = {
    "reasoning_content": openai(said(reasoning_content=THOUGHT)),
    "reasoning": openai(said(reasoning=THOUGHT)),
    "thinking": openai(said(thinking=THOUGHT)),
    "equal under two keys": openai(said(reasoning=THOUGHT, reasoning_content=THOUGHT)),
    "a list of parts": openai(said(reasoning=[{"type": "text", "text": THOUGHT}])),
    "a thinking part of the content": openai(
        said([{"type": "thinking", "thinking": THOUGHT, "signature": "s"}, {"type": "text", "text": ANSWER}])
    ),
    "a thinking part that holds parts": openai(
        said([{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}, {"type": "text", "text": ANSWER}])
    ),
    "tags": openai(said(TAGGED + ANSWER)),
    "tags after line breaks": openai(said(f"\n<think>{THOUGHT}</think>{ANSWER}")),
    "tags without the opening one": openai(said(f"{THOUGHT}\n</think>\n\n{ANSWER}")),
    "tags and an equal key": openai(said(TAGGED + ANSWER, reasoning=THOUGHT)),
    "another model's tags": openai(said(f"[THINK]{THOUGHT}[/THINK]{ANSWER}")),
    "the analysis channel": openai(said(THOUGHT, channel="analysis"), said(channel="final")),
    "a message of reasoning": openai({"role": "reasoning", "content": THOUGHT}, said()),
    "conversations of roles": {
        "conversations": [{"role": "user", "content": "Weather in Paris?"}, said(reasoning=THOUGHT)]
    },
    "sharegpt tags": sharegpt(("gpt", TAGGED + ANSWER)),
    "sharegpt turn": sharegpt(("thought", THOUGHT), ("gpt", ANSWER)),
    "sharegpt key": {
        "conversations": [
            {"from": "human", "value": "Weather in Paris?"},
            {"from": "gpt", "value": ANSWER, "reasoning": THOUGHT},
        ]
    },
    "glaive": {
        "system": "",
        "chat": f"USER: Weather in Paris?\n\n\nASSISTANT: <think>{THOUGHT}</think>{ANSWER} <|endoftext|>\n",
    },
}
CALL_ROWS: dict[str, dict[str, Any]] = {
    "reasoning_content": openai(
        said(None, reasoning_content=THOUGHT, tool_calls=[{"function": CALL}]), tools=[WEATHER]
    ),
    "tags": openai(said(TAGGED, tool_calls=[{"function": CALL}]), tools=[WEATHER]),
    "a thinking part": openai(
        said([{"type": "thinking", "thinking": THOUGHT}], tool_calls=[{"function": CALL}]), tools=[WEATHER]
    ),
    "sharegpt turn": sharegpt(("reasoning", THOUGHT), ("function_call", json.dumps(CALL)), tools=json.dumps([WEATHER])),
    "sharegpt tags": sharegpt(("function_call", TAGGED + json.dumps(CALL)), tools=json.dumps([WEATHER])),
    "hermes": sharegpt(("gpt", f"{TAGGED}<tool_call>\n{json.dumps(CALL)}\n</tool_call>"), tools=json.dumps([WEATHER])),
    "hermes' scratch pad": sharegpt(
        ("gpt", f"<scratch_pad>\n{THOUGHT}\n</scratch_pad>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
        tools=json.dumps([WEATHER]),
    ),
    "toolace": {
        **sharegpt(("assistant", f'{TAGGED}[get_weather(city="Paris")]')),
        "system": f"Here is a list of functions in JSON format that you can invoke:\n{json.dumps([WEATHER])}",
    },
    "glaive": {
        "system": "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
        + json.dumps(WEATHER),
        "chat": f"USER: Weather in Paris?\n\n\nASSISTANT: <think>{THOUGHT}</think><functioncall> "
        '{"name": "get_weather", "arguments": \'{"city": "Paris"}\'} <|endoftext|>\n',
    },
    "xlam": {
        "query": "Weather in Paris?",
        "answers": json.dumps([CALL]),
        "tools": json.dumps([WEATHER]),
        "reasoning": THOUGHT,
    },
}


@pytest.mark.parametrize("name", TEXT_ROWS)
def test_reasoning_before_a_text_is_read_from_every_shape(name: str) -> None:
    (*_, last) = read(TEXT_ROWS[name]).messages
    assert (last.role, last.reasoning, last.content, last.calls) == ("assistant", THOUGHT, ANSWER, ())


@pytest.mark.parametrize("name", CALL_ROWS)
def test_reasoning_before_a_call_is_read_from_every_shape(name: str) -> None:
    (*_, last) = read(CALL_ROWS[name]).messages
    assert (last.role, last.reasoning, last.content) == ("assistant", THOUGHT, None)
    assert [(call.name, call.arguments) for call in last.calls] == [("get_weather", {"city": "Paris"})]


@given(st.text(max_size=30), st.text(max_size=30))
def test_tags_split_a_text_as_the_servers_do(thought: str, answer: str) -> None:
    """vLLM and Qwen's own template split at the closing tag; whitespace around both parts is the template's."""
    text = f"<think>\n{thought}\n</think>\n\n{answer}"
    if "</think>" in thought or "<think>" in thought:
        return
    (*_, last) = read(openai(said(text))).messages
    space = " \t\r\n"
    assert last.reasoning == (thought.strip(space) or None)
    assert last.content == answer.lstrip(space)


BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "in a user's message": (
        {"messages": [{"role": "user", "content": "Hi", "reasoning_content": "Hm."}, said()]},
        *("reasoning_role", "messages[0].reasoning_content", "user's"),
    ),
    "in a result": (
        openai(
            said(None, tool_calls=[{"function": CALL}]), {"role": "tool", "content": "1", "thinking": "Hm."}, said()
        ),
        *("reasoning_role", "messages[2].thinking", "tool's"),
    ),
    "unclosed": (openai(said("<think>So")), "unclosed_think", "messages[1].content", "without </think>"),
    "unclosed before a call": (
        sharegpt(("gpt", f"<think>So <tool_call>\n{json.dumps(CALL)}\n</tool_call>")),
        *("unclosed_think", "conversations[1].value", "cut off"),
    ),
    "empty": (openai(said(reasoning=" \n")), "reasoning_empty", "messages[1].reasoning", "null"),
    "an empty part": (
        openai(said([{"type": "thinking", "thinking": ""}, {"type": "text", "text": "x"}])),
        *("reasoning_empty", "messages[1].content", "leave it out"),
    ),
    "two keys": (
        openai(said(reasoning_content="a", thinking="b")),
        *("reasoning_conflict", "messages[1].thinking", "reasoning_content"),
    ),
    "key and tags": (
        openai(said("<think>a</think>x", reasoning="b")),
        *("reasoning_conflict", "messages[1].content", "keep one"),
    ),
    "key and part": (
        openai(said([{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "x"}], reasoning="b")),
        *("reasoning_conflict", "messages[1].content", "keep one"),
    ),
    "a number": (openai(said(reasoning=7)), "reasoning_not_text", "messages[1].reasoning", "number 7"),
    "a part without text": (
        openai(said(reasoning=[{"type": "text"}])),
        *("reasoning_not_text", "messages[1].reasoning[0]", "object"),
    ),
    "a turn that nothing follows": (
        sharegpt(("gpt", "x"), ("thought", "So")),
        *("reasoning_role", "conversations[2].value", "the row ends after it"),
    ),
    "a turn before the user's": (
        sharegpt(("thought", "So"), ("human", "And?"), ("gpt", "x")),
        *("reasoning_role", "conversations[1].value", "the user's message follows"),
    ),
    "two turns in a row": (
        sharegpt(("thought", "So"), ("thought", "Now"), ("gpt", "x")),
        *("reasoning_conflict", "conversations[2].value", "conversations[1].value"),
    ),
    "a switch of another type": (
        openai(said(), enable_thinking="no"),
        *("template_switch", "enable_thinking", "true or false"),
    ),
    "two values of a switch": (
        openai(said(), enable_thinking=True, chat_template_kwargs={"enable_thinking": False}),
        *("template_switch", "enable_thinking", "True here and False"),
    ),
    "an input as a switch": (
        openai(said(), chat_template_kwargs={"messages": []}),
        *("template_switch", "chat_template_kwargs", "messages"),
    ),
    "switches that are not an object": (
        openai(said(), chat_template_kwargs=[1]),
        *("template_switch", "chat_template_kwargs", "object"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_reasoning_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    row, kind, pointer, words = BAD[name]
    with pytest.raises(RowError) as caught:
        read(row)
    assert (caught.value.kind, caught.value.pointer) == (kind, pointer)
    assert words in caught.value.reason
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(openai(said())) + "\n" + json.dumps(row) + "\n")
    _, defect = parse_source(str(rows))
    assert isinstance(defect, Defect)
    assert str(defect).startswith(f"{rows}:2: {pointer}: ")


def test_absent_reasoning_is_none() -> None:
    for keys in ({}, {"reasoning_content": None}, {"thinking": None, "reasoning": None}):
        assert read(openai(said(**keys))).messages[-1].reasoning is None
    (*_, last) = read(openai(said(f"<think>\n\n</think>\n\n{ANSWER}"))).messages
    assert (last.reasoning, last.content) == (None, ANSWER)
    user = read({"messages": [{"role": "user", "content": "<think>a</think>", "reasoning": ""}, said()]}).messages[0]
    assert (user.reasoning, user.content) == (None, "<think>a</think>")


def test_switches_of_a_row_are_its_template_args() -> None:
    assert read(openai(said())).template_args == {}
    row = openai(
        said(), enable_thinking=True, reasoning_effort="low", chat_template_kwargs={"builtin_tools": None, "level": 2}
    )
    assert read(row).template_args == {"level": 2, "enable_thinking": True, "reasoning_effort": "low"}
    assert read(openai(said(), thinking=False)).template_args == {"thinking": False}
    assert read(openai(said(), thinking=0.5)).template_args == {}  # a column of another kind


def test_a_written_conversation_reads_back_the_same() -> None:
    row = {**CALL_ROWS["reasoning_content"], "enable_thinking": True}
    conversation = read(row)
    assert read(json.loads(conversation.to_json())) == conversation


@pytest.mark.parametrize("name", [*TEXT_ROWS, *CALL_ROWS])
def test_rows_with_reasoning_are_found_without_reading_the_others(name: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    plain = [openai(said("I think so, by that reasoning.")), openai(said(reasoning_content=None))]
    rows.write_text("".join(json.dumps(row) + "\n" for row in plain))
    assert not has_reasoning_rows([(str(rows), "auto")])
    with rows.open("a") as file:
        file.write(json.dumps({**TEXT_ROWS, **CALL_ROWS}[name]) + "\n")
    assert has_reasoning_rows([(str(rows), "auto")])
    assert not has_reasoning_rows([(str(rows), "auto")], max_samples=2)
    assert not has_reasoning_rows([(str(rows), "auto")], selection=Selection(parse_conditions("messages > 50")))
    assert sum(isinstance(row, Conversation) for row in read_source(str(rows))) == 3


@pytest.mark.parametrize(
    ("name", "has_json"),
    [
        (name, has_json)
        for name in (*TEXT_ROWS, *CALL_ROWS)
        for has_json in (True, False)
        if has_json or "thinking part" not in name  # Arrow has no structs with content of several types
    ],
)
def test_reasoning_in_tables_is_found_without_reading_the_other_batches(
    name: str, has_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**TEXT_ROWS, **CALL_ROWS}[name]
    plain = [openai(said("I think so, by that reasoning."))] * 300  # more than a batch
    without, table = tmp_path / "without.parquet", tmp_path / "table.parquet"
    pq.write_table(pa.Table.from_pylist(plain), without)
    json_columns = {key: pa.array([json.dumps(value)], pa.json_()) for key, value in row.items()}
    pq.write_table(pa.table(json_columns) if has_json else pa.Table.from_pylist([row]), table)
    assert has_reasoning_rows([(str(without), "auto"), (str(table), "auto")])
    assert not has_reasoning_rows([(str(without), "auto"), (str(without), "auto")], max_samples=2)

    def refuse(self: RowReader, row: UnreadRow) -> None:
        raise AssertionError(f"{row.file}:{row.line} was read")

    monkeypatch.setattr(RowReader, "read", refuse)
    assert not has_reasoning_rows([(str(without), "auto")])


@pytest.mark.parametrize(
    ("values", "kind", "found"),
    [
        (["a </think> b"], pa.string(), True),
        (["thinking about it"], pa.string(), True),
        (["I think", None], pa.large_string(), False),
        ([{"Reasoning": None}], pa.struct([("Reasoning", pa.string())]), True),
        ([{"x": [{"y": "[/THINK]"}]}], pa.struct([("x", pa.list_(pa.struct([("y", pa.string())])))]), True),
        ([{"x": [{"y": "think"}, {"y": "a"}]}], pa.struct([("x", pa.list_(pa.struct([("y", pa.string())])))]), True),
        ([[("thought", "x")]], pa.map_(pa.string(), pa.string()), True),
        ([[("x", "y")]], pa.map_(pa.string(), pa.string()), False),
        (["</thought>", "x"], pa.dictionary(pa.int32(), pa.string()), True),
        ([1, None], pa.int64(), False),
        ([None], pa.null(), False),
        ([b"x"], pa.binary(), True),  # unknown, so the rows are read
    ],
)
def test_text_is_found_in_columns_of_any_type(values: list[Any], kind: pa.DataType, found: bool) -> None:
    batch = pa.record_batch({"column": pa.array(values, kind)})
    assert holds_text(batch, "reasoning|think|thought", r"(?:think|thought)[\]>]") is found
    assert holds_text(pa.table({"column": pa.array(values, kind)}), "column", "-")
