"""Data types that a run stores weights in and computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fctune.base.errors import ConfigError
from fctune.config.schema import Precision

_UNMIXED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "float8": torch.bfloat16}

# First CUDA compute capability with matrix products in the dtype.
_BF16_SINCE = (8, 0)
_FLOAT8_SINCE = (8, 9)


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Dtypes of a run.

    Attributes:
        weight_dtype: Dtype that the weights are stored in; with adapters, the frozen base's.
        compute_dtype: Dtype of the activations and of the weights in matrix products.
        has_float8_matmuls: The blocks' linears round both factors to float8 first, with one scale per tensor.
    """

    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    has_float8_matmuls: bool = False

    def __str__(self) -> str:
        weights, compute = (str(dtype).removeprefix("torch.") for dtype in (self.weight_dtype, self.compute_dtype))
        return f"{weights} computed in {compute}" if self.is_mixed else weights

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> PrecisionPolicy:
        """Store and compute in one dtype."""
        return cls(dtype, dtype)

    @property
    def is_mixed(self) -> bool:
        """True if sharding casts weights to the compute dtype as it gathers them."""
        return self.weight_dtype is not self.compute_dtype


def choose_precision(precision: Precision | None, has_adapter: bool, device_type: str) -> PrecisionPolicy:
    """Return the dtypes of the config key ``precision``; None selects the default of the device.

    The default is float32 on CPU; on CUDA, bfloat16 with adapters and mixed bfloat16 when all weights train.
    """
    if precision is None:
        precision = "fp32" if device_type == "cpu" else "bf16" if has_adapter else "bf16_mixed"
    if precision in ("bf16_mixed", "float8_mixed"):
        return PrecisionPolicy(torch.float32, torch.bfloat16, precision == "float8_mixed")
    return PrecisionPolicy(_UNMIXED_DTYPES[precision], _UNMIXED_DTYPES[precision], precision == "float8")


def is_emulated(dtype: torch.dtype) -> bool:
    """Return True if this processor has no instructions for matrix products in a 16-bit dtype, unlike for float32.

    torch then computes them several times slower than in float32. On x86, oneDNN needs AVX-512 or conversions beyond
    AVX2, which laptops and many servers lack. False where torch has no oneDNN and cannot tell.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    onednn = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return not onednn._is_mkldnn_bf16_supported()
    return dtype is torch.float16 and not onednn._is_mkldnn_fp16_supported()


def check_device(precision: PrecisionPolicy, base: str, capability: tuple[int, int] | None, device_name: str) -> None:
    """Check that the device has matrix products in the dtypes of the run.

    Args:
        precision: Dtypes of the run.
        base: Storage of a frozen base: bf16, nf4 or float8.
        capability: CUDA compute capability; None on CPU, which supports every dtype.
        device_name: Name for the message.

    Raises:
        ConfigError: The device is too old; names the dtype and the first capability that supports it.
    """
    if capability is None:
        return
    here = f"{device_name} has compute capability {capability[0]}.{capability[1]}"
    if (precision.has_float8_matmuls or base == "float8") and capability < _FLOAT8_SINCE:
        key = "adapter.base=float8" if base == "float8" else "precision"
        raise ConfigError(
            f"{key}: float8 matrix products need compute capability {_FLOAT8_SINCE[0]}.{_FLOAT8_SINCE[1]} (Ada, "
            f"Hopper) or later; {here}. Use bf16{'' if capability >= _BF16_SINCE else ' on another device, or fp32'}."
        )
    if precision.compute_dtype is torch.bfloat16 and capability < _BF16_SINCE:
        raise ConfigError(
            f"precision: bfloat16 needs compute capability {_BF16_SINCE[0]}.{_BF16_SINCE[1]} (Ampere) or later; "
            f"{here}. Set precision=fp32."
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over tensors in ``dtype``, and of adapters of a base in it."""
    return torch.float64 if dtype is torch.float64 else torch.float32
