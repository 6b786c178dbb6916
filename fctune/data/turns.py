"""Training samples of a conversation: its supervised turns, each with the history that the model will see.

At inference the model continues the generation prompt of the messages so far until it emits a stop token. Many chat
templates rewrite earlier turns, for example without their reasoning, so the rendering of a complete conversation does
not hold every turn as the model writes it. ``TurnPlanner`` renders each turn as it is at inference, and joins the turns
that one rendering holds unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fctune.base.errors import DataError
from fctune.data.conversation import Conversation, Message
from fctune.data.structure import describe_structure, mark_parts
from fctune.data.tracing import Span, TracedTemplate

_MAX_PLANS = 20_000


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of a kind of turn in a chat template.

    Args:
        printed: Spellings of the stop tokens that the template prints at the end of the turn.
        following: If it prints none, spellings of the tokens that open the next message, with which the model stops.
        appended: If it prints none, the id of the stop token where no message follows.
    """

    printed: tuple[str, ...]
    following: tuple[str, ...] = ()
    appended: int | None = None

    def find(self, text: str, start: int, stop: int) -> int | None:
        """Return the index after the stop token at the end of ``text[start:stop]``; None if there is none."""
        end = start + len(text[start:stop].rstrip())
        return end if self.printed and text.endswith(self.printed, start, end) else None

    def find_following(self, text: str, start: int) -> int | None:
        """Return the index after the stop token at ``start``, where the next message begins; None if there is none."""
        return next((start + len(token) for token in self.following if text.startswith(token, start)), None)


@dataclass(frozen=True, slots=True)
class Sample:
    """The first messages of a conversation and its supervised turns.

    Args:
        num_messages: Number of messages.
        template_args: Template switches of its rendering.
        headers: By supervised message, the text of the turn that belongs to the generation prompt.
        is_joined: True if the text is the prompt of the last turn and the turn, since the template renders the messages
            before a turn differently once the turn follows them.
    """

    num_messages: int
    template_args: Mapping[str, Any]
    headers: Mapping[int, str]
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn at inference.

    Args:
        template_args: Template switches.
        prompt: Text of the generation prompt.
        text: Text up to the turn; None if the template requires a message to follow it.
        end: End of the stop token in the text, if it is printed.
        is_joined: True if the text is not one rendering, but the prompt joined with the turn's part of another.
    """

    template_args: Mapping[str, Any]
    prompt: str
    text: str | None
    end: int | None
    is_joined: bool = False


class TurnPlanner:
    """Divides conversations into samples.

    The division depends on which parts the messages have, seldom on their values, so it is determined once for each
    structure.

    Args:
        template: Traced chat template.
        answer_end: End of a turn without calls.
        call_end: End of a turn with calls.
        thinking_switch: Variable that turns reasoning on and off, or None.
    """

    def __init__(self, template: TracedTemplate, answer_end: TurnEnd, call_end: TurnEnd, thinking_switch: str | None):
        self._template = template
        self._ends = (answer_end, call_end)
        self._switch = thinking_switch
        self._plans: dict[Any, tuple[Sample, ...] | None] = {}

    def __reduce__(self) -> tuple[type[TurnPlanner], tuple[TracedTemplate, TurnEnd, TurnEnd, str | None]]:
        return TurnPlanner, (self._template, *self._ends, self._switch)

    def find_end(self, message: Message) -> TurnEnd:
        """Return how the turn of a message ends."""
        return self._ends[bool(message.calls)]

    def plan(self, conversation: Conversation, turns: Sequence[int]) -> tuple[Sample, ...]:
        """Return the samples in which the given turns, indices of assistant messages, are supervised.

        Each turn is in one sample. Without turns, the only sample is the complete conversation.

        Raises:
            DataError: A turn does not continue its generation prompt, or the template rejects the conversation.
        """
        if self._template.may_depend_on_values(conversation):
            return self.plan_exactly(conversation, turns)
        key = (tuple(turns), describe_structure(conversation))
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            try:
                self._plans[key] = self.plan_exactly(mark_parts(conversation), turns)
            except DataError:
                self._plans[key] = None  # it may depend on the values
        return self._plans[key] or self.plan_exactly(conversation, turns)

    def plan_exactly(self, conversation: Conversation, turns: Sequence[int]) -> tuple[Sample, ...]:
        """Return what ``plan`` does, determined with the conversation's own values."""
        samples: list[Sample] = []
        all_found = {index: self._find_turn(conversation, index) for index in turns}
        found = {index: turn for index, turn in all_found.items() if turn is not None}
        left, num_messages, is_joined = list(found), len(conversation.messages), False
        while left or not samples:
            template_args = found[left[-1]].template_args if left else conversation.template_args
            sample = Sample(num_messages, template_args, {}, is_joined)
            text, spans = self.render(conversation, sample)
            by_message = {span.message: span for span in reversed(spans)}
            headers: dict[int, str] = {}
            for index in left:
                span = by_message.get(index)
                if span is None:
                    continue
                header = self._find_header(conversation.messages[index], found[index], text, span)
                if header is not None:
                    headers[index] = header
            is_last_try = bool(left) and num_messages == left[-1] + 1 and is_joined == found[left[-1]].is_joined
            if headers or not left:
                samples.append(replace(sample, headers=headers))
            elif is_last_try:
                raise DataError("the chat template starts an assistant turn differently from its generation prompt")
            left = [index for index in left if index not in headers]
            if left:
                num_messages, is_joined = left[-1] + 1, found[left[-1]].is_joined
        return tuple(reversed(samples))

    def render(self, conversation: Conversation, sample: Sample) -> tuple[str, list[Span]]:
        """Return the text of a sample of a conversation and the spans of its messages."""
        if not sample.is_joined:
            return self._template.render(self.cut(conversation, sample))
        index = sample.num_messages - 1
        turn = self._join(_cut(conversation, index + 1, sample.template_args))
        if turn is None or turn.text is None:
            raise DataError("the chat template starts an assistant turn differently from its generation prompt")
        before = _cut(conversation, index, sample.template_args)
        _, spans = self._template.render(before, add_generation_prompt=True)
        closed = len(self._template.render(before)[0])
        start = min(closed, len(turn.prompt))
        return turn.text, [*(span for span in spans if span.stop <= start), Span(index, start, len(turn.text))]

    def cut(self, conversation: Conversation, sample: Sample) -> Conversation:
        """Return the messages of a sample with its switches."""
        return _cut(conversation, sample.num_messages, sample.template_args)

    def _find_turn(self, conversation: Conversation, index: int) -> _Turn | None:
        """Return a turn as it is at inference; None for one that no user's message precedes, if it has no prompt.

        A turn that does not continue the prompt, such as one without reasoning where the prompt begins the reasoning,
        is taken to be written with reasoning switched off, or on.
        """
        problem: DataError | None = None
        for template_args in self._iter_template_args(conversation):
            before, until = (_cut(conversation, count, template_args) for count in (index, index + 1))
            try:
                prompt = self._template.render(before, add_generation_prompt=True)[0]
            except DataError as error:
                if all(message.role != "user" for message in before.messages):
                    return None
                problem = problem or error
                continue
            try:
                text = self._template.render(until)[0]
            except DataError:
                return _Turn(template_args, prompt, None, None)
            if text.startswith(prompt):
                end = self.find_end(conversation.messages[index]).find(text, len(prompt), len(text))
                return _Turn(template_args, prompt, text, end)
        for template_args in self._iter_template_args(conversation):
            turn = self._join(_cut(conversation, index + 1, template_args))
            if turn is not None:
                return turn
        raise problem or DataError("the chat template starts an assistant turn differently from its generation prompt")

    def _join(self, conversation: Conversation) -> _Turn | None:
        """Return the last message as a turn whose text is its prompt and its part of the conversation's rendering.

        None if the part does not begin as the prompt ends.
        """
        index = len(conversation.messages) - 1
        before = replace(conversation, messages=conversation.messages[:index])
        try:
            closed = self._template.render(before)[0]
            prompt = self._template.render(before, add_generation_prompt=True)[0]
            text, spans = self._template.render(conversation)
        except DataError:
            return None
        span = next((span for span in spans if span.message == index), None)
        header = prompt[len(closed) :]
        if span is None or not prompt.startswith(closed) or not text.startswith(header, span.start):
            return None
        text = prompt + text[span.start + len(header) :]
        end = self.find_end(conversation.messages[index]).find(text, len(prompt), len(text))
        return _Turn(conversation.template_args, prompt, text, end, is_joined=True)

    def _iter_template_args(self, conversation: Conversation) -> Iterator[Mapping[str, Any]]:
        yield conversation.template_args
        if self._switch is not None:
            for value in (False, True):
                yield {**conversation.template_args, self._switch: value}

    def _find_header(self, message: Message, turn: _Turn, text: str, span: Span) -> str | None:
        """Return the header of a turn in a rendering; None if the turn is not there as it is at inference."""
        if not text.startswith(turn.prompt) or not span.start <= len(turn.prompt) <= span.stop:
            return None
        if turn.text is not None:
            if not text.startswith(turn.text if turn.end is None else turn.text[: turn.end]):
                return None
            is_last = len(text) == len(turn.text)
            if turn.end is None and not is_last and self.find_end(message).find_following(text, len(turn.text)) is None:
                return None
        return text[span.start : len(turn.prompt)]


def _cut(conversation: Conversation, num_messages: int, template_args: Mapping[str, Any]) -> Conversation:
    if num_messages == len(conversation.messages) and template_args == conversation.template_args:
        return conversation
    return replace(conversation, messages=conversation.messages[:num_messages], template_args=dict(template_args))
