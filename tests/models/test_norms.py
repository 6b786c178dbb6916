"""Norms computed for some rows at a time equal torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from fctune.models import norms

EPS = 1e-3


def draw(dtype: torch.dtype, size: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 2, 37, 5, size, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(size, generator=generator, dtype=torch.float64).to(dtype), grad


@pytest.mark.sample(1)
@pytest.mark.parametrize("chunk", [1, 1000, 2**16])
def test_values_and_gradients_are_those_of_the_definition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_CHUNK", chunk)
    x, weight, _ = draw(torch.float64, 6)
    x = x[:1, :7].transpose(1, 2).requires_grad_()
    weight.requires_grad_()
    expected = torch_rms_norm(x, (6,), weight, EPS)
    torch.testing.assert_close(norms.rms_norm(x, weight, EPS), expected, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x, w: norms.rms_norm(x, w, EPS), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: norms.rowwise_rms_norm(x, w, EPS, 1.0), (x, weight))


def test_bfloat16_is_rounded_once() -> None:
    x, weight, grad = draw(torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    out = norms.rms_norm(x, weight, EPS)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = torch_rms_norm(wide[0], (96,), wide[1], EPS)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
    found = torch.autograd.grad(out, (x, weight), grad)
    expected = torch.autograd.grad(exact, wide, grad.double())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=2**-8, atol=1e-3)


def test_a_frozen_norm_keeps_its_input_and_a_number_per_row() -> None:
    x, weight, _ = draw(torch.bfloat16)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        norms.rms_norm(x.requires_grad_(), weight, EPS)
    assert sum(kept) == x.nbytes + weight.nbytes + x.numel() // 96 * 4


def test_compiled_code_uses_torchs_norm() -> None:
    x, weight, _ = draw(torch.float32)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        out = torch.compile(norms.rms_norm, backend="aot_eager", fullgraph=True)(x, weight, EPS)
    torch.testing.assert_close(out, norms.rms_norm(x, weight, EPS))
