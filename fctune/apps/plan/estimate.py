"""Time, files and cost of a run in one setting: start-up, generation in reinforcement, training, saves and failures.

Start-up is counted from the first paid minute to the first step. In reinforcement, a decoding step reads the weights
once and the KV cache of each answer in progress, and multiplies each new token by the weights; it takes at least as
long as the slower of the two at the GPU's peak rates (R. Pope et al., Efficiently Scaling Transformer Inference, 2022,
arXiv:2211.05102, section 2). Real engines are slower, so these times are lower bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fctune.apps.plan.request import PlanRequest
from fctune.base.gpus import Gpu
from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture
from fctune.parallel.memory import Peak, Setting
from fctune.parallel.search import LayoutSearch
from fctune.parallel.speed import StepTime
from fctune.parallel.storage import Storage, count_expert_bytes, plan_storage
from fctune.runs.prices import Cost, compute_cost

# Gigabytes of the image, or of the packages, that a new node downloads; torch's CUDA wheels are most of it. An
# assumption, as no image was built yet.
IMAGE_GB = 8.0

# Tokens per second that preparation reads, tokenizes, masks and packs: 633,269 on two cores
# (benchmarks/results/data_2026-11-22.json), assumed to grow up to its limit of 16 processes, which nodes of GPUs have
# cores for.
PREPARED_TOKENS_S = 633_000 // 2 * 16

# Seconds until the model is built, and for the compilation of each kind of block in the first step: medians of the rows
# measured on an H100 (benchmarks/results/gpu.json, ``setup_s`` and ``first_step_s``).
SETUP_S, COMPILE_S = 18.0, 17.0

_WIDTH = 2  # bytes of a weight and of a value of the KV cache, in bfloat16


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds before the first step, while all GPUs are paid for."""

    image_s: float
    download_s: float  # of the base, by one node to the shared disk
    prepare_s: float
    load_s: float  # of the base, from the shared disk into the GPUs
    setup_s: float
    compile_s: float
    given_s: float | None = None  # all of it, as given by the user

    @property
    def total_s(self) -> float:
        """All parts, one after the other, or what the user gave."""
        if self.given_s is not None:
            return self.given_s
        return self.image_s + self.download_s + self.prepare_s + self.load_s + self.setup_s + self.compile_s


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """One batch of rollouts.

    Attributes:
        num_gpus: GPUs that generate, each with a share of the weights and of the cache.
        weights_bytes: Weights on each of them.
        cache_bytes: KV cache on each of them for all answers in progress, each as long as it may become.
        training_bytes: Training state on each of them, which stays there while ranks or a server on their GPUs
            generate.
        memory_bytes: Memory of one.
        num_answers: Answers of a batch in which no group is dropped.
        num_rows: Conversations from rows that are trained beside them, in distillation.
        num_concurrent: Answers in progress.
        tokens_per_s: Generated tokens per second of all GPUs, at most.
        generation_s: Seconds for the answers of a batch, each as long as it may become, at least.
        training_s: Seconds for the updates on both, if each is as long as ``data.seq_len``.
        is_overlapped: A server generates the next batch while this one is trained.
    """

    num_gpus: int
    weights_bytes: float
    cache_bytes: float
    training_bytes: float
    memory_bytes: int
    num_answers: int
    num_rows: int
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
    """Plan the generation of a run; None for a run without its own answers.

    Args:
        config: Config of the run.
        architecture: Sizes of the model.
        num_parameters: Its parameters.
        gpu: The GPUs.
        num_gpus: GPUs that generate: of the servers, or of all ranks in process, which do not share the weights.
        pack_s: Seconds that training takes for one row of ``data.seq_len`` tokens.
        training_bytes: Memory of training on a rank between two steps, if the same GPUs generate.
    """
    if (section := config.rollouts) is None:
        return None
    is_server = section.engine == "server"
    at_a_time = section.num_at_once if is_server else section.generation_batch_size * num_gpus
    num_answers = section.answers_per_batch
    concurrent = min(at_a_time, num_answers)
    # In process each rank has all weights and its own answers; a server splits the weights over its GPUs.
    num_replicas = num_gpus if section.server is None else min(num_gpus, len(section.server.urls))
    weights = num_parameters * _WIDTH * num_replicas / num_gpus
    cache = concurrent * config.data.row_tokens * count_cache_bytes(architecture) / num_gpus
    # On average over an answer, half of its cache is there.
    read_s = (weights + cache / 2) / (gpu.memory_gb_s * 1e9)
    compute_s = 2 * num_parameters * concurrent / num_gpus / (gpu.tflops(_WIDTH) * 1e12)
    step_s = max(read_s, compute_s)
    tokens = num_answers * section.max_new_tokens
    if is_server:
        tokens_per_s = concurrent / step_s  # a new answer begins as soon as one has ended
        generation_s = tokens / tokens_per_s
    else:
        generation_s = math.ceil(num_answers / at_a_time) * section.max_new_tokens * step_s
        tokens_per_s = tokens / generation_s
    return RolloutPlan(
        num_gpus=num_gpus,
        weights_bytes=weights,
        cache_bytes=cache,
        training_bytes=0.0 if is_server and not section.shares_gpus else training_bytes,
        memory_bytes=gpu.memory_bytes,
        num_answers=num_answers,
        num_rows=section.rows_per_step,
        num_concurrent=concurrent,
        tokens_per_s=tokens_per_s,
        generation_s=generation_s,
        training_s=(num_answers + section.rows_per_step) * pack_s,
        is_overlapped=is_server and section.max_staleness > 0,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time, files and cost of a run in one setting; hours and cost are None if the number of steps is unknown."""

    time: StepTime
    rollouts: RolloutPlan | None  # generation, in reinforcement
    step_s: float  # with generation, if no answer is dropped
    storage: Storage
    startup: Startup
    num_gpus: int  # paid for: those that train, and those of the server in reinforcement
    training_hours: float | None  # with the expected saves and failures
    cost: Cost | None  # None without a price of a GPU-hour, too

    @property
    def hours(self) -> float | None:
        """Hours from the first paid minute to the last step."""
        return None if self.training_hours is None else self.startup.total_s / 3600 + self.training_hours


def estimate_run(
    search: LayoutSearch, request: PlanRequest, setting: Setting, peak: Peak, time: StepTime, num_steps: int | None
) -> Estimate:
    """Return the time, files and cost of a run in a setting, whose peak memory and step time are known."""
    config, memory, gpus = search.config, search.memory, setting.world_size
    nodes = max(1, gpus // request.gpus_per_node)
    section, footprint, pack_s = config.rollouts, peak.footprint, time.total_s / config.global_batch_size
    is_served = section is not None and section.engine == "server" and not section.shares_gpus
    server_gpus = (request.server_gpus or request.gpus_per_node) if is_served else 0
    rollouts = plan_rollouts(
        config,
        search.architecture,
        sum(t.numel for t in memory.all.tensors),
        request.gpu,
        server_gpus or gpus,
        pack_s,
        footprint.state + footprint.buffers + footprint.teacher + footprint.context,
    )
    if rollouts is not None and section is not None:
        step_s = rollouts.batch_s / section.updates_per_batch
    elif config.distill is not None:
        step_s = config.distill.rows_per_step * pack_s  # if each is as long as data.seq_len
    else:
        step_s = time.total_s
    rates = request.disk_gb_s, request.failures_per_gpu_day
    storage = plan_storage(memory, config, gpus, search.rows, *rates, setting.shard, num_steps, step_s)
    startup = _estimate_startup(search, request, setting, nodes, storage.base_bytes)
    num_gpus, training_hours = gpus + server_gpus, storage.hours(num_steps, step_s)
    cost = None
    if training_hours is not None and request.price is not None:
        exported = storage.export_bytes / 2**30 if request.egress_gib is None else request.egress_gib
        disks = request.shared_gib, request.network_gib * nodes
        hours = startup.total_s / 3600 + training_hours
        cost = compute_cost(request.prices, request.price, hours, num_gpus, *disks, exported)
    return Estimate(time, rollouts, step_s, storage, startup, num_gpus, training_hours, cost)


def _estimate_startup(
    search: LayoutSearch, request: PlanRequest, setting: Setting, nodes: int, base_bytes: int
) -> Startup:
    """Estimate the time before the first step on new nodes; a base or data that are there already cost nothing."""
    config, rows = search.config, search.rows
    to_prepare = 0 if rows is None or rows.is_prepared else rows.tokens
    num_kinds = len(set(search.architecture.blocks))  # each of which is compiled
    return Startup(
        image_s=IMAGE_GB / request.download_gb_s,
        download_s=base_bytes / (request.download_gb_s * 1e9) if config.model.path.startswith("hf:") else 0.0,
        prepare_s=to_prepare / PREPARED_TOKENS_S,
        load_s=_count_read_bytes(search, setting, nodes, base_bytes) / (request.disk_gb_s * 1e9),
        setup_s=SETUP_S,
        compile_s=COMPILE_S * num_kinds if config.compile else 0.0,
        given_s=None if request.startup_min is None else 60 * request.startup_min,
    )


def _count_read_bytes(search: LayoutSearch, setting: Setting, nodes: int, base_bytes: int) -> int:
    """Count the bytes of the base that all nodes read: each, once, what its GPUs hold, and all 4-bit linears."""
    copies = min(nodes, setting.replicate)
    read = copies * base_bytes
    read += (nodes - copies) * _WIDTH * sum(t.numel for t in search.memory.all.tensors if t.is_nf4)
    if setting.expert > 1:
        holders = min(nodes, setting.world_size // setting.expert)
        read += (holders - copies) * count_expert_bytes(search.architecture)
    return read
