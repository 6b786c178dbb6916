"""Multi-turn cases put to a model: many conversations at a time, each a step further with every answer.

The calls that are made, and that the conversation goes on with, are those a serving engine would read (the lenient
reading); what the strict one reads is judged beside them. A turn ends with an answer that makes no call, or that holds
a malformed one.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fctune.calls.bfcl.multi_turn import World
from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.metrics import Outcome, judge_failure, rate, score
from fctune.data.conversation import Call, Conversation, Message
from fctune.errors import DataError
from fctune.evaluation.bfcl import BFCL
from fctune.evaluation.judging import Row, read_answer
from fctune.evaluation.multi_turn import MultiTurnCase
from fctune.evaluation.suites import Suite
from fctune.evaluation.summary import summarise
from fctune.generation.engine import Answer, Engine

# How a prompt is refused that leaves no room for an answer: in process, by vLLM, SGLang, llama.cpp and TGI.
_OVERLONG = re.compile(
    r"over the model's [\d,]+ positions|context[ _](length|size|window)|`inputs` tokens \+ `max_new_tokens`",
    re.IGNORECASE,
)


def ask_multi_turn(
    cases: Sequence[MultiTurnCase],
    engine: Engine,
    call_format: CallFormat | None,
    max_new_tokens: int,
    num_at_once: int,
    is_first: bool = True,
) -> Iterator[Row]:
    """The row of each case as its conversation ends.

    A row is as one of a single turn, with ``turns`` beside it: the steps of each turn, each with its ``answer``, what
    both readings make of it, and what its calls gave; ``calls`` and ``malformed`` are those of all steps, ``messages``
    the whole conversation. ``stopped`` says why a conversation was not let go on; such a row is not asked again, other
    than one with an ``error``.

    Args:
        cases: What is asked.
        engine: Who answers.
        call_format: How the answers are read; None: the server has read the calls.
        max_new_tokens: The most that an answer may be.
        num_at_once: Conversations that advance together; the next begins when one has ended.
        is_first: Whether nothing was answered before, by which to tell a model that can be asked.

    Raises:
        DataError: ``is_first``, and none of the first prompts can be answered at all.
    """
    waiting, active = deque(cases), list[_Talk]()
    num_lost_in_a_row = 0
    while waiting or active:
        while waiting and len(active) < num_at_once:
            active.append(_Talk(waiting.popleft()))
        for answer in _answer_all(engine, [talk.prompt() for talk in active], max_new_tokens, is_first):
            talk = active[answer.index]
            talk.take(answer, call_format)
            is_first &= answer.error is not None
            num_lost_in_a_row = 0 if talk.failure is None else num_lost_in_a_row + 1
            if talk.is_over:
                yield talk.to_row()
        active = [talk for talk in active if not talk.is_over]
        if num_lost_in_a_row >= max(8, 2 * num_at_once):
            for case in waiting:
                talk = _Talk(case)
                talk.fail(f"not asked: {num_lost_in_a_row} conversations in a row got no answer")
                yield talk.to_row()
            waiting.clear()


def judge_turns(case: MultiTurnCase, row: Row, lenient: bool = False) -> tuple[Outcome, dict[str, Any]]:
    """The outcome of a row of the results, and the benchmark's verdict."""
    if row.get("error") is not None:
        return judge_failure(sum(map(len, case.expected)), row["error"]), {}
    steps = [[_read_back(step["lenient"] if lenient else step) for step in turn] for turn in row["turns"]]
    outcome, details = case.judge(steps)
    if (stopped := row.get("stopped")) is None:
        return outcome, details
    verdict = outcome.verdict
    if row["is_unanswered"] and verdict != "malformed":
        verdict = "no_answer"
    elif verdict == "correct":
        # The wheel judges one that it stops in the last turn like any other; one that never ends is not right here.
        verdict = "wrong_count"
    return outcome._replace(verdict=verdict, differences=(stopped, *outcome.differences)), details


def summarise_run(suite: Suite, rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, as ``fctune.evaluation.summary`` gives it, with the multi-turn categories in it."""
    summary = summarise(suite, rows, settings)
    if not suite.multi_turn:
        return summary
    by_id = {row["id"]: row for row in rows}
    outcomes: dict[str, dict[str, list[Outcome]]] = {"scores": defaultdict(list), "lenient": defaultdict(list)}
    official: dict[str, dict[str, list[bool]]] = {"official": defaultdict(list), "typed": defaultdict(list)}
    for case in suite.multi_turn:
        row = by_id.get(case.id, {"error": "no row in the results"})
        for name, by_category in outcomes.items():
            by_category[case.category].append(judge_turns(case, row, lenient=name == "lenient")[0])
        verdict = row.get("bfcl", {})
        official["official"][case.category].append(bool(verdict.get("valid")))
        official["typed"][case.category].append(verdict.get("typed") == "correct")
        summary["num_no_answer"] += row.get("error") is not None
    summary["num_cases"] += len(suite.multi_turn)
    for name, by_category in outcomes.items():
        summary[name] |= score(by_category)
    for name, held in official.items():
        summary[name] = summary.get(name, {}) | {key: rate(sum(v), len(v)) for key, v in held.items()}
    return summary


@dataclass(slots=True)
class _Step:
    """One answer, both its readings, and what its calls gave."""

    answer: Answer
    strict: Parsed
    lenient: Parsed
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()

    def to_messages(self, has_one_call_each: bool) -> Iterator[Message]:
        said = _encodable(self.answer.text if self.lenient.malformed else self.lenient.prose)
        if not self.calls:
            yield Message("assistant", said)
            return
        results = [
            Message("tool", _encodable(result), call_id=call.id, name=call.name)
            for call, result in zip(self.calls, self.results, strict=True)
        ]
        if not has_one_call_each:
            yield Message("assistant", said or None, self.calls)
            yield from results
            return
        for place, (call, result) in enumerate(zip(self.calls, results, strict=True)):
            yield Message("assistant", (said or None) if place == 0 else None, (call,))
            yield result

    def to_row(self) -> Row:
        row = {
            "answer": self.answer.text,
            **_plain(self.strict),
            "lenient": _plain(self.lenient),
            "results": list(self.results),
        }
        return row if self.answer.tool_calls is None else {**row, "tool_calls": list(self.answer.tool_calls)}


@dataclass(slots=True)
class _Talk:
    """A conversation under way: its turns so far, and the tools in the state that its calls have brought them to."""

    case: MultiTurnCase
    turns: list[list[_Step]] = field(default_factory=lambda: [[]])
    world: World | None = None
    is_over: bool = False
    failure: str | None = None
    stopped: str | None = None
    is_unanswered: bool = False
    has_one_call_each: bool = False
    num_calls: int = 0

    def prompt(self) -> Conversation:
        """The conversation up to where the model is to act."""
        tools = self.case.turns[len(self.turns) - 1].tools
        return Conversation(tuple(self.messages()), tools, f"{BFCL} {self.case.id}")

    def messages(self) -> Iterator[Message]:
        """All that was said."""
        for opening, steps in zip(self.case.turns, self.turns, strict=False):
            yield from opening.messages
            for step in steps:
                yield from step.to_messages(self.has_one_call_each)

    def take(self, answer: Answer, call_format: CallFormat | None) -> None:
        """Go on by the model's answer to ``prompt``."""
        if answer.error is not None:
            self._take_error(" ".join(answer.error.split())[:400])
            return
        strict, lenient = read_answer(answer, call_format, self.case.turns[len(self.turns) - 1].tools)
        step = _Step(answer, strict, lenient)
        self.turns[-1].append(step)
        place = self._place(len(self.turns[-1]))
        if not lenient.calls or lenient.malformed:
            self._end_turn()
            return
        step.calls = tuple(self._with_id(call) for call in lenient.calls)
        self.world = self.world or self.case.start()
        try:
            step.results = tuple(self.world.play(lenient.calls))
        except TimeoutError as error:
            step.calls = ()
            self._stop(f"{place}: {error}")
            return
        if len(self.turns[-1]) > self.case.max_steps:
            self._stop(f"{place}: still calling after {self.case.max_steps} steps")

    def fail(self, reason: str) -> None:
        """End it without an answer that could be judged."""
        self.failure, self.is_over = reason, True

    def to_row(self) -> Row:
        """The row for the results, judged in both readings."""
        steps = [step for turn in self.turns for step in turn]
        seconds = [step.answer.seconds for step in steps if step.answer.seconds is not None]
        row: Row = {
            "id": self.case.id,
            "category": self.case.category,
            "verdict": "",
            "differences": [],
            "answer": steps[-1].answer.text if steps else "",
            "is_cut": any(step.answer.is_cut for step in steps),
            "seconds": round(sum(seconds), 4) if seconds else None,
            **_plain(*(step.strict for step in steps)),
            "lenient": {"verdict": "", **_plain(*(step.lenient for step in steps))},
            "expected_calls": _plain(Parsed(tuple(call for due in self.case.expected for call in due)))["calls"],
            "messages": [message.to_openai() for message in self.messages()],
            "tools": [tool.to_openai() for tool in self.case.turns[len(self.turns) - 1].tools],
            # Of a turn that the model could not end there is nothing to judge.
            "turns": [[step.to_row() for step in turn] for turn in self.turns[: -1 if self.is_unanswered else None]],
        }
        if self.stopped is not None:
            row |= {"stopped": self.stopped, "is_unanswered": self.is_unanswered}
        if self.failure is not None:
            row["error"] = self.failure
        outcome, details = judge_turns(self.case, row)
        row |= {"verdict": outcome.verdict, "differences": list(outcome.differences), **details}
        row["lenient"]["verdict"] = judge_turns(self.case, row, lenient=True)[0].verdict
        return row

    def _take_error(self, error: str) -> None:
        place = self._place(len(self.turns[-1]) + 1)
        has_several = any(len(step.calls) > 1 for turn in self.turns for step in turn)
        if _OVERLONG.search(error):
            self.is_unanswered = True
            self._stop(f"{place}: outgrew the model's context ({error})")
        elif has_several and not self.has_one_call_each:
            # Some templates refuse an answer of several calls, which its model has given all the same.
            self.has_one_call_each = True
        else:
            self.fail(f"{place}: {error}")

    def _end_turn(self) -> None:
        if len(self.turns) == len(self.case.turns):
            self.is_over = True
        else:
            self.turns.append([])

    def _stop(self, reason: str) -> None:
        self.stopped, self.is_over = reason, True

    def _place(self, num_steps: int) -> str:
        return f"turn {len(self.turns)}, step {num_steps}"

    def _with_id(self, call: Call) -> Call:
        # Nine letters and digits: templates and tokenizers of Mistral's take no other.
        self.num_calls += 1
        return Call(_encodable(call.name), _encodable(call.arguments), f"call{self.num_calls:05d}")


def _answer_all(
    engine: Engine, prompts: Sequence[Conversation], max_new_tokens: int, is_first: bool
) -> Iterator[Answer]:
    """An answer to each prompt; where an engine raises because it can answer none of them, that is an error of each."""
    try:
        yield from engine.answer(prompts, max_new_tokens)
    except DataError as error:
        if is_first:
            raise
        if len(prompts) == 1:
            yield Answer(0, error=str(error).rpartition(f"{prompts[0].source}: ")[2])
            return
        for place, prompt in enumerate(prompts):
            for answer in _answer_all(engine, [prompt], max_new_tokens, is_first=False):
                yield replace(answer, index=place)


def _encodable(value: Any) -> Any:
    """The value with what UTF-8 does not have, half of a surrogate pair, replaced: no prompt can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _plain(*parsed: Parsed) -> Row:
    return {
        "calls": [{"name": call.name, "arguments": call.arguments} for one in parsed for call in one.calls],
        "malformed": [stretch.reason for one in parsed for stretch in one.malformed],
    }


def _read_back(step: Row) -> Parsed:
    calls = tuple(Call(call["name"], call["arguments"]) for call in step["calls"])
    return Parsed(calls, tuple(Malformed(0, 0, reason) for reason in step["malformed"]))
