"""Keys and values of the prompts that a model has read, for later prompts that begin with the same tokens.

The next prompt of a conversation begins with the last one and its answer, as far as the chat template writes both with
the same tokens again. Only what follows is read then.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Pairs of a query and a key in a forward pass. A mask has as many values, and so have the scores of each head in
# attention without a fused kernel, so this bounds the memory of a long prompt.
_MAX_PAIRS = 2**25
_MIN_CHUNK = 128  # tokens, which are worth a pass


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Token ids ``[s]``, and the keys and values ``[1, h, s, d]`` of each layer."""

    ids: NDArray[np.int64]
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def count_shared(self, ids: NDArray[np.int64]) -> int:
        """Return the number of ids that both begin with."""
        length = min(len(self.ids), len(ids))
        differing = np.flatnonzero(self.ids[:length] != ids[:length])
        return int(differing[0]) if len(differing) else length

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for layer in self.layers for part in layer)


class PrefixCache:
    """Reads prompts, and keeps what it has read for those that continue them.

    All keys are kept, also of layers with a sliding window, whose mask hides those before it: so the end of a prefix
    can be left out where a prompt differs from it.

    Args:
        model: A transformers model.
        max_bytes: Bytes to keep; further prompts are read in full each time.

    Attributes:
        can_continue: The model reads a prompt in several passes as in one.
    """

    def __init__(self, model: Any, max_bytes: int):
        self._model, self._max_bytes = model, max_bytes
        self._kept: list[_Prefix] = []
        self._num_earlier = 0  # of them, kept before the last call of ``retain``
        with torch.no_grad():
            output = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=True)
        self.can_continue = can_continue(model, getattr(output, "past_key_values", None))

    def __len__(self) -> int:
        return len(self._kept)

    def retain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forget what none of the next prompts would use; without prompts, everything."""
        used = {id(self._find(ids)) for ids in prompts}
        self._kept = [prefix for prefix in self._kept if id(prefix) in used]
        self._num_earlier = len(self._kept)

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]]) -> DynamicCache:
        """Return the cache of a batch of prompts, padded on the left, before the last token of each.

        What it uses is no longer kept, unless it was read since ``retain`` for another conversation.

        Args:
            prompts: Token ids of each prompt, at least two.
        """
        assert self.can_continue
        found = {tuple(ids): self._find(ids[:-1]) for ids in prompts}
        read = {ids: _read(self._model, np.asarray(ids[:-1]), prefix) for ids, prefix in found.items()}
        used = set(map(id, found.values()))
        del found
        earlier = [prefix for prefix in self._kept[: self._num_earlier] if id(prefix) not in used]
        self._kept = earlier + self._kept[self._num_earlier :]
        self._num_earlier = len(earlier)
        width, joined = max(map(len, prompts)) - 1, DynamicCache()
        for index in range(len(next(iter(read.values())).layers)):
            layers = [read[tuple(ids)].layers[index] for ids in prompts]
            keys = torch.cat([_pad_left(layer.keys, width) for layer in layers])
            joined.update(keys, torch.cat([_pad_left(layer.values, width) for layer in layers]), index)
            for layer in layers:  # so that there are never two copies of all layers
                layer.reset()
        return joined

    def keep(self, cache: DynamicCache, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Keep what ``read`` has returned, now with the answers, and free it.

        Args:
            cache: Cache of the batch.
            prompts: Token ids of each prompt.
            answers: Token ids of each answer.
        """
        width, end = max(map(len, prompts)), cache.get_seq_length()
        free = self._max_bytes - sum(prefix.num_bytes for prefix in self._kept)
        token_bytes = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
        token_bytes //= end * len(prompts)
        rows: list[tuple[int, slice, _Prefix]] = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start = width - len(prompt)
            ids = np.asarray([*prompt, *answer])[: end - start]  # the last token of the longest answer was not read
            if len(ids) * token_bytes <= free:
                free -= len(ids) * token_bytes
                rows.append((row, slice(start, start + len(ids)), _Prefix(ids)))
        try:
            for layer in cache.layers:
                for row, columns, prefix in rows:
                    keys, values = (part[row : row + 1, :, columns].clone() for part in (layer.keys, layer.values))
                    prefix.layers.append((keys, values))
                layer.reset()
        except torch.OutOfMemoryError:  # the answers are there; their conversations are read again
            self.retain(())
        else:
            self._kept += [prefix for _, _, prefix in rows]

    def _find(self, ids: Sequence[int]) -> _Prefix | None:
        """Return what is kept that shares the longest beginning with some ids; None if nothing does."""
        wanted = np.asarray(ids)
        shared = [(prefix.count_shared(wanted), prefix) for prefix in self._kept]
        count, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        return best if count else None


def _read(model: Any, ids: NDArray[np.int64], prefix: _Prefix | None) -> DynamicCache:
    """Return the cache of some ids, of which those that the prefix begins with are not read again."""
    cache, num_shared = DynamicCache(), 0
    if prefix is not None:
        num_shared = prefix.count_shared(ids)
        for index, (keys, values) in enumerate(prefix.layers):
            cache.update(keys[:, :, :num_shared], values[:, :, :num_shared], index)
    options: dict[str, Any] = {"logits_to_keep": 1} if has_logits_to_keep(model) else {}
    rest = torch.tensor(ids[None, num_shared:], device=model.device)
    for part in torch.split(rest, choose_chunk(1, len(ids)), dim=1) if rest.numel() else ():
        model(input_ids=part, past_key_values=cache, use_cache=True, **options)
    return cache


def _pad_left(part: Tensor, width: int) -> Tensor:
    """Return keys or values ``[1, h, s, d]`` with zeros before them, so that they have ``width`` tokens."""
    return pad(part, (0, 0, width - part.shape[2], 0))


def choose_chunk(num_rows: int, width: int) -> int:
    """Return how many tokens of each row a forward pass of a prompt reads, of rows of ``width`` tokens."""
    return max(_MIN_CHUNK, _MAX_PAIRS // (num_rows * width))


def can_continue(model: Any, cache: Any) -> TypeGuard[DynamicCache]:
    """Return True if a model, whose cache of some tokens is given, reads others after them as in one pass.

    The cache must hold nothing but the keys and values of all tokens, or of those in a sliding window: recurrent states
    are not rolled forward by several tokens in every model, and some models keep theirs in a subclass. And keys must
    not depend on the length that a prompt will have, as those of LongRoPE and of dynamic scaling do.
    """
    if type(cache) is not DynamicCache or not cache.layers:
        return False
    if not {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    found = (getattr(module, "rope_type", None) for module in model.modules())
    kinds = {kind for one in found for kind in (one.values() if isinstance(one, dict) else (one,))}
    return kinds.isdisjoint(("dynamic", "longrope"))


def has_logits_to_keep(model: Any) -> bool:
    """Return True if a model's forward computes the logits of the last tokens alone on request."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
