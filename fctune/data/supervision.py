"""Token ids of conversations and the loss weight of each token.

A conversation is divided into samples (``fctune.data.turns``), and the traced template reports which text of a sample
belongs to which message (``fctune.data.tracing``). Of a supervised turn, the text between the end of the generation
prompt and the end of the stop token is supervised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fctune.data.completeness import REASONING, CompletenessCheck, Missing, describe_missing, find_unescaped
from fctune.data.control_tokens import ControlTokens, restore_hidden
from fctune.data.conversation import Conversation, Message
from fctune.data.reasoning import ReasoningMode, ReasoningSupport, ThinkingMode
from fctune.data.token_offsets import OffsetTokenizer, TokenOffsets
from fctune.data.tracing import Span, TracedTemplate
from fctune.data.turns import Sample, TurnPlanner
from fctune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "calls"]
TrainReasoning = Literal["all", "last", "none"]


class SpecialTokenError(DataError):
    """A row spells a special token of the tokenizer."""


def get_defect_kind(error: DataError) -> str:
    """Return the kind of defect (a key of ``DEFECT_KINDS``) of a row that cannot be encoded."""
    return "special_token_in_content" if isinstance(error, SpecialTokenError) else "not_renderable"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation and the loss weight of each token as a target; 0.0 for context."""

    tokens: list[int]
    weights: list[float]

    @property
    def num_supervised(self) -> int:
        """The number of tokens with a nonzero loss weight."""
        return sum(weight > 0 for weight in self.weights)


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


@dataclass(frozen=True, slots=True)
class _Turn:
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
class _Rendering:
    """A sample's messages, text and supervised turns by message, in order.

    ``render_alike`` renders messages of the same structure in the same way, if it is not simply with the template.
    """

    conversation: Conversation
    text: str
    turns: dict[int, _Turn]
    render_alike: Callable[[Conversation], str] | None = None


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Encodes conversations with a chat template and tokenizer; small and quick to send to another process.

    Args:
        template: Traced chat template.
        tokenizer: Tokenizer with offsets.
        control_tokens: The tokenizer's special tokens, as rows may spell them.
        completeness: Finds the parts of a row that the template does not print.
        planner: Divides conversations into samples.
        supervision: Selects the supervised tokens.
        reasoning: The template's use of reasoning and switches.
    """

    template: TracedTemplate
    tokenizer: OffsetTokenizer
    control_tokens: ControlTokens
    completeness: CompletenessCheck
    planner: TurnPlanner
    supervision: SupervisionConfig
    reasoning: ReasoningSupport

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Return the training samples of a conversation; each supervised turn has weights in exactly one.

        A turn's weights start where the generation prompt ends and include the stop token. Token ids are those of
        transformers' ``apply_chat_template`` for the first messages of the conversation, with two exceptions: a stop
        token that the template never prints is appended, and a token is split where it would cross the end of the
        generation prompt, as it is at inference.

        Raises:
            DataError: The template rejects the conversation, does not print a part of it, or prints a call that cannot
                be read; or a turn does not continue its generation prompt.
            SpecialTokenError: The conversation spells a special token, and ``special_tokens_in_content`` is fail.
        """
        conversation = self.reasoning.fit(conversation, self.supervision.reasoning, self.supervision.thinking)
        if self.supervision.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        original = conversation
        if self.supervision.special_tokens_in_content != "keep":
            conversation = self._hide_special_tokens(conversation)
        is_hidden = conversation is not original
        turns = [index for index in range(len(conversation.messages)) if self._message_weight(conversation, index) > 0]
        samples = []
        for rendering in self._render_completely(conversation, turns):
            samples += self._encode_rendering(rendering, is_hidden)
        return samples

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation up to the start of the model's answer.

        Special tokens in its content are plain text unless ``special_tokens_in_content`` is keep.
        """
        prompt = conversation
        if self.supervision.special_tokens_in_content != "keep":
            prompt = self.control_tokens.hide(conversation)
        text = self.template.render(prompt, add_generation_prompt=True)[0]
        return self.tokenizer.ids(text) if prompt is conversation else self.tokenizer.encode_hidden(text).ids

    def _hide_special_tokens(self, conversation: Conversation) -> Conversation:
        if self.supervision.special_tokens_in_content == "escape":
            return self.control_tokens.hide(conversation)
        found = self.control_tokens.find(conversation)
        if found is not None:
            raise SpecialTokenError(
                f"{found}, a control token of the tokenizer; set data.special_tokens_in_content=escape to encode it as "
                "plain text, or keep to encode it as the control token"
            )
        return conversation

    def _message_weight(self, conversation: Conversation, index: int) -> float:
        message = conversation.messages[index]
        if message.role != "assistant":
            return 0.0
        if self.supervision.train_on == "calls" and not message.calls:
            return 0.0
        if self.supervision.train_on == "last_assistant":
            last = max(i for i, m in enumerate(conversation.messages) if m.role == "assistant")
            if index != last:
                return 0.0
        return message.weight

    def _render_completely(self, conversation: Conversation, turns: list[int]) -> list[_Rendering]:
        """Return the renderings of all samples; raise DataError if a part of the conversation is missing from them."""
        renderings = self._render_samples(conversation, turns)
        missing = self._find_missing(conversation, renderings)
        messages = list(conversation.messages)
        for index, part in missing:
            if part is None and messages[index].calls and self.supervision.content_with_calls == "drop":
                messages[index] = replace(messages[index], content=None)
            elif part == REASONING and self.supervision.reasoning == "keep_printed":
                messages[index] = replace(messages[index], reasoning=None)
        if any(new is not old for new, old in zip(messages, conversation.messages, strict=True)):
            conversation = replace(conversation, messages=tuple(messages))
            renderings = self._render_samples(conversation, turns)
            missing = self._find_missing(conversation, renderings)
        if missing:
            raise DataError(describe_missing(missing, conversation))
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

    def _find_missing(self, conversation: Conversation, renderings: list[_Rendering]) -> list[Missing]:
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

    def _render_samples(self, conversation: Conversation, turns: list[int]) -> list[_Rendering]:
        renderings = [self._render_sample(conversation, sample) for sample in self.planner.plan(conversation, turns)]
        if None in renderings:  # a value changed what its structure leads to
            exact = self.planner.plan_exactly(conversation, turns)
            renderings = [self._render_sample(conversation, sample) for sample in exact]
            if None in renderings:
                raise DataError("the chat template does not end an assistant turn with a stop token")
        return [rendering for rendering in renderings if rendering is not None]

    def _render_sample(self, conversation: Conversation, sample: Sample) -> _Rendering | None:
        """Render a sample and find its turns; None if one of them does not start or end as planned."""
        text, spans = self.planner.render(conversation, sample)
        cut = self.planner.cut(conversation, sample)
        by_message = {span.message: span for span in reversed(spans)}
        turns: dict[int, _Turn] = {}
        for index, header in sample.headers.items():
            span = by_message.get(index)
            if span is None or not text.startswith(header, span.start):
                return None
            message, start = conversation.messages[index], span.start + len(header)
            end, appended = self._find_end(cut, span, text, start, by_message)
            if end is None:
                return None
            reasoning_end = start
            if message.reasoning and not self._is_reasoning_trained(conversation, index):
                reasoning_end = _find_reasoning_end(message.reasoning, text, start, end)
            prose_end = _find_prose_end(message, text, start, end)
            weight = self._message_weight(conversation, index)
            call_weight = weight * self.supervision.call_weight if message.calls else weight
            turns[index] = _Turn(weight, call_weight, start, reasoning_end, prose_end, end, appended)
        render_alike = (lambda probe: self.planner.render(probe, sample)[0]) if sample.is_joined else None
        return _Rendering(cut, text, turns, render_alike)

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

    def _is_reasoning_trained(self, conversation: Conversation, index: int) -> bool:
        if self.supervision.train_reasoning == "last":
            return all(message.role != "user" for message in conversation.messages[index:])
        return self.supervision.train_reasoning == "all"

    def _encode_rendering(self, rendering: _Rendering, is_hidden: bool) -> list[Encoded]:
        """Encode a rendering; a turn whose prompt ends within a token gets a sample of its own."""
        text, turns = rendering.text, rendering.turns
        encoded = self.tokenizer.encode_hidden(text) if is_hidden else self.tokenizer.encode(text)
        to_offset = _OffsetConverter(text, encoded.text, is_hidden)
        tokens, weights, samples = encoded.ids, [0.0] * len(encoded.ids), []
        for index, turn in turns.items():
            start = to_offset(turn.start)
            first = bisect_right(encoded.ends, start)
            if first < len(encoded.starts) and encoded.starts[first] < start:
                samples.append(self._encode_alone(rendering, index, is_hidden))
            else:
                _weigh_turn(turn, to_offset, encoded, weights)
                if turn.appended is not None:
                    tokens, weights = [*tokens, turn.appended], [*weights, turn.call_weight]
        return [*samples, Encoded(tokens, weights)] if len(samples) < len(turns) or not turns else samples

    def _encode_alone(self, rendering: _Rendering, index: int, is_hidden: bool) -> Encoded:
        """Encode the text up to a turn with the prompt and the turn as separate texts, as at inference."""
        turn, text = rendering.turns[index], rendering.text
        prompt, rest = text[: turn.start], text[turn.start : turn.end]
        encode = self.tokenizer.encode_hidden if is_hidden else self.tokenizer.encode
        prompt_ids, encoded = encode(prompt).ids, encode(rest)
        weights = [0.0] * len(encoded.ids)
        moved = replace(
            turn,
            start=0,
            reasoning_end=turn.reasoning_end - turn.start,
            prose_end=turn.prose_end - turn.start,
            end=len(rest),
        )
        _weigh_turn(moved, _OffsetConverter(rest, encoded.text, is_hidden), encoded, weights)
        appended = [] if turn.appended is None else [turn.appended]
        return Encoded(
            [*prompt_ids, *encoded.ids, *appended],
            [*[0.0] * len(prompt_ids), *weights, *[turn.call_weight for _ in appended]],
        )


class _OffsetConverter:
    """Converts indices of a text to offsets of its encoding, which are in bytes or characters."""

    def __init__(self, text: str, encoded: bytes | str, is_hidden: bool):
        self._plain = None
        if len(encoded) != len(text):  # the offsets count bytes, and some characters have several
            self._plain = restore_hidden(text) if is_hidden else text

    def __call__(self, index: int) -> int:
        return index if self._plain is None else len(self._plain[:index].encode())


def _weigh_turn(
    turn: _Turn, to_offset: _OffsetConverter, encoded: TokenOffsets[bytes] | TokenOffsets[str], weights: list[float]
) -> None:
    """Set the weights of a turn's tokens, whose first token starts at the turn's start."""
    ends = encoded.ends
    first = bisect_right(ends, to_offset(turn.start))
    end = bisect_left(encoded.starts, to_offset(turn.end), lo=first)
    if turn.reasoning_end > turn.start:
        first = bisect_left(ends, to_offset(turn.reasoning_end), lo=first, hi=end) + 1
    weights[first:end] = [turn.weight] * (end - first)
    if turn.call_weight != turn.weight:
        call = bisect_right(ends, to_offset(turn.prose_end), lo=first, hi=end)
        weights[call:end] = [turn.call_weight] * (end - call)


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

    Results are matched by ``call_id`` if the row has ids, else by order.
    """
    messages: list[Message] = []
    pending = list(conversation.messages)
    while pending:
        message = pending.pop(0)
        if len(message.calls) < 2:
            messages.append(message)
            continue
        results: list[Message] = []
        while pending and pending[0].role == "tool":
            results.append(pending.pop(0))
        for number, call in enumerate(message.calls):
            turn = message if number == 0 else replace(message, content=None, reasoning=None)
            messages.append(replace(turn, calls=(call,)))
            own = next((r for r in results if call.id is not None and r.call_id == call.id), None)
            if own is None and results and all(r.call_id is None or call.id is None for r in results):
                own = results[0]
            if own is not None:
                results.remove(own)
                messages.append(own)
        messages += results
    return replace(conversation, messages=tuple(messages))
