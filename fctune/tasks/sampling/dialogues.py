"""Multi-turn rollouts: generate, parse the calls, append the tools' results as token ids, generate again.

Generated tokens are never re-encoded. The ids of results and of the next answer's opening come from the chat template;
they are context and not trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fctune.base.errors import ConfigError, DataError
from fctune.calls.answers import read_text
from fctune.calls.formats.base import CallFormat, Parsed
from fctune.calls.reasoning.base import Reasoning
from fctune.data.chat_template import ChatTemplate
from fctune.data.conversation import Call, Conversation, Message, to_encodable
from fctune.engines.decoding import AnswerDecoder
from fctune.tasks.sampling.rewards import toss_coin, weigh_parts
from fctune.tasks.sampling.rollouts import Generation, Request, Rollout, RolloutEngine, make_seed

# Failing tasks in a row after which the cause must be systematic, so that more tasks will not help. A single task,
# such as one whose prompt is too long, fails as many times as its group has answers.
_MAX_FAILING = 20


class DialogueError(Exception):
    """The world of a dialogue failed, through no fault of the policy."""


class World(Protocol):
    """The other side of a dialogue: answers the policy's calls, and judges the dialogue at the end."""

    prompt: Conversation
    category: str

    def respond(self, parsed: Parsed) -> Sequence[Message]:
        """Return the messages that follow an answer, read strictly; none end the dialogue.

        Raises:
            DialogueError: The world cannot answer.
        """

    def score(self, text: str) -> Mapping[str, float]:
        """Return the parts of the reward; ``text`` is the prose of the last answer, empty if it was cut off.

        Raises:
            DialogueError: The dialogue cannot be judged.
        """

    def close(self) -> None:
        """Release what the world holds."""


@dataclass(frozen=True, slots=True)
class DialogueLimits:
    """Limits of a dialogue.

    Attributes:
        max_turns: Answers of the policy.
        max_new_tokens: Tokens of one answer.
        max_tokens: Tokens of the complete dialogue, prompt and results included.
    """

    max_turns: int = 8
    max_new_tokens: int = 256
    max_tokens: int = 4096


@dataclass(slots=True)
class _Dialogue:
    request: Request
    world: World
    conversation: Conversation
    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    is_generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last_prose: str = ""
    num_turns: int = 0
    num_calls: int = 0
    version: int = 0
    is_cut: bool = False
    is_over: bool = False
    error: str | None = None
    rejected: tuple[str, ...] = ()

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.ids)

    def fail(self, reason: str) -> None:
        self.error, self.is_over = reason, True


class DialoguePlayer:
    """Plays a batch of dialogues, advancing all of them by one turn at a time.

    Args:
        template: Chat template and tokenizer of the policy.
        call_format: Format in which it writes calls.
        limits: Where dialogues end.
        weights: Weight of each part of the reward.
    """

    def __init__(
        self, template: ChatTemplate, call_format: CallFormat, limits: DialogueLimits, weights: Mapping[str, float]
    ):
        self._template = template
        self._call_format = call_format
        self._limits = limits
        self._weights = dict(weights)
        self._decoder = AnswerDecoder(template, template.stop_ids)
        self._failing: set[str] = set()  # tasks of the failures since the last answer

    def play(
        self, engine: RolloutEngine, requests: Iterable[Request], open_world: Callable[[Request], World]
    ) -> Iterator[Rollout]:
        """Yield the rewarded rollout of each request, in the order in which dialogues end.

        A world that fails, or a template that cannot continue, ends its dialogue with an error.

        Raises:
            ConfigError: Many tasks in a row failed.
        """
        active: list[_Dialogue] = []
        for request in requests:
            opened = self._open(request, open_world)
            if isinstance(opened, Rollout):
                yield self._count(opened)
            else:
                active.append(opened)
        try:
            while active:
                for dialogue in self._advance(engine, active):
                    if dialogue.is_over:
                        yield self._count(self._finish(dialogue))
                active = [dialogue for dialogue in active if not dialogue.is_over]
        finally:
            for dialogue in active:
                dialogue.world.close()

    def _open(self, request: Request, open_world: Callable[[Request], World]) -> _Dialogue | Rollout:
        world: World | None = None
        try:
            world = open_world(request)
            prompt_ids = tuple(self._template.encode_prompt(world.prompt))
        except (DialogueError, DataError) as error:
            if world is not None:
                world.close()
            return _make_failed(request, "" if world is None else world.category, str(error))
        room = self._limits.max_tokens - len(prompt_ids)
        if room <= 0:
            world.close()
            said = f"{len(prompt_ids):,} prompt tokens leave no room within {self._limits.max_tokens:,}"
            return _make_failed(request, world.category, said)
        return _Dialogue(request, world, world.prompt, prompt_ids)

    def _advance(self, engine: RolloutEngine, active: Sequence[_Dialogue]) -> Iterator[_Dialogue]:
        """Generate one answer for each dialogue, and yield each with what followed."""
        prompts = [dialogue.context for dialogue in active]
        seeds = [make_seed(dialogue.request.seed, dialogue.num_turns) for dialogue in active]
        rooms = [min(self._limits.max_new_tokens, self._limits.max_tokens - len(prompt)) for prompt in prompts]
        for generation in engine.generate(prompts, seeds, rooms):
            dialogue = active[generation.index]
            dialogue.rejected += generation.rejected
            if generation.error is not None:
                dialogue.fail(generation.error)
            else:
                self._take(dialogue, generation)
            yield dialogue

    def _take(self, dialogue: _Dialogue, generation: Generation) -> None:
        context = dialogue.context
        dialogue.ids += generation.ids
        dialogue.logprobs += generation.logprobs
        dialogue.is_generated += [True] * len(generation.ids)
        # The oldest policy that wrote any part of the answer.
        dialogue.version = min(dialogue.version, generation.version) if dialogue.num_turns else generation.version
        dialogue.num_turns += 1
        has_stop = not generation.is_cut and bool(generation.ids)
        text = self._template.decode(generation.ids[:-1] if has_stop else generation.ids)
        dialogue.texts.append(text)
        if generation.is_cut:
            dialogue.is_cut = dialogue.is_over = True
            return
        reasoning = self._decoder.find_reasoning(context, text)
        parsed = read_text(text, self._call_format, dialogue.conversation.tools, reasoning).strict
        dialogue.last_prose = parsed.prose
        answer = self._to_message(dialogue, parsed, reasoning)
        try:
            following = () if parsed.malformed else dialogue.world.respond(parsed._replace(calls=answer.calls))
            if not following or dialogue.num_turns >= self._limits.max_turns:
                dialogue.is_over = True
                return
            self._append(dialogue, answer, following)
        except (DialogueError, DataError) as error:
            dialogue.fail(f"turn {dialogue.num_turns}: {error}")

    def _append(self, dialogue: _Dialogue, answer: Message, following: Sequence[Message]) -> None:
        """Append the messages that follow an answer; end the dialogue if no room is left for another answer."""
        index = len(dialogue.conversation.messages)
        dialogue.conversation = replace(
            dialogue.conversation, messages=(*dialogue.conversation.messages, answer, *following)
        )
        ids = self._template.encode_continuation(dialogue.conversation, index)
        if len(dialogue.context) + len(ids) >= self._limits.max_tokens:
            dialogue.is_cut = dialogue.is_over = True
            return
        dialogue.ids += ids
        dialogue.is_generated += [False] * len(ids)
        dialogue.logprobs += [0.0] * len(ids)
        dialogue.texts += [f"[{message.role}] {message.content}" for message in following]

    def _finish(self, dialogue: _Dialogue) -> Rollout:
        start = time.perf_counter()
        parts: Mapping[str, float] = {}
        text = "\n".join(dialogue.texts)
        try:
            if dialogue.error is None:
                scored = dialogue.world.score("" if dialogue.is_cut else dialogue.last_prose)
                parts = {**scored, "random": toss_coin(dialogue.request.case_id, text)}
        except DialogueError as error:
            dialogue.fail(str(error))
        finally:
            dialogue.world.close()
        if dialogue.error is not None:
            return _make_failed(dialogue.request, dialogue.world.category, dialogue.error, dialogue.rejected)
        return Rollout(
            dialogue.request.case_id,
            dialogue.request.sample,
            dialogue.world.category,
            dialogue.version,
            dialogue.prompt_ids,
            tuple(dialogue.ids),
            tuple(dialogue.is_generated),
            tuple(dialogue.logprobs),
            dialogue.is_cut,
            weigh_parts(parts, self._weights),
            parts,
            text,
            judging_s=time.perf_counter() - start,
            rejected=dialogue.rejected,
        )

    def _count(self, rollout: Rollout) -> Rollout:
        if rollout.error is None:
            self._failing.clear()
        else:
            self._failing.add(rollout.case_id)
        if len(self._failing) >= _MAX_FAILING:
            raise ConfigError(
                f"all dialogues of {len(self._failing)} tasks in a row failed, the last one, {rollout.case_id}, with: "
                f"{rollout.error}. Fix the cause and run the same command again to resume."
            )
        return rollout

    def _to_message(self, dialogue: _Dialogue, parsed: Parsed, reasoning: Reasoning | None) -> Message:
        calls = []
        for call in parsed.calls:
            dialogue.num_calls += 1
            # Nine letters and digits: Mistral's templates and tokenizers accept no other ids.
            calls.append(Call(to_encodable(call.name), to_encodable(call.arguments), f"call{dialogue.num_calls:05d}"))
        thought = (to_encodable(reasoning.text) or None) if reasoning is not None else None
        prose = to_encodable(parsed.prose)
        return Message("assistant", prose or (None if calls else ""), tuple(calls), reasoning=thought)


def to_results(calls: Sequence[Call], results: Sequence[str]) -> tuple[Message, ...]:
    """Return the tools' messages with the results of calls."""
    return tuple(
        Message("tool", to_encodable(result), call_id=call.id, name=call.name)
        for call, result in zip(calls, results, strict=True)
    )


def _make_failed(request: Request, category: str, reason: str, rejected: tuple[str, ...] = ()) -> Rollout:
    reason = " ".join(reason.split())[:400]
    return Rollout(request.case_id, request.sample, category, 0, (), (), (), (), error=reason, rejected=rejected)
