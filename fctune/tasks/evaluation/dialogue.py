"""Ask multi-turn cases: many conversations at a time, each one step further with every answer.

The calls that are made, and that the conversation continues with, are those of the lenient reading, as a serving engine
would parse them; the strict reading is judged as well. A turn ends with an answer that makes no call or holds a
malformed one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fctune.base.errors import DataError
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.engines.engine import Answer, Engine
from fctune.tasks.evaluation.cases import MultiTurnCase, SimulatedTools
from fctune.tasks.evaluation.judging import (
    Row,
    judge_row,
    read_answer,
    to_benchmark_fields,
    to_plain,
    to_plain_calls,
    to_reasoning_fields,
)

# Errors for a prompt that leaves no room for an answer: in process, from vLLM, SGLang, llama.cpp and TGI.
_OVERLONG = re.compile(
    r"the model's [\d,]+ positions|context[ _](length|size|window)|`inputs` tokens \+ `max_new_tokens`",
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
    """Run multi-turn cases and yield the row of each as its conversation ends.

    A row is like that of a single-turn case, with ``turns`` in addition: the steps of each turn, each with its
    ``answer``, both readings and the results of its calls. ``calls`` and ``malformed`` are those of all steps,
    ``messages`` the complete conversation. ``stopped`` is the reason that a conversation was ended early; such a row is
    final, while one with an ``error`` is retried by the next run.

    Args:
        cases: The cases to run.
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        max_new_tokens: Maximum length of an answer.
        num_at_once: Number of conversations that advance together; the next begins when one has ended.
        is_first: No prompt was answered before, so an engine that can answer none of them is an error.

    Raises:
        DataError: ``is_first``, and none of the first prompts can be answered.
    """
    waiting, active = deque(cases), list[_Dialogue]()
    num_lost_in_a_row = 0
    while waiting or active:
        while waiting and len(active) < num_at_once:
            active.append(_Dialogue(waiting.popleft()))
        for answer in _answer_all(engine, [dialogue.prompt() for dialogue in active], max_new_tokens, is_first):
            dialogue = active[answer.index]
            dialogue.take(answer, call_format)
            is_first &= answer.error is not None
            num_lost_in_a_row = 0 if dialogue.failure is None else num_lost_in_a_row + 1
            if dialogue.is_over:
                yield dialogue.to_row()
        active = [dialogue for dialogue in active if not dialogue.is_over]
        if num_lost_in_a_row >= max(8, 2 * num_at_once):
            for case in waiting:
                dialogue = _Dialogue(case)
                dialogue.fail(f"not queried: {num_lost_in_a_row} conversations in a row got no answer")
                yield dialogue.to_row()
            waiting.clear()


@dataclass(slots=True)
class _Step:
    """One answer, both readings, and the results of its calls."""

    answer: Answer
    strict: Parsed
    lenient: Parsed
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()

    def to_messages(self, has_one_call_each: bool) -> Iterator[Message]:
        reasoning = self.answer.reasoning
        thought = (to_encodable(reasoning.text) or None) if reasoning is not None else None
        text = reasoning.blank(self.answer.text).strip() if reasoning is not None else self.answer.text
        content = to_encodable(text if self.lenient.malformed else self.lenient.prose)
        if not self.calls:
            yield Message("assistant", content, reasoning=thought)
            return
        results = [
            Message("tool", to_encodable(result), call_id=call.id, name=call.name)
            for call, result in zip(self.calls, self.results, strict=True)
        ]
        if not has_one_call_each:
            yield Message("assistant", content or None, self.calls, reasoning=thought)
            yield from results
            return
        for index, (call, result) in enumerate(zip(self.calls, results, strict=True)):
            first = index == 0
            yield Message(
                "assistant", content or None if first else None, (call,), reasoning=thought if first else None
            )
            yield result

    def to_row(self) -> Row:
        row = {
            "answer": self.answer.text,
            **to_reasoning_fields(self.answer),
            **to_plain(self.strict),
            "lenient": to_plain(self.lenient),
            "results": list(self.results),
        }
        return row if self.answer.tool_calls is None else {**row, "tool_calls": list(self.answer.tool_calls)}


@dataclass(slots=True)
class _Dialogue:
    """A conversation in progress: its turns so far, and the simulated tools in their current state."""

    case: MultiTurnCase
    turns: list[list[_Step]] = field(default_factory=lambda: [[]])
    tools: SimulatedTools | None = None
    is_over: bool = False
    failure: str | None = None
    stopped: str | None = None
    is_unanswered: bool = False
    has_one_call_each: bool = False
    num_calls: int = 0

    def prompt(self) -> Conversation:
        """Return the conversation up to where the model is to act."""
        return Conversation(tuple(self.messages()), self._turn_tools(), self.case.id)

    def messages(self) -> Iterator[Message]:
        """Yield all messages so far."""
        for opening, steps in zip(self.case.turns, self.turns, strict=False):
            yield from opening.messages
            for step in steps:
                yield from step.to_messages(self.has_one_call_each)

    def take(self, answer: Answer, call_format: CallFormat | None) -> None:
        """Continue with the model's answer to ``prompt``."""
        if answer.error is not None:
            self._take_error(" ".join(answer.error.split())[:400])
            return
        strict, lenient = read_answer(answer, call_format, self._turn_tools())
        step = _Step(answer, strict, lenient)
        self.turns[-1].append(step)
        position = self._position(len(self.turns[-1]))
        if not lenient.calls or lenient.malformed:
            self._end_turn()
            return
        step.calls = tuple(self._with_id(call) for call in lenient.calls)
        self.tools = self.tools or self.case.start()
        try:
            step.results = tuple(self.tools.play(lenient.calls))
        except TimeoutError as error:
            step.calls = ()
            self._stop(f"{position}: {error}")
            return
        if len(self.turns[-1]) > self.case.max_steps:
            self._stop(f"{position}: still calling after {self.case.max_steps} steps")

    def fail(self, reason: str) -> None:
        """End the conversation without an answer that could be judged."""
        self.failure, self.is_over = reason, True

    def to_row(self) -> Row:
        """Return the row for the results, judged in both readings."""
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
            **to_plain(*(step.strict for step in steps)),
            "lenient": {"verdict": "", **to_plain(*(step.lenient for step in steps))},
            "expected_calls": to_plain_calls([call for due in self.case.expected for call in due]),
            "messages": [message.to_openai() for message in self.messages()],
            "tools": [tool.to_openai() for tool in self._turn_tools()],
            # A turn that the model could not finish is not judged.
            "turns": [[step.to_row() for step in turn] for turn in self.turns[: -1 if self.is_unanswered else None]],
        }
        if self.stopped is not None:
            row |= {"stopped": self.stopped, "is_unanswered": self.is_unanswered}
        if self.failure is not None:
            row["error"] = self.failure
        judgement = judge_row(self.case, row)
        row |= {"verdict": judgement.outcome.verdict, "differences": list(judgement.differences)}
        lenient = judge_row(self.case, row, lenient=True)
        row["lenient"] |= {"verdict": lenient.outcome.verdict, **to_benchmark_fields(self.case, lenient)}
        return row | to_benchmark_fields(self.case, judgement)

    def _turn_tools(self) -> tuple[Tool, ...]:
        return self.case.turns[len(self.turns) - 1].tools

    def _take_error(self, error: str) -> None:
        position = self._position(len(self.turns[-1]) + 1)
        has_several = any(len(step.calls) > 1 for turn in self.turns for step in turn)
        if _OVERLONG.search(error):
            self.is_unanswered = True
            self._stop(f"{position}: outgrew the model's context ({error})")
        elif has_several and not self.has_one_call_each:
            # Some templates refuse several calls in one message, though their model has just made them.
            self.has_one_call_each = True
        else:
            self.fail(f"{position}: {error}")

    def _end_turn(self) -> None:
        if len(self.turns) == len(self.case.turns):
            self.is_over = True
        else:
            self.turns.append([])

    def _stop(self, reason: str) -> None:
        self.stopped, self.is_over = reason, True

    def _position(self, num_steps: int) -> str:
        return f"turn {len(self.turns)}, step {num_steps}"

    def _with_id(self, call: Call) -> Call:
        # Nine letters and digits: Mistral's templates and tokenizers accept no other ids.
        self.num_calls += 1
        return Call(to_encodable(call.name), to_encodable(call.arguments), f"call{self.num_calls:05d}")


def _answer_all(
    engine: Engine, prompts: Sequence[Conversation], max_new_tokens: int, is_first: bool
) -> Iterator[Answer]:
    """Answer each prompt; if the engine raises because it cannot answer any, each gets that error."""
    try:
        yield from engine.answer(prompts, max_new_tokens)
    except DataError as error:
        if is_first:
            raise
        if len(prompts) == 1:
            yield Answer(0, error=str(error).rpartition(f"{prompts[0].source}: ")[2])
            return
        for index, prompt in enumerate(prompts):
            for answer in _answer_all(engine, [prompt], max_new_tokens, is_first=False):
                yield replace(answer, index=index)
