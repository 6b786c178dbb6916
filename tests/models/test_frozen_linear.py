"""Bases in 4 and 8 bits, and DoRA: loading, training and export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fctune.base.errors import ConfigError
from fctune.config.sections.adapter import AdapterConfig
from fctune.models import export
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import FrozenLinear, copy_rows_, is_nf4
from fctune.models.lora import apply_lora_, init_adapters_, row_norms
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from tests.models.hybrid_samples import save_hybrid
from tests.models.model_samples import ALL_MODULES, draw_tokens, load_model, load_reference
from tests.models.tiny_models import save_tiny_model

# 16,384 weights share scales in NF4, so linears must be larger than those of other tests.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def adapted(path: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return load_model(path, AdapterConfig(rank=4, alpha=8, modules=ALL_MODULES, **config), dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_dora_logits_equal_those_of_peft(family: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    from peft import PeftModel

    path = make_model(family)
    model = adapted(path, dora=True)
    tokens = draw_tokens(path)
    for name, parameter in model.named_parameters():
        if name.endswith("magnitude"):
            parameter.mul_(1 + 0.1 * torch.linspace(-1, 1, len(parameter)))
    logits = model(tokens)
    assert (logits - load_model(path)(tokens)).abs().max() > 0.01
    config = AdapterConfig(rank=4, alpha=8, modules=ALL_MODULES, dora=True)
    export.export_adapter(model, config, str(path), path, tmp_path / "adapter", is_writer=True)
    theirs = PeftModel.from_pretrained(load_reference(path), str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    export.export_merged(model, path, tmp_path / "merged", is_writer=True)
    torch.testing.assert_close(load_reference(tmp_path / "merged")(tokens).logits, logits, rtol=1e-4, atol=1e-4)


def test_dora_gradients_equal_those_of_peft(make_model: Callable[..., Path], tmp_path: Path) -> None:
    from peft import PeftModel

    path = make_model("llama")
    model = adapted(path, dora=True)
    config = AdapterConfig(rank=4, alpha=8, modules=ALL_MODULES, dora=True)
    export.export_adapter(model, config, str(path), path, tmp_path / "adapter", is_writer=True)
    theirs = PeftModel.from_pretrained(load_reference(path), str(tmp_path / "adapter"), is_trainable=True).eval()
    tokens = draw_tokens(path)
    model(tokens).square().mean().backward()
    theirs(tokens).logits.square().mean().backward()
    ours = model.decoder.layers[1].attn.v_proj
    other = theirs.base_model.model.model.layers[1].self_attn.v_proj
    for mine, their in (
        (ours.lora_a, other.lora_A["default"].weight),
        (ours.lora_b, other.lora_B["default"].weight),
        (ours.magnitude, other.lora_magnitude_vector["default"].weight),
    ):
        torch.testing.assert_close(mine.grad, their.grad.view_as(mine), rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_dora_starts_as_the_base(make_model: Callable[..., Path]) -> None:
    path = make_model("qwen2")
    model = adapted(path, torch.float64, dora=True)
    init_adapters_(model, 3)
    tokens = draw_tokens(path)
    torch.testing.assert_close(model(tokens), load_model(path, dtype=torch.float64)(tokens), rtol=1e-9, atol=1e-9)


def test_row_norms_equal_those_of_the_merged_weight() -> None:
    weight, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((9, 7), (3, 7), (9, 3)))
    torch.testing.assert_close(row_norms(weight, a, b, 0.7), (weight + 0.7 * b @ a).norm(dim=1))


@pytest.mark.parametrize(("base", "error"), [("nf4", 0.12), ("float8", 0.04)])
def test_a_quantised_linear_approximates_the_full_one(base: Any, error: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 512, bias=True)
    small = FrozenLinear(linear, base)
    small.bias = linear.bias
    copy_rows_(small, "weight", linear.weight.detach())
    x = torch.randn(2, 5, 256, requires_grad=True)
    grad = torch.randn(2, 5, 512)
    ours, theirs = small(x), linear(x)
    assert (ours - theirs).norm() < error * theirs.norm()
    (our_grad,) = torch.autograd.grad(ours, x, grad)
    (their_grad,) = torch.autograd.grad(theirs, x, grad)
    assert (our_grad - their_grad).norm() < error * their_grad.norm()
    assert (small.dequantized_weight() - linear.weight).norm() < error * linear.weight.norm()


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("base", ["nf4", "float8"])
@torch.no_grad()
def test_exports_of_a_quantised_base_equal_the_trained_model(
    base: str, dora: bool, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = make_model("llama", **WIDE)
    model = load_model(path, AdapterConfig(rank=4, alpha=8, modules=["q_proj", "down_proj"], base=base, dora=dora))  # type: ignore[arg-type]
    assert is_nf4(model.decoder.layers[0].attn.v_proj.weight) == (base == "nf4")  # also linears without an adapter
    tokens = draw_tokens(path)
    logits = model(tokens)
    export.export_merged(model, path, tmp_path / "merged", is_writer=True)
    merged = load_reference(tmp_path / "merged")(tokens).logits
    # The float8 product also rounds its inputs; in the export only the weights are rounded.
    close = (merged - logits).norm() / logits.norm()
    assert close < (1e-5 if base == "nf4" else 0.06)


def run_with_constant_b(model: CausalLM, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients of the A matrices, by Hugging Face's names."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.constant_(parameter, 0.01)  # in any order of rows
    loss = model.train()(tokens, labels=tokens)
    loss.backward()
    names = {name: p for name, p in model.named_parameters() if name.endswith("lora_a")}
    found = {model.architecture.to_hf_name(name): p.grad for name, p in names.items() if p.grad is not None}
    return {"loss": loss.detach()} | found


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


@pytest.mark.parametrize("base", ["nf4", "float8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantised_base_is_the_same_through_both_sources(
    family: str, base: Any, make_model: Callable[..., Path]
) -> None:
    path = make_model(family, **WIDE)
    tokens, adapter = draw_tokens(path), AdapterConfig(rank=4, alpha=8, base=base)
    ours, theirs, full = (
        run_with_constant_b(load_model(path, config, source=source), tokens)
        for config, source in (
            (adapter, "transformers"),
            (adapter, "torchtune"),
            (replace(adapter, base="bf16"), "torchtune"),
        )
    )
    # A last bit of an input may round to another float8 number; a wrong scale, or none, makes a difference of 1.
    assert distance(ours, theirs) < (1e-4 if base == "nf4" else 0.25) * distance(theirs, full)


JAMBA = {"num_experts": 1, "num_experts_per_tok": 1, "mamba_dt_rank": 16}


@pytest.mark.parametrize(
    ("model_type", "base", "kept"),
    [
        ("qwen3", "float8", set()),
        ("lfm2", "float8", set()),
        ("lfm2", "nf4", set()),
        ("jamba", "float8", {"dt_proj"}),  # transformers multiplies with its weight
    ],
)
def test_a_quantised_base_from_transformers_approximates_the_full_one(
    model_type: str, base: Any, kept: set[str], tmp_path: Path
) -> None:
    changes = WIDE | {"head_dim": 64} | (JAMBA if model_type == "jamba" else {})
    path = (save_tiny_model if model_type == "qwen3" else save_hybrid)(model_type, tmp_path, **changes)
    adapter, tokens = AdapterConfig(rank=4, alpha=8, base=base), draw_tokens(path)
    small = load_model(path, adapter)
    plain = {path.rpartition(".")[2] for path, module in small.named_modules() if type(module) is nn.Linear}
    assert plain - {"lm_head"} == kept
    full = load_model(path, replace(adapter, base="bf16"))
    ours, theirs = (run_with_constant_b(model, tokens) for model in (small, full))
    assert 0 < abs(float(ours["loss"] / theirs["loss"] - 1)) < 0.01
    assert distance(ours, theirs) < (0.7 if base == "nf4" else 0.4)


def test_only_adapters_train_on_a_quantised_base(make_model: Callable[..., Path]) -> None:
    path = make_model("qwen2", **WIDE)
    for base in ("nf4", "float8"):
        model = adapted(path, torch.bfloat16, base=base, dora=True, dropout=0.0).train()
        tokens = draw_tokens(path)
        before = {
            name: module.dequantized_weight().clone()
            for name, module in model.named_modules()
            if hasattr(module, "dequantized_weight")
        }
        model(tokens, labels=tokens).backward()
        for name, parameter in model.named_parameters():
            assert (
                (parameter.grad is not None)
                == parameter.requires_grad
                == name.endswith(("lora_a", "lora_b", "magnitude"))
            ), name
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        torch.optim.AdamW(trained, lr=0.1).step()
        for name, module in model.named_modules():
            if name in before:
                assert torch.equal(before[name], module.dequantized_weight()), name


def test_linears_too_small_for_4_bits_are_rejected(make_model: Callable[..., Path]) -> None:
    model = build_model(read_architecture(make_model("llama")), 256, PrecisionPolicy.uniform(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"adapter\.base=nf4: the size of a linear, \[64, 64\]"):
        apply_lora_(model, AdapterConfig(base="nf4"))


def test_a_float8_base_of_odd_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.base=float8: the size of a linear, \[24, 32\], is not a multiple"):
        FrozenLinear(torch.nn.Linear(32, 24), "float8")
