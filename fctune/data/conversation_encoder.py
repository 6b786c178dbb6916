"""Encoding of conversations to token ids and the loss weight of each token."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import ParamSpec, TypeVar

from fctune.base.errors import DataError
from fctune.data.bounded_process import LimitError
from fctune.data.completeness import CompletenessCheck
from fctune.data.control_tokens import ControlTokens, restore_hidden
from fctune.data.conversation import Conversation
from fctune.data.reasoning import ReasoningSupport
from fctune.data.supervision import Rendering, SampleRenderer, SupervisionConfig, Turn, split_parallel_calls
from fctune.data.token_offsets import OffsetTokenizer, TokenOffsets
from fctune.data.tracing import TracedTemplate
from fctune.data.turns import TurnPlanner

P = ParamSpec("P")
T = TypeVar("T")


class SpecialTokenError(DataError):
    """A row contains the text of a special token."""


class TemplateLimitError(DataError):
    """The chat template takes too much time or memory for a row."""


def make_limit_error(reason: object) -> TemplateLimitError:
    """Return the error for a reason such as "it takes more than 30 s"."""
    return TemplateLimitError(f"the chat template exceeds the limits on rendering: {reason}")


def _within_limits(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise ``TemplateLimitError`` for ``LimitError``."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except LimitError as error:
            raise make_limit_error(error) from None

    return run


def get_defect_kind(error: DataError) -> str:
    """Return the kind of defect (a key of ``DEFECT_KINDS``) of a row that cannot be encoded."""
    return "special_token_in_content" if isinstance(error, SpecialTokenError) else "not_renderable"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation and the loss weight of each token as a target; 0.0 for context.

    They are arrays of C ints and doubles, which are copied to a prepared set without a conversion of each.
    """

    token_array: array[int]
    weight_array: array[float]

    @property
    def tokens(self) -> list[int]:
        """Token ids of the sample, as a list."""
        return self.token_array.tolist()

    @property
    def weights(self) -> list[float]:
        """Loss weight of each token, as a list; 0 where unsupervised."""
        return self.weight_array.tolist()

    @property
    def num_supervised(self) -> int:
        """The number of tokens with a nonzero loss weight."""
        return sum(weight > 0 for weight in self.weight_array)

    @property
    def is_supervised(self) -> bool:
        """True if any token is supervised; supervised turns are near the end."""
        return any(reversed(self.weight_array))


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

    @_within_limits
    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Return the training samples of a conversation; each supervised turn has weights in exactly one.

        A turn's weights start where the generation prompt ends and include the stop token. Token ids are those of
        transformers' ``apply_chat_template`` for the first messages of the conversation, with two exceptions: a stop
        token that the template never prints is appended, and a token is split where it would cross the end of the
        generation prompt, as it is at inference.

        Raises:
            DataError: The template rejects the conversation, does not print a part of it, or prints a call that cannot
                be read; or a turn does not continue its generation prompt.
            SpecialTokenError: The conversation contains the text of a special token, or pieces that the template joins
                to one, and ``special_tokens_in_content`` is fail.
            TemplateLimitError: Rendering it takes too much time or memory.
        """
        conversation = self.reasoning.fit(conversation, self.supervision.reasoning, self.supervision.thinking)
        if self.supervision.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        original = conversation
        if self.supervision.special_tokens_in_content != "keep":
            conversation = self._hide_special_tokens(conversation)
        renderer = SampleRenderer(self.template, self.completeness, self.planner, self.supervision)
        samples = []
        for rendering in renderer.render(conversation):
            is_hidden = conversation is not original and self.control_tokens.has_formed(rendering.text)
            if is_hidden and self.supervision.special_tokens_in_content == "fail":
                raise SpecialTokenError(
                    f"{self.control_tokens.find_piece(original)}, which the chat template joins with other text to a "
                    "control token of the tokenizer; set data.special_tokens_in_content=escape to encode it as plain "
                    "text, or keep to encode it as the control token"
                )
            if conversation is not original and not is_hidden:
                rendering = replace(rendering, text=restore_hidden(rendering.text))
            samples += self._encode_rendering(rendering, is_hidden)
        return samples

    @_within_limits
    def encode_prompt(self, conversation: Conversation, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a conversation up to the start of the model's answer.

        Special tokens in its content are plain text unless ``special_tokens_in_content`` is keep.

        Args:
            conversation: Messages up to where the model is to act.
            add_generation_prompt: Open the model's answer; without, the ids end with the last message.
        """
        prompt = self._hide_in_prompt(conversation)
        text = self.template.render(prompt, add_generation_prompt=add_generation_prompt)[0]
        return self._to_ids(text, prompt is not conversation)

    @_within_limits
    def encode_continuation(self, conversation: Conversation, index: int) -> list[int]:
        """Return the token ids between the model's answer and its next one: those of the tools' results, for example.

        They continue ids that the model has generated, which need not be those that its answer would be encoded to.

        Args:
            conversation: Messages up to where the model is to act again; special tokens in their content are treated as
                in ``encode_prompt``.
            index: The message that the model has generated; its ids end with the stop token.

        Raises:
            DataError: The template rejects the conversation, or renders what precedes or the answer differently once
                messages follow, so that ids cannot be appended.
        """
        shown = self._hide_in_prompt(conversation)
        before, answered = (replace(shown, messages=shown.messages[:count]) for count in (index, index + 1))
        prompt = self.template.render(before, add_generation_prompt=True)[0]
        text, spans = self.template.render(shown, add_generation_prompt=True)
        by_message = {span.message: span for span in reversed(spans)}
        if index in by_message and index + 1 in by_message:
            stop = by_message[index].stop
        else:  # a result is printed within the turn
            stop = len(self.template.render(answered)[0])
        ending = self.planner.find_end(shown.messages[index])
        end: int | None = stop
        if ending.printed:
            end = ending.find(text, len(prompt), stop)
        elif ending.following:
            end = ending.find_following(text, stop)
        if end is None or not text.startswith(prompt):
            raise DataError(
                "the chat template renders the answer, or what precedes it, differently once messages follow, so "
                "results cannot be appended to what was generated; use a model whose template does not"
            )
        ids, own = (self._to_ids(part, shown is not conversation) for part in (text, text[:end]))
        if ids[: len(own)] != own:
            raise DataError("the tokenizer joins the answer's stop token with what follows")
        return ids[len(own) :]

    def _hide_in_prompt(self, conversation: Conversation) -> Conversation:
        if self.supervision.special_tokens_in_content == "keep":
            return conversation
        return self.control_tokens.hide(conversation)

    def _to_ids(self, text: str, has_hidden: bool) -> list[int]:
        if has_hidden and self.control_tokens.has_formed(text):
            return self.tokenizer.encode_hidden(text).ids.tolist()
        return self.tokenizer.ids(restore_hidden(text) if has_hidden else text)

    def _hide_special_tokens(self, conversation: Conversation) -> Conversation:
        found = None
        if self.supervision.special_tokens_in_content == "fail":
            found = self.control_tokens.find(conversation)
        if found is not None:
            raise SpecialTokenError(
                f"{found}, a control token of the tokenizer; set data.special_tokens_in_content=escape to encode it as "
                "plain text, or keep to encode it as the control token"
            )
        return self.control_tokens.hide(conversation)

    def _encode_rendering(self, rendering: Rendering, is_hidden: bool) -> list[Encoded]:
        """Encode a rendering; a turn whose prompt ends within a token gets a sample of its own."""
        text, turns = rendering.text, rendering.turns
        encoded = self.tokenizer.encode_hidden(text) if is_hidden else self.tokenizer.encode(text)
        to_offset = _OffsetConverter(text, encoded.text, is_hidden)
        tokens, weights, samples = encoded.ids, _make_zeros(len(encoded.ids)), []
        for index, turn in turns.items():
            start = to_offset(turn.start)
            first = bisect_right(encoded.ends, start)
            if first < len(encoded.starts) and encoded.starts[first] < start:
                samples.append(self._encode_alone(rendering, index, is_hidden))
            else:
                _weigh_turn(turn, to_offset, encoded, weights)
                if turn.appended is not None:
                    tokens.append(turn.appended)
                    weights.append(turn.call_weight)
        return [*samples, Encoded(tokens, weights)] if len(samples) < len(turns) or not turns else samples

    def _encode_alone(self, rendering: Rendering, index: int, is_hidden: bool) -> Encoded:
        """Encode the text up to a turn with the prompt and the turn as separate texts, as at inference."""
        turn, text = rendering.turns[index], rendering.text
        prompt, rest = text[: turn.start], text[turn.start : turn.end]
        encode = self.tokenizer.encode_hidden if is_hidden else self.tokenizer.encode
        tokens, encoded = encode(prompt).ids, encode(rest)
        before, weights = _make_zeros(len(tokens)), _make_zeros(len(encoded.ids))
        moved = replace(
            turn,
            start=0,
            reasoning_end=turn.reasoning_end - turn.start,
            prose_end=turn.prose_end - turn.start,
            end=len(rest),
        )
        _weigh_turn(moved, _OffsetConverter(rest, encoded.text, is_hidden), encoded, weights)
        if turn.appended is not None:
            encoded.ids.append(turn.appended)
            weights.append(turn.call_weight)
        return Encoded(tokens + encoded.ids, before + weights)


def _make_zeros(count: int) -> array[float]:
    return array("d", bytes(8 * count))


class _OffsetConverter:
    """Converts indices of a text to offsets of its encoding, which are in bytes or characters."""

    def __init__(self, text: str, encoded: bytes | str, is_hidden: bool):
        self._plain = None
        if len(encoded) != len(text):  # the offsets count bytes, and some characters have several
            self._plain = restore_hidden(text) if is_hidden else text

    def __call__(self, index: int) -> int:
        return index if self._plain is None else len(self._plain[:index].encode())


def _weigh_turn(
    turn: Turn, to_offset: _OffsetConverter, encoded: TokenOffsets[bytes] | TokenOffsets[str], weights: array[float]
) -> None:
    """Set the weights of a turn's tokens, whose first token starts at the turn's start."""
    ends = encoded.ends
    first = bisect_right(ends, to_offset(turn.start))
    end = bisect_left(encoded.starts, to_offset(turn.end), lo=first)
    if turn.reasoning_end > turn.start:
        first = bisect_left(ends, to_offset(turn.reasoning_end), lo=first, hi=end) + 1
    weights[first:end] = array("d", (turn.weight,)) * (end - first)
    if turn.call_weight != turn.weight:
        call = bisect_right(ends, to_offset(turn.prose_end), lo=first, hi=end)
        weights[call:end] = array("d", (turn.call_weight,)) * (end - call)
