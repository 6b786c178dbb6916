"""Tables, as most CSV files are: a query, and a call in columns of its own; unknown columns get a suggestion."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fctune.base.errors import DataError
from fctune.config.sections.data import SourceConfig
from fctune.data.conversation import Call
from fctune.data.observed_tools import draft_tools
from fctune.data.sources import Defect, parse_source

TOOLS = json.dumps([{"name": "get_weather", "description": "", "parameters": {"type": "object", "properties": {}}}])
CALL = {"query": "Weather in Rome?", "tool": "get_weather", "arguments": '{"city": "Rome"}', "tools": TOOLS}


def write(path: Path, *rows: dict[str, str]) -> str:
    with open(path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    return str(path / "rows.csv")


def test_a_row_of_a_table_is_a_call_or_a_reply(tmp_path: Path) -> None:
    reply = {"query": "Hello", "response": "Good day.", "tools": TOOLS, "system": "Be brief."}
    rows = list(parse_source(write(tmp_path, CALL, reply, CALL | {"arguments": ""})))
    first, second, third = (row.conversation for row in rows if not isinstance(row, Defect))
    assert {row.row_format for row in rows if not isinstance(row, Defect)} == {"table"}
    assert first.messages[1].calls == (Call("get_weather", {"city": "Rome"}, None),)
    assert [tool.name for tool in first.tools] == ["get_weather"]
    assert [(m.role, m.content) for m in second.messages] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Good day."),
    ]
    assert third.messages[1].calls == (Call("get_weather", {}, None),)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"arguments": "city=Rome"}, "arguments_not_json"),
        ({"tool": "", "response": ""}, "unknown_row_format"),  # neither a call nor a reply
        ({"tool": "", "response": "Good day."}, "call_shape"),  # arguments of no call
        ({"response": "It is warm."}, "unread_text"),  # a reply beside a call would be lost
        ({"tools": ""}, "call_without_tools"),
    ],
)
def test_a_row_that_would_lose_something_is_a_defect(change: dict[str, str], kind: str, tmp_path: Path) -> None:
    *_, row = parse_source(write(tmp_path, CALL | {"response": ""}, CALL | change))
    assert isinstance(row, Defect)
    assert row.kind == kind


def test_unknown_columns_get_a_mapping_that_reads_the_file(tmp_path: Path) -> None:
    renamed = {"Question": CALL["query"], "function": "get_weather", "args": CALL["arguments"], "tools": TOOLS}
    path = write(tmp_path, renamed)
    with pytest.raises(DataError, match="A table needs the columns query") as caught:
        list(parse_source(path))
    suggested = str(caught.value).partition("Perhaps: --columns ")[2].partition(". ")[0]
    columns = dict(pair.split("=") for pair in suggested.split(","))
    assert columns == {"Question": "query", "function": "tool", "args": "arguments"}
    (row,) = parse_source(path, columns=columns)
    assert not isinstance(row, Defect)


def test_several_calls_need_no_column_of_tools_if_tools_are_drafted(tmp_path: Path) -> None:
    answers = json.dumps([{"name": "a", "arguments": {"x": 1}}, {"name": "a", "arguments": {"x": 2.5, "y": True}}])
    path = write(tmp_path, {"query": "Twice", "answers": answers})
    (row,) = parse_source(path)
    assert isinstance(row, Defect)
    assert row.kind == "call_without_tools"
    (tool,) = draft_tools([SourceConfig(path=path)])
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": ["integer", "number"], "description": ""},
            "y": {"type": "boolean", "description": ""},
        },
        "required": ["x"],
    }
    with pytest.raises(DataError, match="nothing to draft tools from"):
        draft_tools([SourceConfig(path=write(tmp_path, CALL))])
