"""Token ids of a conversation, and which of them are learnt.

Which text the template prints for which message, the template itself tells (``fctune.data.tracing``). Of an assistant's
text, what precedes the model's own words (the generation prompt) and what follows its end-of-turn token is context; the
rest is learnt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from fctune.data.conversation import Conversation, Message
from fctune.data.token_offsets import PlacedTokens, PlacingTokenizer
from fctune.data.tracing import Span, TracedTemplate
from fctune.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "calls"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a conversation and the loss weight of each as a target; 0.0 where nothing is learnt."""

    tokens: list[int]
    weights: list[float]

    @property
    def num_supervised(self) -> int:
        """How many tokens carry a loss."""
        return sum(weight > 0 for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Policy:
    """What of a conversation is learnt, and what is done where a template cannot say it."""

    train_on: TrainOn = "assistant"
    call_weight: float = 1.0
    parallel_calls: Literal["error", "split"] = "error"


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """What encoding needs of a template and tokenizer; small and quick to send to another process.

    ``prompts`` are the texts that open an answer, the longest first, ``history_header`` what opens one that is not the
    last; ``special_ids`` are the tokenizer's special tokens.
    """

    template: TracedTemplate
    tokenizer: PlacingTokenizer
    special_ids: Set[int]
    prompts: tuple[str, ...]
    history_header: str
    policy: Policy

    def encode(self, conversation: Conversation) -> Encoded:
        """Token ids, equal to transformers' ``apply_chat_template``, and their loss weights.

        Raises:
            DataError: when the template refuses the conversation, or a token straddles the edge of what is learnt.
        """
        if self.policy.parallel_calls == "split":
            conversation = split_parallel_calls(conversation)
        text, spans = self.template.render(conversation)
        printed = {span.message for span in spans}
        placed = self.tokenizer.place(text)
        weights = [0.0] * len(placed.ids)
        for span in spans:
            weight = self._message_weight(conversation, span.message)
            if weight > 0:
                start = self._answer_start(conversation, span, text)
                stop = self._answer_stop(conversation, span, text, printed)
                message = conversation.messages[span.message]
                if len(placed.text) != len(text):  # its places are those of bytes, and not all characters are one
                    start, stop = len(text[:start].encode()), len(text[:stop].encode())
                self._weigh_span(message, weight, start, stop, placed, weights)
        return Encoded(placed.ids, weights)

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation up to where the model is to answer."""
        text = self.template.render(conversation, add_generation_prompt=True)[0]
        return self.tokenizer.ids(text)

    def _message_weight(self, conversation: Conversation, place: int) -> float:
        message = conversation.messages[place]
        if message.role != "assistant":
            return 0.0
        if self.policy.train_on == "calls" and not message.calls:
            return 0.0
        if self.policy.train_on == "last_assistant":
            last = max(i for i, m in enumerate(conversation.messages) if m.role == "assistant")
            if place != last:
                return 0.0
        return message.weight

    def _answer_start(self, conversation: Conversation, span: Span, text: str) -> int:
        """Where in ``text`` the model's own words of an assistant's turn begin: after what it is prompted with."""
        turn = text[span.start : span.stop]
        for prompt in self.prompts:
            if turn.startswith(prompt):
                return span.start + len(prompt)
        # A template may prompt otherwise in other places, such as after a result.
        before = Conversation(conversation.messages[: span.message], conversation.tools)
        prompted = self.template.render(before, add_generation_prompt=True)[0]
        if span.start <= len(prompted) <= span.stop and text.startswith(prompted):
            return len(prompted)
        # A turn that is history may lack what the prompt opens, such as a think block: its plain header is left.
        if self.history_header and turn.startswith(self.history_header):
            return span.start + len(self.history_header)
        raise DataError("the chat template opens an assistant turn otherwise than its generation prompt does")

    def _answer_stop(self, conversation: Conversation, span: Span, text: str, printed: set[int]) -> int:
        """Where an assistant's turn ends: where its text does, or before a result that is printed within it."""
        following = span.message + 1
        if following in printed or following == len(conversation.messages):
            return span.stop
        alone = self.template.render(Conversation(conversation.messages[:following], conversation.tools))[0]
        if span.start < len(alone) <= span.stop and text.startswith(alone):
            return len(alone)
        raise DataError("the chat template prints another message within an assistant's turn")

    def _weigh_span(
        self,
        message: Message,
        weight: float,
        start: int,
        stop: int,
        placed: PlacedTokens[bytes] | PlacedTokens[str],
        weights: list[float],
    ) -> None:
        """Weigh the tokens of the answer that stands at ``start:stop`` of the tokens' text."""
        ends = placed.ends
        first = bisect_right(ends, start)
        inside = range(first, bisect_left(placed.starts, stop, lo=first))
        if inside and placed.starts[first] < start:
            piece = placed.text[placed.starts[first] : ends[first]]
            raise DataError(f"the tokenizer joins the template's text to the answer's in one token ({piece!r})")
        end_of_turn = next((n for n in reversed(inside) if placed.ids[n] in self.special_ids), None)
        if end_of_turn is None or placed.text[ends[end_of_turn] : stop].strip():
            raise DataError("the chat template does not close an assistant turn with a special token")
        end = end_of_turn + 1
        weights[first:end] = [weight] * (end - first)
        if message.calls and self.policy.call_weight != 1.0:
            call = bisect_right(ends, _prose_stop(message, start, stop, placed.text), lo=first, hi=end)
            weights[call:end] = [weight * self.policy.call_weight] * (end - call)


def _prose_stop(message: Message, start: int, stop: int, text: str | bytes) -> int:
    """Where the text beside a message's calls ends within ``start:stop``; its start where there is none."""
    content = (message.content or "").strip()
    found = text.find(content, start, stop) if isinstance(text, str) else text.find(content.encode(), start, stop)
    if not content or found < 0:
        return start
    return found + len(content if isinstance(text, str) else content.encode())


def split_parallel_calls(conversation: Conversation) -> Conversation:
    """The same conversation with one call a turn: each call of a turn is followed by its own result.

    Results are told apart by ``call_id`` where the row has them, else by order.
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
