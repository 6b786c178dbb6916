"""Three of torchtune's layers, done otherwise.

torchtune's RMSNorm and rotary embeddings cast to float32 whatever they are given: a float64 model would be one in name
only (losses on one and on two ranks then agree to 1e-9, not to 1e-15), and with bfloat16 weights the norm falls off
torch's fused kernel, which keeps float32 inside anyway. Its attention copies keys and values for every query head, and
its packed rows need a dense mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention
from torchtune.modules import RMSNorm as TorchtuneRMSNorm

from fctune.models.attention import DocumentBounds, attend


class RMSNorm(nn.Module):
    """Root mean square norm (https://arxiv.org/abs/1910.07467) with torchtune's parameter name."""

    def __init__(self, norm: Any):
        super().__init__()
        self.eps = norm.eps
        self.scale: nn.Parameter = norm.scale

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last dim of ``[..., d]``."""
        return rms_norm(x, (x.shape[-1],), self.scale, self.eps)


class Rotary(nn.Module):
    """Rotary position embeddings (https://arxiv.org/abs/2104.09864) from the tables of a torchtune module."""

    def __init__(self, tables: Any):
        super().__init__()
        self.tables = tables
        # Qwen2 rotates the two halves of a head against one another, Llama each pair of neighbours.
        self.is_halved = isinstance(tables, Qwen2RotaryPositionalEmbeddings)

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate ``[b, s, h, d]`` by position; ``input_pos`` ``[b, s]`` where positions do not count along the row."""
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
    """torchtune's attention, whose ``mask`` is the bounds of conversations; with a KV cache, exactly torchtune's."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Attend within ``x`` (``[b, s, d]``)."""
        if self.cache_enabled or not (mask is None or isinstance(mask, DocumentBounds)):
            cached: Tensor = super().forward(x, y, mask=mask, input_pos=input_pos)
            return cached
        b, s, _ = x.shape
        q, k, v = (project(x).view(b, s, -1, self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.pos_embeddings(q, input_pos=input_pos), self.pos_embeddings(k, input_pos=input_pos)
        out: Tensor = self.output_proj(attend(q, k, v, mask).reshape(b, s, -1))
        return out


def replace_layers_(decoder: nn.Module) -> None:
    """Put these layers in place of torchtune's, in place; parameters keep their names and are not copied."""
    rotaries: dict[int, Rotary] = {}  # torchtune shares one module among all blocks
    for module in list(decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, TorchtuneRMSNorm):
                setattr(module, name, RMSNorm(child))
        if isinstance(module, MultiHeadAttention):
            module.__class__ = Attention
            tables = module.pos_embeddings
            module.pos_embeddings = rotaries.setdefault(id(tables), Rotary(tables))
