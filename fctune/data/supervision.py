"""Token ids of conversations and the loss weight of each token.

The traced template reports which text belongs to which message (``fctune.data.tracing``). Of an assistant turn, the
generation prompt before the model's own words and everything after the end-of-turn token are context; the rest is
supervised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal

from fctune.data.completeness import CompletenessCheck, describe_missing, find_unescaped
from fctune.data.control_tokens import ControlTokens, restore_hidden
from fctune.data.conversation import Conversation, Message
from fctune.data.reasoning import ReasoningMode, ReasoningSupport, ThinkingMode
from fctune.data.token_offsets import OffsetTokenizer, TokenOffsets
from fctune.data.tracing import Span, TracedTemplate
from fctune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "calls"]


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
    call_weight: float = 1.0
    parallel_calls: Literal["error", "split"] = "error"
    content_with_calls: Literal["error", "drop"] = "error"
    special_tokens_in_content: Literal["fail", "escape", "keep"] = "fail"
    reasoning: ReasoningMode = "keep"
    thinking: ThinkingMode = "rows"  # auto sets the switch of every row, so it needs a run that has reasoning


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Encodes conversations with a chat template and tokenizer; small and quick to send to another process.

    Args:
        template: Traced chat template.
        tokenizer: Tokenizer with offsets.
        special_ids: Ids of the tokenizer's special tokens.
        control_tokens: The tokenizer's special tokens, as rows may spell them.
        completeness: Finds the parts of a row that the template does not print.
        prompts: Texts that open an answer, the longest first.
        history_header: Text that opens an answer that is not the last; empty if unknown.
        supervision: Selects the supervised tokens.
        reasoning: The template's use of reasoning and switches.
    """

    template: TracedTemplate
    tokenizer: OffsetTokenizer
    special_ids: Set[int]
    control_tokens: ControlTokens
    completeness: CompletenessCheck
    prompts: tuple[str, ...]
    history_header: str
    supervision: SupervisionConfig
    reasoning: ReasoningSupport

    def encode(self, conversation: Conversation) -> list[Encoded]:
        """Return the training samples of a conversation; each supervised turn has weights in exactly one.

        Token ids are equal to transformers' ``apply_chat_template``.

        Raises:
            DataError: The template rejects the conversation, does not print a part of it, or prints a call that cannot
                be read; or a token crosses the boundary of a supervised span.
            SpecialTokenError: The conversation spells a special token, and ``special_tokens_in_content`` is fail.
        """
        conversation = self.reasoning.fit(conversation, self.supervision.reasoning, self.supervision.thinking)
        if self.supervision.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        original = conversation
        if self.supervision.special_tokens_in_content != "keep":
            conversation = self._hide_special_tokens(conversation)
        is_hidden = conversation is not original
        conversation, text, spans = self._render_completely(conversation)
        printed = {span.message for span in spans}
        encoded = self.tokenizer.encode_hidden(text) if is_hidden else self.tokenizer.encode(text)
        weights = [0.0] * len(encoded.ids)
        for span in spans:
            weight = self._message_weight(conversation, span.message)
            if weight > 0:
                start = self._answer_start(conversation, span, text)
                stop = self._answer_stop(conversation, span, text, printed)
                message = original.messages[span.message]
                if len(encoded.text) != len(text):  # the offsets count bytes, and some characters have several
                    plain = restore_hidden(text) if is_hidden else text
                    start, stop = len(plain[:start].encode()), len(plain[:stop].encode())
                self._weigh_span(message, weight, start, stop, encoded, weights)
        return [Encoded(encoded.ids, weights)]

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

    def _render_completely(self, conversation: Conversation) -> tuple[Conversation, str, list[Span]]:
        """Return the conversation as it is rendered, its text and its spans; raise DataError if a part is missing."""
        text, spans = self.template.render(conversation)
        missing = self.completeness.find_missing(conversation, text)
        dropped = {part.message for part in missing if part.call is None and conversation.messages[part.message].calls}
        if dropped and self.supervision.content_with_calls == "drop":
            messages = [replace(m, content=None) if i in dropped else m for i, m in enumerate(conversation.messages)]
            conversation = replace(conversation, messages=tuple(messages))
            text, spans = self.template.render(conversation)
            missing = self.completeness.find_missing(conversation, text)
        if missing:
            raise DataError(describe_missing(missing, conversation))
        for span in spans:
            path = find_unescaped(conversation.messages[span.message].calls, text[span.start : span.stop])
            if path is not None:
                raise DataError(
                    f"the chat template prints the argument {path} of messages[{span.message}] in quotes without "
                    "escaping the quotes, backslashes or line breaks in it, so the call cannot be parsed back; change "
                    "the argument, use another template, or skip the row"
                )
        return conversation, text, spans

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

    def _answer_start(self, conversation: Conversation, span: Span, text: str) -> int:
        """Return the index in ``text`` of the assistant turn's own words, which follow the generation prompt."""
        turn = text[span.start : span.stop]
        for prompt in self.prompts:
            if turn.startswith(prompt):
                return span.start + len(prompt)
        # A template may use another prompt elsewhere, such as after a result.
        before = replace(conversation, messages=conversation.messages[: span.message])
        prompted = self.template.render(before, add_generation_prompt=True)[0]
        if span.start <= len(prompted) <= span.stop and text.startswith(prompted):
            return len(prompted)
        # A turn in the history may have a plain header, without the think block that the prompt opens.
        if self.history_header and turn.startswith(self.history_header):
            return span.start + len(self.history_header)
        raise DataError("the chat template starts an assistant turn differently from its generation prompt")

    def _answer_stop(self, conversation: Conversation, span: Span, text: str, printed: set[int]) -> int:
        """Return the index of the end of the assistant turn, or of the start of a result printed within it."""
        following = span.message + 1
        if following in printed or following == len(conversation.messages):
            return span.stop
        alone = self.template.render(replace(conversation, messages=conversation.messages[:following]))[0]
        if span.start < len(alone) <= span.stop and text.startswith(alone):
            return len(alone)
        raise DataError("the chat template prints another message inside an assistant turn")

    def _weigh_span(
        self,
        message: Message,
        weight: float,
        start: int,
        stop: int,
        encoded: TokenOffsets[bytes] | TokenOffsets[str],
        weights: list[float],
    ) -> None:
        """Set the weights of the tokens of the answer at ``start:stop`` of the encoded text."""
        ends = encoded.ends
        first = bisect_right(ends, start)
        inside = range(first, bisect_left(encoded.starts, stop, lo=first))
        if inside and encoded.starts[first] < start:
            piece = encoded.text[encoded.starts[first] : ends[first]]
            raise DataError(f"the tokenizer merges text of the template and of the answer into one token ({piece!r})")
        end_of_turn = next((n for n in reversed(inside) if encoded.ids[n] in self.special_ids), None)
        if end_of_turn is None or encoded.text[ends[end_of_turn] : stop].strip():
            raise DataError("the chat template does not end an assistant turn with a special token")
        end = end_of_turn + 1
        weights[first:end] = [weight] * (end - first)
        if message.calls and self.supervision.call_weight != 1.0:
            call = bisect_right(ends, _prose_stop(message, start, stop, encoded.text), lo=first, hi=end)
            weights[call:end] = [weight * self.supervision.call_weight] * (end - call)


def _prose_stop(message: Message, start: int, stop: int, text: str | bytes) -> int:
    """Return the end of the message's own text within ``start:stop``, or ``start`` if it has calls only."""
    content = (message.content or "").strip()
    found = text.find(content, start, stop) if isinstance(text, str) else text.find(content.encode(), start, stop)
    if not content or found < 0:
        return start
    return found + len(content if isinstance(text, str) else content.encode())


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
