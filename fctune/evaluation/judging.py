"""An answer read as calls, strictly and as serving engines read; and whether they are the right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fctune.calls.cases import Case
from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.metrics import Outcome, judge_failure
from fctune.data.conversation import Call, Tool
from fctune.evaluation.suites import Suite
from fctune.generation.engine import Answer
from fctune.parsing.json_reader import ParseError, decode_json

Row = dict[str, Any]


def read_answer(answer: Answer, call_format: CallFormat | None, tools: Sequence[Tool] = ()) -> tuple[Parsed, Parsed]:
    """The strict reading of an answer and the lenient one.

    Args:
        answer: What the model said.
        call_format: The wire format of its text; None: the server has read the calls out of it.
        tools: What was on offer.
    """
    if call_format is not None:
        return call_format.parse_both(answer.text, tools)
    return _read_served(answer, lenient=False), _read_served(answer, lenient=True)


def judge_answer(suite: Suite, case: Case, answer: Answer, call_format: CallFormat | None) -> Row:
    """The row of a case for the results: prompt, answer, calls and verdict of both readings, in plain values."""
    strict, lenient = read_answer(answer, call_format, case.prompt.tools)
    row: Row = {
        "id": case.id,
        "category": case.category,
        "verdict": "",
        "differences": [],
        "answer": answer.text,
        "is_cut": answer.is_cut,
        "seconds": answer.seconds,
        "calls": _plain_calls(strict.calls),
        "malformed": [stretch.reason for stretch in strict.malformed],
        "lenient": {
            "verdict": "",
            "calls": _plain_calls(lenient.calls),
            "malformed": [stretch.reason for stretch in lenient.malformed],
        },
        "expected_calls": _plain_calls(case.expected),
        "messages": [message.to_openai() for message in case.prompt.messages],
        "tools": [tool.to_openai() for tool in case.prompt.tools],
    }
    if answer.tool_calls is not None and call_format is None:
        row["tool_calls"] = list(answer.tool_calls)
    if answer.error is not None:
        row["error"] = answer.error
    outcome, details = judge_row(suite, case, row)
    row |= {"verdict": outcome.verdict, "differences": list(outcome.differences), **details}
    row["lenient"]["verdict"] = judge_row(suite, case, row, lenient=True)[0].verdict
    return row


def judge_row(suite: Suite, case: Case, row: Row, lenient: bool = False) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a row of the results, and what else the suite keeps of its verdict."""
    if row.get("error") is not None:
        return judge_failure(len(case.expected), row["error"]), {}
    reading = row["lenient"] if lenient else row
    calls = tuple(Call(call["name"], call["arguments"]) for call in reading["calls"])
    return suite.judge(case, Parsed(calls, tuple(Malformed(0, 0, reason) for reason in reading["malformed"])))


def _read_served(answer: Answer, lenient: bool) -> Parsed:
    calls: list[Call] = []
    malformed: list[Malformed] = []
    for sent in answer.tool_calls or ():
        call = _read_served_call(sent, lenient)
        if isinstance(call, Call):
            calls.append(call)
        else:
            malformed.append(Malformed(0, 0, call))
    return Parsed(tuple(calls), tuple(malformed), answer.text.strip())


def _read_served_call(sent: Mapping[str, Any], lenient: bool) -> Call | str:
    """A call of OpenAI's protocol, in which arguments are a string of JSON; or the reason why it is none."""
    function = sent.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return "a call without function.name"
    arguments = function.get("arguments")
    if isinstance(arguments, str) and not (lenient and not arguments.strip()):
        try:
            arguments = decode_json(arguments, lenient)
        except ParseError as error:
            return f"arguments are not JSON: {error.reason}"
    elif lenient:
        arguments = arguments or {}
    else:
        return f"arguments are not a string but {type(arguments).__name__}"
    if not isinstance(arguments, dict):
        return f"arguments are not an object but {type(arguments).__name__}"
    return Call(name, arguments)


def _plain_calls(calls: Sequence[Call]) -> list[Row]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]
