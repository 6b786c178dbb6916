"""Preference pairs: rows of a prompt with a better and a worse answer, read and encoded.

A row has ``prompt``, ``chosen`` and ``rejected``, lists of messages in OpenAI's format, and ``tools``. TRL reads the
same rows. Without ``prompt``, the answers are the last messages of two conversations that are otherwise equal. Answers
that an engine has written can be given as ``chosen_token_ids`` and ``rejected_token_ids``, which are used as they are.

Also read are OpenAI's rows (``input``, ``preferred_output``, ``non_preferred_output``), those of nvidia/When2Call
(``messages``, ``chosen_response``, ``rejected_response``) and ms-swift's (``messages`` that end in the chosen answer,
and ``rejected_response`` or ``rejected_messages``).
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fctune.base.errors import DataError
from fctune.data.conversation import Conversation, Message
from fctune.data.conversation_encoder import ConversationEncoder, Encoded
from fctune.data.sources import Defect, UnreadRow
from fctune.data.sources.columns import Columns, map_columns
from fctune.data.sources.defects import RowError, describe_value
from fctune.data.sources.read_context import ReadContext
from fctune.data.sources.reader import decode_row
from fctune.data.sources.row_builder import ParsedRow
from fctune.data.sources.row_formats.exchange import peek
from fctune.data.sources.row_formats.registry import read_row

# Pass this to ``scan_source``: no format of conversations would be detected in a pair.
PAIRS_FORMAT = "openai"

_PLACEHOLDER = {"role": "assistant", "content": "answer"}
_MESSAGE = re.compile(r"messages\[(\d+)\]")
_TOOL_CALLS = re.compile(r"\s*<TOOLCALL>(.*)</TOOLCALL>\s*", re.DOTALL)  # of When2Call


class _Names(NamedTuple):
    """Where a row has its prompt and its answers."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


_OPENAI = _Names("input.messages", "preferred_output", "non_preferred_output")
_WHEN2CALL = _Names("messages", "chosen_response", "rejected_response")


class PairError(DataError):
    """A pair that cannot be trained on; ``kind`` is a key of ``DEFECT_KINDS``."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as messages, the first one the assistant's, or as the token ids that an engine generated."""

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with two answers, of which the first is the better one.

    ``benchmark`` names the benchmark whose questions the row was made of, if it was.
    """

    prompt: Conversation
    chosen: Answer
    rejected: Answer
    benchmark: str | None = None

    @property
    def has_reasoning(self) -> bool:
        """True if an answer has reasoning."""
        return any(m.reasoning for answer in (self.chosen, self.rejected) for m in answer.messages)

    def digest(self) -> str:
        """Return a digest of the content, 16 hex digits, which does not depend on the source."""
        parts = [replace(self.prompt, messages=self.prompt.messages + a.messages).digest() for a in self.answers]
        text = json.dumps([parts, [answer.token_ids for answer in self.answers]])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def answers(self) -> tuple[Answer, Answer]:
        """The chosen and the rejected answer."""
        return self.chosen, self.rejected


class PairReader:
    """Reads the pairs of a source.

    Args:
        columns: The name of a pair's column for each column of another name, or ``ignore``.
    """

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns or {}
        self._context = ReadContext()

    def read(self, row: UnreadRow) -> Pair | Defect:
        """Return the pair of a row, or its defect."""
        if isinstance(row.value, Defect):
            return row.value
        if isinstance(row.value, Conversation):
            return Defect(row.file, row.line, "", "pair_shape", "a conversation, not a preference pair")
        try:
            return self._read(decode_row(row.value, self._context), f"{row.file}:{row.line}")
        except RowError as error:
            return Defect(row.file, row.line, error.pointer, error.kind, error.reason)

    def _read(self, row: Any, source: str) -> Pair:
        if not isinstance(row, dict):
            raise RowError("", "pair_shape", f"expected an object, got {describe_value(row)}")
        row = map_columns(row, self._columns)
        row, names = _name_parts(row)
        messages = row["prompt"]
        if not isinstance(messages, list) or not messages:
            raise RowError(names.prompt, "pair_shape", f"expected a list of messages, got {describe_value(messages)}")
        parsed = self._read_messages(row, names, messages, [_PLACEHOLDER], "prompt", source)
        prompt = replace(parsed.conversation, messages=parsed.conversation.messages[:-1])
        if prompt.messages and prompt.messages[-1].role == "assistant":
            reason = "ends with an assistant's message; the answers follow the prompt"
            raise RowError(names.prompt, "pair_shape", reason)
        chosen, rejected = (self._read_answer(row, names, prompt, key, source) for key in ("chosen", "rejected"))
        if chosen == rejected:
            reason = f"is the same answer as {names.chosen}, so there is nothing to prefer"
            raise RowError(names.rejected, "pair_equal", reason)
        return Pair(prompt, chosen, rejected, parsed.benchmark)

    def _read_answer(self, row: dict[str, Any], names: _Names, prompt: Conversation, key: str, source: str) -> Answer:
        token_ids = _read_token_ids(row.get(f"{key}_token_ids"), f"{key}_token_ids")
        if token_ids is not None:
            return Answer((), token_ids)
        messages = row.get(key)
        if not isinstance(messages, list) or not messages:
            reason = f"expected a list of messages (or {key}_token_ids), got {describe_value(messages)}"
            raise RowError(getattr(names, key), "pair_shape", reason)
        both = self._read_messages(row, names, row["prompt"], messages, key, source).conversation
        answer = both.messages[len(prompt.messages) :]
        if not answer or answer[0].role != "assistant":
            reason = "an answer starts with an assistant's message"
            raise RowError(f"{getattr(names, key)}[0]", "pair_shape", reason)
        return Answer(answer)

    def _read_messages(
        self, row: dict[str, Any], names: _Names, prompt: list[Any], answer: list[Any], key: str, source: str
    ) -> ParsedRow:
        """Read the prompt with an answer as one conversation; errors name the part of the row that they are in."""
        joined = {name: value for name, value in row.items() if name not in ("prompt", "chosen", "rejected")}
        try:
            return read_row(joined | {"messages": prompt + answer}, PAIRS_FORMAT, self._context, source)
        except RowError as error:
            found = _MESSAGE.match(error.pointer)
            if found is None:
                raise
            index = int(found[1])
            in_answer = index >= len(prompt)
            where = f"{getattr(names, key)}[{index - len(prompt)}]" if in_answer else f"{names.prompt}[{index}]"
            raise RowError(where + error.pointer[found.end() :], error.kind, error.reason) from None


def encode_pair(pair: Pair, encoder: ConversationEncoder) -> list[Encoded]:
    """Return the samples of the chosen and the rejected answer, each after the same prompt.

    Raises:
        PairError: An answer has no supervised tokens or is of several samples, the prompts differ, or both answers
            are the same tokens.
        DataError: The template rejects an answer; see ``ConversationEncoder.encode``.
    """
    chosen, rejected = (
        _encode_answer(pair.prompt, answer, name, encoder)
        for name, answer in zip(("chosen", "rejected"), pair.answers, strict=True)
    )
    prompts = [sample.token_array[: _count_prompt(sample)] for sample in (chosen, rejected)]
    if prompts[0] != prompts[1]:
        raise PairError(
            "pair_prompts",
            "the chat template renders the prompt of the rejected answer differently from that of the chosen one; use "
            "answers of one kind, for example both with reasoning or both without",
        )
    if chosen.token_array == rejected.token_array:
        raise PairError("pair_equal", "rejected: has the same tokens as chosen, so there is nothing to prefer")
    return [chosen, rejected]


def _encode_answer(prompt: Conversation, answer: Answer, name: str, encoder: ConversationEncoder) -> Encoded:
    if answer.token_ids is not None:
        num_vocab = encoder.tokenizer.tokenizer.get_vocab_size()
        if max(answer.token_ids) >= num_vocab:
            raise PairError(
                "pair_shape",
                f"{name}_token_ids: {max(answer.token_ids)} is not a token of this model's {num_vocab:,}; sample the "
                "answers with this model",
            )
        ids = encoder.encode_prompt(prompt)
        return Encoded(
            array("i", [*ids, *answer.token_ids]), array("d", [0.0] * len(ids) + [1.0] * len(answer.token_ids))
        )
    history = tuple(replace(message, weight=0.0) for message in prompt.messages)
    samples = encoder.encode(replace(prompt, messages=history + answer.messages))
    samples = [sample for sample in samples if sample.is_supervised]
    if not samples:
        raise PairError("pair_unsupervised", f"{name}: has no supervised token under data.train_on and its weights")
    if len(samples) > 1:
        raise PairError(
            "pair_shape",
            f"{name}: the chat template rewrites its earlier turns, so they are {len(samples)} samples; keep one turn "
            "of the assistant in each answer",
        )
    return samples[0]


def _count_prompt(sample: Encoded) -> int:
    """Return the number of tokens before the first supervised one."""
    return next(index for index, weight in enumerate(sample.weight_array) if weight > 0)


def _name_parts(row: dict[str, Any]) -> tuple[dict[str, Any], _Names]:
    """Return a row with its parts under ``prompt``, ``chosen`` and ``rejected``, and the names that it has for them."""
    if "preferred_output" in row:
        given = row.get("input")
        if not isinstance(given, dict):
            raise RowError("input", "pair_shape", f"expected an object with messages, got {describe_value(given)}")
        others = {key: value for key, value in given.items() if key != "messages"}
        if both := sorted(name for name in others if row.get(name) is not None):
            raise RowError(both[0], "pair_shape", "is in the row and in its input; keep one of the two")
        parts = (given.get("messages"), row["preferred_output"], row.get("non_preferred_output"))
        return _rename(row | others, ("input", *_OPENAI[1:]), parts), _OPENAI
    if "chosen_response" in row and "messages" in row:
        answers = [_read_response(row.get(key)) for key in _WHEN2CALL[1:]]
        return _rename(row, _WHEN2CALL, (row["messages"], *answers)), _WHEN2CALL
    messages = row.get("messages")
    if isinstance(messages, list) and messages and row.get("rejected_response"):
        parts = (messages[:-1], messages[-1:], _read_response(row["rejected_response"]))
        names = _Names("messages", "messages", "rejected_response")
        return _rename(row, ("messages", "rejected_response"), parts), names
    if messages and row.get("rejected_messages"):
        renamed = _rename(row, ("messages", "rejected_messages"), (None, messages, row["rejected_messages"]))
        return _split_prompt(renamed), _Names("messages", "messages", "rejected_messages")
    return (_split_prompt(row) if "prompt" not in row else row), _Names()


def _rename(row: dict[str, Any], names: Iterable[str], parts: tuple[Any, ...]) -> dict[str, Any]:
    """Return a row whose parts replace the columns that they are from."""
    kept = {key: value for key, value in row.items() if key not in names}
    if clash := next((name for name in _Names() if kept.get(name)), None):
        raise RowError(clash, "pair_shape", "a second pair in the row, beside that in other columns; keep one")
    return kept | dict(zip(_Names(), parts, strict=True))


def _read_response(value: Any) -> Any:
    """Return an answer that is a text or a single message as a list of messages, with When2Call's calls as calls."""
    if isinstance(value, str):
        value = {"role": "assistant", "content": value}
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    tagged = _TOOL_CALLS.fullmatch(content) if isinstance(content, str) else None
    calls = peek(tagged[1]) if tagged else None
    # A call that is not JSON stays text, which the reader of messages refuses.
    return [{**value, "content": None, "tool_calls": calls}] if isinstance(calls, list) else [value]


def _split_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of two complete conversations as one with their common prompt."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list) or not chosen or not rejected:
        keys = ", ".join(map(str, list(row)[:12])) or "none"
        raise RowError("", "pair_shape", f"expected prompt, chosen and rejected, lists of messages; keys found: {keys}")
    if chosen[:-1] != rejected[:-1]:
        first = next((i for i, (a, b) in enumerate(zip(chosen[:-1], rejected[:-1], strict=False)) if a != b), None)
        where = "in their numbers of messages" if first is None else f"in message {first}"
        reason = f"the two conversations differ before their last message ({where}), so they share no prompt"
        raise RowError("", "pair_prompts", reason)
    return row | {"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


def _read_token_ids(value: Any, pointer: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    if not is_list or not value:
        raise RowError(pointer, "pair_shape", f"expected a list of token ids, got {describe_value(value)}")
    return tuple(value)
