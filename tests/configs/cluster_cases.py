"""Configs of large models, with the sizes of their models and the clusters they are meant for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fctune.models.sources import find_public_config

# As in the models' config.json.
LLAMA_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_ROPE |= {"factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
LLAMA |= {"max_position_embeddings": 131072, "rope_scaling": LLAMA_ROPE, "num_key_value_heads": 8}
QWEN = {"model_type": "qwen2", "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
QWEN |= {"max_position_embeddings": 32768}


def sizes(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


@dataclass(frozen=True)
class Case:
    """Sizes of a config's model, and the cluster and layout that it is meant for."""

    model: dict[str, Any]
    num_parameters: int  # of the base, as its model card says
    num_trained: int
    nodes: int
    ranks_per_node: int
    layout: tuple[str, int, int]


LLAMA_8B = LLAMA | sizes(32, 4096, 14336, 32)
CASES = {
    "llama3_1_8b_lora": Case(LLAMA_8B, 8_030_261_248, 167_772_160, 2, 8, ("ddp", 16, 1)),
    "llama3_1_8b_full": Case(LLAMA_8B, 8_030_261_248, 8_030_261_248, 2, 8, ("hsdp", 2, 8)),
    "qwen2_7b_lora": Case(
        QWEN | sizes(28, 3584, 18944, 28) | {"num_key_value_heads": 4},
        *(7_615_616_512, 161_480_704, 1, 8, ("ddp", 8, 1)),
    ),
    "qwen2_5_72b_full": Case(
        QWEN | sizes(80, 8192, 29568, 64) | {"num_key_value_heads": 8},
        *(72_706_203_648, 72_706_203_648, 8, 8, ("hsdp", 2, 32)),
    ),
    "llama3_3_70b_lora": Case(LLAMA | sizes(80, 8192, 28672, 64), 70_553_706_496, 828_375_040, 2, 8, ("hsdp", 2, 8)),
}


def public(name: str) -> dict[str, Any]:
    """Return the sizes of a public model, whose counts of parameters below are those of its model card."""
    config = find_public_config(name)
    assert config is not None
    return config


ALONE = (1, 1, ("none", 1, 1))
CASES |= {
    "qwen2_5_coder_0_5b_lora": Case(public("Qwen/Qwen2.5-Coder-0.5B-Instruct"), 494_032_768, 35_192_832, *ALONE),
    "qwen3_0_6b_lora": Case(public("Qwen/Qwen3-0.6B"), 596_049_920, 20_185_088, *ALONE),
    "qwen3_4b_lora": Case(public("Qwen/Qwen3-4B-Instruct-2507"), 4_022_468_096, 66_060_288, *ALONE),
    "qwen3_8b_lora": Case(public("Qwen/Qwen3-8B"), 8_190_735_360, 87_293_952, *ALONE),
    "qwen3_32b_lora": Case(public("Qwen/Qwen3-32B"), 32_762_123_264, 268_435_456, 1, 8, ("ddp", 8, 1)),
    "qwen3_5_0_8b_lora": Case(public("Qwen/Qwen3.5-0.8B"), 752_393_024, 21_645_312, *ALONE),
    "qwen3_5_2b_lora": Case(public("Qwen/Qwen3.5-2B"), 1_881_825_088, 33_638_400, *ALONE),
    "qwen3_5_4b_lora": Case(public("Qwen/Qwen3.5-4B"), 4_205_751_296, 64_929_792, *ALONE),
    "qwen3_5_9b_lora": Case(public("Qwen/Qwen3.5-9B"), 8_953_803_264, 86_556_672, *ALONE),
    "qwen3_30b_a3b_lora": Case(
        public("Qwen/Qwen3-30B-A3B-Instruct-2507"), 30_532_122_624, 26_738_688, 1, 8, ("ddp", 8, 1)
    ),
    "gpt_oss_20b_lora": Case(public("openai/gpt-oss-20b"), 20_914_757_184, 15_925_248, *ALONE),
    "qwen3_30b_a3b_qlora": Case(public("Qwen/Qwen3-30B-A3B-Instruct-2507"), 30_532_122_624, 26_738_688, *ALONE),
    "gpt_oss_120b_lora": Case(public("openai/gpt-oss-120b"), 116_829_156_672, 23_887_872, *ALONE),
    "gemma3_270m_full": Case(public("google/gemma-3-270m-it"), 268_098_176, 268_098_176, *ALONE),
    "gemma3_270m_lora": Case(public("google/gemma-3-270m-it"), 268_098_176, 15_187_968, *ALONE),
    "gemma3_270m_dpo": Case(public("google/gemma-3-270m-it"), 268_098_176, 7_593_984, *ALONE),
    "gemma3_270m_grpo": Case(public("google/gemma-3-270m-it"), 268_098_176, 7_593_984, *ALONE),
    "llama3_1_8b_grpo": Case(LLAMA_8B, 8_030_261_248, 83_886_080, 1, 8, ("ddp", 8, 1)),
    "functiongemma_270m_lora": Case(public("google/functiongemma-270m-it"), 268_098_176, 7_593_984, *ALONE),
    "gemma4_e2b_lora": Case(public("google/gemma-4-E2B-it"), 4_628_569_344, 52_330_496, *ALONE),
    "gemma4_e4b_lora": Case(public("google/gemma-4-E4B-it"), 7_463_013_376, 77_332_480, *ALONE),
    "ministral3_8b_lora": Case(
        public("mistralai/Ministral-3-8B-Instruct-2512-BF16"), 8_489_553_920, 89_128_960, *ALONE
    ),
    "granite4_350m_lora": Case(public("ibm-granite/granite-4.0-350m"), 352_379_904, 13_303_808, *ALONE),
    "granite4_micro_lora": Case(public("ibm-granite/granite-4.0-micro"), 3_402_836_480, 58_982_400, *ALONE),
    "lfm2_5_350m_lora": Case(public("LiquidAI/LFM2.5-350M"), 354_483_968, 11_993_088, *ALONE),
    "smollm3_3b_lora": Case(public("HuggingFaceTB/SmolLM3-3B"), 3_075_098_624, 60_456_960, *ALONE),
    "llama3_2_1b_qlora": Case(public("meta-llama/Llama-3.2-1B-Instruct"), 1_235_814_400, 22_544_384, *ALONE),
}
