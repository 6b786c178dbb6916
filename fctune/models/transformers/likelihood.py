"""Log-likelihoods of several continuations of the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from fctune.models.transformers.prefix_cache import can_continue, choose_chunk, has_logits_to_keep


@torch.no_grad()
def score_continuations(model: Any, ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probability ``[s]`` of each token of every continuation, in float32 on the CPU.

    The common tokens are read once if the model ``can_continue``; others read the complete sequence for each
    continuation.

    Args:
        model: A transformers model.
        ids: Token ids before each continuation; at least one.
        continuations: Token ids of each continuation; at least one each.
    """
    *context, last = ids
    cache = _read(model, context) if context else None
    scores = []
    for continuation in continuations:
        inputs = [last, *continuation[:-1]] if cache is not None else [*ids, *continuation[:-1]]
        options: dict[str, Any] = {} if cache is None else {"past_key_values": copy.deepcopy(cache), "use_cache": True}
        if has_logits_to_keep(model):
            options["logits_to_keep"] = len(continuation)
        logits = model(input_ids=torch.tensor([inputs], device=model.device), **options).logits[0]
        logprobs = logits[-len(continuation) :].float().log_softmax(-1)
        chosen = torch.tensor(continuation, device=logprobs.device)[:, None]
        scores.append(logprobs.gather(1, chosen).squeeze(1).cpu())
    return scores


def _read(model: Any, ids: Sequence[int]) -> Cache | None:
    """Return the cache after some tokens; None if it cannot be continued by several tokens at once."""
    options: dict[str, Any] = {"logits_to_keep": 1} if has_logits_to_keep(model) else {}
    for part in torch.split(torch.tensor([ids], device=model.device), choose_chunk(1, len(ids)), dim=1):
        cache = getattr(model(input_ids=part, use_cache=True, **options), "past_key_values", None)
        if not can_continue(model, cache):
            return None
        options["past_key_values"] = cache
    return cache
