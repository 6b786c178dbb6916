"""Tiny models of transformers' hybrid families, with random weights, for the tests of several modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.tiny_models import DELTA_NET, SIZES, copy_tokenizer

_SIZES = {key: value for key, value in SIZES.items() if key != "sliding_window"} | {"max_position_embeddings": 2048}
_EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_CONV = {"layer_types": ["conv", "full_attention"]}

# By model_type: what to set besides the sizes, and the class of the layers with state.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", DELTA_NET),
    "qwen3_5_moe_text": ("Qwen3_5MoeGatedDeltaNet", DELTA_NET | _EXPERTS),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", DELTA_NET | _EXPERTS),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", DELTA_NET),
    "lfm2": ("Lfm2ShortConv", _CONV),
    "lfm2_moe": ("Lfm2MoeShortConv", _CONV | _EXPERTS | {"num_dense_layers": 1}),
    "lfm3": ("Lfm3ShortConv", _CONV),
    "nemotron_h": (
        "NemotronHMamba2Mixer",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridMambaLayer",
        _MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "falcon_h1": ("FalconH1Mixer", _MAMBA | {"mamba_d_ssm": 64}),
    "bamba": ("BambaMixer", _MAMBA | {"attn_layer_indices": [1]}),
    "jamba": (
        "JambaMambaMixer",
        {
            "mamba_d_state": 8,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "kimi_linear": (
        "KimiLinearDeltaAttention",
        _EXPERTS
        | {
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
}


def make_config(model_type: str, **changes: Any) -> Any:
    """Return the config of a tiny model; ``changes`` are values of it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **(_SIZES | HYBRIDS[model_type][1] | changes))


def save_hybrid(model_type: str, path: Path, with_tokenizer: bool = False, **changes: Any) -> Path:
    """Save a random model with transformers, and the demo's tokenizer; ``changes`` are values of its config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    if with_tokenizer:
        changes["vocab_size"] = copy_tokenizer(path)["vocab_size"]
    model = AutoModelForCausalLM.from_config(make_config(model_type, **changes))
    with torch.no_grad():
        # Biases and norms, too, which start as zeros and ones; but not buffers, which hold the decay of some layers.
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    return path
