"""Configs of large models, with the sizes of their models and the clusters they are meant for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
