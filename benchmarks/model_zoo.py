"""Tiny random models of the architectures in the table of supported models, with the choices of the real families.

A tiny config is transformers' default for the architecture, which is a published model of the family, with smaller
sizes. Everything that distinguishes the family stays: soft caps, scales, sinks, kinds of layers, RoPE, ties,
shared experts, the ratio of heads, and the dimensions of latent attention among themselves.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[1]
# Gives every model its tokenizer and chat template.
TOKENIZER_DIR = ROOT / "fctune" / "assets" / "tiny_base"
_VOCAB_SIZE = 1408

_NUM_LAYERS = 4

# Sizes of a tiny model, for keys that its default config sets.
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "vocab_size_per_layer_input": _VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "shared_intermediate_size": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 2048,
    "model_max_length": 2048,
    "sliding_window": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "block_multiple_of": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "bos_token_id": 1397,
    "eos_token_id": 1400,
    "pad_token_id": 1401,
}
# Keys that others imply, which are left to transformers' own rules for the smaller sizes.
_IMPLIED = ("qk_head_dim", "moe_layers", "full_attn_idxs", "layers_block_type_indices", "max_window_layers")
_POSITIONS = ("max_position_embeddings", "model_max_length")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k")

_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION = {
    "hidden_size": 16,
    "num_heads": 2,
    "depth": 1,
    "intermediate_size": 24,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA_4_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "tie_word_embeddings": True,
}
# Most layers of Nemotron 3 Nano come in groups such as this one.
_NEMOTRON_GROUP = (*("linear_attention", "moe") * 2, "linear_attention", "full_attention", "moe")


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table.

    Attributes:
        model_type: Key of transformers' architecture.
        models: Names of public models of it.
        changes: Values of the config, or of its text model's, in place of the default's shrunk ones.
        sections: Configs of the other parts of a vision-language model; None for a text model.
        text_type: Architecture of the text model of a vision-language model.
        real: Values that transformers' default config lacks, without which it builds no model.
        deep: Values per layer of a model with as many layers as the default one, if they are not the default's or in
            ``real``.
    """

    model_type: str
    models: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] | None = None
    text_type: str = ""
    real: Mapping[str, Any] = field(default_factory=dict)
    deep: Mapping[str, Any] = field(default_factory=dict)


ENTRIES: tuple[Entry, ...] = (
    Entry("llama", "Llama 3, 3.1, 3.2, 3.3", {"rope_parameters": _LLAMA_ROPE, "num_key_value_heads": 2}),
    Entry("qwen2", "Qwen2, Qwen2.5", {"num_key_value_heads": 2}),
    Entry("qwen3", "Qwen3 0.6B to 32B, Qwen3-4B-2507", {"num_key_value_heads": 2}),
    Entry("qwen3_moe", "Qwen3-30B-A3B, Qwen3-Coder"),
    Entry("qwen3_next", "Qwen3-Next"),
    Entry("qwen3_5_text", "Qwen3.5, 3.6 and 3.8, text only"),
    Entry("qwen3_5_moe_text", "Qwen3.5-35B-A3B, text only"),
    Entry("qwen3_5", "Qwen3.5, 3.6 and 3.8", {}, {"vision_config": _QWEN_VISION}, "qwen3_5_text"),
    Entry("qwen3_5_moe", "Qwen3.5-35B-A3B", {}, {"vision_config": _QWEN_VISION}, "qwen3_5_moe_text"),
    Entry("gpt_oss", "gpt-oss-20b, gpt-oss-120b"),
    Entry("gemma", "Gemma"),
    Entry("gemma2", "Gemma 2"),
    Entry("gemma3_text", "Gemma 3 270M and 1B, FunctionGemma"),
    Entry(
        "gemma3",
        "Gemma 3 4B to 27B",
        {},
        {"vision_config": {"model_type": "siglip_vision_model", **_VISION}, "mm_tokens_per_image": 4},
        "gemma3_text",
    ),
    Entry("gemma4_text", "Gemma 4 E2B and E4B, text only", {**_GEMMA_4_LAYERS, "num_kv_shared_layers": 2}),
    Entry(
        "gemma4",
        "Gemma 4 E2B to 31B",
        {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1},
        {
            "vision_config": {"model_type": "gemma4_vision", **_VISION, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": None,
        },
        "gemma4_text",
    ),
    Entry(
        "nemotron_h",
        "Nemotron 3 Nano 30B-A3B, Nemotron Nano 2",
        {"n_groups": 2},
        deep={"layers_block_type": [*_NEMOTRON_GROUP * 7, "linear_attention", "moe", "mlp"]},
    ),
    Entry("nemotron", "Nemotron 4, Minitron", {"num_key_value_heads": 2}, real={"num_key_value_heads": 8}),
    Entry("mistral", "Mistral 7B, Mistral Nemo", {"sliding_window": None}),
    Entry("ministral", "Ministral 8B", {"head_dim": 16}, real={"head_dim": 128}),
    Entry("ministral3", "Ministral 3, text only"),
    Entry(
        "mistral3",
        "Ministral 3, Mistral Small 3",
        {"tie_word_embeddings": False},
        {"vision_config": {"model_type": "pixtral", "head_dim": 8, **_VISION}, "tie_word_embeddings": False},
        "ministral3",
    ),
    Entry("mixtral", "Mixtral 8x7B"),
    Entry("granite", "Granite 3, Granite 4 dense", _GRANITE),
    Entry("granitemoe", "Granite 3 MoE", _GRANITE),
    Entry(
        "granitemoehybrid",
        "Granite 4 hybrid",
        {**_GRANITE, "layer_types": ["mamba", "attention"] * 2},
        real={"layer_types": [*["mamba"] * 7, "attention"] * 4},
    ),
    Entry("smollm3", "SmolLM3 3B"),
    Entry("glm", "GLM-4-9B"),
    Entry("glm4", "GLM-4-0414"),
    Entry("glm4_moe", "GLM-4.5, 4.6 and 4.7", {"use_qk_norm": True}),
    Entry("glm4_moe_lite", "GLM-4.7-Flash"),
    Entry("glm_moe_dsa", "GLM-5"),
    Entry(
        "lfm2",
        "LFM2, LFM2.5",
        {"layer_types": ["conv", "full_attention"] * 2},
        deep={"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16},
    ),
    Entry(
        "lfm2_moe",
        "LFM2-8B-A1B",
        {"layer_types": ["conv", "full_attention"] * 2},
        real={"layer_types": ["conv", "full_attention"] * 16},
    ),
    Entry("lfm3", "LFM3"),
    Entry("muse_glimmer_text", "Muse-Glimmer-30B, text only"),
    Entry("phi3", "Phi-3, Phi-4-mini"),
    Entry("phimoe", "Phi-3.5-MoE"),
    Entry("olmo", "OLMo"),
    Entry("olmo2", "OLMo 2"),
    Entry("olmo3", "OLMo 3"),
    Entry("olmo_hybrid", "OLMo hybrid"),
    Entry("olmoe", "OLMoE"),
    Entry("cohere", "Command R"),
    Entry("cohere2", "Command R7B, Command A"),
    Entry("cohere2_moe", "Command A, mixture of experts"),
    Entry("deepseek_v2", "DeepSeek V2", {"num_experts_per_tok": 2}, real={"num_experts_per_tok": 6}),
    Entry("deepseek_v3", "DeepSeek V3 and R1, Kimi K2"),
    Entry("deepseek_v32", "DeepSeek V3.2"),
    Entry("deepseek_v4", "DeepSeek V4", {"head_dim": 64, "o_groups": 2, "o_lora_rank": 16}),
    Entry("exaone4", "EXAONE 4"),
    Entry("exaone_moe", "K-EXAONE"),
    Entry("seed_oss", "Seed-OSS"),
    Entry("hunyuan_v1_dense", "Hunyuan dense", {"head_dim": 16}, real={"head_dim": 128}),
    Entry("hunyuan_v1_moe", "Hunyuan-A13B", {"head_dim": 16}, real={"head_dim": 128}),
    Entry("hy_v3", "Hunyuan 3"),
    Entry("ernie4_5", "ERNIE 4.5"),
    Entry("ernie4_5_moe", "ERNIE 4.5 MoE"),
    Entry("apertus", "Apertus"),
    Entry("arcee", "AFM-4.5B"),
    Entry("afmoe", "Trinity"),
    Entry("falcon_h1", "Falcon-H1"),
    Entry("bamba", "Bamba", {"attn_layer_indices": [1, 3]}, real={"attn_layer_indices": [9, 18, 27]}),
    Entry(
        "jamba",
        "Jamba 1.5 and 1.6",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    Entry("minimax_m2", "MiniMax M2"),
    Entry("llama4_text", "Llama 4, text only"),
    Entry("kimi_linear", "Kimi Linear"),
    Entry("stablelm", "StableLM 2"),
    Entry("starcoder2", "StarCoder2"),
    Entry("internlm3", "InternLM3"),
    Entry("nanochat", "nanochat"),
    Entry("solar_open", "Solar Open"),
    Entry("mimo_v2_flash", "MiMo-V2-Flash", {"head_dim": 24, "v_head_dim": 16}),
    Entry(
        "dots1",
        "dots.llm1",
        {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
        real={"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    ),
    Entry("laguna", "Laguna"),
    # transformers zeroes the row of a padding token whenever it loads this model.
    Entry("youtu", "Youtu-LLM", {"pad_token_id": None}),
    Entry("bailing_hybrid", "Ling 3.0 Flash", {"num_expert_group": 4, "topk_group": 2}),
    Entry(
        "gemma4_unified",
        "Gemma 4 unified",
        {**_GEMMA_4_LAYERS},
        {"vision_config": None, "audio_config": None},
        "gemma4_unified_text",
    ),
    Entry("gemma4_unified_text", "Gemma 4 unified, text only"),
    Entry("granite_swa", "Granite Swash 2B"),
    Entry("granitemoe_swa", "Granite Swash 3B-A600M"),
    Entry("hyperclovax", "HyperCLOVA X SEED Think"),
    Entry("mellum", "Mellum 2"),
    Entry("minimax_m3_vl_text", "MiniMax M3, text only"),
    Entry("phi", "Phi-1.5, Phi-2"),
    Entry("qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B"),
    Entry("zaya", "ZAYA1"),
    Entry("aria_text", "Aria, text only"),
    Entry("axk1", "A.X K1"),
    Entry("cwm", "CWM"),
    Entry("helium", "Helium 1"),
    Entry("iquestcoder", "IQuest-Coder"),
    Entry("jais2", "Jais 2"),
    Entry("kolibri1", "Kolibri 1"),
    Entry("flint", "Flint"),
    Entry("muse_spark", "Muse Spark"),
    Entry("beam", "Beam 1.0"),
    Entry("diffllama", "DiffLlama"),
    Entry("flex_olmo", "FlexOlmo"),
    Entry(
        "gpt_bigcode",
        "StarCoder",
        {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 2048},
        deep={"n_layer": 12},
    ),
    Entry("gpt_neox", "GPT-NeoX-20B, Pythia"),
    Entry(
        "granitemoeshared",
        "Granite MoE with shared experts",
        {**_GRANITE, "shared_intermediate_size": 48},
        real={"shared_intermediate_size": 1024},
    ),
    Entry("modernbert-decoder", "Ettin, ModernBERT decoders"),
    Entry("persimmon", "Persimmon 8B"),
    Entry("vaultgemma", "VaultGemma"),
)

# Call formats that the models of an architecture write, by their chat templates or by the parsers that servers have for
# them; ``NO_CALL_FORMAT`` has the others.
CALL_FORMATS: dict[str, tuple[str, ...]] = {
    "llama": ("llama3_json",),
    "qwen2": ("hermes",),
    "qwen3": ("hermes",),
    "qwen3_moe": ("hermes", "qwen3_coder"),
    "qwen3_next": ("hermes",),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), ("qwen3_coder",)),
    "gpt_oss": ("gpt_oss",),
    "gemma3_text": ("functiongemma",),
    "gemma4_text": ("gemma4",),
    "gemma4": ("gemma4",),
    "nemotron_h": ("qwen3_coder", "nemotron_list"),
    "mistral": ("mistral_v3",),
    "ministral": ("mistral_v3",),
    "ministral3": ("mistral_v13",),
    "mistral3": ("mistral_v13", "mistral_v11"),
    "mixtral": ("mistral_v3",),
    "granite": ("granite3", "hermes"),
    "granitemoe": ("granite3",),
    "granitemoehybrid": ("hermes",),
    "smollm3": ("hermes",),
    "glm4_moe": ("glm45",),
    "glm4_moe_lite": ("glm45",),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("lfm",)),
    "phi3": ("phi4_mini",),
    "olmo3": ("olmo3",),
    "cohere2": ("cohere",),
    "deepseek_v3": ("deepseek_v3", "deepseek_v31", "kimi_k2"),
    "minimax_m2": ("minimax_m2",),
    "llama4_text": ("llama4_json", "pythonic"),
    "kimi_linear": ("kimi_k2",),
    "seed_oss": ("seed_oss",),
    "hunyuan_v1_moe": ("hunyuan_a13b",),
    "ernie4_5_moe": ("ernie45",),
    "apertus": ("apertus",),
    "jamba": ("jamba",),
    "dots1": ("dots",),
    "mimo_v2_flash": ("qwen3_coder",),
    **dict.fromkeys(("laguna", "bailing_hybrid"), ("glm45",)),
    **dict.fromkeys(("exaone4", "exaone_moe", "afmoe"), ("hermes",)),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), ("gemma4",)),
}

# Why an architecture has none: its public models are base models or their templates print no tools, or the format of
# their calls is not known here.
_NO_TOOLS, _UNKNOWN = "none: its templates print no tools", "none: its own format is not read"
NO_CALL_FORMAT: dict[str, str] = {
    **dict.fromkeys(
        (
            *("gemma", "gemma2", "gemma3", "nemotron", "olmo", "olmo2", "olmoe", "deepseek_v2", "ernie4_5"),
            *("stablelm", "starcoder2", "nanochat", "bamba", "aria_text", "diffllama", "flex_olmo"),
            *("gpt_bigcode", "gpt_neox", "granitemoeshared", "helium", "modernbert-decoder", "persimmon"),
            *("phi", "qwen2_moe", "vaultgemma"),
        ),
        _NO_TOOLS,
    ),
    **dict.fromkeys(
        (
            *("lfm3", "falcon_h1", "glm", "glm4", "cohere", "cohere2_moe", "olmo_hybrid", "hunyuan_v1_dense"),
            *("hy_v3", "arcee", "internlm3", "solar_open", "youtu", "axk1", "beam", "cwm", "flint", "granite_swa"),
            *("granitemoe_swa", "hyperclovax", "iquestcoder", "jais2", "kolibri1", "mellum"),
            *("minimax_m3_vl_text", "zaya"),
        ),
        _UNKNOWN,
    ),
}

# Chat templates of an architecture's models that the wheels of trl and transformers have: tests train on each of them.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "llama": ("llama3_1", "llama3_2"),
    "qwen2": ("qwen2_5",),
    "qwen3": ("qwen3", "qwen3_instruct_2507"),
    "qwen3_moe": ("qwen3", "qwen3_instruct_2507"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5"), ("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_moe"), ("qwen3_5_think",)),
    "gpt_oss": ("gptoss",),
    "gemma4_text": ("gemma4_v5",),
    "gemma4": ("gemma4_v5",),
    "nemotron_h": ("nemotron_3_nano",),
    "glm4_moe": ("glm4moe",),
    "lfm2": ("lfm2_2_5", "lfm2_v2"),
    "llama4_text": ("transformers_llama4",),
}

# Tests and results in which a real server answers as fctune does, with a model of the architecture.
SERVED = {
    "llama": "tests/serving/test_vllm_server.py",
    "falcon_h1": "tests/serving/test_vllm_hybrid.py",
    "granitemoehybrid": "tests/serving/test_vllm_hybrid.py",
    "gemma3_text": "benchmarks/results/real_model_2026-11-23.json",
}

# Models that people tune for tool calls most, which come first on the page.
HEADLINES = frozenset(
    {
        *(
            "llama",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "gpt_oss",
            "gemma3_text",
            "gemma3",
            "gemma4",
        ),
        *("nemotron_h", "mistral", "mistral3", "granite", "granitemoe", "granitemoehybrid", "smollm3", "glm4_moe"),
        *("glm4_moe_lite", "lfm2", "lfm2_moe", "lfm3", "phi3", "olmo3", "cohere2", "deepseek_v3", "minimax_m2"),
        *("falcon_h1", "qwen3_next", "mixtral"),
    }
)


def find_entry(model_type: str) -> Entry:
    """Return the entry of a model type."""
    return next(entry for entry in ENTRIES if entry.model_type == model_type)


def shrink(
    default: Mapping[str, Any], changes: Mapping[str, Any] | None = None, keeps_depth: bool = False
) -> dict[str, Any]:
    """Return a config with the choices of a default one, in sizes of a tiny model.

    ``keeps_depth``: with all layers and positions of the default; otherwise with a few layers of every kind.
    """
    values = {key: value for key, value in default.items() if key not in _IMPLIED}
    values |= {key: size for key, size in _SIZES.items() if default.get(key) is not None or key.endswith("token_id")}
    heads, groups = default.get("num_attention_heads"), default.get("num_key_value_heads")
    if heads and groups:
        values["num_key_value_heads"] = 4 if heads == groups else 1 if groups == 1 else 2
    if default.get("qk_rope_head_dim"):  # latent attention, whose head_dim is one of its own sizes
        values.pop("head_dim", None)
    values |= {key: 2 for key in _TOP_K if (default.get(key) or 0) > 1}
    if (default.get("n_group") or 1) > 1:
        values |= {"n_group": 4, "topk_group": 2}
    if (default.get("first_k_dense_replace") or 0) > 1:
        values["first_k_dense_replace"] = 1
    if keeps_depth:
        values |= {key: default[key] for key in _POSITIONS if key in default}
        values |= {key: 0 for key in _SIZES if default.get(key) == 0}  # Granite 4 Micro has no experts
        values |= _shrink_each_layer(default)
        return values | dict(changes or {})
    values |= _cut_layers(default)
    if isinstance(rope := default.get("rope_parameters"), dict):
        values["rope_parameters"] = _shrink_rope(rope)
    return values | dict(changes or {})


def _shrink_each_layer(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that list sizes per layer, for all layers in the sizes of a tiny model."""
    kept: dict[str, Any] = {}
    if isinstance(per_layer := default.get("per_layer_config"), dict):
        kept["per_layer_config"] = {int(i): {key: 2 * _SIZES[key] for key in values} for i, values in per_layer.items()}
    if heads := default.get("num_attention_heads_per_layer"):
        kept["num_attention_heads_per_layer"] = [4] * len(heads)
    return kept


def _cut_layers(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that list a value per layer, for a few layers of every kind in their order."""
    count = default.get("num_hidden_layers")
    lists = {
        key: value
        for key, value in default.items()
        if isinstance(value, list) and len(value) == count and key not in _IMPLIED
    }
    if not lists:
        return {} if count is None else {"num_hidden_layers": _NUM_LAYERS}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    chosen += [i for i in range(len(kinds)) if i not in chosen][: max(0, _NUM_LAYERS - len(chosen))]
    chosen.sort()
    cut: dict[str, Any] = {key: [value[i] for i in chosen] for key, value in lists.items()}
    if isinstance(per_layer := default.get("per_layer_config"), dict):
        # Gemma 4's global layers have larger heads.
        cut["per_layer_config"] = {
            chosen.index(int(i)): {key: 2 * _SIZES[key] for key in values}
            for i, values in per_layer.items()
            if int(i) in chosen
        }
    if "num_attention_heads_per_layer" in cut:
        cut["num_attention_heads_per_layer"] = [4] * len(chosen)
    return cut | {"num_hidden_layers": len(chosen)}


def _shrink_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE's parameters with the positions of a tiny model."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _shrink_rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    factor = rope.get("factor") or 1.0
    tiny = {"original_max_position_embeddings": math.ceil(2048 / factor), "max_position_embeddings": 2048}
    return {key: tiny.get(key, value) for key, value in rope.items()}


def make_config(entry: Entry, size: Literal["tiny", "deep", "real"] = "tiny") -> Any:
    """Return transformers' config of an entry: the default, a tiny one, or a tiny one with all layers of the default.

    Raises:
        KeyError: This version of transformers does not have the architecture.
    """
    from transformers import CONFIG_MAPPING

    def resolve(model_type: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        default: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
        if size == "real":
            return default | dict(entry.real)
        if size == "tiny":
            return shrink(default, changes)
        real = {key: value for key, value in entry.real.items() if isinstance(value, list)} | dict(entry.deep)
        kept = {key: value for key, value in changes.items() if not _is_per_layer(value)}
        return shrink(default | real, kept | real, keeps_depth=True)

    if entry.sections is None:
        return CONFIG_MAPPING[entry.model_type].from_dict(resolve(entry.model_type, entry.changes))
    text = {"model_type": entry.text_type, **resolve(entry.text_type, entry.changes)}
    return CONFIG_MAPPING[entry.model_type](text_config=text, **({} if size == "real" else entry.sections))


def _is_per_layer(value: Any) -> bool:
    """Return whether a change lists values for the layers of a tiny model, by their order or number."""
    return isinstance(value, list) or (isinstance(value, dict) and all(isinstance(key, int) for key in value))


def save_config(entry: Entry, folder: Path, size: Literal["tiny", "deep", "real"] = "tiny") -> None:
    """Write the config.json of an entry, as a checkpoint of it has it, and the tokenizer."""
    folder.mkdir(parents=True)
    config = make_config(entry, size)
    config.architectures = [name] if (name := _find_class(config)) else None
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TOKENIZER_DIR / file).is_file():
            shutil.copyfile(TOKENIZER_DIR / file, folder / file)


def _find_class(config: Any) -> str | None:
    """Return the name of the class that checkpoints are saved from."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if (found := mapping.get(type(config), None)) is not None:
            return str(found.__name__)
    return None


def quantize_to_mxfp4_(folder: Path, quantization: Mapping[str, Any], exponents: tuple[int, int]) -> None:
    """Store random four-bit numbers for the experts of a saved gpt-oss, as its published checkpoints do, in place.

    Args:
        folder: Directory of the model, with its weights in one file.
        quantization: The ``quantization_config`` of config.json.
        exponents: Smallest and largest power of two that 32 weights share.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    low, high = (127 + exponent for exponent in exponents)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(low, high + 1, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def save_weights(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save random weights next to a config.json, by transformers' own class and in its form of checkpoints."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0])
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.empty_like(tensor).normal_(std=0.08, generator=generator)
            # Norms and biases move from their starting values, of which an error would not show.
            tensor.copy_(noise if tensor.ndim > 1 and "conv" not in name else tensor + noise)
    model.to(dtype).save_pretrained(folder)
