"""Conversations longer than a training row: cut at the end of a turn, or divided into parts.

A trace of an agent is often one request and a hundred calls with their results. Each of its parts keeps the tools, the
system prompt, the request that is being worked on, and as much of what came last as fits, so that a turn is trained
with the history that a server with a window of this length would give the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fctune.data.conversation import Conversation, Message
from fctune.data.conversation_encoder import ConversationEncoder, Encoded


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a conversation, with their samples.

    ``num_lost`` supervised turns are in none of them, since each is too long even without the turns before it.
    """

    conversations: list[Conversation]
    samples: list[Encoded]
    num_lost: int


def cut_conversation(conversation: Conversation, encoder: ConversationEncoder, seq_len: int) -> list[Encoded] | None:
    """Encode the longest beginning that fits ``seq_len`` tokens and ends with an assistant turn; None without one."""
    messages = conversation.messages
    ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]

    def encode(end: int) -> list[Encoded]:
        return encoder.encode(replace(conversation, messages=messages[:end]))

    ends = ends[:-1]
    # The one found may be longer than a later one if the template leaves out the reasoning of earlier turns.
    for end in reversed(ends[: _count_fitting(ends, lambda end: measure(encode(end)) <= seq_len)]):
        shorter = encode(end)
        if measure(shorter) <= seq_len:
            return shorter
    return None


def split_conversation(conversation: Conversation, encoder: ConversationEncoder, seq_len: int) -> Parts:
    """Divide a conversation into parts of at most ``seq_len`` tokens; each supervised turn is trained in one of them.

    The first part is the longest beginning that fits. In each later one, the first turns are history, with weight 0,
    and fill at least half of what the first supervised turn leaves, if there are as many.

    Raises:
        DataError: The conversation, or a part of it, cannot be encoded.
    """
    supervision = encoder.supervision
    # The switch of thinking depends on the reasoning of all turns, so it is set before turns are left out.
    conversation = encoder.reasoning.fit(conversation, supervision.reasoning, supervision.thinking)
    left = [i for i in range(len(conversation.messages)) if supervision.weigh_message(conversation, i) > 0]
    splitter = _Splitter(conversation, encoder, seq_len)
    parts, num_lost = Parts([], [], 0), 0
    while left:
        found = splitter.find_part(left, is_first=not parts.conversations and not num_lost)
        if found is None:
            num_lost += 1
            left = left[1:]
            continue
        last, part, samples = found
        parts.conversations.append(part)
        parts.samples.extend(samples)
        left = left[left.index(last) + 1 :]
    return replace(parts, num_lost=num_lost)


@dataclass(frozen=True, slots=True)
class _Splitter:
    conversation: Conversation
    encoder: ConversationEncoder
    seq_len: int

    def find_part(self, left: Sequence[int], is_first: bool) -> tuple[int, Conversation, list[Encoded]] | None:
        """Return the last message of the next part, the part and its samples; None if the next turn is too long.

        Args:
            left: Turns to supervise that are in no part yet.
            is_first: No part came before, so no history is needed.
        """
        starts = [i for i in _iter_starts(self.conversation.messages) if i <= left[0]]
        if is_first and self._measure(0, left[0]) <= self.seq_len:
            own_start, limit, starts = 0, self.seq_len, []
        else:
            own_start = starts[-1]
            shortest = self._measure(own_start, left[0])
            if shortest > self.seq_len:
                return None
            limit = shortest + (self.seq_len - shortest) // 2
        turns = left[: _count_fitting(left, lambda last: self._measure(own_start, last) <= limit)]
        for count in range(len(turns), 0, -1):
            if (found := self._fill(own_start, starts, turns[:count])) is not None:
                return turns[count - 1], *found
        return None

    def _fill(
        self, own_start: int, starts: Sequence[int], turns: Sequence[int]
    ) -> tuple[Conversation, list[Encoded]] | None:
        """Return the part of some turns with the most history that fits, and its samples; None if none fits."""
        last = turns[-1]
        num_starts = _count_fitting(starts[::-1], lambda start: self._measure(start, last) <= self.seq_len)
        for start in starts[len(starts) - num_starts :] or [own_start]:
            part = _make_part(self.conversation, start, last, turns)
            samples = self.encoder.encode(part)
            if measure(samples) <= self.seq_len:
                return part, samples
        return None

    def _measure(self, start: int, last: int) -> int:
        """Return the number of tokens up to a turn.

        The sample of a turn before it may be longer, if the template leaves out the reasoning of earlier turns.
        """
        return measure(self.encoder.encode(_make_part(self.conversation, start, last, [last])))


@dataclass(slots=True)
class LongConversations:
    """The supervised tokens that ``data.overlong`` would keep of conversations longer than a row, by its value.

    ``num_supervised`` tokens are supervised in the conversations that were measured. ``cut`` keeps ``kept_by_cut`` of
    them and drops ``dropped_by_cut`` conversations; ``split_turns`` keeps ``kept_by_split`` in ``num_parts`` parts, and
    no part has ``lost_turns`` supervised turns.
    """

    num_measured: int = 0
    num_supervised: int = 0
    kept_by_cut: int = 0
    dropped_by_cut: int = 0
    kept_by_split: int = 0
    num_parts: int = 0
    lost_turns: int = 0

    def add(self, conversation: Conversation, encoder: ConversationEncoder, seq_len: int, num_supervised: int) -> None:
        """Measure a conversation that has more than ``seq_len`` tokens, of which so many are supervised.

        Raises:
            DataError: A part of it cannot be encoded.
        """
        cut = cut_conversation(conversation, encoder, seq_len)
        parts = split_conversation(conversation, encoder, seq_len)
        self.num_measured += 1
        self.num_supervised += num_supervised
        self.kept_by_cut += sum(sample.num_supervised for sample in cut or ())
        self.dropped_by_cut += cut is None
        self.kept_by_split += sum(sample.num_supervised for sample in parts.samples)
        self.num_parts += len(parts.conversations)
        self.lost_turns += parts.num_lost


def measure(samples: Sequence[Encoded]) -> int:
    """Return the number of tokens of the longest sample."""
    return max(len(sample.token_array) for sample in samples)


def _iter_starts(messages: Sequence[Message]) -> Iterator[int]:
    """Yield where a part may begin: at a user's turn, or at an assistant's, never between a call and its results."""
    for index, message in enumerate(messages):
        before = messages[index - 1].role if index else None
        if message.role == "assistant" or (message.role == "user" and before != "user"):
            yield index


def _make_part(conversation: Conversation, start: int, end: int, targets: Sequence[int]) -> Conversation:
    """Return the messages from ``start`` to ``end``, both inclusive, after the system prompt and the request."""
    messages = conversation.messages
    system = next((i for i, message in enumerate(messages) if message.role != "system"), 0)
    kept = list(range(system))
    if messages[start].role == "assistant":
        stop = next((i + 1 for i in range(start - 1, -1, -1) if messages[i].role == "user"), 0)
        begin = stop
        while begin and messages[begin - 1].role == "user":
            begin -= 1
        kept += range(max(begin, system), stop)
    kept += range(max(start, system), end + 1)
    trained = set(targets)
    return replace(
        conversation,
        messages=tuple(
            messages[i] if i in trained or messages[i].role != "assistant" else replace(messages[i], weight=0.0)
            for i in kept
        ),
    )


def _count_fitting(candidates: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Return how many candidates fit, by bisection: if one does not fit, those after it do not; the first one does."""
    low, high = min(1, len(candidates)), len(candidates)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(candidates[middle - 1]) else (low, middle - 1)
    return low
