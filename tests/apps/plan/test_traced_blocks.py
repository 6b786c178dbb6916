"""What the planner counts of models that its formulas do not describe: traced activations, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fctune.apps.plan.block_tracing import trace_blocks
from fctune.apps.plan.memory import MemoryModel
from fctune.apps.plan.models import shape_model
from fctune.apps.plan.speed import count_flops
from fctune.config.loading import load_config
from fctune.models.architecture import Architecture
from fctune.models.sources import find_public_config, parse_architecture
from tests.conftest import ROOT

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}


def make_architecture(family: str, folder: Path, **changes: Any) -> Architecture:
    config = AutoConfig.for_model(family, **SIZES | changes)
    return parse_architecture(str(folder), config.to_dict())


def count_kept(family: str, length: int, **changes: Any) -> int:
    """Count what real layers of transformers keep for backward, all weights trained."""
    config = AutoConfig.for_model(family, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}
    inside = False

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if inside and tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    for layer in model.model.layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.zeros(1, length, dtype=torch.int64))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_traced_activations_are_those_that_transformers_layers_keep(family: str, tmp_path: Path) -> None:
    config = load_config(ROOT / "configs" / "tiny_full.yaml", ["data.seq_len=1024"])
    traced = trace_blocks(make_architecture(family, tmp_path), config, 4)
    assert traced is not None
    measured = (count_kept(family, 512) - count_kept(family, 256)) / 256 / SIZES["num_hidden_layers"]
    assert traced.per_token == pytest.approx(measured, rel=0.1)


def test_experts_count_by_those_that_a_token_meets() -> None:
    raw = find_public_config("Qwen/Qwen3-30B-A3B")
    assert raw is not None
    a = parse_architecture("Qwen/Qwen3-30B-A3B", raw)
    met = sum(block.num_active_weights for block in a.blocks) + 2 * a.vocab_size * a.embed_dim
    assert met == pytest.approx(3.3e9, rel=0.02)  # of 30.5 billion, as its model card says

    config = load_config(ROOT / "configs" / "qwen3_30b_a3b_lora.yaml")
    flops = count_flops(MemoryModel(shape_model(config, a), config, None), 0.0, 0.0, 0.0)
    trained = 26_738_688
    assert flops.total == pytest.approx(4 * (met - 2 * a.vocab_size * a.embed_dim) + 6 * trained, rel=1e-3)


def test_public_sizes_are_those_of_the_model_cards() -> None:
    known = {
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "openai/gpt-oss-20b": 20_914_757_184,
        "google/gemma-3-270m-it": 268_098_176,
        "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    }
    for name, count in known.items():
        raw = find_public_config(name)
        assert raw is not None
        config = load_config(ROOT / "configs" / "tiny_full.yaml")
        model = shape_model(config, parse_architecture(name, raw))
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name
