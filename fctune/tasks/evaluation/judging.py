"""From an answer to its judgement: read strictly and as serving engines read, judged in both readings, kept as a row.

Every command takes this path: evaluation of a model or server, prediction files, served checks, and training runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fctune.calls.answers import read_text
from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.judge import Judgement, judge_error
from fctune.calls.tool_calls import Reading, read_tool_calls
from fctune.data.conversation import Call, Tool
from fctune.engines.engine import Answer
from fctune.tasks.benchmarks import find_verdict
from fctune.tasks.evaluation.cases import Case, MultiTurnCase

Row = dict[str, Any]


def read_answer(answer: Answer, call_format: CallFormat | None, tools: Sequence[Tool] = ()) -> Reading:
    """Read the calls of an answer, strictly and leniently.

    Args:
        answer: The model's answer.
        call_format: The call format of its text; None: the server has parsed the calls.
        tools: The tools on offer.
    """
    if call_format is not None:
        return read_text(answer.text, call_format, tools, answer.reasoning)
    prose = answer.reasoning.blank(answer.text) if answer.reasoning else answer.text
    return read_tool_calls(answer.tool_calls or (), prose.strip())


def judge_reading(case: Case, reading: Reading) -> tuple[Judgement, Judgement]:
    """Judge a single-turn answer in its strict and in its lenient reading; an answer must not end the evaluation."""
    try:  # as in judge_or_report, without its function for each answer: files hold millions of them
        strict = case.judge(reading.strict, reading.decoded if reading.strict.malformed else None)
    except Exception as error:
        strict = judge_error(case.judge_failure(""), error)
    if reading.lenient is reading.strict:
        return strict, strict
    return strict, judge_or_report(case, lambda: case.judge(reading.lenient))


def judge_or_report(case: Case | MultiTurnCase, judge: Callable[[], Judgement]) -> Judgement:
    """Judge an answer to a case; whatever judging raises becomes the judgement "not_judged"."""
    try:
        return judge()
    except Exception as error:  # an answer may hold anything, and checkers that are not ours may raise anything
        return judge_error(case.judge_failure(""), error)


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """One answer to a single-turn case, with both readings, their judgements, and the seconds that these took."""

    case: Case
    answer: Answer
    reading: Reading
    strict: Judgement
    lenient: Judgement
    judging_s: float = 0.0

    def to_row(self) -> Row:
        """Return the results row: prompt, answer, calls and verdicts as plain values."""
        case, answer, (strict, lenient) = self.case, self.answer, self.reading
        row: Row = {
            "id": case.id,
            "category": case.category,
            "verdict": self.strict.outcome.verdict,
            "differences": list(case.describe_differences(strict, self.strict)),
            "answer": answer.text,
            **to_reasoning_fields(answer),
            "is_cut": answer.is_cut,
            "seconds": answer.seconds,
            **to_plain(strict),
            "lenient": {
                "verdict": self.lenient.outcome.verdict,
                **to_plain(lenient),
                **to_benchmark_fields(case, self.lenient),
            },
            "expected_calls": to_plain_calls(case.expected),
            "messages": [message.to_openai() for message in case.prompt.messages],
            "tools": [tool.to_openai() for tool in case.prompt.tools],
        }
        if answer.tool_calls is not None:
            row["tool_calls"] = list(answer.tool_calls)
        if answer.error is not None:
            row["error"] = answer.error
        return row | to_benchmark_fields(case, self.strict)


def judge_answer(case: Case, answer: Answer, call_format: CallFormat | None) -> JudgedAnswer:
    """Read and judge an answer to a single-turn case.

    Args:
        case: The case.
        answer: The model's answer, or the error in its place.
        call_format: The call format of its text; None: the server has parsed the calls.
    """
    start = time.perf_counter()
    reading = read_answer(answer, call_format, case.prompt.tools)
    if answer.error is not None:
        failure = case.judge_failure(answer.error)
        return JudgedAnswer(case, answer, reading, failure, failure)
    judgements = judge_reading(case, reading)
    return JudgedAnswer(case, answer, reading, *judgements, judging_s=time.perf_counter() - start)


def judge_row(case: Case | MultiTurnCase, row: Row, lenient: bool = False) -> Judgement:
    """Judge a row of the results again, from the calls that it holds."""
    if row.get("error") is not None:
        return case.judge_failure(row["error"])
    return judge_or_report(case, lambda: _judge_row(case, row, lenient))


def _judge_row(case: Case | MultiTurnCase, row: Row, lenient: bool) -> Judgement:
    if isinstance(case, Case):
        reading = _read_plain(row)
        return case.judge(reading.lenient) if lenient else case.judge(reading.strict, reading.decoded)
    turns = [[_read_plain(step) for step in turn] for turn in row["turns"]]
    ending = row.get("stopped"), bool(row.get("is_unanswered"))
    if lenient:
        return case.judge([[step.lenient for step in turn] for turn in turns], *ending)
    decoded = [[step.decoded for step in turn] for turn in turns]
    return case.judge([[step.strict for step in turn] for turn in turns], *ending, decoded)


def is_valid(row: Mapping[str, Any]) -> bool:
    """Return True if a row of the results, or the lenient reading in it, counts as solved: see ``Judgement``."""
    found = find_verdict(row)
    return bool(row["verdict"] == "correct" if found is None else found[1]["valid"])


def to_benchmark_fields(case: Case | MultiTurnCase, judgement: Judgement) -> Row:
    """Return the fields of a row that hold a benchmark's own verdict, if there is one."""
    if (verdict := judgement.benchmark) is None or case.benchmark_name is None:
        return {}
    return {case.benchmark_name: verdict._asdict()}


def to_reasoning_fields(answer: Answer) -> Row:
    """Return the fields of a row that hold the reasoning of an answer, if there is any."""
    if (reasoning := answer.reasoning) is None:
        return {}
    return {
        "reasoning": {
            "text": reasoning.text,
            "num_tokens": reasoning.num_tokens,
            "is_closed": reasoning.is_closed,
            "is_cut": answer.is_cut and not reasoning.is_closed,
        }
    }


def to_plain(*parsed: Parsed) -> Row:
    """Return the calls and malformed stretches of one or several readings as JSON values."""
    calls: list[Row] = []
    malformed: list[Row] = []
    decoded: list[Row] = []
    for one in parsed:
        calls += to_plain_calls(one.calls)
        malformed += [stretch._asdict() for stretch in one.malformed] if one.malformed else ()
        decoded += to_plain_calls(one.decoded) if one.decoded else ()
    return {"calls": calls, "malformed": malformed} | ({"decoded": decoded} if decoded else {})


def to_plain_calls(calls: Sequence[Call]) -> list[Row]:
    """Return calls as JSON values."""
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def _read_plain(row: Row) -> Reading:
    return Reading(from_plain(row), from_plain(row["lenient"]))


def from_plain(reading: Row) -> Parsed:
    """Return the reading that ``to_plain`` made a row of."""
    calls, decoded = (
        tuple(Call(call["name"], call["arguments"]) for call in reading.get(key, ())) for key in ("calls", "decoded")
    )
    malformed = tuple(Malformed(**stretch) for stretch in reading["malformed"])
    return Parsed(calls, malformed, decoded=decoded or None)
