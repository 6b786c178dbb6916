"""Memory and time of generation in reinforcement learning, in addition to training.

A decoding step reads the weights once and the KV cache of each answer in progress, and multiplies each new token by the
weights; it takes at least as long as the slower of the two at the GPU's peak rates (R. Pope et al., Efficiently Scaling
Transformer Inference, 2022, arXiv:2211.05102, section 2). Real engines are slower, so times are lower bounds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fctune.base.gpus import Gpu
from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture

_WIDTH = 2  # bytes of a weight and of a value of the cache, in bfloat16


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One batch of rollouts.

    Attributes:
        num_gpus: GPUs that generate, each with a share of the weights and of the cache.
        weights_bytes: Weights on each of them.
        cache_bytes: KV cache on each of them for all answers in progress, each as long as it may become.
        training_bytes: Training state on each of them, which stays there while ranks generate in process.
        memory_bytes: Memory of one.
        num_answers: Answers of a batch in which no group is dropped.
        num_concurrent: Answers in progress.
        tokens_per_s: Generated tokens per second of all GPUs, at most.
        generation_s: Seconds for the answers of a batch, each as long as it may become, at least.
        training_s: Seconds for the updates on them, if each fills a row.
        is_overlapped: A server generates the next batch while this one is trained.
    """

    num_gpus: int
    weights_bytes: float
    cache_bytes: float
    training_bytes: float
    memory_bytes: int
    num_answers: int
    num_concurrent: int
    tokens_per_s: float
    generation_s: float
    training_s: float
    is_overlapped: bool

    @property
    def fits(self) -> bool:
        """True if weights and cache fit; otherwise fewer answers are in progress at a time."""
        return self.free_bytes >= 0

    @property
    def free_bytes(self) -> float:
        """Memory of each that is left; negative if weights and cache do not fit."""
        return self.memory_bytes - self.training_bytes - self.weights_bytes - self.cache_bytes

    @property
    def batch_s(self) -> float:
        """Seconds from one batch to the next."""
        if self.is_overlapped:
            return max(self.generation_s, self.training_s)
        return self.generation_s + self.training_s

    def to_json(self) -> dict[str, Any]:
        """Return the values with their sums."""
        return asdict(self) | {"fits": self.fits, "batch_s": self.batch_s}


def count_cache_bytes(architecture: Architecture) -> int:
    """Return the bytes of the KV cache for one token: keys and values of all layers."""
    return 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * _WIDTH


def plan_rollouts(
    config: RunConfig,
    architecture: Architecture,
    num_parameters: int,
    gpu: Gpu,
    num_gpus: int,
    pack_s: float,
    training_bytes: float = 0.0,
) -> RolloutPlan | None:
    """Plan the generation of a run; None for a run without ``grpo``.

    Args:
        config: Config of the run.
        architecture: Sizes of the model.
        num_parameters: Its parameters.
        gpu: The GPUs.
        num_gpus: GPUs that generate: of the server, or of all ranks in process, which do not share the weights.
        pack_s: Seconds that training takes for one row of ``data.seq_len`` tokens.
        training_bytes: Memory of training on a rank between two steps.
    """
    if (grpo := config.grpo) is None:
        return None
    is_server = grpo.engine == "server"
    at_a_time = grpo.server.concurrency if grpo.server is not None else grpo.generation_batch_size * num_gpus
    num_answers = grpo.answers_per_batch
    concurrent = min(at_a_time, num_answers)
    # In process each rank has all weights and its own answers; a server splits the weights.
    weights = num_parameters * _WIDTH / (num_gpus if is_server else 1)
    cache = concurrent * config.data.seq_len * count_cache_bytes(architecture) / num_gpus
    # On average over an answer, half of its cache is there.
    read_s = (weights + cache / 2) / (gpu.memory_gb_s * 1e9)
    compute_s = 2 * num_parameters * concurrent / num_gpus / (gpu.tflops(_WIDTH) * 1e12)
    step_s = max(read_s, compute_s)
    tokens = num_answers * grpo.max_new_tokens
    if is_server:
        tokens_per_s = concurrent / step_s  # a new answer begins as soon as one has ended
        generation_s = tokens / tokens_per_s
    else:
        generation_s = math.ceil(num_answers / at_a_time) * grpo.max_new_tokens * step_s
        tokens_per_s = tokens / generation_s
    return RolloutPlan(
        num_gpus=num_gpus,
        weights_bytes=weights,
        cache_bytes=cache,
        training_bytes=0.0 if is_server else training_bytes,
        memory_bytes=gpu.memory_bytes,
        num_answers=num_answers,
        num_concurrent=concurrent,
        tokens_per_s=tokens_per_s,
        generation_s=generation_s,
        training_s=num_answers * pack_s,
        is_overlapped=is_server and grpo.max_staleness > 0,
    )
