"""Log-likelihoods of several continuations of the same tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


@torch.no_grad()
def score_continuations(model: Any, ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the log-probability ``[s]`` of each token of every continuation, in float32 on the CPU.

    The common tokens are read once if the model's cache holds plain attention only. A recurrent state is not rolled
    forward by several tokens in every model, so others read the complete sequence for each continuation.

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
        if _has_logits_to_keep(model):
            options["logits_to_keep"] = len(continuation)
        logits = model(input_ids=torch.tensor([inputs], device=model.device), **options).logits[0]
        logprobs = logits[-len(continuation) :].float().log_softmax(-1)
        chosen = torch.tensor(continuation, device=logprobs.device)[:, None]
        scores.append(logprobs.gather(1, chosen).squeeze(1).cpu())
    return scores


def _read(model: Any, ids: Sequence[int]) -> Cache | None:
    """Return the cache after some tokens; None if it cannot be continued by several tokens at once."""
    options: dict[str, Any] = {"logits_to_keep": 1} if _has_logits_to_keep(model) else {}
    output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=True, **options)
    cache = getattr(output, "past_key_values", None)
    if not isinstance(cache, Cache) or not cache.layers:
        return None
    return cache if {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer} else None


def _has_logits_to_keep(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
