"""Rows of predictions: accepted shapes, errors of the model and errors of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import ConfigError, DataError
from fctune.data.conversation import Call, Tool
from fctune.tasks.evaluation.score_file import Prediction, read_predictions

WriteRows = Callable[..., Path]
CALL = {"name": "f", "arguments": {"a": 1}}
TOOLS = [Tool({"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}})]


def read_one(write_rows: WriteRows, row: Any, default_format: str | None = None) -> Prediction:
    (prediction,) = read_predictions(write_rows([row]), default_format)
    return prediction


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"name": "f", "arguments": '{"a": 1}'},
        {"id": "c1", "type": "function", "function": CALL},
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ],
)
def test_calls_are_read_as_endpoints_send_them(write_rows: WriteRows, call: Any) -> None:
    strict, lenient = read_one(write_rows, {"id": "x", "calls": [call]}).read([]) or (None, None)
    assert strict is lenient
    assert strict is not None
    assert (strict.calls, strict.malformed) == ((Call("f", {"a": 1}),), ())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"calls": [{"arguments": {}}]}, "without a name"),
        ({"calls": [{"name": "", "arguments": {}}]}, "without a name"),
        ({"calls": [{"name": "f"}]}, "not an object but NoneType"),
        ({"calls": [{"name": "f", "arguments": [1]}]}, "not an object but list"),
        ({"calls": [{"name": "f", "arguments": "{"}]}, "not JSON"),
        ({"calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, "duplicate key"),
        ({"calls": ["f"]}, "as an object, got str"),
        ({"calls": "f()"}, "a list of calls, got str"),
        ({"calls": {"f": {}}}, "a list of calls, got dict"),
        ({"calls": [], "malformed": ["not closed"]}, "not closed"),
    ],
)
def test_invalid_calls_of_a_model_are_malformed(write_rows: WriteRows, row: Any, reason: str) -> None:
    strict, _ = read_one(write_rows, {"id": "x", **row}).read([]) or (None, None)
    assert strict is not None
    assert reason in strict.malformed[0].reason
    assert not strict.calls


@pytest.mark.parametrize("value", ["NaN", "1e999", '{"a": 1, "a": 2}', "[" * 200 + "]" * 200])
def test_values_that_are_not_json_are_malformed_and_not_an_error_of_the_file(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "x", "calls": [{"name": "f", "arguments": {"a": ' + value + "}}]}\n")
    (prediction,) = read_predictions(path)
    assert prediction.calls is not None
    assert prediction.calls.strict.malformed


def test_a_text_is_read_in_both_readings(write_rows: WriteRows) -> None:
    row = {"id": "x", "text": "Sure: f(a=1)", "format": "bfcl"}
    strict, lenient = read_one(write_rows, row).read(TOOLS) or (None, None)
    assert strict is not None
    assert lenient is not None
    assert (strict.calls, strict.prose) == ((), "Sure: f(a=1)")
    assert lenient.calls == (Call("f", {"a": 1}),)


def test_the_format_of_a_text_may_be_given_once_for_all(write_rows: WriteRows) -> None:
    assert read_one(write_rows, {"id": "x", "text": "[f(a=1)]"}, "pythonic").read(TOOLS) is not None
    row = {"id": "x", "text": "[f(a=1)]", "format": "hermes"}
    strict, _ = read_one(write_rows, row, "pythonic").read(TOOLS) or (None, None)
    assert strict is not None
    assert not strict.calls
    with pytest.raises(ConfigError, match="no such call format"):
        list(read_predictions(write_rows([row]), "no such"))


def test_turns_hold_steps_of_calls_or_text(write_rows: WriteRows) -> None:
    row = {"id": "x", "turns": [[[CALL, CALL], "[f(a=2)]"], []], "format": "pythonic"}
    turns = read_one(write_rows, row).read_turns([TOOLS])
    assert turns is not None
    assert [[step[0].calls for step in turn] for turn in turns] == [
        [(Call("f", {"a": 1}), Call("f", {"a": 1})), (Call("f", {"a": 2}),)],
        [],
    ]


@pytest.mark.parametrize(
    "row", [{}, {"error": "timed out"}, {"calls": None}, {"text": None}, {"text": 5}, {"turns": [1]}]
)
def test_a_row_without_an_answer_is_a_failure(write_rows: WriteRows, row: Any) -> None:
    prediction = read_one(write_rows, {"id": "x", **row})
    assert prediction.read([]) is None
    assert prediction.read_turns([]) is None
    assert prediction.failure == row.get("error", "the row has no calls, text or turns")


def test_all_errors_of_a_file_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        '{"id": "x", "calls": []}',
        "{oops",
        "[1]",
        '{"calls": []}',
        '{"id": null, "calls": []}',
        '{"id": "x", "text": "t"}',
        '{"id": "x", "text": "t", "format": "hermez"}',
        '{"id": "x", "turns": [["t"]]}',
        "",
        '{"id": "x", "calls": ' + "[" * 100_000,
    ]
    path.write_text("\n".join(rows))
    with pytest.raises(DataError) as error:
        list(read_predictions(path))
    lines = str(error.value).split("\n")
    assert lines[0] == f"{path}: 8 invalid predictions"
    for number, words in [
        (2, "expected a key in double quotes"),
        (3, "got list"),
        (4, "no id"),
        (5, "no id"),
        (6, "pass --format"),
        (7, "did you mean hermes"),
        (8, "pass --format"),
        (10, "not JSON"),
    ]:
        assert any(line.startswith(f"  {path}:{number}: ") and words in line for line in lines), (number, words)


def test_ids_may_be_numbers_and_bytes_need_not_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        json.dumps({"id": 5, "calls": [CALL]}).encode() + b'\n{"id": "\xff", "text": "\xfe", "format": "xlam"}\n'
    )
    first, second = read_predictions(path)
    assert first.id == "5"
    assert second.read([]) is not None


def test_a_missing_and_an_empty_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_predictions(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="contains no predictions"):
        list(read_predictions(tmp_path / "empty.jsonl"))
