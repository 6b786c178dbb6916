"""Experts by grouped products, against transformers' own loop over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model
from fctune.models.transformers.architecture import parse_architecture
from fctune.models.transformers.experts import EXPERTS_IMPLEMENTATION, iter_experts
from tests.models.expert_samples import MODEL_TYPES, draw_ids, make_config, make_model, make_reference


def use_implementation(model: Any, name: str) -> None:
    for _, experts in iter_experts(model):
        experts.config._experts_implementation = name


def run(model: Any, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits and the gradient of every parameter."""
    use_implementation(model, implementation)
    model.zero_grad()
    logits = model(input_ids=draw_ids(2, 20), use_cache=False).logits
    logits.pow(2).mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_grouped_experts_equal_transformers(model_type: str) -> None:
    model = make_reference(model_type)
    assert list(iter_experts(model))
    expected, expected_grads = run(model, "eager")
    found, grads = run(model, EXPERTS_IMPLEMENTATION)
    # transformers adds the experts of Nemotron-H in the dtype of their weights, float32.
    tolerance = 1e-6 if model_type == "nemotron_h" else 1e-9
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=tolerance, msg=name)


def test_experts_of_transformers_5_17_have_no_norm_behind_them() -> None:
    model = make_reference("qwen3_moe")
    expected, _ = run(model, EXPERTS_IMPLEMENTATION)
    for _, experts in iter_experts(model):
        vars(experts).pop("has_post_expert_norm", None)
    found, _ = run(model, EXPERTS_IMPLEMENTATION)
    assert torch.equal(found, expected)


def test_bfloat16_experts_are_as_close_to_float64_as_transformers_own() -> None:
    model = make_reference("gpt_oss", torch.bfloat16)
    exact, _ = run(make_reference("gpt_oss", torch.bfloat16).double(), "eager")
    errors = {name: float((run(model, name)[0].double() - exact).abs().mean()) for name in ("eager", "fctune")}
    assert errors["fctune"] <= 1.1 * errors["eager"]


def test_experts_larger_than_the_memory_are_shaped() -> None:
    config = make_config("qwen3_moe", hidden_size=2**14, moe_intermediate_size=2**14, num_local_experts=2**10)
    architecture = parse_architecture("config.json", config.to_dict())
    model = build_model(architecture, 64, PrecisionPolicy.uniform(torch.float32))
    assert sum(p.numel() for p in model.parameters()) > 2 * 3 * 2**38  # 6.6 TB
    assert all(parameter.is_meta for parameter in model.parameters())


class Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.add(str(function).rpartition(".")[0])
        return function(*arguments, **(options or {}))


# What makes the host wait for a CUDA device: numbers that are read, and shapes that depend on values.
WAITING = {"aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.bincount"}
WAITING |= {"fctune.multiply_each_group", "fctune.multiply_each_group_rows"}


@pytest.mark.parametrize("has_padding", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_the_host_never_waits_in_a_layer_of_bfloat16_experts(model_type: str, has_padding: bool) -> None:
    adapter = AdapterConfig(rank=3, modules=["experts.gate_up_proj", "experts.down_proj"])
    model = make_model(make_reference(model_type, torch.bfloat16), adapter)
    for path, experts in iter_experts(model):
        layer = model.get_submodule(path.rpartition(".")[0])
        hidden = torch.randn(2, 20, 64, dtype=torch.bfloat16, requires_grad=True)
        experts.token_mask.set(draw_ids(2, 20), torch.tensor([9, 14]) if has_padding else None)
        with Operators() as seen:
            out = layer(hidden)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
        assert seen.names & WAITING == set()
        assert "aten._grouped_mm" in seen.names
