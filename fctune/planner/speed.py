"""Time of a step: arithmetic at a stated efficiency, what kernels move beyond that, what collectives cannot hide."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from fctune.gpus import Gpu
from fctune.models.loss import MAX_LOGITS
from fctune.planner.memory import MemoryModel
from fctune.planner.memory_timeline import Setting
from fctune.planner.memory_traffic import count_bytes_moved, count_fused_bytes
from fctune.planner.storage import HOST_GB_S

# Share of the dense peak that a step with fused kernels reaches, all that it waits for counted: Megatron-LM's README
# gives 41 % to 48 % of H100's for 2 to 462 billion weights; the middle is taken, the ends are the range of a plan.
EFFICIENCY = 0.445
EFFICIENCY_RANGE = (0.41, 0.48)

# Of their peaks, what the best products reach on H100, bfloat16 and float8: 794.5 of 989 and 1402.6 of 1979
# (https://github.com/stas00/ml-engineering, compute/accelerator, maximum achievable matmul).
_BF16_SHARE = 0.803
_FLOAT8_SHARE = 0.709

# Share of a link's rate that collectives reach at the 100s of MB that a block is, and of memory's that a kernel does.
# Assumptions, between what configs/acceptance_2x8_h100.yaml warns of and fails at; ``fctune acceptance`` measures both.
_LINK_SHARE = 0.8
_MEMORY_SHARE = 0.8

# Of arithmetic, what communication can run beside: the first block of a step has nothing before it, collectives take
# some of the processors. An assumption.
_OVERLAP = 0.9

# Of the host's memory, what one rank's update has of it beside the others of its node. An assumption.
_HOST_MEMORY_GB_S = 40


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
    """Seconds of one optimizer step; ``exposed_s`` is what training waits for of what is sent."""

    compute_s: float
    moving_s: float  # what kernels move beyond those that efficiencies are of: eager ones', adapters'
    collectives_s: float
    host_s: float  # that what is offloaded takes between the GPU and the host
    exposed_s: float
    update_s: float
    gathered_bytes: int  # that a rank receives a step
    reduced_bytes: int

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.moving_s + self.exposed_s + self.update_s

    def to_json(self) -> dict[str, float]:
        """All of it."""
        return asdict(self) | {"total_s": self.total_s}


def count_flops(
    memory: MemoryModel,
    fraction: float,
    supervised_share: float,
    pairs_per_token: float,
    max_logits: float = MAX_LOGITS,
    micro_batch_size: int | None = None,
) -> Flops:
    """Operations a token: 2N forward, 2N for gradients of inputs, 2N for those of weights that train.

    So 6N when all train and 4N over a frozen base, with 6 a weight of adapters (https://arxiv.org/abs/2001.08361,
    section 2.1; https://arxiv.org/abs/2204.02311, appendix B). The embedding is a look-up and costs none. A block that
    is computed again adds its forward; with policy ``op``, its first and every second product alone. What a block
    ends with is not computed again, as no backward reads it (torch.utils.checkpoint, early stop). Attention costs
    4d a pair forward and 10d backward, where it forms its scores again (https://arxiv.org/abs/2205.14135). The head
    meets supervised places alone; where they are too many for one chunk, logits are computed again.
    """
    a, config = memory.architecture, memory.config
    adapter = config.adapter
    shapes = a.linear_shapes()
    base = sum(rows * columns for rows, columns in shapes.values())
    added = 0
    outputs: list[int] = []
    for name, (in_dim, out_dim) in shapes.items():
        outputs.append(in_dim * out_dim)
        if adapter is not None and name in a.resolve_adapter_modules(adapter.modules):
            added += adapter.rank * (in_dim + out_dim)
            outputs += [adapter.rank * in_dim, adapter.rank * out_dim]
    products = a.num_layers * ((4 if adapter is not None else 6) * base + 6 * added)
    is_by_operator = config.activation_checkpointing.policy == "op"
    last = math.prod(shapes[a.block_linears.mlp_output]) if adapter is None or config.compile else 0
    again = sum(outputs[:-1:2]) if is_by_operator else base + added - last
    pair = a.num_layers * a.embed_dim * pairs_per_token
    recomputed = fraction * (2 * a.num_layers * again + (0 if is_by_operator else 4 * pair))
    head = a.vocab_size * a.embed_dim
    trains_head = adapter is None
    head_cost = 2 + 2 + 2 * trains_head
    head_adapter = 0
    if adapter is not None and a.head in a.resolve_adapter_modules(adapter.modules):
        head_adapter = 6 * adapter.rank * (a.vocab_size + a.embed_dim)
    places = (micro_batch_size or config.micro_batch_size) * config.data.seq_len * supervised_share
    if places * a.vocab_size > max_logits:
        head_cost += 2
    return Flops(products, recomputed, 14 * pair, supervised_share * (head_cost * head + head_adapter))


def estimate_step_time(
    memory: MemoryModel,
    gpu: Gpu,
    setting: Setting,
    flops: Flops,
    packs: int,
    ranks_per_node: int,
    efficiency: float = EFFICIENCY,
    slots_per_pack: float | None = None,
) -> StepTime:
    """Seconds of a step of ``packs`` packs over all ranks; a rank with a pack less waits for the others.

    ``slots_per_pack`` are places computed, padding among them; None where packs are as long as rows may be.

    A ring moves (n - 1)/n of what is gathered or scattered through each link, and twice that to reduce to all
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    per_rank = math.ceil(packs / setting.world_size)
    tokens = per_rank * (memory.config.data.seq_len if slots_per_pack is None else slots_per_pack)
    micro_batches = math.ceil(per_rank / setting.micro_batch_size)
    compute = tokens * flops.total / (gpu.tflops(memory.precision.compute_dtype.itemsize) * 1e12 * efficiency)
    moving = tokens * memory_traffic_seconds(memory, gpu, setting.fraction)
    compute -= float8_savings(memory, gpu, flops, tokens, micro_batches)
    gathered, scattered, summed = count_communication(memory, setting, micro_batches)
    inner = _bus_bytes_per_s(gpu, setting.shard, ranks_per_node)
    # The copies of each shard meet in a ring of their own, at the same time.
    outer = _bus_bytes_per_s(gpu, setting.world_size, ranks_per_node, num_rings=min(setting.shard, ranks_per_node))
    shards, copies = setting.shard, setting.replicate
    each = (shards - 1) / shards / inner
    last = 2 * summed * (copies - 1) / copies / outer
    last += scattered * each if memory.holds_gradients else 0.0
    steady = gathered * each + (0.0 if memory.holds_gradients else scattered * each)
    sent = steady + last
    host = offloaded_bytes(memory, setting, tokens, micro_batches) / (HOST_GB_S * 1e9)
    hidden = _OVERLAP * (compute + moving)
    # What is sent once a step goes beside its last micro-batch; the others hide none of it.
    exposed = (micro_batches - 1) * max(0.0, steady - hidden) / micro_batches
    exposed += max(0.0, (steady - hidden) / micro_batches + last)
    # Network and host are different wires; of each, the first block's has nothing to go beside.
    exposed = max(exposed, host - hidden, max(sent, host) / len(memory.blocks))
    state = memory.sharded_state(setting)
    moved = 2 * (state.optimizer + state.gradients) + 2 * state.gradients
    update = moved / (_HOST_MEMORY_GB_S * 1e9 if memory.config.parallel.cpu_offload else _memory_bytes_per_s(gpu))
    return StepTime(compute, moving, sent, host, exposed, update, int(gathered), int(scattered + summed))


def memory_traffic_seconds(memory: MemoryModel, gpu: Gpu, fraction: float) -> float:
    """A token's, for what kernels move beyond those of fused blocks without adapters, which efficiencies are of."""
    a, width = memory.architecture, memory.precision.compute_dtype.itemsize
    more = count_bytes_moved(a, memory.config, width).over(count_fused_bytes(a, width), fraction)
    return a.num_layers * more / _memory_bytes_per_s(gpu)


def float8_savings(memory: MemoryModel, gpu: Gpu, flops: Flops, tokens: float, micro_batches: int) -> float:
    """Seconds that products in float8 take less than in bfloat16, at what each reaches at best, less the rounding.

    Each rounding reads a tensor for its largest value, then reads it and writes a byte: of a product's input and weight
    forward and backward, of the gradient backward.
    """
    adapter, a = memory.config.adapter, memory.architecture
    is_base = adapter is not None and adapter.base == "float8"
    if gpu.fp8_tflops is None or not (memory.precision.has_float8_matmuls or is_base):
        return 0.0
    work = tokens * (flops.products + flops.recomputed)
    before, after = gpu.bf16_tflops * 1e12 * _BF16_SHARE, gpu.fp8_tflops * 1e12 * _FLOAT8_SHARE
    shapes = a.linear_shapes().values()
    inputs, outputs = sum(i for i, _ in shapes), sum(o for _, o in shapes)
    weights = 0 if is_base else 2 * sum(i * o for i, o in shapes)  # a frozen base is rounded once and for all
    numbers = tokens * ((1 if is_base else 2) * inputs + outputs) + micro_batches * weights
    rounding = a.num_layers * numbers * (2 * memory.precision.compute_dtype.itemsize + 1) / _memory_bytes_per_s(gpu)
    return work * (1 / before - 1 / after) - rounding


def count_communication(memory: MemoryModel, setting: Setting, micro_batches: int) -> tuple[float, float, float]:
    """Bytes of whole tensors that are gathered, scattered and summed over copies in a step, by one rank.

    Sharded blocks are gathered for each forward and each backward; the head once a micro-batch, as it stays whole
    (ZeRO stage 3, https://arxiv.org/abs/1910.02054). Gradients that fit are reduced once a step, else each time.
    """
    trained = memory.reduced_bytes(memory.all)
    times = 1 if memory.holds_gradients else micro_batches
    gathered = scattered = 0.0
    if setting.shard > 1:
        passes = 2 if memory.config.parallel.reshard_after_forward else 1
        blocks = sum(memory.whole_bytes(block) for block in memory.blocks)
        gathered = micro_batches * (passes * blocks + memory.whole_bytes(memory.root))
        scattered = times * trained
    summed = trained / setting.shard if setting.replicate > 1 else 0.0
    return gathered, scattered, summed


def offloaded_bytes(memory: MemoryModel, setting: Setting, tokens: float, micro_batches: int) -> float:
    """Bytes that a rank sends to the host and gets from it in a step.

    Under ``parallel.cpu_offload`` its shards come for each time that they are gathered, and its gradients go
    (torch.distributed.fsdp, CPUOffloadPolicy); under ``activation_checkpointing.offload`` what blocks keep goes and
    comes back.
    """
    config, total = memory.config, 0.0
    if config.parallel.cpu_offload:
        state = memory.sharded_state(setting)
        times = 1 if memory.holds_gradients else micro_batches
        passes = 2 if config.parallel.reshard_after_forward else 1
        total += micro_batches * passes * (state.parameters + state.adapters) + times * state.gradients
    if config.activation_checkpointing.offload:
        total += 2 * memory.kept_per_token(setting.fraction) * tokens
    return total


def _bus_bytes_per_s(gpu: Gpu, ranks: int, ranks_per_node: int, num_rings: int = 1) -> float:
    """Of each of so many rings: the node's links, or between nodes their share of all of a node's adapters."""
    rate = gpu.link_gb_s
    if ranks > ranks_per_node:
        rate = min(rate, gpu.nic_gb_s * ranks_per_node / num_rings)
    return rate * 1e9 * _LINK_SHARE


def _memory_bytes_per_s(gpu: Gpu) -> float:
    return gpu.memory_gb_s * 1e9 * _MEMORY_SHARE
