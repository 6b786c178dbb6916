"""Models that are built to be counted have the parameters and buffers of those that torchtune builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.lora import apply_lora_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, build_shapes, parse_architecture, read_architecture
from fctune.models.token_rows import train_tokens_

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": SIZES | {"model_type": "llama"},
    "llama, scaled": SIZES | {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3_ROPE},
    "llama, tied": SIZES | {"model_type": "llama", "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "qwen2, tied": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
}


def describe(model: CausalLM) -> dict[str, Any]:
    parameters = {n: (p.shape, p.dtype, p.device, p.requires_grad) for n, p in model.named_parameters()}
    buffers = {f"buffer {n}": (b.shape, b.dtype, b.device) for n, b in model.named_buffers()}
    blocks = [list(dict(block.named_parameters())) for block in model.blocks]
    stored = [name for name, _ in model.stored_buffers()]
    return parameters | buffers | {"blocks": blocks, "linears": list(model.linears()), "stored": stored}


@pytest.mark.parametrize("adapter", [None, AdapterConfig(), AdapterConfig(base="nf4", dora=True)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_counted_model_has_the_tensors_of_one_that_runs(name: str, adapter: AdapterConfig | None) -> None:
    architecture = parse_architecture("a model", MODELS[name], "torchtune")
    precision = PrecisionPolicy.uniform(torch.bfloat16)
    models = [build_model(architecture, 128, precision), build_shapes(architecture, 128, precision)]
    for model in models:
        if adapter is not None:
            apply_lora_(model, adapter)
            train_tokens_(model, (1, 7))
    runs, counted = (describe(model) for model in models)
    assert counted == runs
    assert sum(p.numel() for p in models[0].parameters()) == sum(p.numel() for p in models[1].parameters())


def test_rows_longer_than_the_positions_are_rejected_alike(make_model: Callable[..., Path]) -> None:
    architecture = read_architecture(make_model("llama"))
    for build in (build_model, build_shapes):
        with pytest.raises(ConfigError, match="seq_len"):
            build(architecture, 10**6, PrecisionPolicy.uniform(torch.float32))
