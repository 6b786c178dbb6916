"""Converted rows are the same conversations in OpenAI's format, and converting them again changes nothing."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.cli import main
from fctune.data.conversation import Conversation
from fctune.data.conversion import RowsSkippedError, convert_source
from fctune.data.sources import ROW_FORMATS, ParsedRow, parse_source
from tests.conftest import REAL_DATA

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("get_weather", "find_place")
TOOLS = [
    {
        "name": name,
        "description": f"Do {name}.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "number"}}},
    }
    for name in NAMES
]

# Text that every row format can hold: Glaive's headers, Hermes' tags and ToolACE's lists would be read as such.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]\r\n:{}"), min_size=1, max_size=20).map(
    lambda text: f"a{text.strip()}b"
)
ARGUMENTS = st.fixed_dictionaries({}, optional={"q": TEXTS, "n": st.integers(-9, 9) | st.just(1.5)})
CALLS = st.tuples(st.sampled_from(NAMES), ARGUMENTS)
TURNS = st.lists(st.tuples(TEXTS, st.lists(CALLS, max_size=2), TEXTS), min_size=1, max_size=3)


def write_openai(turns: Any, with_ids: bool = False, as_objects: bool = True) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        if calls:
            listed = [
                {"type": "function", "function": {"name": n, "arguments": a if as_objects else json.dumps(a)}}
                for n, a in calls
            ]
            results = [{"role": "tool", "name": n, "content": "{}"} for n, _ in calls]
            if with_ids:
                for i, (call, result) in enumerate(zip(listed, results, strict=True)):
                    call["id"] = result["tool_call_id"] = f"{number}_{i}"
                results.reverse()
            messages += [{"role": "assistant", "content": None, "tool_calls": listed}, *results]
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "tools": TOOLS, "id": 7}


def write_sharegpt(turns: Any) -> dict[str, Any]:
    listed = []
    for question, calls, answer in turns:
        listed.append({"from": "human", "value": question})
        if calls:
            text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
            listed += [
                {"from": "function_call", "value": text},
                *[{"from": "observation", "value": "{}"} for _ in calls],
            ]
        listed.append({"from": "gpt", "value": answer})
    return {"conversations": listed, "tools": json.dumps(TOOLS)}


def write_hermes(turns: Any) -> dict[str, Any]:
    listed = [{"from": "system", "value": "You are a function calling AI model <tools> [] </tools>"}]
    for question, calls, answer in turns:
        listed.append({"from": "human", "value": question})
        if calls:
            blocks = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
            answers = [
                f"<tool_response>\n{json.dumps({'name': n, 'content': '{}'})}\n</tool_response>" for n, _ in calls
            ]
            listed += [{"from": "gpt", "value": "\n".join(blocks)}, {"from": "tool", "value": "\n".join(answers)}]
        listed.append({"from": "gpt", "value": answer})
    return {"conversations": listed, "tools": json.dumps(TOOLS)}


def write_glaive(turns: Any) -> dict[str, Any]:
    chat = ""
    for question, calls, answer in turns:
        chat += f"USER: {question}\n\n\n"
        for name, arguments in calls[:1]:
            call = f'"name": "{name}", "arguments": \'{json.dumps(arguments)}\''
            chat += f"ASSISTANT: <functioncall> {{{call}}} <|endoftext|>"
            chat += "\n\n\nFUNCTION RESPONSE: {}\n\n\n"
        chat += f"ASSISTANT: {answer} <|endoftext|>\n\n\n"
    prompt = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
    return {"system": prompt + "\n".join(json.dumps(tool, indent=2) for tool in TOOLS), "chat": chat}


def write_toolace(turns: Any) -> dict[str, Any]:
    listed = []
    for question, calls, answer in turns:
        listed.append({"from": "user", "value": question})
        if calls:
            text = ", ".join(f"{n}({', '.join(f'{k}={json.dumps(v)}' for k, v in a.items())})" for n, a in calls)
            results = json.dumps([{"name": name, "results": {}} for name, _ in calls])
            listed += [{"from": "assistant", "value": f"[{text}]"}, {"from": "tool", "value": results}]
        listed.append({"from": "assistant", "value": answer})
    prompt = "Here is a list of functions in JSON format that you can invoke:\n"
    return {"system": prompt + json.dumps(TOOLS), "conversations": listed}


def write_xlam(turns: Any) -> dict[str, Any]:
    question, calls, _ = turns[0]
    answers = [{"name": name, "arguments": arguments} for name, arguments in calls] or [
        {"name": NAMES[0], "arguments": {}}
    ]
    return {"query": question, "answers": json.dumps(answers), "tools": json.dumps(TOOLS)}


def write_table(turns: Any) -> dict[str, Any]:
    question, calls, answer = turns[0]
    called = {"tool": calls[0][0], "arguments": json.dumps(calls[0][1])} if calls else {"response": answer}
    return {"query": question, **called, "tools": json.dumps(TOOLS)}


def write_anthropic(turns: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        if calls:
            used = [
                {"type": "tool_use", "id": f"{number}_{i}", "name": name, "input": arguments}
                for i, (name, arguments) in enumerate(calls)
            ]
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "{}"} for call in used]
            messages += [{"role": "assistant", "content": used}, {"role": "user", "content": results[::-1]}]
        messages.append({"role": "assistant", "content": answer})
    tools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in TOOLS]
    return {"max_tokens": 9, "stop_sequences": [], "messages": messages, "tools": tools}


def write_responses(turns: Any) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        items.append({"role": "user", "content": question})
        for i, (name, arguments) in enumerate(calls):
            call = {"type": "function_call", "call_id": f"{number}_{i}", "name": name}
            items.append({**call, "arguments": json.dumps(arguments)})
        items += [
            {"type": "function_call_output", "call_id": f"{number}_{i}", "output": "{}"} for i in range(len(calls))
        ]
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]})
    return {"input": items, "tools": [{"type": "function", **tool} for tool in TOOLS]}


def write_gemini(turns: Any) -> dict[str, Any]:
    contents: list[dict[str, Any]] = []
    for question, calls, answer in turns:
        contents.append({"role": "user", "parts": [{"text": question}]})
        if calls:
            used = [{"functionCall": {"name": name, "args": arguments}} for name, arguments in calls]
            results = [{"functionResponse": {"name": name, "response": {}}} for name, _ in calls]
            contents += [{"role": "model", "parts": used}, {"role": "user", "parts": results}]
        contents.append({"role": "model", "parts": [{"text": answer}]})
    return {"contents": contents, "tools": [{"functionDeclarations": TOOLS}]}


def write_langchain(turns: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        messages.append({"type": "human", "content": question})
        if calls:
            used = [{"name": name, "args": args, "id": f"{number}_{i}"} for i, (name, args) in enumerate(calls)]
            messages.append({"type": "ai", "content": "", "tool_calls": used})
            messages += [{"type": "tool", "content": "{}", "tool_call_id": call["id"]} for call in used]
        messages.append({"type": "ai", "content": answer})
    return {"messages": messages, "tools": TOOLS}


def write_log(turns: Any) -> dict[str, Any]:
    row = write_openai(turns, with_ids=True)
    message = row["messages"].pop()
    return {"trace_id": "t", "input": row, "output": message}


def write_prompt_completion(turns: Any) -> dict[str, Any]:
    messages = write_openai(turns)["messages"]
    return {"prompt": messages[:1], "completion": messages[1:], "tools": TOOLS}


def write_otel(turns: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        messages.append({"role": "user", "parts": [{"type": "text", "content": question}]})
        if calls:
            used = [
                {"type": "tool_call", "id": f"{number}_{i}", "name": name, "arguments": arguments}
                for i, (name, arguments) in enumerate(calls)
            ]
            results = [{"type": "tool_call_response", "id": call["id"], "response": {}} for call in used]
            messages += [{"role": "assistant", "parts": used}, {"role": "tool", "parts": results[::-1]}]
        messages.append({"role": "assistant", "parts": [{"type": "text", "content": answer}]})
    answered = {"gen_ai.input.messages": messages[:-1], "gen_ai.output.messages": messages[-1:]}
    return {"attributes": {**answered, "gen_ai.tool.definitions": json.dumps(TOOLS)}}


def write_atif(turns: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for number, (question, calls, answer) in enumerate(turns):
        steps.append({"source": "user", "message": question})
        if calls:
            used = [
                {"tool_call_id": f"{number}_{i}", "function_name": name, "arguments": arguments}
                for i, (name, arguments) in enumerate(calls)
            ]
            results = [{"source_call_id": call["tool_call_id"], "content": "{}"} for call in used]
            steps.append({"source": "agent", "message": "", "tool_calls": used, "observation": {"results": results}})
        steps.append({"source": "agent", "message": answer})
    return {"schema_version": "ATIF-v1.7", "agent": {"tool_definitions": TOOLS}, "steps": steps}


def write_swe_trajectory(turns: Any) -> dict[str, Any]:
    row = write_openai(turns)
    return {"trajectory": row["messages"], "tools": row["tools"]}


WRITERS: dict[str, Any] = {
    "otel": write_otel,
    "atif": write_atif,
    "swe_trajectory": write_swe_trajectory,
    "anthropic": write_anthropic,
    "responses": write_responses,
    "gemini": write_gemini,
    "langchain": write_langchain,
    "log": write_log,
    "prompt_completion": write_prompt_completion,
    "openai": write_openai,
    "openai with ids": lambda turns: write_openai(turns, with_ids=True),
    "openai with text": lambda turns: write_openai(turns, as_objects=False),
    "sharegpt": write_sharegpt,
    "hermes": write_hermes,
    "glaive": write_glaive,
    "toolace": write_toolace,
    "xlam": write_xlam,
    "table": write_table,
}


def test_every_row_format_is_converted_here() -> None:
    sessions = {"claude_code", "codex"}  # several lines a conversation, without tools; test_traces.py converts them
    assert {name.split()[0] for name in WRITERS} == set(ROW_FORMATS) - sessions


def read(path: Path) -> list[Conversation]:
    rows = list(parse_source(str(path)))
    assert all(isinstance(row, ParsedRow) for row in rows), rows
    return [row.conversation for row in rows if isinstance(row, ParsedRow)]


def without_ids(conversation: Conversation) -> Conversation:
    messages = tuple(
        replace(message, call_id=None, calls=tuple(replace(call, id=None) for call in message.calls))
        for message in conversation.messages
    )
    return replace(conversation, messages=messages, source="")


def check_conversion(source: str, folder: Path) -> list[dict[str, Any]]:
    """Convert a source twice, check that both results are equal, and return the rows."""
    once, twice = folder / "once.jsonl", folder / "twice.jsonl"
    convert_source(source, once)
    again = convert_source(str(once), twice)
    assert twice.read_bytes() == once.read_bytes()
    assert again.unchanged == again.converted == again.rows
    assert not again.changes
    assert not again.notes
    return [json.loads(line) for line in once.read_text().split("\n")[:-1]]


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(TURNS, min_size=1, max_size=3))
def test_a_converted_row_is_the_same_conversation_and_converts_to_itself(
    name: str, rows: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(WRITERS[name](turns)) + "\n" for turns in rows))
    converted = check_conversion(str(source), folder)
    before, after = read(source), read(folder / "once.jsonl")
    assert [row.conversation.messages for row in parse_source(str(source)) if isinstance(row, ParsedRow)]
    assert list(map(without_ids, after)) == list(map(without_ids, before))
    for row in converted:
        check_is_openai(row)


def check_is_openai(row: dict[str, Any]) -> None:
    """Check a row against OpenAI's description of fine-tuning rows: ids, arguments as text, wrapped tools."""
    assert set(row) <= {"messages", "tools", "parallel_tool_calls", "chat_template_kwargs", "metadata"}
    assert set(row.get("metadata", {})) <= {"run"}  # by which the records of a log's run stay together
    open_ids: set[str] = set()
    for message in row["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] in open_ids
            open_ids.remove(message["tool_call_id"])
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function"
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            assert call["id"] not in open_ids
            open_ids.add(call["id"])
    for tool in row.get("tools", ()):
        assert set(tool) == {"type", "function"}


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["seal_tools/rows.jsonl", "glaive_demo/glaive_toolcall_en_demo.json"])
def test_real_rows_convert_to_themselves(name: str, tmp_path: Path) -> None:
    rows = check_conversion(str(REAL_DATA / name), tmp_path)
    before, after = read(REAL_DATA / name), read(tmp_path / "once.jsonl")
    assert list(map(without_ids, after)) == list(map(without_ids, before))
    assert len(rows) == len(before) > 200
    for row in rows:
        check_is_openai(row)


def test_rows_with_known_defects_are_skipped_with_their_reason(tmp_path: Path) -> None:
    source = str(FIXTURES / "defects.jsonl")
    report = convert_source(source, tmp_path / "rows.jsonl")
    defects = [row for row in parse_source(source) if not isinstance(row, ParsedRow)]
    assert report.skipped == defects
    assert report.num_skipped == len(defects) > 30
    assert report.rows == report.converted + report.num_skipped
    check_conversion(source, tmp_path)


def test_the_report_counts_what_changed(tmp_path: Path) -> None:
    turns = [("hi", [(NAMES[0], {"q": "x"}), (NAMES[1], {})], "bye")]
    (tmp_path / "rows.jsonl").write_text(json.dumps(write_openai(turns)) + "\n")
    report = convert_source(str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl")
    counts = {"call_ids_added": 2, "result_ids_added": 2, "arguments_rewritten": 2, "tools_normalised": 1}
    assert report.changes == {**counts, "columns_dropped": 1}
    assert report.columns == {"id": 1}
    (tmp_path / "hermes.jsonl").write_text(json.dumps(write_hermes(turns)) + "\n")
    assert convert_source(str(tmp_path / "hermes.jsonl"), tmp_path / "out.jsonl").changes["calls_from_text"] == 2


def test_a_report_holds_half_a_surrogate_pair_of_a_column_name(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": messages, "\ud800": 1}, {"messages": messages, "\ud800": "Some words."}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = ["data", "convert", str(source), str(tmp_path / "out.jsonl"), "--json", str(tmp_path / "report.json")]
    assert main(command) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (report["columns"], report["skipped"][0]["pointer"]) == ({"?": 1}, "\\ud800")


def test_results_in_another_order_keep_their_calls(tmp_path: Path) -> None:
    calls = [{"name": name, "arguments": "{}"} for name in NAMES]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call} for call in calls]},
        {"role": "tool", "name": NAMES[1], "content": "second"},
        {"role": "tool", "name": NAMES[0], "content": "first"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "tools": TOOLS}))
    (row,) = check_conversion(str(tmp_path / "rows.jsonl"), tmp_path)
    ids = [call["id"] for call in row["messages"][1]["tool_calls"]]
    assert [message["tool_call_id"] for message in row["messages"][2:]] == ids[::-1]


def test_ids_that_are_added_differ_from_the_rows_own(tmp_path: Path) -> None:
    turns = [("a", [(NAMES[0], {})], "b"), ("c", [(NAMES[0], {})], "d")]
    row = write_openai(turns)
    row["messages"][5]["tool_calls"][0]["id"] = row["messages"][6]["tool_call_id"] = "call_1"
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (converted,) = check_conversion(str(tmp_path / "rows.jsonl"), tmp_path)
    assert [converted["messages"][i]["tool_calls"][0]["id"] for i in (1, 5)] == ["call_2", "call_1"]


def test_empty_ids_are_none(tmp_path: Path) -> None:
    row = write_openai([("a", [(NAMES[0], {"x": 1}), (NAMES[0], {"x": 2})], "b")])
    for message in row["messages"]:
        for call in message.get("tool_calls") or ():
            call["id"] = ""
        if message["role"] == "tool":
            message["tool_call_id"] = ""
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (converted,) = check_conversion(str(tmp_path / "rows.jsonl"), tmp_path)
    assert [call["id"] for call in converted["messages"][1]["tool_calls"]] == ["call_1", "call_2"]
    assert [message["tool_call_id"] for message in converted["messages"][2:4]] == ["call_1", "call_2"]


def test_weights_reasoning_and_switches_are_kept(tmp_path: Path) -> None:
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "weight": 0}
    row = {
        "messages": [
            {"role": "user", "content": "?"},
            thinking,
            {"role": "user", "content": "?"},
            {**thinking, "weight": 1},
        ]
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "parallel_tool_calls": False}))
    (converted,) = check_conversion(str(tmp_path / "rows.jsonl"), tmp_path)
    answers = converted["messages"][1::2]
    assert [answer.get("weight") for answer in answers] == [0.0, None]
    assert [(answer["reasoning_content"].strip(), answer["content"].strip()) for answer in answers] == [
        ("hm", "yes")
    ] * 2
    assert converted["parallel_tool_calls"] is False


def test_reasoning_in_parts_is_moved(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": ["Greet", "back."]}
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, answer]}), encoding="utf-8")
    report = convert_source(str(source), tmp_path / "out.jsonl")
    assert report.changes["reasoning_moved"] == 1
    assert read(tmp_path / "out.jsonl")[0].messages[1].reasoning == "Greet\nback."


def test_a_switch_of_a_row_is_moved_and_not_counted_as_dropped(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "enable_thinking": False, "topic": "any"}))
    report = convert_source(str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl")
    assert dict(report.columns) == {"topic": 1}
    assert report.changes["columns_dropped"] == 1
    (converted,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert converted["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_merged_table_becomes_rows_without_its_nulls(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {"name": n, "arguments": {k: 1}}}],
                },
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": n, "parameters": {"type": "object", "properties": {k: {"type": "integer"}}}},
                }
            ],
        }
        for n, k in (("f", "a"), ("g", "b"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    converted = check_conversion(str(tmp_path / "rows.parquet"), tmp_path)
    assert [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in converted] == [
        '{"a": 1}',
        '{"b": 1}',
    ]
    assert [row["tools"] for row in converted] == [row["tools"] for row in rows]


def run(*arguments: str | Path) -> int:
    return main(["data", "convert", *map(str, arguments)])


def test_the_command_replaces_nothing_without_force_and_never_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text(json.dumps(write_openai([("a", [], "b")])) + "\n")
    assert run(source, out, "--to", "openai") == 0
    assert "1 row, 1 converted" in capsys.readouterr().out
    written = out.read_bytes()
    assert run(source, out) == 2
    assert "pass --force" in capsys.readouterr().err
    assert run(source, out, "--force") == 0
    assert out.read_bytes() == written
    assert run(source, source, "--force") == 2
    assert "is the source itself" in capsys.readouterr().err
    assert run(source, tmp_path / "out.parquet") == 2
    assert ".jsonl" in capsys.readouterr().err
    assert run(source, tmp_path / "rows.jsonl" / "out.jsonl") == 2
    with pytest.raises(SystemExit, match="2"):
        run(source, out, "--to", "opneai")
    assert "did you mean openai?" in capsys.readouterr().err


def test_a_strict_conversion_with_a_bad_row_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(write_openai([("a", [], "b")])) + "\n" + '{"messages": []}\n')
    assert run(source, out, "--strict") == 1
    told = capsys.readouterr().out
    assert f"{source}:2: messages: expected a list of messages" in told
    assert "Nothing was written." in told
    assert sorted(tmp_path.iterdir()) == [source]
    assert run(source, out, "--json", tmp_path / "report.json") == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["converted"], report["num_skipped"], report["skipped"][0]["line"]) == (2, 1, 1, 2)


def test_a_source_without_a_usable_row_and_a_truncated_one_leave_no_file(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"messages": []}\n')
    with pytest.raises(RowsSkippedError):
        convert_source(str(source), out)
    good = json.dumps(write_openai([("a", [], "b")]))
    truncated = tmp_path / "rows.json"
    truncated.write_text(f"[{good}, {good[:40]}")
    assert run(truncated, out) in (1, 2)
    assert sorted(tmp_path.iterdir()) == [truncated, source]


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    row = json.dumps(write_openai([("a" * 2_000, [(NAMES[0], {"q": "x" * 2_000})], "b" * 2_000)])) + "\n"
    peaks = []
    for count in (100, 1_000):
        (tmp_path / "rows.jsonl").write_text(row * count)
        tracemalloc.start()
        convert_source(str(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**20


def write_pages(folder: Path) -> list[str]:
    """Write MCP's ``tools/list`` in two pages, and return the files."""
    tools = [{"name": tool["name"], "inputSchema": tool["parameters"]} for tool in TOOLS]
    pages = [{"tools": tools[:1], "nextCursor": "p2"}, {"tools": tools[1:]}]
    for number, page in enumerate(pages, 1):
        (folder / f"page{number}.json").write_text(json.dumps(page))
    return [str(folder / f"page{number}.json") for number in (1, 2)]


def test_rows_without_tools_get_those_of_files_and_others_keep_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [("Where?", [("get_weather", {"q": "Oslo"})], "There.")]
    own = {"name": "get_weather", "description": "Mine.", "parameters": {"type": "object", "properties": {}}}
    rows = [write_openai(turns), write_openai(turns) | {"tools": [own]}]
    del rows[0]["tools"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert main(["data", "convert", str(tmp_path / "rows.jsonl"), str(out), "--tools", *write_pages(tmp_path)]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert [tool["function"]["name"] for tool in first["tools"]] == list(NAMES)
    assert first["tools"][0]["function"]["parameters"] == TOOLS[0]["parameters"]
    assert second["tools"] == [{"type": "function", "function": own}]
    assert "1  rows without tools that got those given" in capsys.readouterr().out


def test_rows_are_checked_and_shown_with_the_tools_that_they_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = write_openai([("Where?", [("get_weather", {"q": "Oslo"})], "There.")])
    del row["tools"]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tools = ["--tools", *write_pages(tmp_path)]
    for command in ("check", "show"):
        given = ["data", command, str(tmp_path / "rows.jsonl")]
        assert main(given) != 0
        assert "the row has no tools; --tools FILE adds" in " ".join("".join(capsys.readouterr()).split())
        assert main([*given, *tools]) == 0
        assert "the row has no tools" not in capsys.readouterr().out
    augment = ["--augment", "take_away=100%"]
    assert main(["data", "show", str(tmp_path / "rows.jsonl"), *augment, *tools]) == 0
    _, added = capsys.readouterr().out.split("added: take_away")
    assert "tools: find_place\n" in added


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["page1.json"], "page1.json: nextCursor: the page of tools after string 'p2' is missing"),
        (["page2.json", "page1.json"], "page1.json: nextCursor: the page of tools after"),
        (["none.json"], "none.json: cannot be read as tools (No such file or directory)"),
        (["blank.json"], "blank.json: empty; expected tools as JSON"),
        (["empty.json"], "empty.json: no tools in it"),
        (["page2.json", "broken.json"], "broken.json: not JSON"),
        (["page1.json", "page2.json", "page2.json", "other.json"], "other.json: get_weather is declared twice"),
    ],
)
def test_a_file_without_tools_stops_a_conversion_before_it_starts(
    tmp_path: Path, files: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pages(tmp_path)
    for name, text in (
        ("blank", " \n"),
        ("empty", "[]"),
        ("broken", '[{"name": '),
        ("other", '{"name": "get_weather"}'),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    out, paths = tmp_path / "out.jsonl", [str(tmp_path / file) for file in files]
    assert main(["data", "convert", "synthetic:train:3:1", str(out), "--tools", *paths]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_rows_with_kinds_of_warnings_and_repeats_are_left_out_on_request_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

    def make_row(question: str, name: str, content: str | None = None) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": "{}"}}
        messages = [{"role": "user", "content": question}, {"role": "assistant", "tool_calls": [call]}]
        return {"messages": [*messages, *([{"role": "user", "content": content}] if content else [])], "tools": tools}

    text = " ".join(f"word{n}" for n in range(60))
    rows = [make_row("a", "f"), make_row("a", "f"), make_row("b", "g"), make_row("b", "g"), make_row("c", "f", "d")]
    rows += [make_row(f"{text} a", "f"), make_row(f"{text} b", "f")]
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    assert run(source, out) == 0
    assert "Kept with a warning: 3 rows (2 undeclared_tool" in capsys.readouterr().out
    assert run(source, out, "--force", "--dedupe", "--json", tmp_path / "report.json") == 0
    shown = capsys.readouterr().out
    assert "Dropped: 2 duplicates of earlier rows" in shown
    assert "Kept: 1 near duplicate of earlier rows" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["rows"], report["converted"], report["duplicates"], report["near_duplicates"]) == (7, 5, 2, 1)
    assert report["warnings"]["undeclared_tool"] == 1
    assert run(source, out, "--force", "--dedupe", "--drop", "undeclared_tool,ends_on_user") == 0
    shown = capsys.readouterr().out
    assert "Dropped for their warnings: 3 rows (2 undeclared_tool, 1 ends_on_user)" in shown
    assert "with a warning" not in shown
    assert f"3 rows in {out}" in shown
    assert [json.loads(line)["messages"][0]["content"][-1] for line in out.read_text().splitlines()] == ["a", "a", "b"]
    check = main(["data", "check", str(out), "--json", str(tmp_path / "check.json")])
    assert check == 0
    assert json.loads((tmp_path / "check.json").read_text())["duplicates"] == 0


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ("undeclared_tools", "unknown; did you mean undeclared_tool? (known: call_without_result, "),
        ("not_json", "not_json: a defect, whose rows are left out anyway"),
        ("", "unknown (known: "),
    ],
)
def test_unknown_kinds_of_warnings_are_rejected_with_the_known_ones(
    kinds: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("synthetic:train:3:1", tmp_path / "out.jsonl", "--drop", kinds)
    assert words in capsys.readouterr().err
