"""Tiny random models of transformers' families, saved as checkpoints of these are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.conftest import TINY_BASE

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# By model_type: what to set besides the sizes.
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "smollm3": {},
    "gemma3_text": {},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0},
    "ministral3": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": DELTA_NET,
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "gpt_oss": _EXPERTS,
    "glm4_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS | _LATENT,
    "granitemoe": _EXPERTS,
    "olmoe": _EXPERTS | {"sliding_window": None},  # its masks have none
}
# By model_type: the text model's model_type, and what to set in its config and in that of the vision tower.
VISION_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {}, {"model_type": "siglip_vision_model", **_VISION}),
    "mistral3": ("ministral3", {}, {"model_type": "pixtral", "head_dim": 8, **_VISION}),
    "qwen3_5": (
        "qwen3_5_text",
        DELTA_NET,
        {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 24, "out_hidden_size": 32},
    ),
}


def save_tiny_model(model_type: str, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a random model with transformers; ``changes`` are values of its text config."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    if model_type in VISION_MODELS:
        text_type, text, vision = VISION_MODELS[model_type]
        sections = {"text_config": {"model_type": text_type, **SIZES, **text, **changes}, "vision_config": vision}
        config = AutoConfig.for_model(model_type, **sections)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    else:
        config = AutoConfig.for_model(model_type, **(SIZES | TEXT_MODELS[model_type] | changes))
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():  # biases and norms, too, which start as zeros and ones
            if tensor.is_floating_point():
                tensor.normal_(0, 0.2)
    model.save_pretrained(path)
    return path


def copy_tokenizer(path: Path) -> dict[str, int]:
    """Copy the demo's tokenizer and chat template to a model directory; returns the keys of config.json about it."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY_BASE / name).is_file():
            shutil.copyfile(TINY_BASE / name, path / name)
    known = json.loads((TINY_BASE / "config.json").read_text())
    return {key: known[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}


def load_hf(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a directory with transformers in the class that it was saved from."""
    import transformers

    name = json.loads((path / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
