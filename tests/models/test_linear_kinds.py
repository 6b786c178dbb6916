"""Only what computes ``x W' + b`` counts as a linear that takes an adapter or is quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fctune.models.frozen_linear import is_linear
from fctune.models.transformers.architecture import parse_architecture

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
}


class Plain(nn.Linear):
    """Spells out the product, as some models of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Grouped(nn.Linear):
    """Computes something else, for which it has an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.num_groups = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_subclasses_of_linears_count_if_they_compute_its_product() -> None:
    assert is_linear(nn.Linear(4, 4))
    assert is_linear(Plain(4, 4))
    assert not is_linear(Grouped())
    assert not is_linear(nn.Conv1d(4, 4, 1))


def test_routers_that_are_linears_by_inheritance_are_none() -> None:
    from transformers import AutoConfig

    raw = AutoConfig.for_model("llama4_text", **_SIZES).to_dict()
    architecture = parse_architecture("config.json", raw)
    assert "q_proj" in architecture.linear_names
    assert "router" not in architecture.linear_names
