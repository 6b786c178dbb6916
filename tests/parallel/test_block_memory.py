"""What is counted of blocks that the formulas do not describe: traced activations, experts, and blocks of a kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fctune.config.loading import load_config
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.planned_model import shape_model
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, build_shapes, find_public_config, parse_architecture
from fctune.models.transformers.build import TransformersCausalLM
from fctune.parallel.block_memory import _trace_blocks, trace_blocks
from fctune.parallel.memory import MemoryModel
from fctune.parallel.speed import count_flops
from tests.conftest import ROOT
from tests.models.hybrid_samples import HYBRIDS
from tests.models.tiny_models import SIZES, TEXT_MODELS

TRACED_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


TRACED_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}


def count_kept(family: str, length: int, **changes: Any) -> int:
    """Count what real layers of transformers keep for backward, all weights trained."""
    config = AutoConfig.for_model(family, **TRACED_SIZES | changes)
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
def test_traced_activations_are_those_that_transformers_layers_keep(family: str) -> None:
    config = load_config(ROOT / "configs" / "tiny_full.yaml", ["data.seq_len=1024"])
    sizes = AutoConfig.for_model(family, **TRACED_SIZES).to_dict()
    traced = trace_blocks(parse_architecture(f"a tiny {family}", sizes), config, 4)
    assert traced is not None
    measured = (count_kept(family, 512) - count_kept(family, 256)) / 256 / TRACED_SIZES["num_hidden_layers"]
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


@pytest.mark.thorough
def test_public_sizes_are_those_of_the_model_cards() -> None:
    known = {
        "Qwen/Qwen3-0.6B": 596_049_920,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "openai/gpt-oss-20b": 20_914_757_184,
        "openai/gpt-oss-120b": 116_829_156_672,
        "google/gemma-3-270m-it": 268_098_176,
        "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    }
    for name, count in known.items():
        raw = find_public_config(name)
        assert raw is not None
        config = load_config(ROOT / "configs" / "tiny_full.yaml")
        model = shape_model(config, parse_architecture(name, raw))
        assert sum(parameter.numel() for parameter in model.parameters()) == count, name


# Layers and, where the layers differ, the number of kinds.
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 3


_STATEFUL = ["linear_attention", "linear_attention", "full_attention"] * 3


NUM_LAYERS = 9


MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3": ({}, 1),
    "smollm3": ({"no_rope_layers": [1, 1, 0] * 3}, 2),
    "gemma3_text": ({"layer_types": _SLIDING}, 2),
    # The last of each kind that has keys and values of its own hands them to the layers that have none.
    "gemma4_text": ({"layer_types": _SLIDING, "num_kv_shared_layers": 3, "global_head_dim": 16}, 6),
    "qwen3_5_text": ({"layer_types": _STATEFUL}, 2),
    "gpt_oss": ({"layer_types": _SLIDING}, 2),
    "deepseek_v3": ({"first_k_dense_replace": 2}, 2),
    "granitemoehybrid": ({"layer_types": ["mamba", "mamba", "attention"] * 3}, 2),
}


PRECISION = PrecisionPolicy.uniform(torch.float32)


def make_architecture(family: str, **changes: Any) -> Architecture:
    chosen = TEXT_MODELS[family] if family in TEXT_MODELS else HYBRIDS[family][1]
    config = AutoConfig.for_model(family, **(SIZES | chosen | {"num_hidden_layers": NUM_LAYERS} | changes))
    return parse_architecture(f"a tiny {family}", config.to_dict())


def each_its_own_kind(model: CausalLM) -> Sequence[Hashable]:
    return range(len(list(model.blocks)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("config_name", [pytest.param("tiny_full", marks=pytest.mark.thorough), "tiny_lora"])
@pytest.mark.parametrize("family", MODELS)
def test_two_blocks_of_a_kind_tell_what_all_of_them_keep(
    family: str, config_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, num_kinds = MODELS[family]
    architecture = make_architecture(family, **changes)
    overrides = [
        "data.seq_len=256",
        "compile=false",
        *(["adapter.modules=all-linear"] if "lora" in config_name else []),
    ]
    config = load_config(ROOT / "configs" / f"{config_name}.yaml", overrides)
    assert len(set(build_shapes(architecture, 256, PRECISION).block_kinds())) == num_kinds
    traced = trace_blocks(architecture, config, 4)
    monkeypatch.setattr(TransformersCausalLM, "block_kinds", each_its_own_kind)
    _trace_blocks.cache_clear()
    assert traced == trace_blocks(architecture, config, 4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", MODELS)
def test_a_counted_model_has_the_tensors_and_shared_inputs_of_one_that_runs(family: str) -> None:
    architecture = make_architecture(family, **MODELS[family][0])
    models = [build_model(architecture, 256, PRECISION), build_shapes(architecture, 256, PRECISION)]
    built, counted = (
        (
            {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()},
            {name: (b.shape, b.dtype) for name, b in model.named_buffers()},
            list(model.linears()),
            list(model.stored_buffers()),
            sorted(model.attention_layers, key=str),
        )
        for model in models
    )
    assert [str(part) for part in built] == [str(part) for part in counted]
