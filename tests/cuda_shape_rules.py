"""Rules of CUDA kernels that their CPU versions do not have, checked while a model runs on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class CudaShapeRules(TorchDispatchMode):
    """Repeats the scaled and grouped products of a CPU run with fake CUDA tensors, whose kernels check their inputs.

    The scaled ones are computed in float32: some CPUs take seconds for one in float8.
    """

    operators = (torch.ops.aten._scaled_mm.default, torch.ops.aten._grouped_mm.default)

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # the products inside of a tensor subclass come here later
        if function in self.operators:
            self.shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
            with FakeTensorMode():
                function(*tree_map(_to_fake_cuda, args), **tree_map(_to_fake_cuda, kwargs or {}))
        if function is torch.ops.aten._scaled_mm.default:
            return _multiply(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    assert bias is None
    assert scale_result is None
    return ((left.float() * scale_a) @ (right.float() * scale_b)).to(out_dtype or left.dtype)


def _to_fake_cuda(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
