"""Adapters on experts and routers: values, gradients, dropout, selection and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.expert_lora import ExpertLoRA, RouterLoRA
from fctune.models.lora import LoRALinear, describe_adapters, find_frozen_experts
from tests.models.expert_samples import MODEL_TYPES, draw_ids, make_model, make_reference

EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
RANK = 3


def configure(model_type: str, modules: tuple[str, ...] = EXPERTS, **changes: Any) -> AdapterConfig:
    missing = "experts.gate_up_proj" if model_type == "nemotron_h" else "experts.up_proj"
    chosen = [name for name in modules if name != missing]
    return AdapterConfig(**{"rank": RANK, "alpha": 6.0, "modules": chosen} | changes)


def merged_reference(reference: Any, model: CausalLM) -> Any:
    """Add ``alpha / rank B[e] A[e]`` to each expert of the reference, one expert after the other, and return it."""
    for path, adapter in model.named_modules():
        if isinstance(adapter, ExpertLoRA):
            owner, _, name = path.removeprefix("decoder.").rpartition(".adapters.")
            weight = reference.get_submodule(owner).get_parameter(name)
            for expert in range(len(weight)):
                change = 2.0 * adapter.lora_b[expert] @ adapter.lora_a[expert]
                weight.data[expert] += change.T if weight[expert].shape != change.shape else change
        elif isinstance(adapter, RouterLoRA):
            weight = reference.get_submodule(path.removeprefix("decoder.").removesuffix(".adapter")).weight
            weight.data += 2.0 * adapter.lora_b @ adapter.lora_a
    return reference


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_adapters_equal_experts_with_merged_weights(model_type: str) -> None:
    reference = make_reference(model_type)
    model = make_model(reference, configure(model_type))
    tokens = draw_ids(2, 20)
    with torch.no_grad():
        found, base = model(tokens), reference(input_ids=tokens).logits
        expected = merged_reference(reference, model)(input_ids=tokens).logits
    assert float((expected - base).abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if model_type == "nemotron_h" else 1e-9)


@pytest.mark.parametrize(("model_type", "router"), [("qwen3_moe", "gate"), ("gpt_oss", "router")])
def test_an_adapter_on_the_router_equals_one_with_a_merged_weight(model_type: str, router: str) -> None:
    reference = make_reference(model_type)
    model = make_model(reference, configure(model_type, (router,)))
    tokens = draw_ids(2, 20)
    with torch.no_grad():
        found = model(tokens)
        expected = merged_reference(reference, model)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    model(tokens).pow(2).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(grads) == 4
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in grads.values())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_gradients_are_those_of_the_merged_weights(model_type: str) -> None:
    reference = make_reference(model_type)
    model = make_model(reference, configure(model_type))
    tokens = draw_ids(2, 20)
    model(tokens).pow(2).mean().backward()
    merged_reference(reference, model)(input_ids=tokens).logits.pow(2).mean().backward()
    for path, adapter in model.named_modules():
        if not isinstance(adapter, ExpertLoRA):
            continue
        owner, _, name = path.removeprefix("decoder.").rpartition(".adapters.")
        grad: Tensor = reference.get_submodule(owner).get_parameter(name).grad
        grad = grad.transpose(1, 2) if adapter.is_transposed else grad
        expected_a = 2.0 * adapter.lora_b.transpose(1, 2) @ grad
        expected_b = 2.0 * grad @ adapter.lora_a.transpose(1, 2)
        torch.testing.assert_close(adapter.lora_a.grad, expected_a, rtol=0, atol=1e-9)
        torch.testing.assert_close(adapter.lora_b.grad, expected_b, rtol=0, atol=1e-9)


def run_with_dropout(model: CausalLM, tokens: Tensor, row_keys: list[int]) -> Tensor:
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    with torch.no_grad():
        loss: Tensor = model.train()(tokens, labels=labels, row_keys=torch.tensor(row_keys))
    return loss


def test_dropout_of_a_row_does_not_depend_on_its_batch() -> None:
    model = make_model(make_reference("qwen3_moe"), configure("qwen3_moe", dropout=0.5))
    tokens = draw_ids(3, 20)
    together = run_with_dropout(model, tokens, [11, 12, 13])
    apart = [run_with_dropout(model, tokens[i : i + 1], [11 + i]) for i in range(3)]
    torch.testing.assert_close(together, sum(apart, torch.zeros(())).to(together), rtol=0, atol=1e-9)
    assert abs(float(together - run_with_dropout(model, tokens, [11, 12, 14]))) > 1e-6


def test_experts_drop_independently_and_keep_the_mean() -> None:
    model = make_model(make_reference("qwen3_moe"), configure("qwen3_moe", ("experts.down_proj",), dropout=0.3))
    adapter = next(module for module in model.modules() if isinstance(module, ExpertLoRA)).train()
    with torch.no_grad():  # each output is the sum of the inputs that are kept
        adapter.lora_a.fill_(1.0)
        adapter.lora_b.fill_(1.0)
    model.token_keys.set_rows(torch.tensor([5]), 400)
    rows = torch.arange(400).repeat(2)
    experts = torch.arange(2).repeat_interleave(400)
    ends = torch.tensor([400, 800, 800, 800, 800], dtype=torch.int32)
    x = torch.zeros(800, 32, dtype=torch.float64)
    x[:, 7] = 1.0  # one channel alone shows the mask
    out = adapter(x, adapter.make_row_keys(rows, experts), ends)[:, 0] / (2.0 * RANK)
    assert abs(float(out.detach().mean()) - 1) < 0.05
    first, second = (out > 0).view(2, 400)
    assert abs(float((first == second).double().mean()) - 0.58) < 0.06  # 0.7^2 + 0.3^2: independent


def test_all_linear_adapts_experts_and_no_router() -> None:
    model = make_model(make_reference("glm4_moe"), AdapterConfig(rank=2, modules="all-linear"))
    kinds = {type(module) for module in model.modules()}
    assert {LoRALinear, ExpertLoRA} <= kinds
    assert RouterLoRA not in kinds
    assert "gate" in model.architecture.router_names
    assert find_frozen_experts(model) is None


def test_the_number_of_adapter_parameters_is_reported() -> None:
    model = make_model(make_reference("qwen3_moe"), configure("qwen3_moe", ("q_proj", *EXPERTS)))
    # Two blocks of five experts: gate_up 64 -> 64, down 32 -> 64, and queries 64 -> 64.
    experts, linears = 2 * 5 * RANK * (64 + 64 + 32 + 64), 2 * RANK * (64 + 64)
    assert (
        describe_adapters(model) == f"{experts + linears:,} parameters: {linears:,} on linears, {experts:,} on experts"
    )
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == experts + linears


def test_frozen_experts_are_reported() -> None:
    model = make_model(make_reference("qwen3_moe"), configure("qwen3_moe", ("q_proj",)))
    assert find_frozen_experts(model) == (
        "the experts, 59% of the model's parameters, stay frozen; to adapt them, add experts.gate_up_proj and "
        "experts.down_proj to adapter.modules"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "mxfp4"}, "adapter.base=mxfp4: keeps experts as a checkpoint stores them in MXFP4"),
        ({"dora": True}, "adapter.dora: experts and routers have no DoRA"),
        ({"modules": ["experts.gate_proj"]}, "no such module: experts.gate_proj; did you mean experts.gate_up_proj"),
    ],
)
def test_options_that_experts_lack_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(make_reference("qwen3_moe"), configure("qwen3_moe", **changes))


def test_equal_seeds_give_equal_adapters() -> None:
    first, second, other = (
        {
            name: parameter
            for name, parameter in make_model(make_reference("gpt_oss"), configure("gpt_oss"), seed).named_parameters()
            if name.endswith("lora_a")
        }
        for seed in (0, 0, 1)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])
        assert not torch.equal(parameter, other[name])
        assert float(parameter.detach().abs().max()) <= parameter.shape[-1] ** -0.5
