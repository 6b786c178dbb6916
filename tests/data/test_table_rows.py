"""Tables, as most CSV files are: a query, and a call in columns of its own; unknown columns get a suggestion."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fctune.base.errors import DataError
from fctune.cli import main
from fctune.config.sections.data import SourceConfig
from fctune.data.conversation import Call, Tool
from fctune.data.observed_tools import draft_tools
from fctune.data.sources import Defect, parse_source, scan_source

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


TICKET = {"ticket": "4000", "customer_message": "Where is PX-1, please?", "agent_function": "track_parcel"}
TICKET |= {"agent_arguments": '{"parcel_id": "PX-1"}', "agent_reply": ""}
THANKS = {"ticket": "4001", "customer_message": "Thanks a lot!", "agent_reply": "You are welcome."}
MAPPING = "customer_message=query,agent_function=tool,agent_arguments=arguments,agent_reply=response"


def write_table(path: Path, suffix: str, *rows: dict[str, str]) -> str:
    """Write rows whose later columns are empty in the first."""
    path.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    if suffix == "csv":
        return write(path, *rows)
    filled = [{name: row.get(name) or None for name in names} for row in rows]
    if suffix == "jsonl":
        lines = (json.dumps({name: value for name, value in row.items() if value}) + "\n" for row in filled)
        (path / "rows.jsonl").write_text("".join(lines))
    else:
        pq.write_table(pa.Table.from_pylist(filled), path / "rows.parquet")
    return str(path / f"rows.{suffix}")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_column_that_is_empty_in_the_first_rows_is_a_column(suffix: str, tmp_path: Path) -> None:
    path = write_table(tmp_path, suffix, TICKET, THANKS)
    with pytest.raises(DataError, match="customer_mesage") as caught:
        list(parse_source(path, columns={"customer_mesage": "query", "agent_reply": "response"}))
    assert (
        f"maps customer_mesage (did you mean customer_message?), which no row has. Columns found: {', '.join(TICKET)}."
        in str(caught.value)
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_may_be_empty_in_all_rows(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    write_table(tmp_path, "csv", CALL | {"note": ""})
    if suffix == "parquet":
        schema = pa.schema([(name, pa.string()) for name in (*CALL, "note")])
        pq.write_table(pa.Table.from_pylist([CALL], schema), path)
    (row,) = parse_source(str(path), columns={"note": "ignore"})
    assert not isinstance(row, Defect)
    with pytest.raises(DataError, match=r"maps noot \(did you mean note\?\), which no row has"):
        list(parse_source(str(path), columns={"noot": "ignore"}))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("given", [{}, {"customer_message": "query"}])
def test_a_table_gets_a_mapping_and_no_list_of_formats(suffix: str, given: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"Perhaps: --columns {MAPPING}[.] This is a guess") as caught:
        list(parse_source(write_table(tmp_path, suffix, TICKET, THANKS), columns=given))
    assert f"Columns found: {', '.join(TICKET)}." in str(caught.value)
    assert "sharegpt" not in str(caught.value)


def test_names_that_say_nothing_are_told_by_values(tmp_path: Path) -> None:
    rows = [{"c1": f"Track parcel {i}", "c2": "track", "c3": '{"parcel": 1}', "c4": str(i)} for i in range(3)]
    with pytest.raises(DataError, match=r"Perhaps: --columns c1=query,c2=tool,c3=arguments[.]"):
        list(scan_source(write(tmp_path, *rows), tools=(Tool({"name": "track"}),)))
    objects = {"userQuestion": "Track 1", "extra": '{"x": 1}', "toolName": "track", "toolArgs": "{}"}
    with pytest.raises(DataError, match=r"Perhaps: --columns userQuestion=query,toolName=tool,toolArgs=arguments[.]"):
        list(scan_source(write(tmp_path, objects)))
    calls = json.dumps([{"name": "track", "arguments": {}}])
    with pytest.raises(DataError, match=r"Perhaps: --columns c1=query,c2=answers,c3=tools[.]"):
        list(scan_source(write(tmp_path, {"c1": "Track parcel 1", "c2": calls, "c3": TOOLS})))


def test_a_row_of_a_table_without_its_values_is_a_defect_also_if_it_is_the_first(tmp_path: Path) -> None:
    first, second = parse_source(write(tmp_path, CALL | {"query": ""}, CALL))
    assert isinstance(first, Defect)
    assert (first.kind, first.line) == ("unknown_row_format", 2)
    assert first.reason.startswith("values in tool, arguments, tools only")
    assert not isinstance(second, Defect)


def test_a_row_whose_reply_is_in_a_column_that_is_not_mapped_names_it(tmp_path: Path) -> None:
    columns = dict(pair.split("=") for pair in MAPPING.split(",")[:3])
    _, reply = parse_source(write(tmp_path, TICKET, THANKS), columns=columns)
    assert isinstance(reply, Defect)
    assert reply.reason.endswith(f"Perhaps: --columns {MAPPING}")


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_other_separators_are_named(separator: str, name: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path, {"query": "Hello", "response": "Good day."}))
    path.write_text(path.read_text().replace(",", separator))
    with pytest.raises(DataError, match=f"values separated by {name}"):
        list(parse_source(str(path)))
    renamed = path.rename(tmp_path / "rows.tsv")
    with pytest.raises(DataError, match="separated by tabs are not read"):
        list(parse_source(str(renamed)))


def test_a_suffix_in_capitals_is_a_suffix(tmp_path: Path) -> None:
    path = Path(write(tmp_path, CALL)).rename(tmp_path / "ROWS.CSV")
    (row,) = parse_source(str(path))
    assert not isinstance(row, Defect)


def test_several_calls_need_no_column_of_tools_if_tools_are_drafted(tmp_path: Path) -> None:
    answers = json.dumps([{"name": "a", "arguments": {"x": 1}}, {"name": "a", "arguments": {"x": 2.5, "y": True}}])
    path = write(tmp_path, {"query": "Twice", "answers": answers})
    (row,) = parse_source(path)
    assert isinstance(row, Defect)
    assert row.kind == "call_without_tools"
    drafts = draft_tools([SourceConfig(path=path)])
    (tool,) = drafts.tools
    assert (drafts.drafted, drafts.variants, drafts.num_without) == (["a"], {}, 1)
    assert tool["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "x": {"type": ["integer", "number"], "description": ""},
            "y": {"type": "boolean", "description": ""},
        },
        "required": ["x"],
    }
    with pytest.raises(DataError, match="no row has tools or a call, so there is nothing to draft"):
        draft_tools([SourceConfig(path=write(tmp_path, {"query": "Hello", "response": "Good day."}))])


def test_the_tools_that_rows_carry_are_written_and_only_the_missing_ones_drafted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = [{"name": "get_weather", "description": "Weather of a city.", "parameters": {"type": "object"}}]
    more = [*described, {"name": "unused", "description": "", "parameters": {"type": "object"}}]
    rows = [CALL, CALL | {"tools": json.dumps(described)}, CALL | {"tools": json.dumps(more)}]
    path, out = write(tmp_path, *rows), tmp_path / "tools.json"
    assert main(["data", "tools", path, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 tools as the rows carry them, of several definitions, that of the most rows (get_weather 2)" in said
    assert f"No --tools is needed, as the rows have their tools: fctune tune --data {path}" in said
    assert [tool["function"] for tool in json.loads(out.read_text())] == more
    bare = CALL | {"tools": ""}
    others = [{"query": "Hello", "response": "Good day."}, CALL | {"arguments": "{"}]
    write(tmp_path, *rows, bare, bare | {"tool": "get_time", "arguments": ""}, *others)
    assert main(["data", "tools", path, "--out", str(out), "--force"]) == 0
    said = capsys.readouterr().out
    assert "1 draft from calls: get_time. Add the descriptions" in said
    counts = "3 with tools, 2 with calls and no tools, 1 with neither, 1 with a defect (arguments_not_json 1)"
    assert f"7 records: {counts}\n" in said
    assert [tool["function"]["name"] for tool in json.loads(out.read_text())] == ["get_weather", "unused", "get_time"]
