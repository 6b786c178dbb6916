"""In which number formats weights are held, computed and reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fctune.config.schema import Precision
from fctune.errors import ConfigError

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64, "float8": torch.bfloat16}

# First CUDA compute capability with products in the format.
_BF16_SINCE = (8, 0)
_FLOAT8_SINCE = (8, 9)


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of a run: weights, the frozen base's under adapters, are held in ``weights``, multiplied in ``compute``.

    ``has_float8_products``: what the blocks' linears multiply is rounded to float8 first, scaled by its largest value.
    """

    weights: torch.dtype
    compute: torch.dtype
    has_float8_products: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether sharding casts weights to the compute format as it gathers them."""
        return self.weights is not self.compute


def choose_formats(precision: Precision | None, has_adapter: bool, device_type: str) -> Formats:
    """The formats that ``precision`` names; None takes the default of the device."""
    if precision is None:
        precision = "fp32" if device_type == "cpu" else "bf16" if has_adapter else "bf16_mixed"
    if precision in ("bf16_mixed", "float8_mixed"):
        return Formats(torch.float32, torch.bfloat16, precision == "float8_mixed")
    return Formats(_PLAIN[precision], _PLAIN[precision], precision == "float8")


def check_device(
    formats: Formats, base: str, device_type: str, capability: tuple[int, int] | None, device_name: str
) -> None:
    """Stop where the device cannot multiply in the formats of the run.

    Args:
        formats: of the run.
        base: how a frozen base is held: bf16, nf4 or float8.
        device_type: cpu or cuda.
        capability: CUDA compute capability; None on CPU, which has every format.
        device_name: for the message.

    Raises:
        ConfigError: with the format and the first capability that has it.
    """
    if capability is None:
        return
    here = f"{device_name} has compute capability {capability[0]}.{capability[1]}"
    if (formats.has_float8_products or base == "float8") and capability < _FLOAT8_SINCE:
        key = "adapter.base=float8" if base == "float8" else "precision"
        raise ConfigError(
            f"{key}: float8 products need compute capability {_FLOAT8_SINCE[0]}.{_FLOAT8_SINCE[1]} (Ada, Hopper) or "
            f"later, and {here}. Use bf16{'' if capability >= _BF16_SINCE else ' on another device, or fp32'}."
        )
    if formats.compute is torch.bfloat16 and capability < _BF16_SINCE:
        raise ConfigError(
            f"precision: bfloat16 needs compute capability {_BF16_SINCE[0]}.{_BF16_SINCE[1]} (Ampere) or later, and "
            f"{here}. Set precision=fp32."
        )
