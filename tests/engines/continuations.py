"""Continuations of token ids by an engine, as the tests compare them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fctune.data.conversation import Conversation
from fctune.engines.engine import Engine, Prompt


class Continuation(NamedTuple):
    """An answer's tokens, and what came with them."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_cut: bool
    version: int
    error: str | None
    rejected: tuple[str, ...]


def continue_ids(
    engine: Engine, prompts: Sequence[Sequence[int]], seeds: Iterable[int], max_new_tokens: int
) -> list[Continuation]:
    """Return the continuation of each prompt, in the order of the prompts."""
    pairs = zip(prompts, seeds, strict=True)
    asked = [Prompt(Conversation(()), max_new_tokens, ids=tuple(ids), seed=seed) for ids, seed in pairs]
    found = []
    for answer in engine.answer(asked):
        ids, logprobs = ((), ()) if answer.tokens is None else (answer.tokens.ids, answer.tokens.logprobs)
        ending = answer.is_cut, answer.version, answer.error, answer.rejected
        found.append(Continuation(answer.index, ids, logprobs, *ending))
    return sorted(found)
