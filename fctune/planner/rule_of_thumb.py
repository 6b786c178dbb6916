"""The formula by hand that memory is commonly estimated with, to compare with."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.parallel.footprint import GIB


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """GiB a GPU, by the formula."""

    state_gib: float
    activations_gib: float

    @property
    def total_gib(self) -> float:
        """Of both."""
        return self.state_gib + self.activations_gib


def estimate_memory_by_rule(
    num_parameters: float,
    num_trained: float,
    world_size: int,
    micro_batch_size: int,
    seq_len: int,
    embed_dim: int,
    num_layers: int,
    bytes_per_weight: int = 4,
    optimizer_weights: int = 2,
) -> RuleOfThumb:
    """(weights + gradients + optimizer) / GPUs + batch x length x width x layers, all in one format.

    The formula of many tutorials (https://blog.eleuther.ai/transformer-math gives its parts): as if all were sharded
    and a block kept one tensor of the model's width. It leaves out the feed-forward's activations, logits, weights and
    gradients that sharding holds whole, CUDA's context and fragmentation, and knows neither copies nor checkpointing.
    """
    state = bytes_per_weight * (num_parameters + (1 + optimizer_weights) * num_trained) / world_size
    activations = micro_batch_size * seq_len * embed_dim * num_layers * bytes_per_weight
    return RuleOfThumb(state / GIB, activations / GIB)


def estimate_flops_by_rule(num_parameters: float, num_tokens: float, is_recomputed: bool) -> float:
    """6 N D, or 8 N D where activations are computed again (https://arxiv.org/abs/2001.08361, section 2.1).

    It counts the embedding as a product, a frozen base as if it trained, and leaves out attention and padding.
    """
    return (8 if is_recomputed else 6) * num_parameters * num_tokens
