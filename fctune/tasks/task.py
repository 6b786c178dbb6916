"""Tasks: a conversation, the tools on offer, and what follows the model's calls.

A ``Task`` is asked any number of times; ``Task.start`` opens its ``TaskState``, the other side of one episode: it makes
the calls, returns their results, speaks for the user, and holds what must be freed at the end. ``fctune.tasks.episode``
runs episodes, ``fctune.tasks.judge`` and rewards judge them.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from fctune.calls.formats.base import Parsed
from fctune.calls.judge import Judgement, judge, judge_failure
from fctune.calls.tool_calls import Reading
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.data.tool_schema import ToolSet
from fctune.engines.engine import Answer, ChoiceScore

# Errors for a prompt that leaves no room for an answer: in process, from vLLM, SGLang, llama.cpp and TGI.
_OVERLONG = re.compile(
    r"the model's [\d,]+ positions|context[ _](length|size|window)|`inputs` tokens \+ `max_new_tokens`",
    re.IGNORECASE,
)


class TaskError(Exception):
    """A task failed, through no fault of the model; its episode gets no verdict."""


class EpisodeStopped(Exception):
    """A task ends an episode early; the text says why.

    Attributes:
        following: Messages that still belong to the conversation, such as results of the last calls.
        is_unanswered: The model could not answer.
    """

    def __init__(self, reason: str, following: Sequence[Message] = (), is_unanswered: bool = False):
        super().__init__(reason)
        self.following, self.is_unanswered = tuple(following), is_unanswered


@dataclass(slots=True)
class Step:
    """One answer of an episode, both readings of it, and the results of its calls.

    Attributes:
        answer: The model's answer.
        reading: Its calls, read strictly and leniently.
        parsed: The reading that the episode acts on.
        calls: The calls that are made, each with an id; none if a part of the answer is malformed.
        results: What the tools returned, if the task keeps that.
        is_open: The text ends inside a call.
    """

    answer: Answer
    reading: Reading
    parsed: Parsed
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()
    is_open: bool = False

    @property
    def thought(self) -> str | None:
        """The model's reasoning, as a message holds it; None without any."""
        return (to_encodable(self.answer.reasoning.text) or None) if self.answer.reasoning is not None else None

    @property
    def content(self) -> str:
        """The text of the model's message without its calls; with a malformed call, all of it but the reasoning."""
        answer = self.answer
        text = answer.reasoning.blank(answer.text).strip() if answer.reasoning is not None else answer.text
        content: str = to_encodable(text if self.parsed.malformed else self.parsed.prose)
        return content

    def to_message(self) -> Message:
        """Return the answer as a message of the conversation."""
        content = self.content
        return Message("assistant", content or (None if self.calls else ""), self.calls, reasoning=self.thought)


def to_results(calls: Sequence[Call], results: Sequence[str]) -> tuple[Message, ...]:
    """Return the tools' messages with the results of calls."""
    return tuple(
        Message("tool", to_encodable(result), call_id=call.id, name=call.name)
        for call, result in zip(calls, results, strict=True)
    )


class TaskState:
    """The other side of one episode; this one asks once and answers nothing.

    Attributes:
        prompt: The conversation up to where the model acts first.
        choices: Answers that the model chooses from by their likelihood; none: it writes its own.
        is_dialogue: Further answers may be asked for after the first.
    """

    is_dialogue: ClassVar[bool] = False

    def __init__(self, prompt: Conversation, choices: tuple[Message, ...] = ()):
        self.prompt, self.choices = prompt, choices

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools on offer from now on."""
        return self.prompt.tools

    def respond(self, step: Step) -> Sequence[Message]:
        """Make the calls of an answer, and return the messages that follow it; none end the episode.

        Raises:
            EpisodeStopped: The episode ends here, and is judged.
            TaskError: The task failed.
        """
        return ()

    def describe_error(self, error: str) -> str:
        """Return the episode's error after a prompt without an answer.

        Raises:
            EpisodeStopped: The episode is judged without that answer.
        """
        return error

    def close(self) -> None:
        """Release what the episode holds."""


class DialogueState(TaskState):
    """The other side of an episode of any number of answers."""

    is_dialogue = True

    @property
    def position(self) -> str:
        """Where the next answer is due, for messages; empty if they need not say it."""
        return ""

    def describe_error(self, error: str) -> str:
        """Return the error with its position; a prompt that outgrows the model's context stops the episode."""
        error = " ".join(error.split())[:400]
        if _OVERLONG.search(error):
            raise EpisodeStopped(f"{self.position}outgrew the model's context ({error})", is_unanswered=True)
        return f"{self.position}{error}"


class Task(ABC):
    """Something that a model is asked to do.

    Attributes:
        id: Unique among the tasks of a suite or set.
        category: What its results are counted with.
        sample: Number of the answer among those to the same prompt.
    """

    id: str
    category: str
    sample: int = 0

    @property
    def questions(self) -> Sequence[Message]:
        """All messages that are given; none if they are not known before the task is started."""
        return ()

    @property
    def solution(self) -> Sequence[Call]:
        """Calls that solve the task, if it names any."""
        return ()

    @abstractmethod
    def start(self) -> TaskState:
        """Return the state at the start of an episode.

        Raises:
            TaskError: The task failed.
        """


@dataclass(frozen=True)
class Case(Task):
    """One question: the conversation up to where the model is to act, and the calls that are due, if any.

    ``sample`` numbers the answers to the same question where several are asked for.
    """

    id: str
    category: str
    prompt: Conversation
    expected: tuple[Call, ...]
    sample: int = field(default=0, kw_only=True)
    benchmark_name: ClassVar[str | None] = None  # key of the benchmark's own verdict in result rows

    def start(self) -> TaskState:
        """Return a state that ends the episode with the first answer."""
        return TaskState(self.prompt)

    @property
    def questions(self) -> Sequence[Message]:
        """All messages that are given."""
        return self.prompt.messages

    @functools.cached_property
    def _tools(self) -> ToolSet:
        return ToolSet(self.prompt.tools)

    def judge(self, parsed: Parsed, decoded: Parsed | None = None) -> Judgement:
        """Judge one reading of an answer: correct if its calls are the expected ones, typed and in any order.

        Args:
            parsed: The answer as read.
            decoded: The answer as a benchmark's own decoder reads it, if that differs.
        """
        return judge(self.expected, parsed, self._tools)

    def judge_failure(self, reason: str) -> Judgement:
        """Judge a case without an answer."""
        return judge_failure(len(self.expected), reason)

    def describe_differences(self, parsed: Parsed, judgement: Judgement) -> tuple[str, ...]:
        """List everything that is wrong with an answer, one line each."""
        return judgement.differences


@dataclass(frozen=True)
class AnswerCase(Case):
    """A question of a benchmark that judges what the model answers, and not only the calls in it.

    ``choices`` are the answers that the model chooses from; none: it writes its own.
    """

    choices: tuple[Message, ...] = field(default=(), kw_only=True)

    def start(self) -> TaskState:
        """Return a state that ends the episode with the first answer."""
        return TaskState(self.prompt, self.choices)

    @abstractmethod
    def judge_answer(self, content: str, scores: Sequence[ChoiceScore]) -> tuple[Judgement, Judgement]:
        """Judge an answer in its strict and in its lenient reading; each has the benchmark's own verdict.

        Args:
            content: The answer's text without its reasoning.
            scores: Scores of the choices, in their order; none if the model wrote the answer.
        """

    @abstractmethod
    def describe(self) -> Any:
        """Return, as JSON values, what decides verdicts besides prompt and calls; part of the suite's digest."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's messages that open a turn, and the tools on offer from then on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


class SimulatedTools(Protocol):
    """The tools of a multi-turn case, with their state."""

    def play(self, calls: Sequence[Call]) -> Sequence[str]:
        """Make the calls of one answer, and return the result of each.

        Raises:
            TimeoutError: The calls take too long; the message says so.
        """


@dataclass(frozen=True)
class MultiTurnCase(Task):
    """A conversation with several user turns, in which simulated tools answer.

    In each turn the model is queried until it makes no more calls. The conversation ends if it calls in more than
    ``max_steps`` answers of one turn.
    """

    id: str
    category: str
    turns: tuple[Turn, ...]
    max_steps: int
    benchmark_name: ClassVar[str | None] = None

    def start(self) -> MultiTurnState:
        """Return the state before the first turn."""
        return MultiTurnState(self)

    @property
    def questions(self) -> Sequence[Message]:
        """All messages that are given."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    @abstractmethod
    def expected(self) -> tuple[tuple[Call, ...], ...]:
        """The calls that are due in each turn."""

    @abstractmethod
    def open_tools(self) -> SimulatedTools:
        """Create the tools in their initial state."""

    @abstractmethod
    def judge(
        self,
        turns: Sequence[Sequence[Parsed]],
        stopped: str | None = None,
        is_unanswered: bool = False,
        decoded: Sequence[Sequence[Parsed]] | None = None,
    ) -> Judgement:
        """Judge one reading of a conversation.

        Args:
            turns: The steps of each turn; fewer turns if the conversation was stopped.
            stopped: Why the conversation was stopped early; None if it was not.
            is_unanswered: The conversation was stopped because the model could not answer.
            decoded: The steps as a benchmark's own decoder reads them; see ``Reading.decoded``. None: as read.
        """

    @abstractmethod
    def judge_failure(self, reason: str) -> Judgement:
        """Judge a conversation that ended without an answer."""

    @abstractmethod
    def describe(self) -> Any:
        """Return, as JSON values, what decides verdicts besides the turns; part of the suite's digest."""


AnyCase = Case | MultiTurnCase


class MultiTurnState(DialogueState):
    """The user's turns of a case and its simulated tools; a turn ends with an answer that makes no call.

    Attributes:
        turns: The steps of each turn that has begun.
    """

    def __init__(self, case: MultiTurnCase):
        super().__init__(Conversation(case.turns[0].messages, case.turns[0].tools, case.id))
        self._case = case
        self._simulated: SimulatedTools | None = None
        self.turns: list[list[Step]] = [[]]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools on offer in the turn that has begun."""
        return self._case.turns[len(self.turns) - 1].tools

    def respond(self, step: Step) -> Sequence[Message]:
        """Return the results of an answer's calls, or the messages of the next turn."""
        steps = self.turns[-1]
        steps.append(step)
        if not step.calls:
            if len(self.turns) == len(self._case.turns):
                return ()
            self.turns.append([])
            return self._case.turns[len(self.turns) - 1].messages
        position = f"turn {len(self.turns)}, step {len(steps)}"
        self._simulated = self._simulated or self._case.open_tools()
        try:
            step.results = tuple(self._simulated.play(step.parsed.calls))
        except TimeoutError as error:
            step.calls = ()
            raise EpisodeStopped(f"{position}: {error}") from None
        following = to_results(step.calls, step.results)
        if len(steps) > self._case.max_steps:
            raise EpisodeStopped(f"{position}: still calling after {self._case.max_steps} steps", following)
        return following

    @property
    def position(self) -> str:
        """Turn and step of the next answer."""
        return f"turn {len(self.turns)}, step {len(self.turns[-1]) + 1}: "
