"""Differences between two preparations of a row are told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peer_rows import VARIANTS, compare, main, to_form
from tests.conftest import ROOT

WORDS = ["<user>", " Paris", "<bot>", " call", "</s>", "\n", " null", "\ufffd"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "trained", "kind", "shown"),
    [
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1], "equal", ""),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], "equal", ""),
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 0], "trains less", "</s>"),
        ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1], "trains more", "<bot> call"),
        ([0, 1, 2, 3, 6, 4], [0, 0, 0, 1, 1, 1], "text differs", "insert: '' became ' null'"),
    ],
)
def test_the_first_difference_is_named(tokens: list[int], trained: list[int], kind: str, shown: str) -> None:
    ours = ([0, 1, 2, 3, 4], [False, False, False, True, True])
    found, example = compare(ours, (tokens, [bool(one) for one in trained]), decode)
    assert found == kind
    assert shown in example


def test_arguments_become_strings_or_objects_and_nothing_else_changes() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Paris", "n": 2}}}
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}], "tools": []}
    strings = to_form(row, "strings")
    assert json.loads(strings["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "n": 2}
    assert to_form(strings, "objects") == to_form(row, "objects") == row


@pytest.mark.slow
def test_every_variant_says_what_trl_makes_of_the_rows(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    tool = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    row = {"messages": [{"role": "user", "content": "Hi"}, answer], "tools": [tool]}
    rows, result = tmp_path / "rows.jsonl", tmp_path / "result.json"
    rows.write_text(json.dumps(row) + "\n")
    words = ["--model", str(ROOT / "fctune/assets/tiny_base"), "--data", str(rows), "--result", str(result)]
    assert main(words) == 0
    found = json.loads(result.read_text())
    assert found["rows"] == 1
    assert len(found["variants"]) == len(VARIANTS)
    for name, variant in found["variants"].items():
        assert ("refused" in variant) != (sum(variant.get("kinds", {}).values()) == 1), name
