"""A plan runs some blocks of each kind and counts what a model with all of them has and keeps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fctune.apps.plan.block_tracing import trace_blocks
from fctune.config.loading import load_config
from fctune.models.architecture import Architecture
from fctune.models.causal_lm import CausalLM
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import parse_architecture
from fctune.models.transformers.build import TransformersCausalLM
from tests.conftest import ROOT
from tests.models.hybrid_samples import HYBRIDS
from tests.models.tiny_models import SIZES, TEXT_MODELS

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


@pytest.mark.parametrize("config_name", ["tiny_full", "tiny_lora"])
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
    assert len(set(architecture.build_shapes(256, PRECISION).block_kinds())) == num_kinds
    traced = trace_blocks(architecture, config, 4)
    monkeypatch.setattr(TransformersCausalLM, "block_kinds", each_its_own_kind)
    assert traced == trace_blocks(architecture, config, 4)


@pytest.mark.parametrize("family", MODELS)
def test_a_counted_model_has_the_tensors_and_shared_inputs_of_one_that_runs(family: str) -> None:
    architecture = make_architecture(family, **MODELS[family][0])
    models = [architecture.build_model(256, PRECISION), architecture.build_shapes(256, PRECISION)]
    built, counted = (
        (
            {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()},
            {name: (b.shape, b.dtype) for name, b in model.named_buffers()},
            list(model.linears()),
            list(model.stored_buffers()),
        )
        for model in models
    )
    assert [str(part) for part in built] == [str(part) for part in counted]
