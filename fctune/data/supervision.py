"""Token ids of conversations and the loss weight of each token.

The traced template reports which text belongs to which message (``fctune.data.tracing``). Of an assistant turn, the
generation prompt before the model's own words and everything after the end-of-turn token are context; the rest is
supervised.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from fctune.data.conversation import Conversation, Message
from fctune.data.token_offsets import OffsetTokenizer, TokenOffsets
from fctune.data.tracing import Span, TracedTemplate
from fctune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "calls"]


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


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Encodes conversations with a chat template and tokenizer; small and quick to send to another process.

    Args:
        template: Traced chat template.
        tokenizer: Tokenizer with offsets.
        special_ids: Ids of the tokenizer's special tokens.
        prompts: Texts that open an answer, the longest first.
        history_header: Text that opens an answer that is not the last; empty if unknown.
        supervision: Selects the supervised tokens.
    """

    template: TracedTemplate
    tokenizer: OffsetTokenizer
    special_ids: Set[int]
    prompts: tuple[str, ...]
    history_header: str
    supervision: SupervisionConfig

    def encode(self, conversation: Conversation) -> Encoded:
        """Return token ids, equal to transformers' ``apply_chat_template``, and their loss weights.

        Raises:
            DataError: The template rejects the conversation, or a token crosses the boundary of a supervised span.
        """
        if self.supervision.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        text, spans = self.template.render(conversation)
        printed = {span.message for span in spans}
        encoded = self.tokenizer.encode(text)
        weights = [0.0] * len(encoded.ids)
        for span in spans:
            weight = self._message_weight(conversation, span.message)
            if weight > 0:
                start = self._answer_start(conversation, span, text)
                stop = self._answer_stop(conversation, span, text, printed)
                message = conversation.messages[span.message]
                if len(encoded.text) != len(text):  # the offsets count bytes, and some characters have several
                    start, stop = len(text[:start].encode()), len(text[:stop].encode())
                self._weigh_span(message, weight, start, stop, encoded, weights)
        return Encoded(encoded.ids, weights)

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation up to the start of the model's answer."""
        text = self.template.render(conversation, add_generation_prompt=True)[0]
        return self.tokenizer.ids(text)

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
        before = Conversation(conversation.messages[: span.message], conversation.tools)
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
        alone = self.template.render(Conversation(conversation.messages[:following], conversation.tools))[0]
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
            content = message.content if number == 0 else None
            messages.append(Message("assistant", content, (call,), weight=message.weight))
            own = next((r for r in results if call.id is not None and r.call_id == call.id), None)
            if own is None and results and all(r.call_id is None or call.id is None for r in results):
                own = results[0]
            if own is not None:
                results.remove(own)
                messages.append(own)
        messages += results
    return Conversation(tuple(messages), conversation.tools, conversation.source)
