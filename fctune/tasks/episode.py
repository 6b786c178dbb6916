"""Run episodes: many conversations of a model with tasks at a time, each one step further with every answer.

    task = Case(...)                                    # or a multi-turn case, a recorded row, an environment's task
    runner = EpisodeRunner(engine, call_format, EpisodeLimits(max_new_tokens=256))
    for episode in runner.run([Episode(task)]):         # in the order in which they end
        row = judge_episode(episode).to_row()

This is the only loop in which a model answers and calls tools: evaluation, multi-turn benchmarks, sampling, rollouts
and chat use it. A step is the engine's answer, its two readings, and what the task's state returns for its calls.

With a chat template the episode is kept as token ids: generated ids are never decoded and encoded again, and the ids of
results and of the next answer's opening are those that the template adds. Without one, the engine renders the
conversation for each prompt.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from fctune.base.errors import DataError
from fctune.calls.answers import ends_inside_call, find_unread_call, read_text
from fctune.calls.formats.base import CallFormat, Malformed, Parsed
from fctune.calls.tool_calls import Reading, read_tool_calls
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, Tool, to_encodable
from fctune.engines.engine import Answer, AnswerTokens, Engine, Prompt
from fctune.tasks.task import EpisodeStopped, Step, Task, TaskError, TaskState

if TYPE_CHECKING:
    from fctune.tasks.opinions import Opinion


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        max_new_tokens: Tokens of one answer.
        max_turns: Answers of the model; None: only the task ends an episode.
        max_tokens: Tokens of the complete episode, prompt and results included; only with a chat template.
    """

    max_new_tokens: int = 256
    max_turns: int | None = None
    max_tokens: int = 4096

    def describe(self) -> str:
        """Return the text that digests of tasks contain; it stays, since checkpoints hold such digests."""
        return (
            f"DialogueLimits(max_turns={self.max_turns}, max_new_tokens={self.max_new_tokens}, "
            f"max_tokens={self.max_tokens})"
        )


@dataclass(slots=True)
class EpisodeTokens:
    """The token ids of an episode.

    Attributes:
        prompt_ids: Token ids of the prompt.
        ids: Token ids after the prompt.
        is_generated: True for each id that the model generated.
        logprobs: Log-probability of each generated id, 0 for the others.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    is_generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def context(self) -> tuple[int, ...]:
        """All ids so far."""
        return (*self.prompt_ids, *self.ids)

    def add_generated(self, tokens: AnswerTokens) -> None:
        """Append the ids of an answer."""
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.is_generated += [True] * len(tokens.ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Append ids that the template adds between answers."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.is_generated += [False] * len(ids)

    def to_json(self) -> dict[str, Any]:
        """Return the ids as plain values, which ``from_json`` reads back."""
        flags = [int(one) for one in self.is_generated]
        return {
            "prompt_ids": list(self.prompt_ids),
            "ids": list(self.ids),
            "is_generated": flags,
            "logprobs": list(self.logprobs),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> EpisodeTokens:
        """Return the ids from the plain values of ``to_json``."""
        flags = list(map(bool, row["is_generated"]))
        return cls(tuple(row["prompt_ids"]), list(row["ids"]), flags, list(row["logprobs"]))


@dataclass(slots=True, eq=False)
class Episode:
    """One attempt at a task: its steps so far, the conversation, and how it ended.

    Attributes:
        task: The task.
        sample: Number of the attempt among those at the task.
        seed: Seed of the sampled tokens; None: the engine's.
        tokens: The episode as token ids, if it is kept so.
        messages: The conversation so far.
        steps: The answers with their results.
        transcript: What was said after the prompt, for display.
        version: Oldest version of the policy that wrote a step, or was asked in vain.
        is_cut: The limit of tokens ended an episode that is kept as token ids.
        is_over: Nothing more is asked.
        error: Why there is no verdict; None if there is one.
        is_task_fault: The task failed, and not the model or its server.
        stopped: Why the task ended the episode early; None if it did not.
        is_unanswered: It was stopped because the model could not answer.
        rejected: Kinds of unusable answers that a server sent.
        opinion: What a language model that judges said of the answer, if it was asked.
    """

    task: Task
    sample: int = 0
    seed: int | None = None
    tokens: EpisodeTokens | None = None
    messages: tuple[Message, ...] = ()
    steps: list[Step] = field(default_factory=list)
    transcript: list[str] = field(default_factory=list)
    version: int = 0
    is_cut: bool = False
    is_over: bool = False
    error: str | None = None
    is_task_fault: bool = False
    stopped: str | None = None
    is_unanswered: bool = False
    rejected: tuple[str, ...] = ()
    opinion: Opinion | None = None
    _state: TaskState | None = None
    _has_one_call_each: bool = False
    _num_calls: int = 0

    @property
    def state(self) -> TaskState:
        """The task's state; only once the episode was started."""
        assert self._state is not None, "the episode was not started"
        return self._state

    @property
    def conversation(self) -> Conversation:
        """The conversation so far, with the tools on offer now."""
        if not self.steps:
            return self.state.prompt
        return replace(self.state.prompt, messages=self.messages, tools=self.state.tools)

    def start(self) -> None:
        """Open the task's state.

        Raises:
            TaskError: The task failed.
        """
        self._state = self.task.start()
        self.messages = self._state.prompt.messages
        self._num_calls = sum(len(message.calls) for message in self.messages)

    def adopt(self, state: TaskState, steps: Sequence[Step]) -> None:
        """Take the steps of an episode that something else ran, and the state that its last answer is of."""
        self._state, self.steps, self.is_over = state, list(steps), True

    @property
    def final_text(self) -> str:
        """Text of the last answer without its calls; empty if it was cut off, or if the episode ended without one."""
        if self.is_cut or self.is_unanswered or not self.steps or self.steps[-1].answer.is_cut:
            return ""
        return self.steps[-1].parsed.prose

    def fail(self, reason: str, is_task_fault: bool = False) -> None:
        """End the episode without anything that could be judged."""
        self.error, self.is_task_fault, self.is_over = reason, is_task_fault, True

    def stop(self, stopped: EpisodeStopped) -> None:
        """End the episode early; it is judged."""
        self.stopped, self.is_unanswered, self.is_over = str(stopped), stopped.is_unanswered, True

    def add_answer(self, answer: Answer, call_format: CallFormat | None, acts_on: Literal["strict", "lenient"]) -> Step:
        """Read an answer and append its step."""
        self.note_origin(answer)
        reading = read_answer(answer, call_format, self.state.tools)
        parsed = reading.strict if acts_on == "strict" else reading.lenient
        step = Step(answer, reading, parsed, () if parsed.malformed else tuple(map(self._with_id, parsed.calls)))
        if reading.strict.malformed and not answer.is_cut:
            if call_format is not None:
                step.is_open = ends_inside_call(answer.text, call_format, reading, self.state.tools, answer.reasoning)
            elif (unread := _find_unread_call(answer, self.state.tools)) is not None:
                step.is_open = unread[1]
        self.steps.append(step)
        self.transcript.append(answer.text)
        return step

    def note_origin(self, answer: Answer) -> None:
        """Keep what an answer, usable or not, says about the policy and the server that it is from."""
        self.rejected += answer.rejected
        self.version = min(self.version, answer.version) if self.steps else answer.version

    def add_messages(self, step: Step, following: Sequence[Message]) -> None:
        """Append an answer and what followed it to the conversation."""
        new = (step.to_message(), *following)
        self.messages += with_one_call_each(new) if self._has_one_call_each else new

    def split_calls(self) -> bool:
        """Write one call to a message from now on, in earlier messages as well; False if that changes nothing.

        Some templates refuse several calls in one message, though their model has just made them.
        """
        if self._has_one_call_each or not any(len(step.calls) > 1 for step in self.steps):
            return False
        start = len(self.state.prompt.messages)
        self.messages = (*self.messages[:start], *with_one_call_each(self.messages[start:]))
        self._has_one_call_each = True
        return True

    def close(self) -> None:
        """Release what the task's state holds."""
        if self._state is not None:
            self._state.close()

    def _with_id(self, call: Call) -> Call:
        # Nine letters and digits: Mistral's templates and tokenizers accept no other ids.
        self._num_calls += 1
        return Call(to_encodable(call.name), to_encodable(call.arguments), f"call{self._num_calls:05d}")


class EpisodeRunner:
    """Runs episodes with an engine.

    Args:
        engine: The model or server.
        call_format: The call format of its text; None: the server has parsed the calls.
        limits: Where episodes end.
        template: Chat template with which episodes are kept as token ids, for an engine that continues ids; None: the
            engine renders the conversations.
        acts_on: The reading whose calls are made: ``lenient`` as serving engines do, or ``strict``, so that only
            well-formed calls are rewarded.
    """

    def __init__(
        self,
        engine: Engine,
        call_format: CallFormat | None,
        limits: EpisodeLimits,
        *,
        template: ChatTemplate | None = None,
        acts_on: Literal["strict", "lenient"] = "lenient",
    ):
        self._engine, self._call_format, self._limits = engine, call_format, limits
        self._template = template
        self._acts_on: Literal["strict", "lenient"] = acts_on

    def run(
        self,
        episodes: Iterable[Episode],
        num_at_once: int | None = None,
        is_first: bool = True,
        gives_up: bool = True,
    ) -> Iterator[Episode]:
        """Yield each episode as it ends; its state is closed when the next one is requested.

        Args:
            episodes: Episodes to run.
            num_at_once: Number of episodes that advance together; the next begins when one has ended. None: all.
            is_first: No prompt was answered before, so an engine that can answer none of them is an error.
            gives_up: The rest fails unasked after many failures in a row; only with a number.

        Raises:
            DataError: ``is_first``, and none of the first prompts can be answered.
        """
        waiting, active, num_lost_in_a_row = deque(episodes), list[Episode](), 0
        try:
            while waiting or active:
                while waiting and (num_at_once is None or len(active) < num_at_once):
                    episode = waiting.popleft()
                    self._start(episode)
                    if episode.is_over:
                        yield from _closed_after(episode)
                    else:
                        active.append(episode)
                for answer in self._answer([self._to_prompt(episode) for episode in active], is_first):
                    episode = active[answer.index]
                    self._take(episode, answer)
                    is_first &= answer.error is not None
                    is_lost = episode.error is not None and not episode.is_task_fault
                    num_lost_in_a_row = num_lost_in_a_row + 1 if is_lost else 0
                    if episode.is_over:
                        yield from _closed_after(episode)
                active = [episode for episode in active if not episode.is_over]
                if gives_up and num_at_once is not None and num_lost_in_a_row >= max(8, 2 * num_at_once):
                    for episode in waiting:
                        self._start(episode)
                        episode.fail(f"not queried: {num_lost_in_a_row} conversations in a row got no answer")
                        yield from _closed_after(episode)
                    waiting.clear()
        finally:
            for episode in active:
                if not episode.is_over:
                    episode.close()

    def _start(self, episode: Episode) -> None:
        try:
            episode.start()
            if self._template is None:
                return
            if episode.tokens is None:
                episode.tokens = EpisodeTokens(tuple(self._template.encode_prompt(episode.state.prompt)))
        except (TaskError, DataError) as error:
            episode.fail(str(error), isinstance(error, TaskError))
            return
        num_tokens, most = len(episode.tokens.prompt_ids), self._limits.max_tokens
        if num_tokens >= most:
            episode.fail(f"{num_tokens:,} prompt tokens leave no room within {most:,}")

    def _to_prompt(self, episode: Episode) -> Prompt:
        limits, state = self._limits, episode.state
        is_continued = state.is_dialogue and len(episode.steps) + 1 != limits.max_turns
        if episode.tokens is None:
            options: dict[str, Any] = {"choices": state.choices, "is_continued": is_continued}
            return Prompt(episode.conversation, limits.max_new_tokens, episode.task.sample, **options)
        ids = episode.tokens.context
        room = min(limits.max_new_tokens, limits.max_tokens - len(ids))
        assert episode.seed is not None, "an episode that is kept as token ids has a seed"
        # An episode of one answer uses its seed as it is.
        seed = episode.seed if limits.max_turns is None else make_seed(episode.seed, len(episode.steps))
        return Prompt(state.prompt, room, episode.sample, ids, seed, is_continued=is_continued)

    def _answer(self, prompts: Sequence[Prompt], is_first: bool) -> Iterator[Answer]:
        """Answer each prompt; if the engine raises because it cannot answer any, each gets that error."""
        if not prompts:
            return
        try:
            yield from self._engine.answer(prompts)
        except DataError as error:
            if is_first:
                raise
            if len(prompts) == 1:
                yield Answer(0, error=str(error).rpartition(f"{prompts[0].conversation.source}: ")[2])
                return
            for index, prompt in enumerate(prompts):
                for answer in self._answer([prompt], is_first=False):
                    yield replace(answer, index=index)

    def _take(self, episode: Episode, answer: Answer) -> None:
        """Continue an episode with the model's answer."""
        if answer.error is not None:
            self._take_error(episode, answer)
            return
        if episode.tokens is not None:
            assert answer.tokens is not None, "the engine keeps no tokens"
            episode.tokens.add_generated(answer.tokens)
        step = episode.add_answer(answer, self._call_format, self._acts_on)
        if episode.tokens is not None and answer.is_cut:  # without its stop token, nothing can follow
            episode.is_cut = episode.is_over = True
            return
        try:
            following = tuple(episode.state.respond(step))
            if episode.tokens is None:
                episode.add_messages(step, following)
            episode.is_over = not following or len(episode.steps) == self._limits.max_turns
            if episode.tokens is not None and not episode.is_over:
                self._append(episode, episode.tokens, step, following)
        except EpisodeStopped as stopped:
            episode.add_messages(step, stopped.following)
            episode.stop(stopped)
        except (TaskError, DataError) as error:
            episode.fail(f"turn {len(episode.steps)}: {error}", isinstance(error, TaskError))

    def _take_error(self, episode: Episode, answer: Answer) -> None:
        assert answer.error is not None
        episode.note_origin(answer)
        try:
            reason = episode.state.describe_error(answer.error)
        except EpisodeStopped as stopped:
            episode.stop(stopped)
            return
        if episode.tokens is not None or not episode.split_calls():
            episode.fail(reason)

    def _append(self, episode: Episode, tokens: EpisodeTokens, step: Step, following: Sequence[Message]) -> None:
        """Append the messages that follow an answer; end the episode if no room is left for another answer."""
        assert self._template is not None
        index = len(episode.messages)
        episode.add_messages(step, following)
        ids = self._template.encode_continuation(episode.conversation, index)
        if len(tokens.context) + len(ids) >= self._limits.max_tokens:
            episode.is_cut = episode.is_over = True
            return
        tokens.add_context(ids)
        episode.transcript += [f"[{message.role}] {message.content}" for message in following]


def read_answer(answer: Answer, call_format: CallFormat | None, tools: Sequence[Tool] = ()) -> Reading:
    """Read the calls of an answer, strictly and leniently.

    Args:
        answer: The model's answer.
        call_format: The call format of its text; None: the server has parsed the calls.
        tools: The tools on offer.
    """
    if call_format is not None and not answer.choices:
        return read_text(answer.text, call_format, tools, answer.reasoning)
    if (unread := _find_unread_call(answer, tools)) is not None:
        parsed = Parsed((), (unread[0],), _get_prose(answer)[: unread[0].start].strip())
        return Reading(parsed, parsed)
    return read_tool_calls(answer.tool_calls or (), _get_prose(answer).strip())


def _find_unread_call(answer: Answer, tools: Sequence[Tool]) -> tuple[Malformed, bool] | None:
    """Return the call that a server left in the text of an answer; None if it read calls, or there is none."""
    return None if answer.tool_calls or answer.choices else find_unread_call(_get_prose(answer), tools)


def _get_prose(answer: Answer) -> str:
    return answer.reasoning.blank(answer.text) if answer.reasoning else answer.text


def with_one_call_each(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages in which one with several calls becomes several, each before the result of its call."""
    rest, written = iter(messages), list[Message]()
    for message in rest:
        if len(message.calls) < 2:
            written.append(message)
            continue
        results = islice(rest, len(message.calls))
        written.append(replace(message, calls=message.calls[:1]))
        for call, result in zip(message.calls, results, strict=True):
            if call is not message.calls[0]:
                written.append(Message("assistant", None, (call,)))
            written.append(result)
    return tuple(written)


def make_seed(*parts: Any) -> int:
    """Return a 48-bit seed derived from any values, such as the run's seed, a task, a sample and a step."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "big")


def _closed_after(episode: Episode) -> Iterator[Episode]:
    """Yield an episode, and close it afterwards."""
    try:
        yield episode
    finally:
        episode.close()
