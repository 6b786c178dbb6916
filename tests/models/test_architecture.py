"""The architecture answers for its family: names, adapter modules and weight layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, find_public_config, parse_architecture, read_architecture


def test_all_linear_selects_every_linear_but_the_head(make_model: Callable[..., Path]) -> None:
    architecture = read_architecture(make_model("llama"))
    assert architecture.resolve_adapter_modules("all-linear") == architecture.adapter_modules[:-1]
    assert architecture.adapter_modules[-1] == architecture.head
    assert not architecture.find_adapter_problems("all-linear")


def test_unknown_adapter_modules_are_reported_with_the_nearest_name(make_model: Callable[..., Path]) -> None:
    architecture = read_architecture(make_model("llama"))
    assert "did you mean q_proj?" in architecture.find_adapter_problems(["q_prj"])[0]
    assert "empty" in architecture.find_adapter_problems([])[0]


def test_linear_shapes_are_those_of_the_built_model(make_model: Callable[..., Path]) -> None:
    for family in ("llama", "qwen2"):
        architecture = read_architecture(make_model(family))
        model = build_model(architecture, 128, PrecisionPolicy.uniform(torch.float32))
        shapes = {one.name: (one.in_dim, one.out_dim) for one in architecture.blocks[0].linears}
        for linear in model.linears():
            if linear.module != architecture.head:
                built = model.get_submodule(linear.path)
                assert shapes[linear.module] == (built.in_features, built.out_features), linear


def test_layouts_are_inverse(make_model: Callable[..., Path]) -> None:
    for family in ("llama", "qwen2"):
        architecture = read_architecture(make_model(family))
        name = "decoder.layers.0.attn.q_proj.weight"
        weight = torch.arange(64.0 * 3).view(64, 3)
        assert torch.equal(architecture.from_hf_layout(name, architecture.to_hf_layout(name, weight)), weight)
        assert architecture.row_group(name) == (architecture.head_dim if family == "llama" else 1)


def test_public_models_are_known_by_their_hub_name() -> None:
    config = find_public_config("meta-llama/Llama-3.1-8B-Instruct")
    assert config is not None
    assert parse_architecture("config.json", json.loads(json.dumps(config))).num_layers == 32
    assert find_public_config("some/model") is None


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen2-7B", {"max_position_embeddings": 131072}),
        ("Qwen/Qwen2-7B-Instruct", {"max_position_embeddings": 32768}),
        ("Qwen/Qwen2.5-7B", {"max_position_embeddings": 131072}),
        ("Qwen/Qwen2.5-7B-Instruct", {"max_position_embeddings": 32768}),
        (
            "ibm-granite/granite-4.0-350m",
            {
                "attention_multiplier": 0.015625,
                "embedding_multiplier": 12,
                "logits_scaling": 4,
                "residual_multiplier": 0.263,
            },
        ),
        # Its blocks are 4,608 wide: two thirds of this, rounded up to a multiple of 256.
        ("LiquidAI/LFM2.5-350M", {"intermediate_size": 6656, "block_auto_adjust_ff_dim": True}),
    ],
)
def test_public_models_have_the_values_of_their_published_config(name: str, published: dict[str, Any]) -> None:
    config = find_public_config(name)
    assert config is not None
    assert {key: config.get(key) for key in published} == published


@pytest.mark.parametrize("name", ["google/functiongemma-270m", "meta-llama/Llama-3.3-70B"])
def test_names_without_a_base_model_on_the_hub_are_unknown(name: str) -> None:
    assert find_public_config(name) is None
    assert any(find_public_config(name + suffix) for suffix in ("-it", "-Instruct"))


def test_reading_an_architecture_imports_no_torch() -> None:
    script = "import sys, fctune.models.sources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
