"""Differences between two preparations of a row are told apart.

The tests with LLaMA-Factory and axolotl need a Python that has the tool: FCTUNE_LLAMAFACTORY_PYTHON, or
FCTUNE_AXOLOTL_PYTHON, names it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_rows import (
    VARIANTS,
    check,
    compare,
    describe,
    find_marks,
    main,
    make_rows,
    mark,
    prepare_elsewhere,
    to_form,
    to_sharegpt,
    to_text_parameters,
)
from fctune.data.chat_template import ChatTemplate
from tests.conftest import ROOT

WORDS = ["<user>", " Paris", "<bot>", " call", "</s>", "\n", " null", "\ufffd"]
MARKS = ("<bot>", "</s>")
CALLS = [{"name": "f", "arguments": {"n": 0.1}}, {"name": "f", "arguments": {"n": 2}}]


def make_marked(*pieces: tuple[str, int]) -> tuple[str, list[bool]]:
    return "".join(text for text, _ in pieces), [bool(trained) for text, trained in pieces for _ in text]


def write_calls(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("tokens", "trained", "kind", "shown"),
    [
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 1], "equal", ""),
        ([0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 1], "equal", ""),
        ([0, 1, 2, 3, 4], [0, 0, 0, 1, 0], "trains less", "</s>"),
        ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1], "trains more", "<bot> call"),
        ([0, 1, 2, 3, 6, 4], [0, 0, 0, 1, 1, 1], "text differs", "'</s>' became ' null</s>'"),
        ([0, 1, 2, 3], [0, 0, 0, 1], "text differs", "'</s>' became ''"),
    ],
)
def test_the_first_difference_is_named(tokens: list[int], trained: list[int], kind: str, shown: str) -> None:
    def decode(*tokens: int) -> str:
        return "".join(WORDS[token] for token in tokens)

    ours = mark(([0, 1, 2, 3, 4], [False, False, False, True, True]), decode)
    found, example = compare(ours, mark((tokens, [bool(one) for one in trained]), decode))
    assert found == kind
    assert shown in example


@pytest.mark.parametrize(
    ("prompt", "answer", "end", "lost"),
    [
        (("<user>Hi", 0), (write_calls(*CALLS), 1), ("</s>", 1), set()),
        (("<user>Hi", 0), (write_calls(*CALLS[::-1]), 1), ("</s>", 1), {"answers_equal"}),
        (
            ("<user>Hi", 0),
            (write_calls(CALLS[0]), 1),
            ("</s>", 1),
            {"answers_equal", "calls_equal", "parallel_calls_kept"},
        ),
        (
            ("<user>Hi", 0),
            (write_calls(CALLS[0] | {"arguments": {"n": 0.10000000000000002}}, CALLS[1]), 1),
            ("</s>", 1),
            {"answers_equal", "calls_equal"},
        ),
        (
            ("<user>Hi", 0),
            (write_calls(*({**call, "arguments": json.dumps(call["arguments"])} for call in CALLS)), 1),
            ("</s>", 1),
            {"answers_equal", "calls_equal"},
        ),
        (("<user>Hi", 0), (write_calls(*CALLS), 0), ("</s>", 1), {"calls_equal", "parallel_calls_kept"}),
        (("<user>Hi", 0), (write_calls(*CALLS), 1), ("</s>", 0), {"ends_trained"}),
        (("<user>Hi", 0), (write_calls(*CALLS), 1), ("", 1), {"answers_equal", "ends_trained"}),
        (("<user>Hi", 1), (write_calls(*CALLS), 1), ("</s>", 1), {"prompts_untrained"}),
        (("<tools>null<user>Hi", 0), (write_calls(*CALLS), 1), ("</s>", 1), {"prompts_equal"}),
    ],
    ids=["all", "order", "one call", "value", "quoted", "masked", "end", "no end", "prompt trained", "prompt text"],
)  # fmt: skip
def test_each_loss_is_counted_by_itself(
    prompt: tuple[str, int], answer: tuple[str, int], end: tuple[str, int], lost: set[str]
) -> None:
    calls = [{"type": "function", "function": call} for call in CALLS]
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}]}
    opened = ("<bot>", 0)
    ours = make_marked(("<user>Hi", 0), opened, (write_calls(*CALLS), 1), ("</s>", 1), ("\n", 0))
    found = check(row, ours, make_marked(prompt, opened, answer, end, ("\n", 1)), MARKS)
    assert {name for name, holds in found.items() if not holds} == lost


def test_a_call_where_the_row_has_none_and_a_lost_answer_are_wrong_calls() -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No."}]}
    ours = make_marked(("<user>Hi<bot>", 0), ("No.</s>", 1))
    assert check(row, ours, ours, MARKS)["calls_equal"]
    assert not check(row, ours, make_marked(("<user>Hi<bot>", 0), (write_calls(CALLS[0]), 1)), MARKS)["calls_equal"]
    assert not check(row, ours, make_marked(("<user>Hi", 0)), MARKS)["calls_equal"]
    assert not check(row, ours, ours, MARKS)["parallel_calls_kept"]  # as it has none


def test_a_dropped_row_is_counted_as_dropped_and_holds_nothing() -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No."}]}
    ours = make_marked(("<user>Hi<bot>", 0), ("No.</s>", 1))
    found = describe([row, row], [ours, ours], [ours, None], MARKS)
    assert found["kinds"] == {"equal": 1, "dropped": 1}
    assert found["holds"] == describe([row], [ours], [ours], MARKS)["holds"]


def test_arguments_become_strings_or_objects_and_nothing_else_changes() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Paris", "n": 2}}}
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}], "tools": []}
    strings = to_form(row, "strings")
    assert json.loads(strings["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris", "n": 2}
    assert to_form(strings, "objects") == to_form(row, "objects") == row


def write_row(path: Path) -> Path:
    """Write a dialogue with a call, two parallel calls of other types and their results, and a refusal."""
    names = {"add": {"a": 0.1, "b": 2}, "find": {"words": ["x"], "exact": True}}
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in names.items()
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": name,
                "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in arguments}},
            },
        }
        for name, arguments in names.items()
    ]
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        results[0],
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "3 and 3."},
        {"role": "user", "content": "Fly."},
        {"role": "assistant", "content": "I have no tool for that."},
    ]
    path.write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    return path


def test_rows_keep_their_calls_and_results_in_the_forms_of_both_tools() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"n": 0.1}}} for name in "fg"]
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "1 and 2."},
    ]
    row = {"messages": messages, "tools": tools}
    sharegpt = to_sharegpt(row)
    assert [turn["from"] for turn in sharegpt["conversations"]] == ["human", "function_call", "observation", "gpt"]
    assert json.loads(sharegpt["conversations"][1]["value"]) == [call["function"] for call in calls]
    assert sharegpt["conversations"][2]["value"] == "1\n</tool_response>\n<tool_response>\n2"
    assert sharegpt["system"] == "Be brief."
    assert json.loads(sharegpt["tools"]) == tools
    strings = to_text_parameters(to_form(row, "strings"))
    assert strings["messages"][2]["tool_calls"][1]["function"]["arguments"] == '{"n": 0.1}'
    assert strings["tools"][0]["function"]["parameters"] == '{"type": "object"}'
    assert row["tools"][0]["function"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize("tool", ["llamafactory", "axolotl"])
def test_a_python_without_the_tool_is_named(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(ROOT / "fctune/assets/tiny_base"), "--data", str(write_row(tmp_path / "rows.jsonl"))]
    assert main([*words, f"--{tool}", sys.executable, "--skip-trl"]) == 2
    assert f"--{tool} {sys.executable}: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "form", "how"), [("llamafactory", "objects", "sharegpt"), ("axolotl", "strings", "parameters")]
)
def test_a_tool_trains_what_the_row_has(tool: str, form: str, how: str, chatml_base: Path, tmp_path: Path) -> None:
    python = os.environ.get(f"FCTUNE_{tool.upper()}_PYTHON")
    if not python:
        pytest.skip(f"FCTUNE_{tool.upper()}_PYTHON names no Python with {tool}")
    template = ChatTemplate(chatml_base)
    [(row, ours)] = make_rows(str(write_row(tmp_path / "rows.jsonl")), template, 1)
    version, prepared = prepare_elsewhere(tool, python, [to_form(row, form)], chatml_base, how)
    assert version
    [theirs] = prepared

    def decode(*tokens: int) -> str:
        return template.decode(tokens)

    found = check(row, mark(ours, decode), mark(theirs, decode), find_marks(template))
    assert {name for name, holds in found.items() if not holds} == set()


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
    assert set(found["variants"]) == {f"trl: {form}, {how}" for form, how in VARIANTS["trl"]}
    for name, variant in found["variants"].items():
        assert ("refused" in variant) != (sum(variant.get("kinds", {}).values()) == 1), name
