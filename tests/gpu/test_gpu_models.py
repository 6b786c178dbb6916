"""Models of transformers on a GPU: packed rows against transformers' own code in float64, conversation by conversation.

Attention goes by each of its kernels (heads of 512, caps and sinks by flex attention), experts by grouped products, and
layers that carry state per conversation, as where the packages of their kernels are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fctune.models.attention import choose_attention_kernel
from fctune.models.base_weights import load_base_
from fctune.models.causal_lm import CausalLM, materialize_
from fctune.models.grouped_products import multiply_each_group, multiply_groups
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_model, read_architecture
from fctune.models.transformers.float64 import keep_float64_
from tests.models.expert_samples import save_base
from tests.models.hybrid_samples import HYBRIDS, save_hybrid
from tests.models.tiny_models import save_tiny_model

_WIDE = {"hidden_size": 64, "head_dim": 32}
# By model_type: what to change, and whether the CPU stands in for a GPU. Sizes suit all kernels of attention.
DENSE: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "smollm3": {},
    "gemma3_text": {},  # windows of 8 tokens
    "gemma4_text": {"global_head_dim": 512},  # flash attention has no heads over 256
}
EXPERTS = ("qwen3_moe", "gpt_oss", "deepseek_v3")
STATEFUL = ("qwen3_5_text", "lfm2", "bamba")
ON_CPU = ("qwen3", "gpt_oss", "lfm2")

LENGTHS = [[70, 40, 0, 18], [9, 100, 19, 0]]
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 4e-2}


def save_model(model_type: str, path: Path) -> Path:
    if model_type in HYBRIDS:
        return save_hybrid(model_type, path)
    if model_type in EXPERTS:
        return save_base(model_type, path)
    return save_tiny_model(model_type, path, **_WIDE, **DENSE[model_type])


def load(path: Path, dtype: torch.dtype, device: torch.device, capability: tuple[int, int] | None) -> CausalLM:
    architecture = read_architecture(path, "transformers")
    kernel, _ = choose_attention_kernel(device.type, dtype, architecture.head_dim, capability)
    model = build_model(architecture, 256, PrecisionPolicy.uniform(dtype), kernel)
    materialize_(model, device)
    load_base_(model, path)
    return model


def draw_rows(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens, labels (of a third of them) and positions of packed rows."""
    generator = torch.Generator().manual_seed(1)
    shape = (len(LENGTHS), sum(LENGTHS[0]))
    tokens, labels = (torch.randint(3, vocab_size, shape, generator=generator) for _ in range(2))
    labels[torch.rand(shape, generator=generator) > 1 / 3] = -100
    return tokens, labels, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def reference_loss(path: Path, tokens: Tensor, labels: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the summed loss of transformers' model in float64 on the CPU, each conversation alone, and gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    keep_float64_(getattr(model, model.base_model_prefix))
    total = 0.0
    for row, lengths in enumerate(LENGTHS):
        at = 0
        for length in filter(None, lengths):
            place = slice(at, at + length)
            logits = model(input_ids=tokens[row : row + 1, place], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.double(), labels[row, place], reduction="sum")
            if (labels[row, place] >= 0).any():
                loss.backward()
                total += loss.item()
            at += length
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def cases() -> list[Any]:
    found = [pytest.param("cpu", model_type, torch.float32, id=f"cpu-{model_type}") for model_type in ON_CPU]
    for model_type in (*DENSE, *EXPERTS, *STATEFUL):
        for dtype in TOLERANCES:
            name = f"cuda-{model_type}-{str(dtype).removeprefix('torch.')}"
            found.append(pytest.param("cuda", model_type, dtype, marks=pytest.mark.gpu, id=name))
    return found


@pytest.mark.parametrize(("device_type", "model_type", "dtype"), cases(), indirect=["device_type"])
def test_packed_rows_give_the_loss_and_gradients_of_float64(
    device_type: str, model_type: str, dtype: torch.dtype, capability: tuple[int, int] | None, tmp_path: Path
) -> None:
    path = save_model(model_type, tmp_path / "model")
    device = torch.device(device_type)
    model = load(path, dtype, device, capability)
    tokens, labels, positions = draw_rows(model.architecture.vocab_size)
    expected, expected_gradients = reference_loss(path, tokens, labels)
    bounds = model.make_bounds(LENGTHS).to(device)
    loss = model(tokens.to(device), positions.to(device), bounds, labels=labels.to(device))
    assert loss.item() == pytest.approx(expected, rel=TOLERANCES[dtype])
    loss.backward()
    found = {name.removeprefix("decoder."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    names = sorted(expected_gradients.keys() & found.keys())
    assert len(names) > 10
    if model_type in EXPERTS and dtype is torch.bfloat16:
        return  # rounding sends some tokens to other experts
    flat = [torch.cat([grads[n].flatten().double().cpu() for n in names]) for grads in (found, expected_gradients)]
    error = (flat[0] - flat[1]).norm() / flat[1].norm()
    assert error < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("sizes", [(64, 48), (64, 10), (12, 64)], ids=str)
def test_grouped_products_equal_float64_group_by_group(device_type: str, sizes: tuple[int, int]) -> None:
    device, generator = torch.device(device_type), torch.Generator().manual_seed(0)
    counts = torch.tensor([33, 0, 1, 94, 0])
    ends = counts.cumsum(0).to(torch.int32)
    x = torch.randn(int(ends[-1]), sizes[0], generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(len(counts), *sizes, generator=generator).to(device, torch.bfloat16).requires_grad_()
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, weight)]
    ours, theirs = multiply_groups(x, weight, ends.to(device)), multiply_each_group(*exact, ends)
    factors = torch.randn(ours.shape, generator=generator)
    (ours * factors.to(device, torch.bfloat16)).sum().backward()
    (theirs * factors.bfloat16().double()).sum().backward()
    pairs = [(ours, theirs), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)]
    for mine, true in pairs:
        assert mine is not None
        assert true is not None
        assert (mine.double().cpu() - true).norm() / true.norm() < 1e-2
