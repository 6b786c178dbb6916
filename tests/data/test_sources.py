"""Rows of every known format, and a file with one row for each defect found in public datasets."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fctune.base.errors import DataError
from fctune.data.check.warnings import WARNING_KINDS, iter_warnings
from fctune.data.conversation import Conversation, Tool
from fctune.data.sources import (
    DEFECT_KINDS,
    LEFT_OUT_KINDS,
    NOTE_KINDS,
    ROW_FORMATS,
    Defect,
    LeftOut,
    ParsedRow,
    RowReader,
    describe_defects,
    parse_source,
    read_source,
    scan_source,
)
from fctune.data.sources.defects import RowError
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.row_formats.registry import read_row
from tests.conftest import REAL_DATA

DEFECTS = Path(__file__).parent / "fixtures" / "defects.jsonl"
GLAIVE_DEMO = REAL_DATA / "glaive_demo" / "glaive_toolcall_en_demo.json"

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def read(row: dict[str, Any], row_format: str = "auto") -> Conversation:
    return read_row(row, row_format, ReadContext()).conversation


def fixture_rows() -> list[tuple[int, str, str, ParsedRow | Defect | LeftOut]]:
    """Return the line, claim, expected kind and parsed row of each fixture row."""
    rows, reader = [], RowReader()
    lines = DEFECTS.read_text("utf-8").split("\n")[:-1]
    for number, (line, row) in enumerate(zip(lines, map(reader.read, scan_source(str(DEFECTS))), strict=True), start=1):
        try:
            row_value = json.loads(line)
            value = row_value["metadata"] if isinstance(row_value, dict) else row_value
        except ValueError:
            value = {"claim": "a line that is not JSON", "reads_as": "not_json"}
        if isinstance(value, list):
            value = {"claim": "a list instead of a row", "reads_as": "unknown_row_format"}
        rows.append((number, value["claim"], value["reads_as"], row))
    return rows


def describe(row: ParsedRow | Defect | LeftOut) -> set[str]:
    """Return the kind of the row's defect, or why it is left out, or the kinds of its warnings and notes."""
    if isinstance(row, Defect | LeftOut):
        return {row.kind}
    return set(row.notes) | {warning.kind for warning in iter_warnings(row)}


@pytest.mark.parametrize(("line", "claim", "expected", "row"), fixture_rows(), ids=lambda value: str(value)[:60])
def test_every_known_defect_is_reported_as_its_kind(
    line: int, claim: str, expected: str, row: ParsedRow | Defect | LeftOut
) -> None:
    kinds = describe(row)
    if expected in ("ok", "duplicate"):
        assert isinstance(row, ParsedRow), row
        assert not kinds - NOTE_KINDS.keys() - {"ends_on_result", "repeated_call", "wrong_type"}, claim
    else:
        assert expected in kinds, claim
        assert isinstance(row, Defect) == (expected in DEFECT_KINDS), claim
        assert isinstance(row, LeftOut) == (expected in LEFT_OUT_KINDS), claim
    if not isinstance(row, LeftOut):
        source = row.conversation.source if isinstance(row, ParsedRow) else f"{row.file}:{row.line}"
        assert source == f"{DEFECTS}:{line}"


def test_the_file_has_every_kind_of_defect_except_those_of_bytes_arrow_and_tokenizers() -> None:
    found = {row.kind for *_, row in fixture_rows() if isinstance(row, Defect)}
    assert DEFECT_KINDS.keys() - found == {
        *("arrow_null", "csv_fields", "message_shape", "row_too_large", "too_deep"),
        "column_conflict",  # of a mapping of columns
        *("not_renderable", "overlong", "special_token_in_content"),  # found with a tokenizer only; test_check.py
        *("pair_equal", "pair_prompts", "pair_shape", "pair_unsupervised"),  # of pairs, which test_pairs.py reads
    }


def test_a_defect_reports_file_line_pointer_and_reason() -> None:
    defect = Defect("rows.jsonl", 417, "messages[2].content", "content_not_text", "expected text, got null")
    assert str(defect) == "rows.jsonl:417: messages[2].content: expected text, got null"
    assert str(Defect("rows.jsonl", 3, "", "not_json", "not JSON")) == "rows.jsonl:3: not JSON"


def test_a_message_with_a_legacy_call_keeps_all_of_its_tool_calls() -> None:
    cities = [{"name": "get_weather", "arguments": json.dumps({"city": city})} for city in ("Paris", "Rome", "Oslo")]
    listed = [{"id": city["arguments"], "type": "function", "function": city} for city in cities[:2]]
    answer = {"role": "assistant", "tool_calls": listed, "function_call": cities[1]}
    row = {"messages": [{"role": "user", "content": "?"}, answer], "tools": [WEATHER]}
    parsed = read_row(row, "auto", ReadContext(), "rows.jsonl:1")
    assert [call.arguments["city"] for call in parsed.conversation.messages[1].calls] == ["Paris", "Rome"]
    pointers = [place.call for place in parsed.call_pointers]
    assert pointers == [f"messages[1].tool_calls[{i}].function" for i in range(2)]
    answer["function_call"] = cities[2]
    with pytest.raises(RowError, match="not among the message's tool_calls") as caught:
        read(row)
    assert (caught.value.kind, caught.value.pointer) == ("call_shape", "messages[1].function_call")
    answer["tool_calls"] = []
    assert [call.arguments["city"] for call in read(row).messages[1].calls] == ["Oslo"]


def test_all_row_formats_of_one_conversation_read_the_same() -> None:
    tools = json.dumps([WEATHER])
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    system = "You are a helpful assistant with access to the following functions. Use them if required -\n"
    prompt = f"You are a function calling AI model. <tools> {tools} </tools>"
    question, answer = "Weather in Paris?", "Sunny."
    rows: dict[str, dict[str, Any]] = {
        "openai": {
            "messages": [
                {"role": "user", "content": question},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": {**call, "arguments": '{"city": "Paris"}'}}],
                },
                {"role": "tool", "content": "sunny"},
                {"role": "assistant", "content": answer},
            ],
            "tools": [{"type": "function", "function": WEATHER}],
        },
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": question},
                {"from": "function_call", "value": json.dumps(call)},
                {"from": "observation", "value": "sunny"},
                {"from": "gpt", "value": answer},
            ],
            "tools": tools,
        },
        "hermes": {
            "conversations": [
                {"from": "system", "value": prompt},
                {"from": "human", "value": question},
                {"from": "gpt", "value": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
                {"from": "tool", "value": "<tool_response>\nsunny\n</tool_response>"},
                {"from": "gpt", "value": answer},
            ],
            "tools": tools,
        },
        "glaive": {
            "system": f"SYSTEM: {system}{json.dumps(WEATHER, indent=4)}\n",
            "chat": f"USER: {question}\n\n\n"
            'ASSISTANT: <functioncall> {"name": "get_weather", "arguments": \'{"city": "Paris"}\'} <|endoftext|>\n\n\n'
            f"FUNCTION RESPONSE: sunny\n\n\nASSISTANT: {answer} <|endoftext|>\n\n\n",
        },
        "toolace": {
            "system": f"Here is a list of functions in JSON format that you can invoke:\n{tools}. \n",
            "conversations": [
                {"from": "user", "value": question},
                {"from": "assistant", "value": '[get_weather(city="Paris")]'},
                {"from": "tool", "value": "sunny"},
                {"from": "assistant", "value": answer},
            ],
        },
    }
    expected = read(rows["openai"])
    assert [message.role for message in expected.messages] == ["user", "assistant", "tool", "assistant"]
    for name, row in rows.items():
        parsed = read_row(row, "auto", ReadContext())
        assert parsed.row_format == name
        assert parsed.conversation == expected, name


def hermes_row(*replies: str, result: str = "<tool_response>\nsunny\n</tool_response>") -> dict[str, Any]:
    prompt = f"You are a function calling AI model. <tools> {[WEATHER]} </tools>"
    turns = [{"from": "system", "value": prompt}, {"from": "human", "value": "?"}]
    for reply in replies:
        turns += [{"from": "gpt", "value": reply}, *([{"from": "tool", "value": result}] * reply.count("<tool_call>"))]
    return {"id": "1", "conversations": [*turns, {"from": "gpt", "value": "Sunny."}], "tools": json.dumps([WEATHER])}


TYPED_ARGUMENTS: dict[str, Any] = {
    "city": "L'Aquila",
    "quote": 'say "it\'s"',
    "is_metric": True,
    "is_daily": False,
    "units": [None],
    "days": [1, -2, 3.5, 1e-07],
    "nested": {"text": "two\nlines\ttab \\ slash \xa0\u200b é", "empty": {}, "list": [[]]},
}


def test_hermes_calls_are_read_as_json_and_as_python_literals_alike() -> None:
    call = {"arguments": TYPED_ARGUMENTS, "name": "get_weather"}
    spellings = [json.dumps(call), json.dumps(call, ensure_ascii=False, indent=2), repr(call), ascii(call)]
    read_calls = []
    for spelling in spellings:
        parsed = read_row(hermes_row(f"<tool_call>\n{spelling}\n</tool_call>"), "auto", ReadContext())
        assert parsed.row_format == "hermes"
        assert parsed.notes["python_literal"] == (spelling[1] == "'")
        read_calls.append(parsed.conversation.messages[1].calls)
    expected = [[("get_weather", TYPED_ARGUMENTS)]] * len(spellings)
    assert [[(call.name, call.arguments) for call in calls] for calls in read_calls] == expected

    both = f"<tool_call>\n{spellings[0]}\n</tool_call>\n<tool_call>\n{spellings[2]}\n</tool_call>"
    parsed = read_row(hermes_row(both, f"<tool_call>{spellings[3]}</tool_call>"), "auto", ReadContext())
    assert [len(message.calls) for message in parsed.conversation.messages if message.calls] == [2, 1]
    assert parsed.notes["python_literal"] == 2


def test_hermes_results_and_tools_are_read_from_python_literals() -> None:
    call = "<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Paris'}}\n</tool_call>"
    for content, expected in (("it's sunny", "it's sunny"), ({"sky": "sunny", "wet": False}, None)):
        wrapped = {"name": "get_weather", "content": content}
        result = f"<tool_response>\n{wrapped}\n</tool_response>"
        row = hermes_row(call, result=result) | {"tools": "null"}
        parsed = read_row(row, "auto", ReadContext())
        message = parsed.conversation.messages[2]
        assert (message.role, message.name) == ("tool", "get_weather")
        assert message.content == (expected or json.dumps(content))
        assert [tool.function for tool in parsed.conversation.tools] == [WEATHER]
        assert parsed.notes["tools_from_prompt"] == 1
        assert parsed.notes["python_literal"] == 3
    kept = read(hermes_row(call, result="<tool_response>\n{'sky': True}\n</tool_response>"))
    assert kept.messages[2].content == "{'sky': True}"


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("{'name': 'f', 'arguments': {'a': __import__('os').getcwd()}}", "call_not_json"),
        ("{'name': 'f', 'arguments': {'a': 1 + 1}}", "call_not_json"),
        ("{'name': 'f', 'arguments': {'a': ('b' 'c')}}", "call_not_json"),
        ("{'name': 'f', 'arguments': ['a' 'b']}", "call_not_json"),
        ("{'name': 'f', 'arguments': {1: 2}}", "call_not_json"),
        ("{'name': 'f', 'arguments': {'a': 1}", "call_not_json"),
        ("{'name': 'f', 'arguments': {'a': 1, 'a': 2}}", "duplicate_key"),
        ("{'name': 'f', 'arguments': {'a': 1e999}}", "not_finite"),
        ("{'name': 'f', 'arguments': {'a': nan}}", "call_not_json"),
        ("{'name': 'f', 'arguments': {'a': " + "[" * 200 + "]" * 200 + "}}", "too_deep"),
        ("{'name': 'f', 'arguments': {'a': '\\U0000d83d'}}", "invalid_utf8"),
        ("{'f', 'arguments'}", "call_not_json"),
        ("dict(name='f', arguments={})", "call_not_json"),
    ],
)
def test_calls_that_are_neither_json_nor_plain_literals_are_defects(written: str, kind: str, tmp_path: Path) -> None:
    row = hermes_row(f"<tool_call>\n{written}\n</tool_call>")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (defect,) = parse_source(str(tmp_path / "rows.jsonl"))
    assert isinstance(defect, Defect)
    assert defect.kind == kind


def test_xlam_types_are_converted_to_json_schema() -> None:
    parameters = {
        "city": {"description": "City", "type": "str"},
        "days": {"description": "Days", "type": "int, optional", "default": 1},
        "tags": {"description": "Tags", "type": "List[Dict[str, Union[int, float]]], optional"},
        "box": {"description": "Box", "type": "Tuple[float, float]"},
    }
    tools = json.dumps([{"name": "f", "description": "", "parameters": parameters}])
    answers = json.dumps([{"name": "f", "arguments": {"city": "Paris"}}])
    (tool,) = read({"query": "?", "answers": answers, "tools": tools}).tools
    number = {"anyOf": [{"type": "integer"}, {"type": "number"}]}
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"description": "City", "type": "string"},
            "days": {"description": "Days", "type": "integer", "default": 1},
            "tags": {
                "description": "Tags",
                "type": "array",
                "items": {"type": "object", "additionalProperties": number},
            },
            "box": {"description": "Box", "type": "array", "items": {"type": "number"}},
        },
        "required": ["city", "box"],
    }


def test_tools_are_kept_verbatim() -> None:
    function = {"parameters": {"required": [], "type": "object", "x-note": 1}, "strict": True, "name": "f"}
    row = {
        "messages": [{"role": "assistant", "content": "x"}],
        "tools": json.dumps([{"type": "function", "function": function}]),
    }
    assert json.dumps(read(row).tools[0].function) == json.dumps(function)


def iter_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from iter_paths(item, (*path, key))


def change(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = change(copied[path[0]], path[1:], new)
    return copied


STRAYS = ["", "'", '"', "\\", "}", "<tool_call>", "\n\nUSER:"]
ODD = [None, True, 0, -1.5, "", "x", "[", "{}", "[]", "null", [], {}, [[]], [{}], {"name": 1}, [None], ["x"], "\ud800"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_change_of_a_row_crashes_a_reader_or_the_check(data: st.DataObject) -> None:
    lines = [line for line in DEFECTS.read_text("utf-8").split("\n") if line.startswith('{"metadata": {')]
    row = data.draw(st.sampled_from([value for line in lines if (value := load_or_none(line)) is not None]))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(iter_paths(row))))
        new = data.draw(st.sampled_from(ODD) | st.sampled_from(["cut"]))
        old = functools.reduce(lambda value, key: value[key], path, row)
        if new == "cut" and isinstance(old, str):
            start = data.draw(st.integers(0, len(old)))
            new = old[:start] + data.draw(st.sampled_from(STRAYS)) + old[start + 1 :]
        row = change(row, path, new)
    kind, parsed = attempt(row, data.draw(st.sampled_from(["auto", "auto", *ROW_FORMATS])))
    assert kind is None or kind in DEFECT_KINDS
    if parsed is not None:
        parsed.conversation.digest()
        assert all(warning.kind in WARNING_KINDS for warning in iter_warnings(parsed))
        assert parsed.notes.keys() <= NOTE_KINDS.keys()
        assert len(parsed.message_pointers) == len(parsed.conversation.messages)


def attempt(row: Any, row_format: str) -> tuple[str | None, ParsedRow | None]:
    """Return the kind of the row's defect, or the row."""
    try:
        return None, read_row(row, row_format, ReadContext())
    except RowError as error:
        return error.kind, None


def load_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=4)


@settings(max_examples=150, deadline=None)
@given(ARGUMENTS, st.booleans())
def test_arguments_are_byte_exact_in_every_row_format(arguments: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    call = {"name": "f", "arguments": arguments}
    call_text = json.dumps(call, ensure_ascii=ascii_only)
    user, question = {"role": "user", "content": "?"}, {"from": "human", "value": "?"}
    as_string = {"type": "function", "function": {"name": "f", "arguments": text}}
    rows: list[dict[str, Any]] = [
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [as_string]}]},
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]},
        {"conversations": [question, {"from": "function_call", "value": call_text}]},
        {"conversations": [question, {"from": "gpt", "value": f"<tool_call>{call_text}</tool_call>"}]},
        {"query": "?", "answers": f"[{call_text}]", "tools": "[]"},
        {"system": "", "chat": f"USER: ?\n\n\nASSISTANT: <functioncall> {call_text} <|endoftext|>\n\n\n"},
        {
            "system": "",
            "chat": "USER: ?\n\n\nASSISTANT: <functioncall> "
            f'{{"name": "f", "arguments": \'{text}\'}} <|endoftext|>\n\n\n',
        },
    ]
    for row in rows:
        line = json.dumps(row, ensure_ascii=ascii_only)
        context = ReadContext(default_tools=(Tool({"name": "f"}),))
        (read_call,) = read_row(context.json.decode(line), "auto", context).conversation.messages[-1].calls
        assert json.dumps(read_call.arguments) == json.dumps(arguments)


def test_results_are_matched_by_id_then_name_then_order() -> None:
    def call(name: str, id: str | None) -> dict[str, Any]:
        return {"id": id, "function": {"name": name, "arguments": {}}}

    def row(calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
        messages = [*turns, *({"role": "tool", "content": "x", **result} for result in results)]
        return {"messages": messages, "tools": [{"name": "f"}, {"name": "g"}]}

    read(row([call("f", "1"), call("f", "2")], [{"tool_call_id": "2"}, {"tool_call_id": "1"}]))
    read(row([call("f", None), call("g", None)], [{"name": "g"}, {"name": "f"}]))
    read(row([call("f", None), call("g", None)], [{}, {}]))
    for wrong in ([{"tool_call_id": "3"}], [{"tool_call_id": "1"}, {"tool_call_id": "1"}], [{}, {}, {}]):
        with pytest.raises(Exception, match="answers no call"):
            read(row([call("f", "1"), call("f", "2")], wrong))


@pytest.mark.parametrize("chat", ["", "\n\n", "USER: ?", "no header"])
def test_a_chat_without_an_assistant_turn_is_a_defect(chat: str) -> None:
    assert attempt({"system": "", "chat": chat}, "auto")[0] in ("no_assistant", "message_shape")


def test_message_weights_are_kept() -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a", "weight": 0}]
    assert [m.weight for m in read({"messages": turns}).messages] == [1.0, 0.0]


def test_a_system_text_that_only_declares_tools_is_removed() -> None:
    turns = [{"from": "user", "value": "?"}, {"from": "assistant", "value": "No tool fits."}]
    lead = "Here is a list of functions in JSON format that you can invoke:\n"
    system = f"You are an expert in composing functions.\nToday is Monday.\n{lead}{json.dumps([WEATHER])}. \n"
    own, *_ = read({"system": system, "conversations": turns}).messages
    assert own.content == "You are an expert in composing functions.\nToday is Monday."
    known = "You should only return the function call in tools call sections.\n"
    prompt = f"{known}{lead}{json.dumps([WEATHER])}. \nShould you decide to return the function call(s). \n"
    assert read({"system": prompt, "conversations": turns}).messages[0].role == "user"


def test_an_empty_tool_list_in_the_prompt_agrees_with_an_empty_column() -> None:
    turns = [{"from": "system", "value": "You are a function calling AI model <tools>[]</tools>"}]
    turns += [{"from": "human", "value": "?"}, {"from": "gpt", "value": "x"}]
    assert read({"conversations": turns, "tools": "[]"}).tools == ()


def test_all_defects_are_described_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]})
    path.write_text(f'{good}\n{{"messages": []}}\n{good}\nnot json\n')
    rows = list(read_source(str(path)))
    text = describe_defects([row for row in rows if isinstance(row, Defect)], len(rows))
    assert "2 of 4 rows" in text
    assert f"{path}:2: messages: expected a list of messages" in text
    assert f"{path}:4: not JSON" in text
    assert sum(isinstance(row, Conversation) for row in rows) == 2


def test_max_samples_limits_the_rows_read() -> None:
    assert len(list(read_source("synthetic:train:20:1", max_samples=7))) == 7


def test_synthetic_rows_are_a_source() -> None:
    items = list(read_source("synthetic:train:5:1"))
    assert [item.source for item in items if isinstance(item, Conversation)] == [
        f"synthetic:train:5:1:{i}" for i in range(1, 6)
    ]
    with pytest.raises(DataError, match="SPLIT one of pretrain, train"):
        list(read_source("synthetic:test:5"))


@pytest.mark.real_data
def test_the_real_rows_have_no_defects() -> None:
    items = list(parse_source(str(GLAIVE_DEMO)))
    rows = [item for item in items if isinstance(item, ParsedRow)]
    assert len(rows) == len(items) == 300
    conversations = [row.conversation for row in rows]
    assert sum(len(message.calls) for c in conversations for message in c.messages) == 211
    assert sum(not c.tools for c in conversations) == 109
    assert sum(count - 1 for count in Counter(c.digest() for c in conversations).values()) == 35
    lines = GLAIVE_DEMO.read_text("utf-8").split("\n")
    for row in rows:
        assert lines[int(row.conversation.source.rpartition(":")[2]) - 1].strip() == "{"
    others = list(parse_source(str(REAL_DATA / "seal_tools" / "rows.jsonl")))
    assert sum(isinstance(item, ParsedRow) for item in others) == len(others) == 1237
