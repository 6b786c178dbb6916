"""Common rules of thumb for memory and FLOPs, reported for comparison with the plan."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.parallel.footprint import GIB


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """Memory per GPU in GiB by the rule of thumb."""

    state_gib: float
    activations_gib: float

    @property
    def total_gib(self) -> float:
        """Sum of state and activations in GiB."""
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
    """Estimate (weights + gradients + optimizer) / GPUs + batch x length x width x layers, all in one dtype.

    Many tutorials give this formula (https://blog.eleuther.ai/transformer-math has its parts). It assumes that all
    state is sharded and a block keeps one tensor of the model's width. It ignores the MLP's activations, logits,
    unsharded weights and gradients, CUDA's context, fragmentation, replicas and checkpointing.
    """
    state = bytes_per_weight * (num_parameters + (1 + optimizer_weights) * num_trained) / world_size
    activations = micro_batch_size * seq_len * embed_dim * num_layers * bytes_per_weight
    return RuleOfThumb(state / GIB, activations / GIB)


def estimate_flops_by_rule(num_parameters: float, num_tokens: float, is_recomputed: bool) -> float:
    """Estimate 6 N D, or 8 N D with recomputed activations (https://arxiv.org/abs/2001.08361, section 2.1).

    The rule counts the embedding as a matrix product and a frozen base as trained, and ignores attention and padding.
    """
    return (8 if is_recomputed else 6) * num_parameters * num_tokens
