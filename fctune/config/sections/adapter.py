"""Config section for LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_1, Range

BaseDtype = Literal["bf16", "nf4", "float8", "mxfp4"]


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """LoRA adapters (https://arxiv.org/abs/2106.09685); without this section all weights train."""

    rank: Annotated[int, AT_LEAST_1] = 64
    """Rank of the low-rank matrices."""
    alpha: Annotated[float, Range(gt=0)] = 128.0
    """Numerator of the factor on the low-rank product; see `scaling`."""
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Probability of dropping each element of an adapter's input."""
    modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linears that get an adapter, by their names in Hugging Face checkpoints, such as `q_proj`; of a mixture of
    experts also `experts.gate_up_proj` and `experts.down_proj`, with an adapter for each expert, and its router, such
    as `gate`. `all-linear`: every linear and expert of the blocks, without routers and the output head."""
    scaling: Literal["standard", "rslora"] = "standard"
    """Factor on the low-rank product: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
    https://arxiv.org/abs/2312.03732)."""
    dora: bool = False
    """Train each row's magnitude separately from its direction (DoRA, https://arxiv.org/abs/2402.09353)."""
    train_tokens: Literal["auto", "off"] | list[str] = "auto"
    """Tokens whose embedding and output rows train along with the adapters. `auto`: supervised tokens and markers
    that look untrained in the base, unless the output head has an adapter; `off`: none; or a list of tokens."""
    base: BaseDtype = "bf16"
    """Storage of the frozen linears and experts: `bf16` keeps the run's precision; `nf4` quantises to 4 bits (QLoRA);
    `float8` quantises to 8 bits, and multiplies linears, but not experts, in 8 bits; `mxfp4` keeps experts in the 4
    bits in which their checkpoint stores them, as gpt-oss's does, and linears in the run's precision."""
