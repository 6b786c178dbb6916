"""Continuations of token ids by an engine, and by a model in process that they are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


def compute_logprobs(model: Any, context: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Return the log-probability of each of the ids after a context under a transformers model, float32 ``[n]``."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(list(ids))[:, None]).squeeze(1)
