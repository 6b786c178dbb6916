"""The parameters and buffers of a model that torchtune builds, made without importing torchtune."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.architecture import TorchtuneArchitecture
from fctune.models.torchtune.decoder import TorchtuneCausalLM


@dataclass(frozen=True, slots=True)
class _TiedHead:
    """Stand-in for torchtune's ``TiedLinear``, which is not a module, so that its weight counts once."""

    tied_module: nn.Module


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Do nothing: torch would import its compiler to draw numbers without memory."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing; see ``_Linear``."""


def build_shapes(a: TorchtuneArchitecture, max_seq_len: int, precision: PrecisionPolicy) -> TorchtuneCausalLM:
    """Build a model on the meta device whose parameters and buffers can be counted and sharded; its blocks do not run.

    Names, shapes and dtypes are those of ``fctune.models.torchtune.build.build_model``.

    Raises:
        ConfigError: ``max_seq_len`` exceeds the model's positions.
    """
    a.check_seq_len(max_seq_len)
    options: dict[str, Any] = {"dtype": precision.weight_dtype, "device": "meta"}
    decoder: Any = nn.Module()
    decoder.tok_embeddings = _Embedding(a.vocab_size, a.embed_dim, **options)
    rotary = _make_rotary(a, max_seq_len)
    decoder.layers = nn.ModuleList(_make_block(a, rotary, options) for _ in range(a.num_layers))
    decoder.norm = _make_norm(a.embed_dim, options)
    if a.is_tied:
        decoder.output = _TiedHead(decoder.tok_embeddings)
    else:
        decoder.output = _Linear(a.embed_dim, a.vocab_size, bias=False, **options)
    return TorchtuneCausalLM(decoder, a, precision, "per_document")


def _make_block(a: TorchtuneArchitecture, rotary: nn.Module, options: dict[str, Any]) -> nn.Module:
    block: Any = nn.Module()
    block.attn, block.mlp = nn.Module(), nn.Module()
    width, kv_width = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    has_bias = a.model_type == "qwen2"
    for name, out_dim in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        setattr(block.attn, name, _Linear(a.embed_dim, out_dim, bias=has_bias, **options))
    block.attn.output_proj = _Linear(width, a.embed_dim, bias=False, **options)
    block.attn.pos_embeddings = rotary
    block.mlp.w1 = _Linear(a.embed_dim, a.intermediate_dim, bias=False, **options)
    block.mlp.w2 = _Linear(a.intermediate_dim, a.embed_dim, bias=False, **options)
    block.mlp.w3 = _Linear(a.embed_dim, a.intermediate_dim, bias=False, **options)
    block.sa_norm, block.mlp_norm = _make_norm(a.embed_dim, options), _make_norm(a.embed_dim, options)
    return block  # type: ignore[no-any-return]


def _make_norm(dim: int, options: dict[str, Any]) -> nn.Module:
    norm = nn.Module()
    norm.scale = nn.Parameter(torch.empty(dim, **options))
    return norm


def _make_rotary(a: TorchtuneArchitecture, max_seq_len: int) -> nn.Module:
    """Make the tables that all blocks share, ``[positions, ...]`` in float32; see ``layers.Rotary``."""
    rotary: Any = nn.Module()
    rotary.tables = nn.Module()
    half = a.head_dim // 2
    shape = (max_seq_len, 2 * a.head_dim) if a.model_type == "qwen2" else (max_seq_len, half, 2)
    rotary.tables.register_buffer("theta", torch.empty(half, device="meta"), persistent=False)
    rotary.tables.register_buffer("cache", torch.empty(shape, device="meta"), persistent=False)
    return rotary  # type: ignore[no-any-return]
