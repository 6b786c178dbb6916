"""LongRoPE (https://arxiv.org/abs/2402.13753), with the factors for long contexts where a conversation is long.

transformers takes them for a whole batch as soon as one of its positions is beyond the original length, so that a
conversation's numbers would depend on its neighbours and on padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fctune.models.attention import DocumentBounds
from fctune.models.forward_override import override_forward_


class TokenLengths:
    """Length of each token's conversation in the running batch, ``[b, s]`` or ``[b, 1]``; None before the first."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def set(self, tokens: Tensor, bounds: DocumentBounds | None, row_lengths: Tensor | None) -> None:
        """Set the lengths in a batch of tokens ``[b, s]``; see ``CausalLM.forward``."""
        if bounds is not None:
            lengths = bounds.ends.diff()
            rows, length = bounds.shape
            by_token = torch.repeat_interleave(lengths, lengths, output_size=rows * length).view(rows, length)
            own = by_token.chunk(bounds.group.size, 1)[bounds.group.rank]  # this rank's part of the tokens
            self.value = own.to(tokens.device)
        elif row_lengths is not None:
            self.value = row_lengths[:, None]
        else:
            self.value = torch.full_like(tokens[:, :1], tokens.shape[1])


def find_original_length(decoder: Any) -> int | None:
    """Return the number of positions that a decoder's RoPE extends; None if it extends none."""
    parameters = getattr(decoder.config, "rope_parameters", None) or {}
    kinds = [kind for kind in (parameters, *parameters.values()) if isinstance(kind, dict)]
    lengths = [kind["original_max_position_embeddings"] for kind in kinds if "original_max_position_embeddings" in kind]
    return min(lengths, default=None)


def choose_by_conversation_(decoder: nn.Module, lengths: TokenLengths) -> None:
    """Make LongRoPE choose its factors by the length of each token's conversation, in place."""
    for module in list(decoder.modules()):
        rotary: Any = module
        rope_type = getattr(module, "rope_type", None)
        if "longrope" in (rope_type.values() if isinstance(rope_type, dict) else (rope_type,)):
            rotary._token_lengths = lengths
            override_forward_(module, _rotate)


def _rotate(
    rotary: Any, own: Callable[..., Any], x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Any:
    """Return cosines and sines by transformers' own code, which chooses by the largest position that it gets."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    parameters = rotary.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    lengths = rotary._token_lengths.value
    if lengths is None or parameters["rope_type"] != "longrope":
        return own(x, position_ids, **options)
    limit = parameters["original_max_position_embeddings"]
    short = own(x, position_ids.clamp(max=limit - 1), **options)
    beyond = torch.full_like(position_ids[:, :1], limit)
    long = own(x, torch.cat([position_ids, beyond], 1), **options)
    is_long = (lengths > limit)[..., None]
    return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))
