"""Grouped products of experts have shapes and strides that CUDA's kernel accepts, in forward and in backward."""

from __future__ import annotations

import pytest
import torch

from fctune.models.grouped_products import multiply_groups
from tests.cuda_shape_rules import CudaShapeRules


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rank", [4, 8, 16])
def test_products_of_an_adapter_of_any_rank_fit_cuda(rank: int, is_transposed: bool) -> None:
    x = torch.randn(37, 64, dtype=torch.bfloat16, requires_grad=True)
    a, b = (torch.randn(3, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((rank, 64), (96, rank)))
    ends = torch.tensor([5, 5, 37], dtype=torch.int32)  # the second expert has no tokens
    frozen = torch.randn(3, 64, 96, dtype=torch.bfloat16)
    weight = frozen if is_transposed else frozen.transpose(1, 2).contiguous().transpose(1, 2)
    with CudaShapeRules() as rules:
        out = multiply_groups(x, weight, ends)
        out = out + multiply_groups(multiply_groups(x, a.transpose(1, 2), ends), b.transpose(1, 2), ends)
        (out * torch.randn_like(out)).sum().backward()
    assert len(rules.shapes) == 3 + 5  # no gradient of the frozen weight
