"""PEFT's form of adapters on experts: ``target_parameters`` of PEFT 0.18. Imports no torch.

PEFT joins the adapters of all experts to two matrices. It takes the second dim of a weight for its input, whichever it
is, so that for weights stored as ``[experts, out, in]`` its A is our B, transposed. Later versions differ in this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fctune.models.architecture import EXPERT_ADAPTERS, ExpertShape

if TYPE_CHECKING:
    from torch import Tensor

_SWAPPED = {"lora_a": "lora_b", "lora_b": "lora_a"}


def name_module(stem: str, expert: ExpertShape, chosen: Sequence[str]) -> str:
    """Return the path of PEFT's module for a weight of experts.

    PEFT wraps the module that holds the experts once for each of its weights that has an adapter, in their order.

    Args:
        stem: Path of our adapter.
        expert: The weight.
        chosen: Names of all weights of experts that have an adapter, in the order of computation.
    """
    owner = stem.rpartition(f".{EXPERT_ADAPTERS}.")[0]
    return owner + ".base_layer" * (len(chosen) - 1 - list(chosen).index(expert.name))


def swap_leaf(leaf: str, expert: ExpertShape) -> str:
    """Return which of our matrices, ``lora_a`` or ``lora_b``, PEFT would call what ``leaf`` is."""
    return leaf if expert.is_transposed else _SWAPPED[leaf]


def join(leaf: str, tensor: Tensor, expert: ExpertShape) -> Tensor:
    """Return PEFT's matrix for an adapter's ``lora_a [experts, rank, in]`` or ``lora_b [experts, out, rank]``."""
    by_rank = tensor if leaf == "lora_a" else tensor.transpose(1, 2)  # [experts, rank, size]
    if swap_leaf(leaf, expert) == "lora_a":
        return by_rank.flatten(0, 1)  # A: rows of the first expert first
    return by_rank.permute(2, 1, 0).flatten(1)  # B: columns of the first rank first


def split(leaf: str, tensor: Tensor, expert: ExpertShape, num_experts: int) -> Tensor:
    """Return an adapter's ``lora_a`` or ``lora_b`` from PEFT's matrix; the inverse of ``join``."""
    if swap_leaf(leaf, expert) == "lora_a":
        by_rank = tensor.view(num_experts, -1, tensor.shape[1])
    else:
        by_rank = tensor.view(len(tensor), -1, num_experts).permute(2, 1, 0)
    return by_rank if leaf == "lora_a" else by_rank.transpose(1, 2)
