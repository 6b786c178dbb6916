"""Replacements for three of torchtune's layers.

torchtune's RMSNorm and rotary embeddings always cast to float32, so a float64 model would be float64 in name only:
losses on one and on two ranks would agree to 1e-9 instead of 1e-15. With bfloat16 weights its norm also misses torch's
fused kernel, which accumulates in float32 anyway. Its attention copies keys and values for every query head, and needs
a dense mask for packed rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention
from torchtune.modules import RMSNorm as TorchtuneRMSNorm

from fctune.models.attention import DocumentBounds, attend
from fctune.models.norms import rms_norm


class RMSNorm(nn.Module):
    """Root mean square norm (https://arxiv.org/abs/1910.07467) with torchtune's parameter name."""

    def __init__(self, norm: Any):
        super().__init__()
        self.eps = norm.eps
        self.scale: nn.Parameter = norm.scale

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of ``[..., d]``."""
        return rms_norm(x, self.scale, self.eps)


class Rotary(nn.Module):
    """Rotary position embeddings (https://arxiv.org/abs/2104.09864) from the tables of a torchtune module.

    ``tables.cache`` is float32: ``[positions, head_dim / 2, 2]``, cosine and sine, for Llama; ``[positions, 2 x
    head_dim]``, cosines and then sines, for Qwen2.
    """

    def __init__(self, tables: Any):
        super().__init__()
        self.tables = tables
        # Qwen2 rotates the two halves of a head against one another, Llama each pair of neighbours.
        self.is_halved = isinstance(tables, Qwen2RotaryPositionalEmbeddings)
        if not hasattr(tables, "cache"):
            # torchtune does not create scaled tables on the meta device, but memory is planned from a meta model.
            theta = torch.empty(tables.dim // 2, dtype=torch.float32)
            cache = torch.empty(tables.max_seq_len, tables.dim // 2, 2, dtype=torch.float32)
            tables.register_buffer("theta", theta, persistent=False)
            tables.register_buffer("cache", cache, persistent=False)

    def init_buffers_(self) -> None:
        """Compute the sine and cosine tables on torch's default device."""
        self.tables.rope_init()

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate ``[b, s, h, head_dim]`` by each token's position: ``input_pos [b, s]`` if given, else its index."""
        wide = x if x.dtype is torch.float64 else x.float()
        cache: Tensor = self.tables.cache[: x.shape[1]][None] if input_pos is None else self.tables.cache[input_pos]
        dim = x.shape[-1]
        if self.is_halved:
            cos, sin = cache[..., None, :dim], cache[..., None, dim:]
            first, second = wide.chunk(2, dim=-1)
            return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
        cos, sin = cache[:, :, None, :, 0], cache[:, :, None, :, 1]
        first, second = wide[..., ::2], wide[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.flatten(-2).to(x.dtype)


class Attention(MultiHeadAttention):  # type: ignore[misc]
    """torchtune's self-attention over packed rows; its ``mask`` is the bounds of the conversations."""

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: DocumentBounds | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention over ``x [b, s, d]``; torchtune's block passes the same tensor as ``y``."""
        b, s, _ = x.shape
        q, k, v = (project(x).view(b, s, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.pos_embeddings(q, input_pos=input_pos), self.pos_embeddings(k, input_pos=input_pos)
        out: Tensor = self.output_proj(attend(q, k, v, mask).reshape(b, s, -1))
        return out


def replace_layers_(decoder: nn.Module) -> None:
    """Swap torchtune's layers for ours, in place; parameters keep their names and are not copied."""
    rotaries: dict[int, Rotary] = {}  # torchtune shares one module among all blocks
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, TorchtuneRMSNorm):
                setattr(module, name, RMSNorm(child))
        if isinstance(module, MultiHeadAttention):
            module.__class__ = Attention
            tables = module.pos_embeddings
            if id(tables) not in rotaries:
                rotaries[id(tables)] = Rotary(tables)
            module.pos_embeddings = rotaries[id(tables)]
