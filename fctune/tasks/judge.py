"""From an episode to its judgement and its row: judged in the strict and in the lenient reading, kept as JSON values.

Every command takes this path: evaluation of a model or server, prediction files, served checks, and training runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.judge import Judgement, judge_error
from fctune.calls.tool_calls import Reading
from fctune.data.conversation import Call, Tool
from fctune.engines.engine import Answer, ChoiceScore
from fctune.tasks.answer_defects import find_defects
from fctune.tasks.benchmarks import find_verdict
from fctune.tasks.episode import Episode
from fctune.tasks.task import AnswerCase, AnyCase, Case, MultiTurnCase, MultiTurnState, Step

Row = dict[str, Any]

NOT_MEASURED = "not_measured"
"""Verdict of a dialogue whose task failed."""


def judge_reading(case: Case, reading: Reading) -> tuple[Judgement, Judgement]:
    """Judge the calls of a single-turn answer in both readings; an answer must not end the evaluation."""
    try:  # as in judge_or_report, without its function for each answer: files hold millions of them
        strict = case.judge(reading.strict, reading.decoded if reading.strict.malformed else None)
    except Exception as error:
        strict = judge_error(case.judge_failure(""), error)
    if reading.lenient is reading.strict:
        return strict, strict
    return strict, judge_or_report(case, lambda: case.judge(reading.lenient))


def judge_answer_case(
    case: AnswerCase, content: str, scores: Sequence[ChoiceScore] = ()
) -> tuple[Judgement, Judgement]:
    """Judge what a model answered in both readings; see ``AnswerCase.judge_answer``."""
    try:
        return case.judge_answer(content, scores)
    except Exception as error:  # an answer may hold anything, and checkers that are not ours may raise anything
        failure = judge_error(case.judge_failure(""), error)
        return failure, failure


def judge_turns(
    case: MultiTurnCase,
    turns: Sequence[Sequence[Reading]],
    stopped: str | None = None,
    is_unanswered: bool = False,
) -> tuple[Judgement, Judgement]:
    """Judge a conversation in its strict and in its lenient reading; see ``MultiTurnCase.judge``."""

    def judge() -> Judgement:
        decoded = [[step.decoded for step in turn] for turn in turns]
        return case.judge([[step.strict for step in turn] for turn in turns], stopped, is_unanswered, decoded)

    def judge_lenient() -> Judgement:
        return case.judge([[step.lenient for step in turn] for turn in turns], stopped, is_unanswered)

    strict = judge_or_report(case, judge)
    if all(step.lenient is step.strict for turn in turns for step in turn):
        return strict, strict
    return strict, judge_or_report(case, judge_lenient)


def judge_or_report(case: AnyCase, judge: Callable[[], Judgement]) -> Judgement:
    """Judge an answer to a case; whatever judging raises becomes the judgement "not_judged"."""
    try:
        return judge()
    except Exception as error:  # an answer may hold anything, and checkers that are not ours may raise anything
        return judge_error(case.judge_failure(""), error)


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """An episode of a case with its judgements in both readings, and the seconds that these took."""

    case: AnyCase
    episode: Episode
    strict: Judgement
    lenient: Judgement
    judging_s: float = 0.0

    @property
    def answer(self) -> Answer:
        """The last answer, or the error in its place."""
        steps = self.episode.steps
        return steps[-1].answer if steps else Answer(0, error=self.episode.error)

    @property
    def reading(self) -> Reading:
        """Both readings of the last answer; empty ones without an answer."""
        steps = self.episode.steps
        return steps[-1].reading if steps else Reading(Parsed(()), Parsed(()))

    def to_row(self) -> Row:
        """Return the results row: conversation, calls and verdicts as plain values.

        The row of a multi-turn case also has ``turns``: the steps of each turn, each with its ``answer``, both readings
        and the results of its calls. Its ``calls`` and ``malformed`` are those of all steps, its ``messages`` the
        complete conversation. ``defects`` are those of ``DEFECTS`` that the answers have. ``stopped`` is the reason
        that it was ended early; such a row is final, while one with an ``error`` is retried by the next run.
        """
        case, episode = self.case, self.episode
        steps = episode.steps
        strict, is_single = self.strict, isinstance(case, Case)
        due: Sequence[Call]
        if isinstance(case, Case):
            due, messages = case.expected, case.prompt.messages
            differences = case.describe_differences(self.reading.strict, strict)
        else:
            due, messages = [call for calls in case.expected for call in calls], episode.messages
            differences = strict.differences
        row: Row = {
            "id": case.id,
            "category": case.category,
            "verdict": strict.outcome.verdict,
            "differences": list(differences),
            "answer": self.answer.text,
            **(_to_reasoning_fields(self.answer) if is_single else {}),
            **to_step_fields(steps, episode.state.tools),
            "lenient": {
                "verdict": self.lenient.outcome.verdict,
                **to_plain(*(step.reading.lenient for step in steps)),
                **_to_benchmark_fields(case, self.lenient),
            },
            "expected_calls": to_plain_calls(due),
            "messages": [message.to_openai() for message in messages],
            "tools": [tool.to_openai() for tool in episode.state.tools],
        }
        if is_single:
            row |= _to_call_fields(self.answer)
            if isinstance(case, AnswerCase):
                row |= _to_answer_fields(self.answer)
        else:
            row["turns"] = [[to_step_row(step) for step in turn] for turn in _judged_turns(episode)]
            if episode.stopped is not None:
                row |= {"stopped": episode.stopped, "is_unanswered": episode.is_unanswered}
        if episode.error is not None:
            row["error"] = episode.error
        return row | _to_benchmark_fields(case, strict)


def judge_episode(episode: Episode) -> JudgedEpisode:
    """Judge an episode of a case, as it was run."""
    start, case = time.perf_counter(), episode.task
    assert isinstance(case, Case | MultiTurnCase)
    if episode.error is not None:
        failure = case.judge_failure(episode.error)
        return JudgedEpisode(case, episode, failure, failure)
    if isinstance(case, AnswerCase):
        answer = episode.steps[0].answer
        strict, lenient = judge_answer_case(case, _find_content(answer), answer.choices)
    elif isinstance(case, Case):
        strict, lenient = judge_reading(case, episode.steps[0].reading)
    else:
        turns = [[step.reading for step in turn] for turn in _judged_turns(episode)]
        strict, lenient = judge_turns(case, turns, episode.stopped, episode.is_unanswered)
    return JudgedEpisode(case, episode, strict, lenient, time.perf_counter() - start)


def judge_answer(case: Case, answer: Answer, call_format: CallFormat | None) -> JudgedEpisode:
    """Read and judge an answer to a single-turn case that was made elsewhere.

    Args:
        case: The case.
        answer: The model's answer, or the error in its place.
        call_format: The call format of its text; None: the server has parsed the calls.
    """
    episode = Episode(case)
    episode.start()
    if answer.error is not None:
        episode.fail(answer.error)
    else:
        episode.add_answer(answer, call_format, "lenient")
    return judge_episode(episode)


def judge_row(case: AnyCase, row: Row) -> tuple[Judgement, Judgement]:
    """Judge a row of the results again, from the calls that it holds, in its strict and in its lenient reading."""
    if row.get("error") is not None:
        failure = case.judge_failure(row["error"])
        return failure, failure
    try:
        if isinstance(case, AnswerCase):
            scores = [ChoiceScore(**score) for score in row.get("choices", ())]
            return judge_answer_case(case, row["answer"] if "content" not in row else row["content"], scores)
        if isinstance(case, Case):
            return judge_reading(case, _read_plain(row))
        turns = [[_read_plain(step) for step in turn] for turn in row["turns"]]
        return judge_turns(case, turns, row.get("stopped"), bool(row.get("is_unanswered")))
    except Exception as error:  # a file may hold any row
        failure = judge_error(case.judge_failure(""), error)
        return failure, failure


def is_valid(row: Mapping[str, Any]) -> bool:
    """Return True if a row of the results, or the lenient reading in it, counts as solved: see ``Judgement``."""
    found = find_verdict(row)
    return bool(row["verdict"] == "correct" if found is None else found[1]["valid"])


def is_measured(row: Mapping[str, Any]) -> bool:
    """Return True unless the task failed, through no fault of the model, so that its row says nothing about it."""
    return bool(row["verdict"] != NOT_MEASURED)


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
    """Return the readings that ``to_plain`` made a row of."""
    readings = []
    for plain in (row, row["lenient"]):
        calls, decoded = (
            tuple(Call(call["name"], call["arguments"]) for call in plain.get(key, ())) for key in ("calls", "decoded")
        )
        malformed = tuple(Malformed(**stretch) for stretch in plain["malformed"])
        readings.append(Parsed(calls, malformed, decoded=decoded or None))
    strict, lenient = readings
    return Reading(strict, strict if lenient == strict else lenient)


def to_step_fields(steps: Sequence[Step], tools: Sequence[Tool]) -> Row:
    """Return the fields of a row that summarize all answers of an episode: cut off, defects, duration and calls."""
    seconds = [step.answer.seconds for step in steps if step.answer.seconds is not None]
    return {
        "is_cut": any(step.answer.is_cut for step in steps),
        "defects": find_defects(steps, tools),
        "seconds": round(sum(seconds), 4) if seconds else None,
        **to_plain(*(step.reading.strict for step in steps)),
    }


def _judged_turns(episode: Episode) -> list[list[Step]]:
    """Return the steps of each turn, without one that the model could not finish."""
    assert isinstance(episode.state, MultiTurnState)
    return episode.state.turns[: -1 if episode.is_unanswered else None]


def to_step_row(step: Step) -> Row:
    """Return one step of a conversation as plain values: the answer, both readings and the results of its calls."""
    return {
        "answer": step.answer.text,
        **_to_reasoning_fields(step.answer),
        **to_plain(step.reading.strict),
        "lenient": to_plain(step.reading.lenient),
        "results": list(step.results),
        **_to_call_fields(step.answer),
    }


def _find_content(answer: Answer) -> str:
    """Return the text of an answer without its reasoning."""
    return answer.text if answer.reasoning is None else answer.reasoning.blank(answer.text).strip()


def _to_answer_fields(answer: Answer) -> Row:
    """Return what an ``AnswerCase`` is judged by, as far as the row does not hold it: text and scores of choices."""
    row: Row = {"choices": [asdict(score) for score in answer.choices]} if answer.choices else {}
    return row if answer.reasoning is None else {**row, "content": _find_content(answer)}


def _to_call_fields(answer: Answer) -> Row:
    """Return the field of a row that holds the calls as a server sent them, if one did."""
    return {} if answer.tool_calls is None else {"tool_calls": list(answer.tool_calls)}


def _to_benchmark_fields(case: AnyCase, judgement: Judgement) -> Row:
    """Return the fields of a row that hold a benchmark's own verdict, if there is one."""
    if (verdict := judgement.benchmark) is None or case.benchmark_name is None:
        return {}
    return {case.benchmark_name: verdict.to_plain()}


def _to_reasoning_fields(answer: Answer) -> Row:
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
