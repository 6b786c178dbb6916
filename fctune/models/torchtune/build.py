"""Models built by torchtune."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtune.models.llama3._component_builders import llama3
from torchtune.models.llama3_2._component_builders import llama3_2
from torchtune.models.qwen2._component_builders import qwen2

from fctune.models.attention import AttentionKernel
from fctune.models.precision import PrecisionPolicy
from fctune.models.torchtune.architecture import TorchtuneArchitecture
from fctune.models.torchtune.decoder import TorchtuneCausalLM
from fctune.models.torchtune.layers import replace_layers_


def build_model(
    architecture: TorchtuneArchitecture,
    max_seq_len: int,
    precision: PrecisionPolicy,
    attention_kernel: AttentionKernel,
) -> TorchtuneCausalLM:
    """Build the model on the meta device; see ``sources.build_model``.

    Raises:
        ConfigError: ``max_seq_len`` exceeds the model's positions, or torchtune cannot build this combination.
    """
    architecture.check_seq_len(max_seq_len)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(precision.weight_dtype)
    try:
        with torch.device("meta"):
            decoder = _build_decoder(architecture, max_seq_len)
            replace_layers_(decoder)
    finally:
        torch.set_default_dtype(previous)
    return TorchtuneCausalLM(decoder, architecture, precision, attention_kernel)


def _build_decoder(a: TorchtuneArchitecture, max_seq_len: int) -> nn.Module:
    common: dict[str, Any] = {
        "vocab_size": a.vocab_size,
        "num_layers": a.num_layers,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "embed_dim": a.embed_dim,
        "intermediate_dim": a.intermediate_dim,
        "max_seq_len": max_seq_len,
        "norm_eps": a.norm_eps,
        "rope_base": a.rope_base,
    }
    decoder: nn.Module
    if a.model_type == "qwen2":
        decoder = qwen2(**common, tie_word_embeddings=a.is_tied)
    elif a.rope_factor is not None:
        decoder = llama3_2(**common, scale_factor=a.rope_factor, tie_word_embeddings=a.is_tied)
    else:
        decoder = llama3(**common)
    return decoder
