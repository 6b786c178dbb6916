"""Nulls that Arrow filled in from other rows are removed and counted; nulls that a row means are kept."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fctune.data.check import check_sources
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources import Defect, ParsedRow, parse_source


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Do {name}.", "parameters": schema}}


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})
SEARCH = tool("search", query={"type": "string"}, site={"type": "string", "enum": ["a", "b"]})
NOTE = tool("add_note", text={"type": "string"}, tag={"type": ["string", "null"]})


def row(tools: list[Any], *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": listed}]
    return {"messages": turns, "tools": tools}


ROWS = [
    row([WEATHER, SEARCH], ("get_weather", {"city": "Oslo"}), ("search", {"query": "fjord"})),
    row([SEARCH], ("search", {"query": "x", "site": "a"})),
    row([WEATHER], ("get_weather", {"city": "Rome", "days": 2})),
]


def merge(rows: list[Any]) -> list[Any]:
    """Return the rows as a table's columns give them back: every struct with the keys of all."""
    merged: list[Any] = json.loads(json.dumps(pa.Table.from_pylist(rows).to_pylist()))
    return merged


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def read(path: str) -> list[Conversation | str]:
    return [
        one.conversation if isinstance(one, ParsedRow) else f"{one.kind} {one.pointer}" for one in parse_source(path)
    ]


def plain(conversations: list[Conversation | str]) -> list[Any]:
    """Return conversations without their source."""
    return [one.to_openai() if isinstance(one, Conversation) else one for one in conversations]


def test_rows_that_a_column_merged_read_as_the_rows_before(tmp_path: Path) -> None:
    before = plain(read(write(tmp_path / "before.jsonl", ROWS)))
    merged = merge(ROWS)
    assert merged[1]["tools"][0]["function"]["parameters"]["properties"]["city"] is None, "nothing was merged"
    assert merged[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["query"] is None
    assert plain(read(write(tmp_path / "merged.jsonl", merged))) == before
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert plain(read(str(tmp_path / "rows.parquet"))) == before


def test_filling_is_removed_by_the_schemas_of_tools_that_a_file_adds(tmp_path: Path) -> None:
    calls = [("get_weather", {"city": "Oslo"}), ("search", {"query": "x", "site": "a"})]
    rows = [{"messages": row([], call)["messages"]} for call in calls] * 2
    merged = merge(rows)
    assert "query" in merged[0]["messages"][1]["tool_calls"][0]["function"]["arguments"], "nothing was merged"
    tools = tuple(Tool(one["function"]) for one in (WEATHER, SEARCH))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for path in (str(tmp_path / "rows.parquet"), write(tmp_path / "rows.jsonl", merged)):
        read_rows = [one for one in parse_source(path, tools=tools) if isinstance(one, ParsedRow)]
        read_calls = [one.conversation.messages[1].calls[0] for one in read_rows]
        assert [(call.name, call.arguments) for call in read_calls] == calls * 2
        assert len(list(parse_source(path, tools=tools, fold="always"))) == len(calls)


def test_the_check_reports_rows_and_keys(tmp_path: Path) -> None:
    clean = check_sources([write(tmp_path / "before.jsonl", ROWS)]).notes
    assert "filled_row" not in clean
    merged = merge(ROWS)
    num_nulls = json.dumps([[one["tools"], one["messages"][1]["tool_calls"]] for one in merged]).count("null")
    report = check_sources([write(tmp_path / "merged.jsonl", merged)])
    assert report.notes["filled_row"] == 3
    assert report.notes["null_key_dropped"] == num_nulls
    assert report.defects == report.warnings == 0


@pytest.mark.parametrize(
    ("tools", "arguments"),
    [
        ([NOTE], {"text": "x", "tag": None}),  # the schema allows it
        ([NOTE], {"text": None}),  # required: wrong, and for the check to warn of
        ([WEATHER], {"city": "Oslo", "days": None}),  # nothing else in the row is filling
        ([tool("f", a={})], {"a": None}),  # a schema that says nothing
        ([{"type": "function", "function": {"name": "f"}}], {"a": None}),  # no schema
    ],
)
def test_a_null_that_a_row_may_mean_is_kept(tools: list[Any], arguments: dict[str, Any], tmp_path: Path) -> None:
    name = tools[0]["function"]["name"]
    (conversation,) = read(write(tmp_path / "rows.jsonl", [row(tools, (name, arguments))]))
    assert isinstance(conversation, Conversation)
    assert conversation.messages[1].calls[0].arguments == arguments


def test_a_null_that_the_schema_allows_is_kept_beside_filling(tmp_path: Path) -> None:
    merged = merge([row([NOTE], ("add_note", {"text": "x", "tag": None})), *ROWS])
    assert plain(read(write(tmp_path / "rows.jsonl", merged)))[0] == row(
        [NOTE], ("add_note", {"text": "x", "tag": None})
    )


def test_open_parameters_keep_their_nulls_and_make_a_table_ambiguous(tmp_path: Path) -> None:
    anything = tool("call", name={"type": "string"})
    anything["function"]["parameters"]["additionalProperties"] = True
    given = row(
        [anything, WEATHER], ("call", {"name": "x", "extra": None}), ("get_weather", {"city": "a", "extra": None})
    )
    (conversation,) = read(write(tmp_path / "rows.jsonl", [given]))
    assert isinstance(conversation, Conversation)
    assert [call.arguments for call in conversation.messages[1].calls] == [{"name": "x", "extra": None}, {"city": "a"}]
    rows = [row([anything], ("call", {"name": "x"})), row([anything], ("call", {"name": "x", "extra": "y"}))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, _ = parse_source(str(tmp_path / "rows.parquet"))
    assert isinstance(first, Defect)
    assert first.kind == "arrow_null"


def test_values_in_a_schema_and_parameters_named_like_keywords_are_left_alone(tmp_path: Path) -> None:
    named = tool(
        "f", default={"type": "string"}, enum={"type": ["string", "null"], "enum": ["a", None], "default": None}
    )
    named["function"]["parameters"]["properties"]["const"] = {"type": "object", "default": {"a": None}}
    (conversation,) = read(write(tmp_path / "rows.jsonl", [row([named], ("f", {"default": "x"}))]))
    assert isinstance(conversation, Conversation)
    assert conversation.tools[0].to_openai() == named


def test_a_null_default_is_filling_only_next_to_other_filling(tmp_path: Path) -> None:
    alone = tool("f", a={"type": "string", "default": None}, b={"type": ["string", "null"], "default": None})
    merged = copy.deepcopy(alone)
    merged["function"]["parameters"]["properties"]["c"] = None
    cleaned = tool("f", a={"type": "string"}, b={"type": ["string", "null"], "default": None})
    given = [row([one], ("f", {"a": "x"})) for one in (alone, merged)]
    read_tools = [one["tools"][0] for one in plain(read(write(tmp_path / "rows.jsonl", given)))]
    assert read_tools == [alone, cleaned]


def test_arguments_in_a_string_are_the_rows_own(tmp_path: Path) -> None:
    given = merge(ROWS[:2])
    for one in given:
        for call in one["messages"][1]["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    (first, _) = read(write(tmp_path / "rows.jsonl", given))
    assert isinstance(first, Conversation)
    assert first.messages[1].calls[0].arguments == {"city": "Oslo", "query": None, "site": None}


def test_nested_structs_and_wrappers_that_a_column_merged_are_cleaned(tmp_path: Path) -> None:
    place = tool("go", to={"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]})
    paint = tool("paint", to={"type": "object", "properties": {"colour": {"type": "string"}}})
    bare = {
        "name": "bare",
        "description": "Do.",
        "parameters": {"type": "object", "properties": {"n": {"type": "number"}}},
    }
    rows = [
        row([place], ("go", {"to": {"lat": 1.5}})),
        row([paint, bare], ("paint", {"to": {"colour": "red"}}), ("bare", {"n": 1.0})),
    ]
    before = plain(read(write(tmp_path / "before.jsonl", rows)))
    merged = merge(rows)
    assert merged[0]["tools"][0]["name"] is None
    assert plain(read(write(tmp_path / "merged.jsonl", merged))) == before


def test_xlam_rows_that_a_column_merged_read_as_the_rows_before(tmp_path: Path) -> None:
    rows = [
        {
            "query": "?",
            "answers": [{"name": name, "arguments": {key: "x"}}],
            "tools": [{"name": name, "description": "d", "parameters": {key: {"type": "str", "description": "e"}}}],
        }
        for name, key in (("f", "a"), ("g", "b"))
    ]
    before = plain(read(write(tmp_path / "before.jsonl", rows)))
    assert plain(read(write(tmp_path / "merged.jsonl", merge(rows)))) == before
