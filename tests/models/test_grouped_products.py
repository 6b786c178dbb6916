"""Products of groups of rows with a matrix each, against one product after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fctune.models import grouped_products
from fctune.models.grouped_products import multiply_groups

SIZES = [3, 0, 7, 1, 0]


def draw(dtype: torch.dtype, size_in: int, size_out: int, is_transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (size_out, size_in) if is_transposed else (size_in, size_out)
    x = torch.randn(sum(SIZES), size_in, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(SIZES), *shape, generator=generator, dtype=torch.float64)
    ends = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ends


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(SIZES), weight, strict=True)])


@pytest.mark.parametrize("size_out", [16, 5])
@pytest.mark.parametrize("size_in", [24, 6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_groups_equal_one_product_each(dtype: torch.dtype, tolerance: float, size_in: int, size_out: int) -> None:
    x, weight, ends = draw(dtype, size_in, size_out)
    grad = torch.randn(len(x), size_out, generator=torch.Generator().manual_seed(2)).to(dtype)
    multiply_groups(x, weight, ends).backward(grad)
    x_wide, weight_wide = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = reference(x_wide, weight_wide)
    expected.backward(grad.double())
    torch.testing.assert_close(multiply_groups(x, weight, ends).double(), expected, rtol=0, atol=tolerance)
    for found, wide in ((x, x_wide), (weight, weight_wide)):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.double(), wide.grad, rtol=0, atol=2 * tolerance)


def test_gradients_are_those_of_finite_differences() -> None:
    x, weight, ends = draw(torch.float64, 4, 3)
    assert torch.autograd.gradcheck(lambda a, b: multiply_groups(a, b, ends), (x, weight))


def test_a_frozen_matrix_keeps_no_rows_for_backward() -> None:
    x, weight, ends = draw(torch.float64, 6, 5)
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        multiply_groups(x, weight.detach(), ends)
    assert not any(tensor.shape == x.shape for tensor in saved)


def test_compilation_keeps_the_products() -> None:
    x, weight, ends = draw(torch.float32, 6, 5)
    compiled = torch.compile(lambda a, b: multiply_groups(a, b, ends) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), 2 * reference(x, weight))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_matrices_without_rows_have_no_gradient_whatever_the_kernel_leaves_there(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = grouped_products.grouped_mm

    class Garbage(torch.autograd.Function):
        """Matrices that get a gradient in empty groups, too, as on some GPUs."""

        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad[[index for index, size in enumerate(SIZES) if not size]] = torch.nan
            return grad

    monkeypatch.setattr(
        grouped_products, "grouped_mm", lambda x, weight, offs: kernel(x, Garbage.apply(weight), offs=offs)
    )
    monkeypatch.setattr(grouped_products, "leaves_empty_groups", lambda device: True)
    x, weight, ends = draw(torch.bfloat16, 24, 6)
    multiply = torch.compile(multiply_groups, backend="aot_eager") if is_compiled else multiply_groups
    multiply(x, weight, ends).sum().backward()
    assert weight.grad is not None
    is_empty = torch.tensor(SIZES) == 0
    assert not weight.grad[is_empty].any()
    assert weight.grad[~is_empty].isfinite().all()
    assert weight.grad[~is_empty].any()
