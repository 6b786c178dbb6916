"""Time of a step: arithmetic at a stated efficiency, what collectives cannot hide behind it, the update."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from fctune.config import RunConfig
from fctune.modeling.loss import MAX_LOGITS
from fctune.planner.blocks import linear_shapes
from fctune.planner.gpus import Gpu
from fctune.planner.memory import MemoryModel, Setting

# Share of the dense peak that all arithmetic of a compiled step reaches, recomputation counted: the mean of four public
# measurements on H100: MPT-7B at 2k, 4k and 8k (llm-foundry scripts/train/benchmarking: 0.45, 0.50, 0.44) and Qwen2.5
# 7B LoRA (NeMo Automodel docs/performance-summary: 0.45). They are not among those that tests compare with.
COMPILED_EFFICIENCY = 0.46

# Eager blocks are slower by this: Llama 3.2 3B on A100, 7,075 and 8,998 tokens/s (torchtune README).
EAGER_SHARE = 7075 / 8998

# Products in float8 with a scale a tensor, against bf16, rounding counted: Llama 3.1 8B on 8 H100, 8,532 and 6,667
# tokens/s over the whole step (torchtitan benchmarks/llama3_h100_202412), solved for the products.
FLOAT8_SPEEDUP = 1.36

# Share of a link's rate that collectives reach (nccl-tests on 2 x 8 H100), of memory's that an update does, and of
# arithmetic that communication can run beside.
_LINK_SHARE = 0.8
_MEMORY_SHARE = 0.8
_OVERLAP = 0.9


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of one token on average, as the step really does them; a multiply-add is two."""

    products: float  # of the blocks' linears and adapters
    recomputed: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        """All."""
        return self.products + self.recomputed + self.attention + self.head


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step; ``collectives_s`` is what is sent, ``exposed_s`` what training waits for."""

    compute_s: float
    collectives_s: float
    exposed_s: float
    update_s: float
    gathered_bytes: int  # that a rank receives a step
    reduced_bytes: int

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.exposed_s + self.update_s

    def to_json(self) -> dict[str, float]:
        """All of it."""
        return asdict(self) | {"total_s": self.total_s}


def count_flops(
    memory: MemoryModel,
    fraction: float,
    supervised_share: float,
    pairs_per_token: float,
    max_logits: float = MAX_LOGITS,
) -> Flops:
    """Operations a token: 2N forward, 2N for gradients of inputs, 2N for those of weights that train.

    So 6N when all train and 4N over a frozen base, with 6 a weight of adapters (https://arxiv.org/abs/2001.08361,
    section 2.1; https://arxiv.org/abs/2204.02311, appendix B). The embedding is a look-up and costs none. A block that
    is computed again adds its forward; with policy ``op``, its first and every second product alone. What a block
    ends with is not computed again, as no backward reads it (torch.utils.checkpoint, early stop). Attention costs
    4d a pair forward and 10d backward, where it forms its scores again (https://arxiv.org/abs/2205.14135). The head
    meets supervised places alone; its chunks' logits are computed again.
    """
    a, config = memory.architecture, memory.config
    adapter = config.adapter
    shapes = linear_shapes(a)
    base = sum(rows * columns for rows, columns in shapes.values())
    added = 0
    outputs: list[int] = []
    for name, (in_dim, out_dim) in shapes.items():
        outputs.append(in_dim * out_dim)
        if adapter is not None and name in adapter.modules:
            added += adapter.rank * (in_dim + out_dim)
            outputs += [adapter.rank * in_dim, adapter.rank * out_dim]
    products = a.num_layers * ((4 if adapter is not None else 6) * base + 6 * added)
    is_by_operator = config.activation_checkpointing.policy == "op"
    last = math.prod(shapes["down_proj"]) if adapter is None or config.compile else 0
    again = sum(outputs[:-1:2]) if is_by_operator else base + added - last
    pair = a.num_layers * a.embed_dim * pairs_per_token
    recomputed = fraction * (2 * a.num_layers * again + (0 if is_by_operator else 4 * pair))
    head = a.vocab_size * a.embed_dim
    trains_head = adapter is None
    head_cost = 2 + 2 + 2 * trains_head
    head_adapter = 0
    if adapter is not None and "lm_head" in adapter.modules:
        head_adapter = 6 * adapter.rank * (a.vocab_size + a.embed_dim)
    places = config.micro_batch_size * config.data.seq_len * supervised_share
    if places * a.vocab_size > max_logits:
        head_cost += 2
    return Flops(products, recomputed, 14 * pair, supervised_share * (head_cost * head + head_adapter))


def efficiency_of(config: RunConfig, given: float | None = None) -> float:
    """Share of the peak that the step's arithmetic reaches."""
    if given is not None:
        return given
    return COMPILED_EFFICIENCY * (1.0 if config.compile else EAGER_SHARE)


def time_step(
    memory: MemoryModel, gpu: Gpu, setting: Setting, flops: Flops, packs: float, ranks_per_node: int, efficiency: float
) -> StepTime:
    """Seconds of a step of ``packs`` packs over all ranks; a rank with a micro-batch less waits for the others.

    A ring moves (n - 1)/n of what is gathered or scattered through each link, and twice that to reduce to all
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    per_rank = math.ceil(packs / setting.world_size)
    tokens = per_rank * memory.config.data.seq_len
    micro_batches = math.ceil(per_rank / setting.micro_batch_size)
    speedup = FLOAT8_SPEEDUP if _multiplies_float8(memory, gpu) else 1.0
    arithmetic = tokens * ((flops.products + flops.recomputed) / speedup + flops.attention + flops.head)
    compute = arithmetic / (gpu.bf16_tflops * 1e12 * efficiency)
    gathered, scattered, summed = count_traffic(memory, setting, micro_batches)
    node = min(setting.shard, ranks_per_node)
    inner = _bus_bytes_per_s(gpu, setting.shard, ranks_per_node)
    outer = _bus_bytes_per_s(gpu, setting.world_size, ranks_per_node)
    if setting.shard > 1 and setting.replicate > 1 and node == ranks_per_node:
        outer = gpu.nic_gb_s * 1e9 * _LINK_SHARE  # each shard's copies meet over its own adapter
    shards, copies = setting.shard, setting.replicate
    sent = (gathered + scattered) * (shards - 1) / shards / inner + 2 * summed * (copies - 1) / copies / outer
    exposed = max(sent / len(memory.blocks), sent - _OVERLAP * compute)  # the first block's at the least
    state = memory.state(setting)
    moved = 2 * (state.optimizer + state.gradients) + 2 * state.gradients
    update = moved / (gpu.memory_gb_s * 1e9 * _MEMORY_SHARE)
    return StepTime(compute, sent, exposed, update, int(gathered), int(scattered + summed))


def count_traffic(memory: MemoryModel, setting: Setting, micro_batches: int) -> tuple[float, float, float]:
    """Bytes of whole tensors that are gathered, scattered and summed over copies in a step, by one rank.

    Sharded blocks are gathered for each forward and each backward; the head once a micro-batch, as it stays whole
    (ZeRO stage 3, https://arxiv.org/abs/1910.02054). Gradients that fit are reduced once a step, else each time.
    """
    trained = sum(t.numel * (4 if memory.formats.is_mixed else t.itemsize) for t in memory.all.tensors if t.is_trained)
    times = 1 if memory.holds_gradients() else micro_batches
    gathered = scattered = 0.0
    if setting.shard > 1:
        passes = 2 if memory.config.parallel.reshard_after_forward else 1
        blocks = sum(memory.whole_bytes(block) for block in memory.blocks)
        gathered = micro_batches * (passes * blocks + memory.whole_bytes(memory.root))
        scattered = times * trained
    summed = trained / setting.shard if setting.replicate > 1 else 0.0
    return gathered, scattered, summed


def _bus_bytes_per_s(gpu: Gpu, ranks: int, ranks_per_node: int) -> float:
    """Of a ring: the node's links, or between nodes all of a node's adapters together."""
    rate = gpu.link_gb_s
    if ranks > ranks_per_node:
        rate = min(rate, gpu.nic_gb_s * ranks_per_node)
    return rate * 1e9 * _LINK_SHARE


def _multiplies_float8(memory: MemoryModel, gpu: Gpu) -> bool:
    adapter = memory.config.adapter
    is_asked = memory.formats.has_float8_products or (adapter is not None and adapter.base == "float8")
    return is_asked and gpu.fp8_tflops is not None
