"""Cases of your own: accepted rows, and the errors of invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fctune.base.errors import DataError
from fctune.data.conversation import Call
from fctune.tasks.suite_files import read_cases

WriteRows = Callable[..., Path]
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
}
CALL = {"name": "f", "arguments": {"a": 1}}


def test_expected_calls_are_a_field_of_their_own_or_the_last_message(write_rows: WriteRows) -> None:
    answer = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]}
    first, second, third = read_cases(
        write_rows(
            [
                {**QUESTION, "expected_calls": [CALL], "id": "x", "kind": "single"},
                {**QUESTION, "messages": [*QUESTION["messages"], answer], "id": 7},
                {**QUESTION, "expected_calls": [], "id": None},
            ]
        )
    )
    assert first.expected == second.expected == (Call("f", {"a": 1}),)
    assert [case.prompt.messages for case in (first, second, third)] == [first.prompt.messages] * 3
    assert [(case.id, case.category) for case in (first, second, third)] == [
        ("x", "single"),
        ("7", "all"),
        ("3", "all"),
    ]
    assert third.expected == ()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (QUESTION, "no expected_calls"),
        ({**QUESTION, "expected_calls": {}}, "expected a list of calls, got dict"),
        ({**QUESTION, "expected_calls": [{"name": "g", "arguments": {}}]}, "which is not on offer (tools: f)"),
        ({"messages": QUESTION["messages"], "expected_calls": [CALL]}, "calls f, but the row has no tools"),
        ({**QUESTION, "expected_calls": [{"arguments": {}}]}, "function.name"),
        ({**QUESTION, "expected_calls": [{"name": "f"}]}, "arguments"),
        ({"expected_calls": []}, "expected an object with messages"),
        ([], "expected an object with messages"),
    ],
)
def test_an_invalid_case_is_reported_with_its_line(write_rows: WriteRows, row: Any, words: str) -> None:
    path = write_rows([{**QUESTION, "expected_calls": []}, row])
    with pytest.raises(DataError) as error:
        read_cases(path)
    assert f"{path}:2: " in str(error.value)
    assert words in str(error.value)


def test_ids_must_be_unique(write_rows: WriteRows) -> None:
    row = {**QUESTION, "expected_calls": [], "id": "x"}
    with pytest.raises(DataError, match="2 cases have the id 'x'"):
        read_cases(write_rows([row, row]))


def test_a_missing_an_empty_and_a_broken_file_are_reported(write_rows: WriteRows, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_cases(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="contains no cases"):
        read_cases(write_rows([]))
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_cases(tmp_path / "broken.jsonl")
