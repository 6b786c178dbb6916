"""Reading and judging answers: calls parsed by a server, and hostile text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fctune.calls.formats.registry import FORMATS
from fctune.data.conversation import Call
from fctune.engines.engine import Answer
from fctune.tasks.episode import read_answer
from fctune.tasks.judge import judge_answer, judge_row
from fctune.tasks.suite_files import load_suite
from tests.conftest import ROOT


def served(*functions: Any) -> Answer:
    return Answer(0, tool_calls=tuple({"type": "function", "function": function} for function in functions))


@pytest.mark.parametrize(
    ("function", "strict", "lenient"),
    [
        ({"name": "f", "arguments": '{"a": 1}'}, {"a": 1}, {"a": 1}),
        ({"name": "f", "arguments": "{}"}, {}, {}),
        ({"name": "f", "arguments": {"a": 1}}, {"a": 1}, {"a": 1}),
        ({"name": "f", "arguments": ""}, "not JSON", {}),
        ({"name": "f", "arguments": None}, "not an object but NoneType", {}),
        ({"name": "f"}, "not an object but NoneType", {}),
        ({"name": "f", "arguments": '{"a": 1'}, "not JSON", None),
        ({"name": "f", "arguments": "[1]"}, "not an object but list", "not an object but list"),
        ({"name": "", "arguments": "{}"}, "a call without a name", "a call without a name"),
        ({"name": 3, "arguments": "{}"}, "a call without a name", "a call without a name"),
        (None, "a call without a name", "a call without a name"),
    ],
)
def test_served_calls_are_read_by_the_protocol_and_leniently(function: Any, strict: Any, lenient: Any) -> None:
    for parsed, due in zip(read_answer(served(function), None), (strict, lenient), strict=True):
        if isinstance(due, dict):
            assert parsed.calls == (Call("f", due),)
            assert not parsed.malformed
        elif due is not None:
            assert not parsed.calls
            assert due in parsed.malformed[0].reason


def test_a_served_answer_without_calls_is_prose() -> None:
    strict, lenient = read_answer(Answer(0, " Hello. ", tool_calls=()), None)
    assert strict == lenient
    assert (strict.calls, strict.malformed, strict.prose) == ((), (), "Hello.")


HOSTILE = {
    "deep": "<tool_call>" + "[" * 100_000,
    "huge number": '<tool_call>{"name": "get_weather", "arguments": {"city": 1e999}}</tool_call>',
    "long number": '<tool_call>{"name": "get_weather", "arguments": {"city": ' + "9" * 6000 + "}}</tool_call>",
    "NaN": '<tool_call>{"name": "get_weather", "arguments": {"city": NaN}}</tool_call>',
    "half a surrogate pair": '<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud800"}}</tool_call>',
    "code": "[get_weather(city=__import__('os').system('touch /tmp/owned'))]",
    "noise": "<tool_call>{" * 50_000,
    "empty": "",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("format_name", ["hermes", "pythonic", "xlam", "qwen3_coder"])
def test_hostile_text_gets_a_verdict_that_can_be_written_and_read_again(name: str, format_name: str) -> None:
    case = load_suite(ROOT / "eval" / "suites" / "smoke.yaml").cases[0]
    start = time.process_time()
    row = judge_answer(case, Answer(0, HOSTILE[name]), FORMATS[format_name]).to_row()
    assert time.process_time() - start < 10
    assert row["verdict"] not in ("", "correct")
    again = json.loads(json.dumps(row))
    for judgement, judged in zip(judge_row(case, again), (row, row["lenient"]), strict=True):
        assert judgement.outcome.verdict == judged["verdict"]
