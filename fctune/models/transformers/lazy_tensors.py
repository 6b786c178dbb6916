"""Tensors that are not read yet, on which transformers' own conversions of weights run.

``LazyTensor`` has the shape and dtype of a tensor and no data. Stacking, joining, splitting and transposing lazy
tensors records how the result consists of stored ones, so that a rank can read a part of it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fctune.models.weight_sources import Concatenation, Narrowed, Reindexed, Source, Stack, Transposed


class LazyTensor(Tensor):
    """A tensor without data that records its source."""

    source: Source

    @staticmethod
    def __new__(cls, source: Source) -> LazyTensor:
        """Create a tensor with the shape and dtype of a source."""
        lazy: LazyTensor = Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype)
        lazy.source = source
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record an operation that moves elements; run one that asks for the shape or dtype."""
        kwargs = kwargs or {}
        if record := _RECORDED.get(getattr(func, "__name__", "")):
            return record(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SHAPE_ONLY or getattr(func, "__name__", "") == "__get__":
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") not in _REINDEXED:
            raise NotImplementedError(f"{func} on a tensor that is not read yet")
        return _reindex(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse an operation that was not recorded."""
        raise NotImplementedError(f"{func} on a tensor that is not read yet")


def _sources(tensors: Sequence[Any]) -> list[Source]:
    return [tensor.source for tensor in tensors]


def _stack(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return LazyTensor(Stack(_sources(tensors), dim))


def _cat(tensors: Sequence[Any], dim: int = 0) -> LazyTensor:
    return tensors[0] if len(tensors) == 1 else LazyTensor(Concatenation(_sources(tensors), dim))


def _transpose(tensor: Any, dim0: int, dim1: int) -> LazyTensor:
    return LazyTensor(Transposed(tensor.source, dim0, dim1))


def _split(tensor: Any, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    total, sizes = tensor.source.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        LazyTensor(Narrowed(tensor.source, dim, start, size)) for start, size in zip(starts, sizes, strict=True)
    )


def _chunk(tensor: Any, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.source.shape[dim] // chunks), dim)


def _unbind(tensor: Any, dim: int = 0) -> tuple[LazyTensor, ...]:
    return tuple(_squeeze(part, dim) for part in _split(tensor, 1, dim))


def _squeeze(tensor: Any, dim: int) -> LazyTensor:
    return _reindex(Tensor.squeeze, (tensor, dim), {})


def _same(tensor: Any, *_: Any, **__: Any) -> LazyTensor:
    lazy: LazyTensor = tensor
    return lazy


def _reindex(func: Any, args: Any, kwargs: Any) -> LazyTensor:
    """Record an operation on a tensor that permutes its elements, such as a reshape."""
    source = args[0].source

    def run(tensor: Tensor) -> Tensor:
        result: Tensor = func(tensor, *args[1:], **kwargs)
        return result

    return LazyTensor(Reindexed(source, run))


_RECORDED: dict[str, Callable[..., Any]] = {
    "stack": _stack,
    "cat": _cat,
    "transpose": _transpose,
    "split": _split,
    "chunk": _chunk,
    "unbind": _unbind,
    "contiguous": _same,
    "to": _same,
}
_REINDEXED = {"reshape", "view", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "movedim", "t", "swapaxes"}
_SHAPE_ONLY = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__}
