"""LoRA adapters on the experts of a mixture, one for each expert, and on their router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fctune.config.sections.adapter import AdapterConfig
from fctune.models.architecture import ROUTER_ADAPTER
from fctune.models.dropout import TokenKeys, channel_keys, keyed_dropout, mix_keys
from fctune.models.forward_override import override_forward_
from fctune.models.grouped_products import multiply_groups


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a weight of experts: all of it unless experts are spread over ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ExpertLoRA(nn.Module):
    """``scaling * dropout(x) A[e]' B[e]'`` for rows x of expert e, added to what the expert's frozen weight returns.

    Shapes: ``lora_a [experts, rank, in]``, ``lora_b [experts, out, rank]``, whichever way the weight is stored.

    Args:
        weight: The experts' weight, ``[experts, out, in]``, or ``[experts, in, out]`` if it is stored transposed.
        is_transposed: How the weight is stored.
        config: The ``adapter`` section of the run's config.
        dtype: Dtype of the adapter.
        scaling: Factor on the product.
        key: Name of the weight within the model; seeds its dropout.
        token_keys: Keys of the tokens in the current forward, shared by all adapters of the model.
    """

    def __init__(
        self,
        weight: Tensor,
        is_transposed: bool,
        config: AdapterConfig,
        dtype: torch.dtype,
        scaling: float,
        key: str,
        token_keys: TokenKeys,
    ):
        super().__init__()
        num_experts, *sizes = weight.shape
        in_dim, out_dim = sizes if is_transposed else reversed(sizes)
        options: dict[str, Any] = {"dtype": dtype, "device": weight.device}
        self.lora_a = nn.Parameter(torch.empty(num_experts, config.rank, in_dim, **options))
        self.lora_b = nn.Parameter(torch.empty(num_experts, out_dim, config.rank, **options))
        self.is_transposed, self.scaling, self.dropout = is_transposed, scaling, config.dropout
        self.is_active = True  # see ``fctune.models.lora.adapters_off``
        self.channel_keys: Tensor
        empty = torch.empty(in_dim, dtype=torch.int32, device=weight.device)
        self.register_buffer("channel_keys", empty, persistent=False)
        self._key, self._token_keys = key, token_keys

    def init_buffers_(self) -> None:
        """Compute the dropout keys of the input channels."""
        self.channel_keys.copy_(channel_keys(self._key, len(self.channel_keys)))

    def make_row_keys(self, tokens: Tensor, experts: Tensor) -> Tensor | None:
        """Return the dropout keys of rows, int32 ``[n]``; None if nothing is dropped.

        Args:
            tokens: The token that each row is of, as its index in the flattened batch, int64 ``[n]``.
            experts: Expert of each row, int64 ``[n]``; each drops independently, as separate linears would.
        """
        if not (self.dropout and self.training):
            return None
        assert self._token_keys.value is not None, "an adapter with dropout was called without token keys"
        return self._token_keys.value.flatten()[tokens] ^ mix_keys(experts)

    def forward(self, x: Tensor, row_keys: Tensor | None, ends: Tensor) -> Tensor:
        """Return the change of each row's output, ``[n, out]``; zero while adapters are off.

        Args:
            x: Inputs of the experts, ``[n, in]``, sorted by expert.
            row_keys: Result of ``make_row_keys``, of this adapter or another one of the same experts.
            ends: Row after the last one of each expert, int32 ``[experts]``.
        """
        if not self.is_active:
            return x.new_zeros(len(x), self.lora_b.shape[1])
        if row_keys is not None:
            x = keyed_dropout(x, self.dropout, row_keys, self.channel_keys)
        a, b = (to_local(matrix).to(x.dtype).transpose(1, 2) for matrix in (self.lora_a, self.lora_b))
        return multiply_groups(self.scaling * multiply_groups(x, a, ends), b, ends)

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the merged weight of all experts, stored as ``weight`` is, in the adapter's dtype."""
        change = torch.bmm(b, a)
        return weight.to(a.dtype) + self.scaling * (change.transpose(1, 2) if self.is_transposed else change)


class RouterLoRA(nn.Module):
    """``scaling * B A``, added to the weight of a router, ``[experts, in]``, which is small; without dropout.

    Args:
        weight: The router's weight.
        config: The ``adapter`` section of the run's config.
        dtype: Dtype of the adapter.
        scaling: Factor on the product.
    """

    def __init__(self, weight: Tensor, config: AdapterConfig, dtype: torch.dtype, scaling: float):
        super().__init__()
        out_dim, in_dim = weight.shape
        options: dict[str, Any] = {"dtype": dtype, "device": weight.device}
        self.lora_a = nn.Parameter(torch.empty(config.rank, in_dim, **options))
        self.lora_b = nn.Parameter(torch.empty(out_dim, config.rank, **options))
        self.scaling = scaling
        self.is_active = True  # see ``fctune.models.lora.adapters_off``

    def merge(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the merged weight, ``[experts, in]``, in the adapter's dtype; while adapters are off, the weight."""
        if not self.is_active:
            return weight.to(a.dtype)
        return weight.to(a.dtype) + self.scaling * (b @ a)


def adapt_router_(router: nn.Module, config: AdapterConfig, dtype: torch.dtype, scaling: float) -> None:
    """Add an adapter to a router, in place; its ``forward`` then reads the merged weight."""
    adapter = RouterLoRA(router.get_parameter("weight"), config, dtype, scaling)
    router.add_module(ROUTER_ADAPTER, adapter)
    override_forward_(router, _route_by_merged)


def _route_by_merged(router: nn.Module, own: Callable[..., Any], *inputs: Any) -> Any:
    adapter: Any = router.get_submodule(ROUTER_ADAPTER)
    weight: Any = router._parameters["weight"]
    merged = adapter.merge(weight, adapter.lora_a, adapter.lora_b).to(weight.dtype)
    router._parameters["weight"] = merged
    try:
        return own(*inputs)
    finally:
        router._parameters["weight"] = weight
