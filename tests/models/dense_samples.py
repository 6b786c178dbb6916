"""Tiny decoders of transformers' families in float64, with their references, shared by several test modules."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.attention import make_bounds
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.dropout import row_key
from fctune.models.expert_lora import ExpertLoRA
from fctune.models.lora import LoRALinear, apply_lora_, init_adapters_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.models.transformers.architecture import parse_architecture
from fctune.models.transformers.float64 import keep_float64_

VOCAB_SIZE = 128
LENGTHS = (9, 14, 7)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"sliding_window": 4}
_MIXED = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LATENT: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}

# Families that differ in attention, norms, positions, scales and caps, by model_type.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": _MIXED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 7},
    "gemma3_text": _MIXED,
    "gemma4_text": _MIXED
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE, "global_head_dim": 64},
    "mistral": _SLIDING,
    # Of the conversations of LENGTHS, two are beyond the original length.
    "phi3": {
        "head_dim": 16,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 8,
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + 3.0 * index for index in range(8)],
        },
    },
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "olmo3": _MIXED,
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 5.0, "residual_multiplier": 0.4},
    "cohere2": _MIXED | {"logit_scale": 0.7},
    "exaone4": _MIXED,
    "glm4": {},
    "nemotron": {"head_dim": None},
    "stablelm": {"head_dim": None},
    "gpt_oss": _MIXED | _EXPERTS,
    "deepseek_v3": _LATENT | _EXPERTS | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
}


def read_raw(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the content of a tiny model's config.json."""
    from transformers import AutoConfig

    chosen = copy.deepcopy({**_SIZES, **FAMILIES.get(model_type, {}), **changes})  # some configs change their lists
    config = AutoConfig.for_model(model_type, **{key: value for key, value in chosen.items() if value is not None})
    raw: dict[str, Any] = config.to_dict()
    return raw


@functools.lru_cache(maxsize=32)
def make_reference(model_type: str) -> Any:
    """Return transformers' model with eager attention, in float64 throughout."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type].from_dict(read_raw(model_type))
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        parameter.data += torch.empty_like(parameter).normal_(std=0.1, generator=generator)
    keep_float64_(getattr(reference, reference.base_model_prefix))
    return reference.eval()


def make_model(model_type: str, dtype: torch.dtype = torch.float64) -> CausalLM:
    """Return our model with the reference's weights."""
    architecture = parse_architecture("config.json", read_raw(model_type))
    model = build_model(architecture, 64, PrecisionPolicy.uniform(dtype))
    materialize_(model, torch.device("cpu"))
    weights = dict(make_reference(model_type).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name.removeprefix("decoder.")])
    return model.eval()


def adapt_(model: CausalLM, adapter: AdapterConfig) -> CausalLM:
    """Add adapters whose B matrices are not zero, in place."""
    apply_lora_(model, adapter)
    init_adapters_(model, 0)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, (LoRALinear, ExpertLoRA)):
            module.init_buffers_()
            module.lora_b.data.normal_(std=0.05, generator=generator)
    return model


def draw_conversations(*lengths: int) -> list[Tensor]:
    """Return random conversations, ``[1, length]`` each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (1, length), generator=generator) for length in lengths]


def pack(conversations: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the tokens and positions of conversations in one row, ``[1, s]`` each."""
    positions = torch.cat([torch.arange(one.shape[1]) for one in conversations])[None]
    return torch.cat(conversations, dim=1), positions


def run_packed(model: CausalLM, lengths: list[list[int]]) -> dict[str, Tensor]:
    """Return the loss and the gradients of packed rows of conversations in training mode."""
    shape = len(lengths), sum(lengths[0])
    tokens = torch.randint(3, model.architecture.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    loss = model.train()(
        tokens,
        positions=torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]),
        bounds=make_bounds(lengths, "per_document"),
        labels=tokens,
        row_keys=torch.tensor([row_key(1, 1, row) for row in range(len(lengths))]),
    )
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found
