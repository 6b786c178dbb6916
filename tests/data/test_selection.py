"""Rows are selected by what they say of themselves, by tools and lengths, and every one that is left out is counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fctune.base.errors import DataError
from fctune.cli import main
from fctune.config.conditions import parse_conditions
from fctune.config.fields import SectionProblems
from fctune.config.sections.data import DataConfig, SourceConfig
from fctune.data.check.checker import check_sources
from fctune.data.conversation import Conversation, Tool
from fctune.data.conversion import convert_source
from fctune.data.prepared_set import describe_counts, open_prepared, prepare
from fctune.data.sources import LEFT_OUT_KINDS, ParsedRow, RowReader, Selection, read_source, scan_source
from tests import api_rows
from tests.api_rows import Row
from tests.trace_rows import FUNCTION, SESSION, assistant, event, otlp, result, span, text_block, use, user


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def select(path: str, where: str = "", **options: Any) -> list[Conversation]:
    rows = read_source(path, selection=Selection(parse_conditions(where), **options))
    return [row for row in rows if isinstance(row, Conversation)]


CALL = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
PLAIN: Row = {"messages": [user("?"), {"role": "assistant", "content": "x"}]}
CALLING: Row = {
    "messages": [user("?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "tools": [{"type": "function", "function": {"name": "search"}}],
}
# A row, conditions that it meets, and conditions that it does not.
CLAIMS: dict[str, tuple[Row, list[str], list[str]]] = {
    "a score": (
        {**PLAIN, "score": 0.9},
        ["score >= 0.8", "score>=0.9", "score <= 0.9", "score != 0.8", "score == 0.9", "score > 0.8 and score < 1"],
        ["score > 0.9", "score < 0.9", "score == 1", "score >= 0.8 and score >= 1"],
    ),
    "a score as text": ({**PLAIN, "score": "0.9"}, ["score >= 0.8", "score == 0.9"], ["score < 0.8", "score == high"]),
    "a mark": ({**PLAIN, "is_good": True}, ["is_good == true", "is_good != false"], ["is_good == false"]),
    "a text": ({**PLAIN, "status": "solved"}, ["status == solved", "status == 'solved'"], ["status != solved"]),
    "a text of words": ({**PLAIN, "status": "well done"}, ['status == "well done"'], ["status == well"]),
    "tags": ({**PLAIN, "tags": ["a", "b"]}, ["tags == a", "tags != c"], ["tags == c", "tags != a"]),
    "a score in the metadata": ({**PLAIN, "metadata": {"score": 0.9}}, ["score > 0.8"], ["score > 0.95"]),
    "a key in a text of JSON": (
        {**PLAIN, "metadata": '{"a": {"b": 3}}'},
        ["metadata.a.b == 3", "a.b > 2"],
        ["a.b > 3"],
    ),
    "a score of Langfuse": (
        {**api_rows.SHAPES["log: Langfuse"], "scores": [{"name": "helpful", "value": 1}]},
        ["helpful == 1", "scores.helpful > 0"],
        ["helpful == 0"],
    ),
    "feedback of LangSmith": (
        api_rows.SHAPES["log: LangSmith around OpenAI"],
        ["correctness >= 1", "feedback_stats.correctness == 1", "status == success"],
        ["correctness < 1"],
    ),
    "a reward of NeMo Gym": (api_rows.SHAPES["responses: NeMo Gym"], ["reward > 0.5"], ["reward < 0.5"]),
    "an attribute of a span": (
        otlp(span() | {"gen_ai.evaluation.score.value": 1}),
        ["gen_ai.evaluation.score.value == 1", "gen_ai.request.model == m"],
        ["gen_ai.evaluation.score.value < 1"],
    ),
    "a tool that is called": (CALLING, ["tool == search", "tool != other"], ["tool == other", "tool != search"]),
    "no call": (PLAIN, ["tool != search", "calls == 0"], ["tool == search", "calls > 0"]),
    "a number of many digits": (
        {**PLAIN, "session": 1234567890123456789},
        ["session == 1234567890123456789"],
        ["session == 1234567890123456788", "session == nan"],
    ),
    "a text of digits": ({**PLAIN, "code": "007"}, ["code == 007", "code == '007'"], ["code == 8", "code == '7'"]),
    "a text like a number": ({**PLAIN, "status": "inf"}, ["status == inf"], ["status > 1"]),
    "lengths": (PLAIN, ["messages <= 2", "characters == 2", "calls < 1"], ["messages > 2", "characters > 2"]),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_rows_are_selected_by_their_conditions(claim: str, tmp_path: Path) -> None:
    row, met, unmet = CLAIMS[claim]
    path = write(tmp_path / "rows.jsonl", [row])
    for where in met:
        assert len(select(path, where)) == 1, where
    for where in unmet:
        assert not select(path, where), where


@pytest.mark.parametrize(
    "where",
    [
        *(
            'category == "Zürich Nord"',
            "version == '1.5'",
            "mark == 'true'",
            "path == 'C:\\Users'",
            "id == 12345678901234567",
        ),
        *("""said == 'a "word"'""", "score >= 0.8 and tool == search", "is_good != true", "x == ''"),
    ],
)
def test_conditions_are_written_as_they_are_read(where: str) -> None:
    conditions = parse_conditions(where)
    written = " and ".join(map(str, conditions))
    assert parse_conditions(written) == conditions
    assert [type(c.value) for c in parse_conditions(written)] == [type(c.value) for c in conditions]


def test_secrets_are_not_among_the_values_that_a_condition_did_not_meet(tmp_path: Path) -> None:
    key = "sk-live-4f9a8b7c6d5e4f3a2b1c0d9e8f7a6b5c"
    rows = [{**PLAIN, "metadata": {"api_key": key, "team": "blue"}}]
    path = write(tmp_path / "rows.jsonl", rows)
    for where in ("metadata.api_key == x", "metadata.team == red"):
        with pytest.raises(DataError) as caught:
            check_sources([path], selection=Selection(parse_conditions(where)))
        assert key not in str(caught.value)
        assert ("blue" in str(caught.value)) == ("team" in where)
    assert "1, which are secrets and not shown" in find_error(path, "metadata.api_key == x")


def find_error(path: str, where: str) -> str:
    with pytest.raises(DataError) as caught:
        check_sources([path], selection=Selection(parse_conditions(where)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("score", "expected NAME OPERATOR VALUE"),
        ("score >= ", "expected NAME OPERATOR VALUE"),
        ("score = 1", "expected NAME OPERATOR VALUE"),
        ("score > 1 score < 2", "expected 'and' before 'score < 2'"),
        ("status > solved", "> needs a number"),
        ("messages == many", "messages is a number"),
    ],
)
def test_conditions_that_say_nothing_are_refused(
    where: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conditions(where)
    path = write(tmp_path / "rows.jsonl", [PLAIN])
    with pytest.raises(SystemExit) as caught:
        main(["data", "check", path, "--where", where])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    problems = SectionProblems()
    SourceConfig(path=path, where=where).check("data.sources[0]", problems)
    assert any(message in line for line in problems.lines)


ROWS = [
    {**PLAIN, "score": 0.9},
    {**PLAIN, "score": 0.1},
    PLAIN,
    {**api_rows.litellm(), "status": "failure", "score": 1.0},
    {"messages": "broken", "score": 1.0},
]


def test_counts_add_up_whatever_is_left_out(tmp_path: Path, tiny_base: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    selection = Selection(parse_conditions("score > 0.5"))
    left_out = {"not_selected": 1, "where_missing": 1, "answer_failed": 1}
    report = check_sources([path], selection=selection)
    assert report.left_out == left_out
    assert (report.conversations, report.defects, report.rows) == (1, 1, 2)
    converted = convert_source(path, tmp_path / "out.jsonl", selection=selection)
    assert converted.left_out == left_out
    assert (converted.converted, converted.num_skipped, converted.rows) == (1, 1, 2)
    assert "5 records, 2 rows, 1 converted" in converted.describe(path, "out.jsonl")[0]
    source = SourceConfig(path=path, where="score > 0.5")
    config = DataConfig(sources=[source], on_invalid="skip", max_invalid_share="90%", seq_len=256)
    prepared = prepare(config, tiny_base, tmp_path / "prepared")
    assert (prepared.counts.rows, prepared.counts.left_out, prepared.counts.conversations) == (2, 3, 1)
    lines = describe_counts(prepared)
    at = lines.index("5 records read: 2 rows, 3 left out:")
    assert sorted(line.split(maxsplit=1) for line in lines[at + 1 : at + 4]) == sorted(
        [str(count), LEFT_OUT_KINDS[kind]] for kind, count in left_out.items()
    )
    again = open_prepared(prepared.path)
    assert again.counts.left_out_kinds == left_out


def test_the_field_that_says_that_an_answer_failed_is_named(tmp_path: Path) -> None:
    records = [
        {**api_rows.litellm(), "status": "failure"},
        {**api_rows.litellm(), "status": "failure"},
        {**api_rows.litellm(), "error": "quota of key sk-1 exceeded"},
        CALLING,
    ]
    report = check_sources([write(tmp_path / "rows.jsonl", records)])
    assert report.left_out == {"answer_failed": 3}
    assert report.failures == {"status: failure": 2, "error": 1}
    printed = StringIO()
    Console(width=120, file=printed).print(report.render_text())
    assert "2 with status: failure" in printed.getvalue()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "tool == serach",
            r"met by none of 2 rows\. tool == serach: met by no row \(did you mean search\?\); tools that",
        ),
        (
            "tool == search and grade == 5",
            r"tool == search: met by 2 rows\. grade == 5.*: met by no row; values are 1 to 2",
        ),
        (
            "tool == search and grad == 5",
            r"grad: no such column or key \(did you mean grade\?\); there are messages, tools",
        ),
        ("kind == lst", r"met by no row \(did you mean list\?\); values: list, tree\."),
    ],
)
def test_conditions_that_no_row_meets_are_an_error_with_what_there_is(
    where: str, message: str, tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**CALLING, "grade": 1, "kind": "list"}, {**CALLING, "grade": 2, "kind": "tree"}]
    path, out = write(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    selection = Selection(parse_conditions(where))
    failed = {**api_rows.litellm(), "status": "failure"}
    log = write(tmp_path / "log.jsonl", [failed, {**api_rows.litellm(), "status": "success"}])
    with pytest.raises(DataError, match=r"values: success\. 1 record that failed is not among them"):
        check_sources([log], selection=Selection(parse_conditions("status == failure")))
    for command in (
        ["check", path],
        ["convert", path, str(out)],
        ["cases", path, "--out", str(out)],
        ["augment", path, str(out), "--kinds", "shuffle_tools"],
        ["tools", path, "--out", str(out)],
    ):
        assert main(["data", *command, "--where", where]) == 2
        assert re.search(message, capsys.readouterr().err)
    with pytest.raises(DataError, match=message):
        check_sources([path], selection=selection)
    config = DataConfig(sources=[SourceConfig(path=path, where=where)], seq_len=256)
    with pytest.raises(DataError, match=message):
        prepare(config, tiny_base, tmp_path / "prepared")


def test_synthetic_rows_are_selected_by_their_counts(tmp_path: Path) -> None:
    rows = select("synthetic:train:40:0", "calls == 1")
    assert 0 < len(rows) < 40
    assert all(sum(len(m.calls) for m in row.messages) == 1 for row in rows)


def test_a_record_that_is_not_selected_replaces_none(tmp_path: Path) -> None:
    messages = span()["gen_ai.input.messages"]
    answer = {"role": "assistant", "parts": [{"type": "text", "content": "x"}]}
    good, bad = (
        {"gen_ai.input.messages": messages[:n], "gen_ai.output.messages": [answer], "score": n} for n in (1, 3)
    )
    path = write(tmp_path / "rows.jsonl", [otlp(span() | good), otlp(span() | bad)])
    assert [len(row.messages) for row in select(path, "score == 1")] == [3]


ERROR = {**result("c1", "no such city"), "is_error": True}
WRONG = [
    event("a", None, user("Weather in Oslo?")),
    event("b", "a", assistant(use("c1", "Olso"), id="m1")),
    event("c", "b", user([ERROR])),
    event("d", "c", assistant(use("c2"), id="m2")),
    event("e", "d", user([result("c2")])),
    event("f", "e", assistant(text_block("3 degrees."), id="m3")),
]


@pytest.mark.parametrize(("wrong_turns", "weights"), [("context", [0.0, 1.0, 1.0]), ("train", [1.0, 1.0, 1.0])])
def test_turns_whose_calls_failed_are_context_unless_asked_for(
    wrong_turns: str, weights: list[float], tmp_path: Path
) -> None:
    tools = [{"name": "get_weather", "input_schema": {"type": "object", "properties": {}}}]
    messages = [line["message"] for line in WRONG]
    row = {"messages": [{"role": m["role"], "content": m["content"]} for m in messages], "tools": tools}
    (found,) = select(write(tmp_path / "rows.jsonl", [row]), wrong_turns=wrong_turns)
    assert [m.weight for m in found.messages if m.role == "assistant"] == weights


def test_a_turn_of_which_a_call_succeeded_is_trained(tmp_path: Path) -> None:
    row = api_rows.SHAPES["anthropic: a log"]  # two calls, one of them with an error
    (found,) = select(write(tmp_path / "rows.jsonl", [row]))
    assert [m.weight for m in found.messages if m.role == "assistant"] == [1.0, 1.0]


def test_a_record_that_ends_with_a_wrong_call_is_folded(tmp_path: Path) -> None:
    request = {**api_rows.anthropic_request(), "messages": api_rows.anthropic_request()["messages"][:1]}
    blocks = api_rows.anthropic_request()["messages"][1]["content"][:3]  # the first of two calls
    error = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such city", "is_error": True}
    called = {**api_rows.anthropic_response(), "content": blocks, "stop_reason": "tool_use"}
    repeated = [*request["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": [error]}]
    records = [
        {"request": request, "response": called},
        {"request": {**request, "messages": repeated}, "response": api_rows.anthropic_response()},
    ]
    (found,) = select(write(tmp_path / "rows.jsonl", records))
    assert [m.weight for m in found.messages if m.role == "assistant"] == [0.0, 1.0]


def test_commands_take_the_same_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", [{**CALLING, "score": 1}, {**CALLING, "score": 0}])
    options = ["--where", "score == 1 and tool == search"]
    assert main(["data", "check", path, *options]) == 0
    assert "2  records, 1 of them left out" in capsys.readouterr().out
    assert main(["data", "convert", path, str(tmp_path / "out.jsonl"), *options]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert main(["data", "cases", path, "--out", str(tmp_path / "cases.jsonl"), *options]) == 0
    assert "1 records that do not meet the conditions (where)" in capsys.readouterr().out


@pytest.mark.parametrize(("where", "count"), [("tool == get_weather", 1), ("tool == search", 0), ("messages >= 4", 1)])
def test_a_session_is_selected_by_its_tools_and_length(where: str, count: int, tmp_path: Path) -> None:
    path, selection = write(tmp_path / "session.jsonl", SESSION), Selection(parse_conditions(where))
    rows = [RowReader(tools=(Tool(FUNCTION),), selection=selection).read(row) for row in scan_source(path)]
    assert sum(isinstance(row, ParsedRow) for row in rows) == count
