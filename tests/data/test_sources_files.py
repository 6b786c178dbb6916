"""Files as streams of rows: line numbers, compression, and files that are not datasets."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fctune.base.errors import DataError
from fctune.config.loading import load_config
from fctune.data.conversation import Conversation
from fctune.data.sources import Defect, ParsedRow, parse_source, read_source
from fctune.data.sources.files import open_rows


def make_row(text: str = "?") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}


def write(path: Path, data: str | bytes) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def read_lines(path: str) -> list[tuple[int, str]]:
    """Return the line and the user's text of each conversation, or the kind of its defect."""
    found = []
    for item in read_source(path):
        if isinstance(item, Defect):
            found.append((item.line, item.kind))
        else:
            found.append((int(item.source.rpartition(":")[2]), item.messages[0].content or ""))
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.just('"]}\\'), min_size=1, max_size=6),
    seed=st.integers(0, 999),
    chunk=st.sampled_from([1, 2, 7, 64, 2**20]),
)
def test_a_list_has_the_rows_of_json_lines_whatever_its_layout(
    tmp_path: Path, texts: list[str], seed: int, chunk: int
) -> None:
    rng = random.Random(seed)
    text, expected = rng.choice(["", "\n \n"]) + "[", []
    for i, content in enumerate(texts):
        text += rng.choice(["", " ", "\n", "\n\n\r\n"])
        expected.append((text.count("\n") + 1, content))
        text += json.dumps(make_row(content), indent=rng.choice([None, 0, 4]), ensure_ascii=rng.random() < 0.5)
        text += rng.choice(["", "\n", " "]) + ("," if i + 1 < len(texts) else "")
    path = write(tmp_path / "list.json", text + rng.choice(["]", "\n]\n"]))
    assert read_lines(path) == expected
    raw = [(row.line, json.loads(row.data or b"")) for row in open_rows(path, chunk)]
    assert [(line, row["messages"][0]["content"]) for line, row in raw] == expected

    lines, expected = "", []
    for content in texts:
        lines += rng.choice(["", "\n"])
        expected.append((lines.count("\n") + 1, content))
        lines += json.dumps(make_row(content)) + rng.choice(["\n", "\r\n"])
    assert read_lines(write(tmp_path / "rows.jsonl", lines)) == expected
    assert read_lines(write(tmp_path / "rows.jsonl.gz", gzip.compress(lines.encode()))) == expected


def test_unicode_line_separators_inside_a_row_do_not_end_lines(tmp_path: Path) -> None:
    rows = [make_row("a\u2028b\u0085c\x0bd"), make_row("e")]
    path = write(tmp_path / "rows.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_lines(path) == [(1, "a\u2028b\u0085c\x0bd"), (2, "e")]


def test_consecutive_pretty_printed_objects_are_rows(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(make_row(t), indent=2) for t in "ab")
    assert [text for _, text in read_lines(write(tmp_path / "rows.json", text))] == ["a", "b"]


def test_the_type_of_a_file_depends_on_its_bytes_and_not_its_name(tmp_path: Path) -> None:
    text = json.dumps(make_row("a"))
    assert read_lines(write(tmp_path / "zipped.jsonl", gzip.compress(text.encode()))) == [(1, "a")]
    assert read_lines(write(tmp_path / "plain.jsonl.gz", "\ufeff" + text)) == [(1, "a")]


def test_a_directory_is_read_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.json", json.dumps([make_row("b")]))
    write(tmp_path / "a.jsonl", json.dumps(make_row("a")))
    write(tmp_path / "README.md", "not data")
    pq.write_table(pa.Table.from_pylist([make_row("c")]), tmp_path / "c.parquet")
    assert [text for _, text in read_lines(str(tmp_path))] == ["a", "b", "c"]


def test_a_directory_is_read_whatever_the_case_of_its_suffixes(tmp_path: Path) -> None:
    write(tmp_path / "a.JSONL", json.dumps(make_row("a")))
    load_config("configs/tiny_lora.yaml", [f"data.sources.0.path={tmp_path}"])  # or it names the missing files
    write(tmp_path / "b.Json.GZ", gzip.compress(json.dumps([make_row("b")]).encode()))
    write(tmp_path / "c.CSV", "query,response\nc,d\n")
    pq.write_table(pa.Table.from_pylist([make_row("d")]), tmp_path / "d.PARQUET")
    assert [text for _, text in read_lines(str(tmp_path))] == ["a", "b", "c", "d"]


def test_an_arrow_stream_is_read_whatever_the_case_of_its_suffix(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([make_row("a")])
    with pa.ipc.new_stream(str(tmp_path / "rows.ARROW"), table.schema) as stream:
        stream.write_table(table)
    assert read_lines(str(tmp_path / "rows.ARROW")) == [(1, "a")]


def test_a_directory_is_read_at_every_depth_and_hidden_folders_are_not(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    for folder in (tmp_path / "rows" / "b" / "c", tmp_path / "rows" / ".cache", other):
        folder.mkdir(parents=True)
    for name in ("rows/a.jsonl", "rows/b/b.jsonl", "rows/b/c/c.jsonl", "rows/.cache/h.jsonl", "elsewhere/l.jsonl"):
        write(tmp_path / name, json.dumps(make_row(Path(name).stem)))
    (tmp_path / "rows" / "linked").symlink_to(other)
    (tmp_path / "rows" / "b" / "loop").symlink_to(tmp_path / "rows")
    assert [text for _, text in read_lines(str(tmp_path / "rows"))] == ["a", "b", "c", "l"]


def test_the_outputs_of_tunes_runs_and_sweeps_below_a_directory_are_no_rows(tmp_path: Path) -> None:
    outputs = {
        "runs/tune": ("tune.json", {"schema_version": 1, "inputs": {}, "steps": {}}),
        "runs/mine": ("run.json", {"config": {}, "versions": {"fctune": "1"}}),
        "runs/sweep": ("study.json", {"sweep": {}, "runs": []}),
        "traces/mine": ("run.json", {"config": {}}),  # of another program
    }
    for folder, (name, record) in outputs.items():
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / name, json.dumps(record))
        write(tmp_path / folder / "held_out.jsonl", json.dumps(make_row(folder)))
    write(tmp_path / "rows.jsonl", json.dumps(make_row("rows")))
    assert [text for _, text in read_lines(str(tmp_path))] == ["rows", "traces/mine"]
    assert read_lines(str(tmp_path / "runs" / "mine" / "held_out.jsonl")) == [(1, "runs/mine")], "it was named"


def test_an_object_over_several_lines_is_one_row(tmp_path: Path) -> None:
    text = json.dumps(make_row("a"), indent=2)
    for name, data in (("a.json", text), ("b.json", "{ " + text[1:].lstrip()), ("c.json", text + "\n" + text)):
        assert {text for _, text in read_lines(write(tmp_path / name, data))} == {"a"}
    assert len(read_lines(str(tmp_path / "c.json"))) == 2


def test_a_zstd_file_may_begin_with_a_frame_to_skip(tmp_path: Path) -> None:
    packed = pa.compress(json.dumps(make_row("a")).encode(), codec="zstd", asbytes=True)
    frame = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    assert read_lines(write(tmp_path / "rows.jsonl.zst", frame + packed)) == [(1, "a")]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.jsonl", b"", "no rows"),
        ("blank.jsonl", b"\n \n", "no rows"),
        ("empty.json", b"[]", "no rows"),
        ("binary.jsonl", bytes(range(256)) * 20, "binary or not UTF-8"),
        ("utf16.jsonl", json.dumps(make_row()).encode("utf-16"), "binary or not UTF-8"),
        ("archive.zip", b"PK\x03\x04rest", "binary or not UTF-8"),
        ("half.json", json.dumps([make_row(), make_row()])[:-30].encode(), "does not end"),
        ("cut.json", b"[" + json.dumps(make_row()).encode() + b",", "ends inside its list"),
        ("twice.json", b"[" + json.dumps(make_row()).encode() + b"] []", "text after the end"),
        ("comma.json", json.dumps([make_row(), make_row()]).replace("}, {", "} {").encode(), "expected ','"),
        ("last.json", b"[" + json.dumps(make_row()).encode() + b",\n]", "the list of rows ends after a comma"),
        (
            "other.json",
            json.dumps({"data": [make_row()]}, indent=2).encode(),
            "keys found: data. Known row formats",
        ),
        ("other.jsonl", b'{"prompt": "a", "completion": "b"}', "keys found: prompt, completion"),
        ("broken.parquet", b"PAR1 and no more", "not a readable Parquet file"),
    ],
)
def test_files_that_are_not_datasets_are_rejected_by_name(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(DataError) as raised:
        list(read_source(path))
    assert message in str(raised.value)
    assert str(raised.value).startswith(path)


def test_a_missing_path_is_rejected_with_a_hint() -> None:
    with pytest.raises(DataError, match=r"/no/such: no such file or directory\. Check the path"):
        list(read_source("/no/such"))
    with pytest.raises(DataError, match="unknown row format"):
        list(read_source("/no/such", row_format="alpaca"))


def test_a_directory_without_data_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file"):
        list(read_source(str(tmp_path)))


def test_a_truncated_gzip_file_is_rejected_after_the_rows_before(tmp_path: Path) -> None:
    lines = "".join(json.dumps(make_row(str(random.random()) * 9)) + "\n" for _ in range(5000))
    path = write(tmp_path / "rows.jsonl.gz", gzip.compress(lines.encode())[:-2000])
    rows = []
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz:\d+: the gzip stream ends early") as raised:
        rows.extend(read_source(path))
    assert int(str(raised.value).split(":")[1]) > 3000


@pytest.mark.parametrize("ending", ["\\n", '\\"', "\\\\"], ids=["escape", "quote", "backslash"])
def test_a_row_of_one_huge_text_in_a_list_is_one_defect(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fctune.data.sources.files.MAX_ROW_BYTES", 100)
    small = json.dumps(make_row("after"))
    for size in (10, 90, 500, 5_000):
        for row in (f'{{"a": "{"x" * size}{ending}"}}', f'{{"a": [{"1, " * size}2], "b": "{ending}"}}'):
            path = write(tmp_path / "rows.json", f"[{row},\n{small},\n{row}]")
            for chunk_bytes in (7, 64, 10_000):
                found = [(raw.line, raw.data and raw.data.decode()) for raw in open_rows(path, chunk_bytes)]
                kept = row if len(row) <= 100 else None
                assert found == [(1, kept), (2, small if len(small) <= 100 else None), (3, kept)], (size, chunk_bytes)
    path = write(tmp_path / "rows.json", f'[{{"a": "{"x" * 5_000}')
    with pytest.raises(DataError, match="does not end"):
        list(open_rows(path))


def test_a_row_too_large_is_one_defect_and_the_next_row_is_read(tmp_path: Path) -> None:
    big, small = json.dumps(make_row("x" * 50_000_000)), json.dumps(make_row("after"))
    assert read_lines(write(tmp_path / "rows.jsonl", f"{big}\n{small}\n")) == [(1, "row_too_large"), (2, "after")]
    assert read_lines(write(tmp_path / "rows.json", f"[{big},\n{small}]")) == [(1, "row_too_large"), (2, "after")]


@pytest.mark.parametrize("depth", [150, 2_000, 100_000])
def test_deep_nesting_is_one_defect_and_the_next_row_is_read(tmp_path: Path, depth: int) -> None:
    call = '{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    turns = '[{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"function": ' + call + "}]}]"
    row, after = f'{{"messages": {turns}}}', json.dumps(make_row("after"))
    assert read_lines(write(tmp_path / "rows.jsonl", f"{row}\n{after}\n")) == [(1, "too_deep"), (2, "after")]
    assert read_lines(write(tmp_path / "rows.json", f"[{row},\n{after}]")) == [(1, "too_deep"), (2, "after")]


def test_bytes_that_are_not_utf8_are_one_defect(tmp_path: Path) -> None:
    bad = json.dumps(make_row("?")).encode().replace(b"?", b"\xff\xfe")
    good = json.dumps(make_row("after")).encode()
    assert read_lines(write(tmp_path / "rows.jsonl", bad + b"\n" + good)) == [(1, "invalid_utf8"), (2, "after")]


def test_a_malformed_row_in_a_list_does_not_affect_the_others(tmp_path: Path) -> None:
    a, b = json.dumps(make_row("a")), json.dumps(make_row("b"))
    text = f"[{a},\n" + '{"messages": [}],}'.replace("[}", "[") + f",\n{b}]"
    assert read_lines(write(tmp_path / "rows.json", text)) == [(1, "a"), (2, "not_json"), (3, "b")]


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {}}}
TOOLS = json.dumps([{"name": "get_weather", "parameters": WEATHER}, {"name": "other"}])


def make_call_row(arguments: Any, tools: Any = TOOLS) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {"messages": turns, "tools": tools}


def read_arguments(path: str) -> list[Any]:
    rows = list(parse_source(path))
    return [r.conversation.messages[-1].calls[0].arguments if isinstance(r, ParsedRow) else r.kind for r in rows]


def test_arguments_as_strings_are_byte_exact_in_parquet(tmp_path: Path) -> None:
    texts = ['{"city": "Z\\u00fcrich", "note": null}', '{"days": 3, "city": "x"}', "{}"]
    pq.write_table(pa.Table.from_pylist([make_call_row(text) for text in texts]), tmp_path / "rows.parquet")
    read = read_arguments(str(tmp_path / "rows.parquet"))
    assert [json.dumps(arguments) for arguments in read] == texts


def test_arrow_filling_is_removed_and_an_ambiguous_null_is_a_defect(tmp_path: Path) -> None:
    rows = [make_call_row({"city": "Paris"}), make_call_row({"days": 3}), make_call_row({"unit": "C"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "filled.parquet")
    assert read_arguments(str(tmp_path / "filled.parquet")) == [{"city": "Paris"}, {"days": 3}, {"unit": "C"}]
    rows = [make_call_row({"city": "Paris", "note": "x"}), make_call_row({"city": "Rome"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "ambiguous.parquet")
    assert read_arguments(str(tmp_path / "ambiguous.parquet")) == [{"city": "Paris", "note": "x"}, "arrow_null"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "not_finite"),
        (float("-inf"), "not_finite"),
        (datetime.datetime(2026, 3, 1), ""),
        (datetime.date(2026, 3, 1), ""),
        (b"abc", ""),
        (decimal.Decimal("1.5"), ""),
    ],
    ids=str,
)
def test_a_value_of_a_table_that_is_not_json_is_a_defect_of_its_call_or_tool(
    value: Any, kind: str, tmp_path: Path
) -> None:
    nested = {"list": [{"note": value}]}
    tool = {"name": "get_weather", "parameters": {"type": "object", "properties": {"note": {"default": value}}}}
    rows = [
        (make_call_row({"note": value}), "arguments_not_json", "messages[1].tool_calls[0].function.arguments.note"),
        (make_call_row(nested), "arguments_not_json", "messages[1].tool_calls[0].function.arguments.list[0].note"),
        (make_call_row("{}", [tool]), "tool_shape", "tools[0].parameters.properties.note.default"),
    ]
    for row, other_kind, pointer in rows:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        (defect,) = parse_source(str(tmp_path / "rows.parquet"))
        assert isinstance(defect, Defect)
        assert (defect.kind, defect.pointer) == (kind or other_kind, pointer)
        assert kind or defect.reason.endswith("store tools and arguments as JSON strings")


def test_arguments_in_a_map_have_strings_as_keys(tmp_path: Path) -> None:
    schema = pa.schema([("query", pa.string()), ("tool", pa.string()), ("arguments", pa.map_(pa.int64(), pa.string()))])
    row = {"query": "?", "tool": "get_weather", "arguments": [(1, "x")]}
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "rows.parquet")
    (defect,) = parse_source(str(tmp_path / "rows.parquet"))
    assert isinstance(defect, Defect)
    assert (defect.kind, defect.pointer) == ("arguments_not_json", "arguments")


def test_arrow_filling_is_removed_from_tools(tmp_path: Path) -> None:
    tools = [
        [{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}],
        [{"name": "other", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}],
    ]
    rows = [{**make_row(), "tools": tool} for tool in tools]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    items = list(read_source(str(tmp_path / "rows.parquet")))
    assert [[tool.function for tool in item.tools] for item in items if isinstance(item, Conversation)] == tools


def test_a_dataset_of_the_hub_keeps_the_nulls_of_its_rows(tmp_path: Path) -> None:
    rows = [
        make_call_row(arguments, [{"name": "get_weather"}])
        for arguments in ({"a": 1, "b": None}, {"b": "x", "a": 2**53 + 1}, {})
    ]
    write(tmp_path / "train.jsonl", "\n".join(json.dumps(row) for row in rows))
    expected = [row["messages"][-1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    assert [json.dumps(arguments) for arguments in read_arguments(f"hf:{tmp_path}")] == [
        json.dumps(arguments) for arguments in expected
    ]


def test_a_dataset_that_cannot_be_loaded_is_rejected_with_a_hint(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", json.dumps(make_row()))
    with pytest.raises(DataError, match=r"could not be read .* Check its name, config, split and revision"):
        list(read_source(f"hf:{tmp_path}::nosuchsplit"))
    with pytest.raises(DataError, match="Expected hf:NAME"):
        list(read_source("hf:a:b:c:d"))


def test_csv_rows_are_read_with_their_lines(tmp_path: Path) -> None:
    rows = [make_row("a"), make_row("b")]
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "messages", "tools"])
        writer.writerow(["a", json.dumps(rows[0]["messages"], indent=1), json.dumps(rows[0].get("tools", []))])
        writer.writerow(["b", json.dumps(rows[1]["messages"]), ""])
        file.write("c,[1\n")
        writer.writerow(["d", "[1", ""])
    second = json.dumps(rows[0]["messages"], indent=1).count("\n") + 3
    found = list(read_source(str(tmp_path / "rows.csv")))
    assert [item.messages[0].content for item in found[:2] if isinstance(item, Conversation)] == [
        "a",
        "b",
    ]
    assert [item.source for item in found[:2] if isinstance(item, Conversation)] == [
        f"{tmp_path}/rows.csv:2",
        f"{tmp_path}/rows.csv:{second}",
    ]
    assert [(item.line, item.kind) for item in found[2:] if isinstance(item, Defect)] == [
        (second + 1, "csv_fields"),
        (second + 2, "not_json"),
    ]


def test_blank_lines_of_a_csv_file_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", "\nquery,response\n\na,b\r\n\r\nc,d\n\n")
    assert read_lines(path) == [(4, "a"), (6, "c")]


@pytest.mark.parametrize("text", ["", "\n\n", "messages,messages\n", "messages,\n1,2\n"])
def test_a_csv_file_without_a_usable_header_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.csv"):
        list(read_source(write(tmp_path / "rows.csv", text)))


def test_datasets_saved_to_disk_are_read_as_their_rows(tmp_path: Path) -> None:
    rows = [make_row("a"), make_row("b")]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "single", num_shards=2)
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict(first=saved, second=saved).save_to_disk(tmp_path / "unnamed")
    for path, count in (("single", 2), ("splits", 2), ("splits/test", 1), ("unnamed/second", 2)):
        found = list(read_source(str(tmp_path / path)))
        assert [item.messages for item in found if isinstance(item, Conversation)] == [
            item.messages for item in read_source(write(tmp_path / "rows.jsonl", to_lines(rows[:count])))
        ]
    with pytest.raises(DataError, match=r"its splits are first, second; name one: .*unnamed/first"):
        list(read_source(str(tmp_path / "unnamed")))


def test_rows_before_the_damage_of_a_file_in_a_directory_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps(make_row()))
    write(tmp_path / "b.json", f"[{json.dumps(make_row())}, {{")
    rows = read_source(str(tmp_path))
    assert len([next(rows), next(rows)]) == 2
    with pytest.raises(DataError, match=r"b\.json"):
        next(rows)


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_state_file_of_another_program_is_a_file_like_others(name: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", json.dumps(make_row()))
    (tmp_path / "rows.jsonl.d.jsonl").mkdir()
    write(tmp_path / name, json.dumps({"cursor": 1}))
    left_out: Counter[str] = Counter()
    assert len(list(parse_source(str(tmp_path), left_out=left_out))) == 1
    assert left_out == {"file_left_out": 1}
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=f"{name}:1: rows of unknown format"):
        list(read_source(str(tmp_path)))
    write(tmp_path / name, "[1")
    with pytest.raises(DataError, match=f"{name}: cannot be read"):
        list(read_source(str(tmp_path)))


@pytest.mark.parametrize("target", ["gone.jsonl", "link.jsonl"])
def test_a_link_that_leads_nowhere_is_an_error_with_its_name(target: str, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=r"link\.jsonl: cannot be opened"):
        list(read_source(str(tmp_path)))


def to_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
