"""Renderings of a conversation's samples, with the text of each supervised turn.

A conversation is divided into samples (``fctune.data.turns``), and the traced template reports which text of a sample
belongs to which message (``fctune.data.tracing``). Of a supervised turn, the text between the end of the generation
prompt and the end of the stop token is supervised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fctune.base.errors import DataError
from fctune.data.call_ids import find_answered
from fctune.data.completeness import (
    REASONING,
    CompletenessCheck,
    Missing,
    UnprintedError,
    describe_missing,
    find_unescaped,
)
from fctune.data.conversation import Conversation, Message
from fctune.data.reasoning import ReasoningMode, ThinkingMode
from fctune.data.tracing import Span, TracedTemplate
from fctune.data.turns import Sample, TurnPlanner

TrainOn = Literal["assistant", "last_assistant", "calls"]
TrainReasoning = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class SupervisionConfig:
    """Selects which tokens of a conversation are supervised; the fields are those of the config's ``data`` section."""

    train_on: TrainOn = "assistant"
    train_reasoning: TrainReasoning = "all"
    call_weight: float = 1.0
    parallel_calls: Literal["error", "split"] = "error"
    content_with_calls: Literal["error", "drop"] = "error"
    special_tokens_in_content: Literal["fail", "escape", "keep"] = "fail"
    reasoning: ReasoningMode = "keep"
    thinking: ThinkingMode = "rows"  # auto sets the switch of every row, so it needs a run that has reasoning

    def weigh_message(self, conversation: Conversation, index: int) -> float:
        """Return the loss weight of a message; 0.0 if it is not supervised."""
        message = conversation.messages[index]
        if message.role != "assistant":
            return 0.0
        if self.train_on == "calls" and not message.calls:
            return 0.0
        if self.train_on == "last_assistant":
            last = max(i for i, m in enumerate(conversation.messages) if m.role == "assistant")
            if index != last:
                return 0.0
        return message.weight

    def is_reasoning_trained(self, conversation: Conversation, index: int) -> bool:
        """Return True if the reasoning of a supervised message is supervised."""
        if self.train_reasoning == "last":
            return all(message.role != "user" for message in conversation.messages[index:])
        return self.train_reasoning == "all"


@dataclass(frozen=True, slots=True)
class Turn:
    """The part ``text[start:end]`` of a rendering that the model writes.

    ``reasoning_end`` and ``prose_end`` are the ends of its reasoning and of its text before calls. ``appended`` is the
    id of the stop token if the rendering ends without it.
    """

    weight: float
    call_weight: float
    start: int
    reasoning_end: int
    prose_end: int
    end: int
    appended: int | None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A sample's messages, text and supervised turns by message, in order.

    ``render_alike`` renders messages of the same structure in the same way, if it is not simply with the template.
    """

    conversation: Conversation
    text: str
    turns: dict[int, Turn]
    render_alike: Callable[[Conversation], str] | None = None


@dataclass(frozen=True, slots=True)
class SampleRenderer:
    """Renders the samples of conversations completely.

    Args:
        template: Traced chat template.
        completeness: Finds the parts of a row that the template does not print.
        planner: Divides conversations into samples.
        supervision: Selects the supervised tokens.
    """

    template: TracedTemplate
    completeness: CompletenessCheck
    planner: TurnPlanner
    supervision: SupervisionConfig

    def render(self, conversation: Conversation) -> list[Rendering]:
        """Return the renderings of a conversation's samples; each supervised turn is in exactly one.

        Raises:
            DataError: The template rejects the conversation, does not print a part of it, or prints a call that cannot
                be read; or a turn does not continue its generation prompt.
        """
        turns = [i for i in range(len(conversation.messages)) if self.supervision.weigh_message(conversation, i) > 0]
        renderings = self._render_samples(conversation, turns)
        missing = self._find_missing(conversation, renderings)
        if missing:
            shorter = self._drop_parts(conversation, missing)
            if shorter is not conversation:
                conversation = shorter
                renderings = self._render_samples(conversation, turns)
                missing = self._find_missing(conversation, renderings)
        if missing:
            raise UnprintedError(describe_missing(missing, conversation), missing[0])
        for rendering in renderings:
            for index, turn in rendering.turns.items():
                calls = conversation.messages[index].calls
                path = find_unescaped(calls, rendering.text[turn.start : turn.end]) if calls else None
                if path is not None:
                    raise DataError(
                        f"the chat template prints the argument {path} of messages[{index}] in quotes without escaping "
                        "the quotes, backslashes or line breaks in it, so the call cannot be parsed back; change the "
                        "argument, use another template, or skip the row"
                    )
        return renderings

    def _drop_parts(self, conversation: Conversation, missing: list[Missing]) -> Conversation:
        """Return the conversation without those of the missing parts that the config drops; itself if there is none."""
        messages = list(conversation.messages)
        for index, part in missing:
            if part is None and messages[index].calls and self.supervision.content_with_calls == "drop":
                messages[index] = replace(messages[index], content=None)
            elif part == REASONING and self.supervision.reasoning == "keep_printed":
                messages[index] = replace(messages[index], reasoning=None)
        if all(new is old for new, old in zip(messages, conversation.messages, strict=True)):
            return conversation
        return replace(conversation, messages=tuple(messages))

    def _find_missing(self, conversation: Conversation, renderings: list[Rendering]) -> list[Missing]:
        """Return the parts that the samples lack, in order.

        A turn must be complete where it is supervised; elsewhere the template may shorten it as it does at inference.
        """
        supervised = {index for rendering in renderings for index in rendering.turns}
        found: set[Missing] = set()
        for rendering in renderings:
            for part in self.completeness.find_missing(rendering.conversation, rendering.text, rendering.render_alike):
                is_shortened = conversation.messages[part.message].role == "assistant" and (
                    part.message in supervised or self._is_rewritten(rendering.conversation, part)
                )
                if part.message in rendering.turns or not is_shortened:
                    found.add(part)
        return sorted(found, key=lambda part: (part.message, -2 if part.call is None else part.call))

    def _is_rewritten(self, conversation: Conversation, part: Missing) -> bool:
        """Return True if the template prints a part where its message is the last, or it is reasoning."""
        if part.call == REASONING:
            return True
        until = replace(conversation, messages=conversation.messages[: part.message + 1])
        return part not in self.completeness.find_missing(until, self.template.render(until)[0])

    def _render_samples(self, conversation: Conversation, turns: list[int]) -> list[Rendering]:
        renderings = [self._render_sample(conversation, sample) for sample in self.planner.plan(conversation, turns)]
        if None in renderings:  # a value changed what its structure leads to
            exact = self.planner.plan_exactly(conversation, turns)
            renderings = [self._render_sample(conversation, sample) for sample in exact]
            if None in renderings:
                raise DataError("the chat template does not end an assistant turn with a stop token")
        return [rendering for rendering in renderings if rendering is not None]

    def _render_sample(self, conversation: Conversation, sample: Sample) -> Rendering | None:
        """Render a sample and find its turns; None if one of them does not start or end as planned."""
        text, spans = self.planner.render(conversation, sample)
        cut = self.planner.cut(conversation, sample)
        by_message = {span.message: span for span in reversed(spans)}
        turns: dict[int, Turn] = {}
        for index, header in sample.headers.items():
            span = by_message.get(index)
            if span is None or not text.startswith(header, span.start):
                return None
            message, start = conversation.messages[index], span.start + len(header)
            end, appended = self._find_end(cut, span, text, start, by_message)
            if end is None:
                return None
            reasoning_end = start
            if message.reasoning and not self.supervision.is_reasoning_trained(conversation, index):
                reasoning_end = _find_reasoning_end(message.reasoning, text, start, end)
            prose_end = _find_prose_end(message, text, start, end)
            weight = self.supervision.weigh_message(conversation, index)
            call_weight = weight * self.supervision.call_weight if message.calls else weight
            turns[index] = Turn(weight, call_weight, start, reasoning_end, prose_end, end, appended)
        render_alike = (lambda probe: self.planner.render(probe, sample)[0]) if sample.is_joined else None
        return Rendering(cut, text, turns, render_alike)

    def _find_end(
        self, conversation: Conversation, span: Span, text: str, start: int, spans: Mapping[int, Span]
    ) -> tuple[int | None, int | None]:
        """Return the end of a turn with its stop token, and the id of the token if the text ends without it."""
        following, stop = span.message + 1, span.stop
        if following not in spans and following < len(conversation.messages):  # a result is printed within the turn
            until = replace(conversation, messages=conversation.messages[:following])
            stop = len(self.template.render(until)[0])
            if not start <= stop <= span.stop:
                return None, None
        turn_end = self.planner.find_end(conversation.messages[span.message])
        if turn_end.printed:
            return turn_end.find(text, start, stop), None
        if stop == len(text):
            return stop, turn_end.appended
        return turn_end.find_following(text, stop), None


def _find_reasoning_end(reasoning: str, text: str, start: int, end: int) -> int:
    words = reasoning.strip()
    found = text.find(words, start, end)
    if found < 0:
        raise DataError(
            "the chat template changes the reasoning of a turn, so it cannot be left untrained; set "
            "data.train_reasoning=all"
        )
    return found + len(words)


def _find_prose_end(message: Message, text: str, start: int, end: int) -> int:
    """Return the end of the message's reasoning and content within ``text[start:end]``; ``start`` without any."""
    stop = start
    for part in (message.reasoning, message.content):
        words = part and part.strip()
        if words and (found := text.find(words, stop, end)) >= 0:
            stop = found + len(words)
    return stop


def split_parallel_calls(conversation: Conversation) -> Conversation:
    """Return the conversation with one call per turn, each followed by its own result.

    Results are matched as the reader of rows matches them; those that answer no call of the turn follow its calls.
    """
    messages: list[Message] = []
    pending = list(conversation.messages)
    while pending:
        message = pending.pop(0)
        if len(message.calls) < 2:
            messages.append(message)
            continue
        waiting = list(enumerate(message.calls))
        results: dict[int, Message] = {}  # by the number of their call
        others: list[Message] = []
        while pending and pending[0].role == "tool":
            result = pending.pop(0)
            index = find_answered([call for _, call in waiting], result.call_id, result.name)
            if index is None:
                others.append(result)
            else:
                results[waiting.pop(index)[0]] = result
        for number, call in enumerate(message.calls):
            turn = message if number == 0 else replace(message, content=None, reasoning=None)
            messages.append(replace(turn, calls=(call,)))
            if number in results:
                messages.append(results[number])
        messages += others
    return replace(conversation, messages=tuple(messages))
