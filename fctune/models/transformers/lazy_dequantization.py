"""Dequantisation of checkpoints while they are read, by transformers' own functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import Mxfp4Dequantize, convert_moe_packed_tensors

from fctune.models.tensor_files import TensorHeader
from fctune.models.transformers.lazy_tensors import LazyTensor
from fctune.models.weight_sources import Dequantized, Stored


def defer_dequantization_(converters: Iterable[WeightConverter]) -> None:
    """Replace the dequantisations among converters' operations by ones on tensors that are not read yet, in place."""
    for converter in converters:
        converter.operations = [_defer(operation) for operation in converter.operations]


def _defer(operation: ConversionOps) -> ConversionOps:
    if isinstance(operation, Fp8Dequantize):
        return _DeferredFp8(operation)
    return _DeferredMxfp4() if isinstance(operation, Mxfp4Dequantize) else operation


class _DeferredMxfp4(ConversionOps):  # type: ignore[misc]
    """Experts in blocks of 32 four-bit numbers, ``[e, out, groups, 16]``, with a scale each; made ``[e, in, out]``."""

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the fused weight of all experts, under its full name."""
        stored = {name.rpartition("_")[2]: _header(value) for name, value in input_dict.items()}
        if set(stored) != {"blocks", "scales"}:
            raise ValueError("blocks or scales are missing")
        blocks, scales = stored["blocks"], stored["scales"]
        if blocks.shape[:-1] != scales.shape:
            raise ValueError(f"blocks are {list(blocks.shape)}, scales {list(scales.shape)}")
        num_experts, rows, groups, size = blocks.shape
        name = blocks.name.removesuffix("_blocks")
        shape = (num_experts, groups * size * 2, rows)
        return {full_layer_name: LazyTensor(Dequantized(name, shape, (blocks, scales), _unpack_mxfp4, num_experts))}


def _unpack_mxfp4(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    blocks, scales = tensors
    unpacked: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return unpacked


class _DeferredFp8(ConversionOps):  # type: ignore[misc]
    """Weights in float8 (or packed in four bits) with a scale per block, or one for all."""

    def __init__(self, operation: Any):
        self.operation = operation

    def convert(self, input_dict: dict[str, Any], full_layer_name: str, **_: Any) -> dict[str, Any]:
        """Return the weights by pattern, without their scales; a single weight under its full name."""
        result: dict[str, Any] = {}
        for pattern, values in input_dict.items():
            if "activation_scale" in pattern or "weight_scale_inv" in pattern:
                continue
            scales = input_dict.get(f"{pattern}_scale_inv")
            if scales is not None and len(scales) != len(values):
                raise ValueError(f"{len(values)} weights have {len(scales)} scales")
            result[pattern] = (
                values if scales is None else [self._pair(w, s) for w, s in zip(values, scales, strict=True)]
            )
        return {full_layer_name: result["weight"]} if "weight" in result else result

    def _pair(self, weight: Any, scale: Any) -> LazyTensor:
        stored, scales = _header([weight]), _header([scale])
        columns = stored.shape[-1] * (2 if stored.dtype is torch.int8 else 1)
        # Without dims, one scale serves any part of the weight.
        num_groups = scales.shape[0] if scales.shape else stored.shape[0]
        if stored.shape[0] % num_groups:
            raise ValueError(f"{stored.name} is {list(stored.shape)}, its scales are {list(scales.shape)}")
        shape = (*stored.shape[:-1], columns)
        return LazyTensor(Dequantized(stored.name, shape, (stored, scales), self._dequantize, num_groups))

    def _dequantize(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = tensors
        dequantized: Tensor = self.operation._dequantize_one(weight, scale, output_dtype=dtype)
        return dequantized


def _header(value: Any) -> TensorHeader:
    source = (value[0] if isinstance(value, list) else value).source
    if not isinstance(source, Stored):
        raise ValueError("a quantised tensor was fused before it was dequantised")
    return source.header
