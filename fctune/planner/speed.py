"""Step time: arithmetic at a stated efficiency, memory traffic beyond that, and communication that is not hidden."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass

from fctune.gpus import Gpu
from fctune.planner.blocks import find_adapted
from fctune.planner.memory import MemoryModel
from fctune.planner.memory_timeline import Setting
from fctune.planner.memory_traffic import count_bytes_moved, count_fused_bytes
from fctune.planner.storage import HOST_GB_S

# Share of the dense peak that a step with fused kernels reaches, including all waiting: Megatron-LM's README reports
# 41 % to 48 % on H100 for 2 to 462 billion parameters. The middle is the default, the ends are the range of a plan.
EFFICIENCY = 0.445
EFFICIENCY_RANGE = (0.41, 0.48)

# Share of the peak that the best matrix products reach on H100: 794.5 of 989 in bfloat16, 1402.6 of 1979 in float8
# (https://github.com/stas00/ml-engineering, compute/accelerator, maximum achievable matmul).
_BF16_SHARE = 0.803
_FLOAT8_SHARE = 0.709

# Share of a link's rate that collectives reach at a block's size of some 100 MB, and of the memory's rate that kernels
# reach. Assumptions, between the warning and failure thresholds of configs/acceptance_2x8_h100.yaml; ``fctune
# acceptance`` measures both.
_LINK_SHARE = 0.8
_MEMORY_SHARE = 0.8

# Share of the arithmetic that can overlap with communication: nothing precedes the first block of a step, and
# collectives occupy some multiprocessors. An assumption.
_OVERLAP = 0.9

# Rate of host memory available to one rank's optimizer update while all ranks of the node update. An assumption.
_HOST_MEMORY_GB_S = 40


@dataclass(frozen=True, slots=True)
class Flops:
    """Average FLOPs per token that a step computes; a multiply-add counts as two."""

    products: float  # matrix products of the blocks' linears and adapters
    recomputed: float
    attention: float
    head: float
    reference: float = 0.0  # forward pass of the blocks of the frozen base, in preference training

    @property
    def total(self) -> float:
        """FLOPs per token, with recomputation, attention, the output head and the reference."""
        return self.products + self.recomputed + self.attention + self.head + self.reference


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by use, and the bytes communicated."""

    compute_s: float
    memory_traffic_s: float  # traffic of eager kernels and adapters beyond the fused kernels that efficiencies refer to
    collectives_s: float
    host_s: float  # transfers of offloaded tensors between GPU and host
    exposed_s: float  # part of the communication that training waits for
    update_s: float  # optimizer update
    gathered_bytes: int  # received per rank and step
    reduced_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of the step: computation, memory traffic, exposed communication and the update."""
        return self.compute_s + self.memory_traffic_s + self.exposed_s + self.update_s

    def to_json(self) -> dict[str, float]:
        """Return the times and sizes as plain values."""
        return asdict(self) | {"total_s": self.total_s}


def count_flops(
    memory: MemoryModel,
    fraction: float,
    supervised_share: float,
    pairs_per_token: float,
    max_logits: float | None = None,
    micro_batch_size: int | None = None,
) -> Flops:
    """Count the FLOPs per token: 2N forward, 2N for input gradients, 2N for gradients of trained weights.

    That is 6N for full training and 4N over a frozen base plus 6 per adapter weight (https://arxiv.org/abs/2001.08361,
    section 2.1; https://arxiv.org/abs/2204.02311, appendix B). The embedding is a look-up and costs nothing. A
    checkpointed block adds its forward; with policy ``op``, only its first and every second product. Its last product
    is not recomputed, because no backward reads it (torch.utils.checkpoint, early stop). Attention costs 4d per pair
    forward and 10d backward, where it recomputes its scores (https://arxiv.org/abs/2205.14135). The head is applied to
    supervised positions only; if they need several chunks and the head trains, logits are recomputed.

    Args:
        memory: Memory model of the run.
        fraction: Share of the blocks that are checkpointed.
        supervised_share: Share of the positions that are supervised.
        pairs_per_token: Average number of tokens that a token attends to.
        max_logits: Logits computed in one chunk; None takes the memory model's.
        micro_batch_size: Packs per micro-batch; None takes the config's.
    """
    a, config = memory.architecture, memory.config
    adapter = config.adapter
    base = added = recomputed_products = 0
    is_by_operator = config.activation_checkpointing.policy == "op"
    for block, count in Counter(a.blocks).items():
        adapted = find_adapted(a, block.linears, adapter)
        outputs: list[int] = []
        for linear in block.linears:
            outputs.append(linear.in_dim * linear.out_dim)
            if adapter is not None and linear in adapted:
                outputs += [adapter.rank * linear.in_dim, adapter.rank * linear.out_dim]
        last = block.linears[-1]
        skipped = last.in_dim * last.out_dim if adapter is None or config.compile else 0
        chosen = find_adapted(a, block.experts, adapter)
        for expert in block.experts:
            outputs.append(expert.num_active_weights)
            if adapter is not None and expert in chosen:
                outputs += [size * expert.num_chosen * adapter.rank for size in (expert.in_dim, expert.out_dim)]
        base += count * block.num_active_weights
        added += count * (sum(outputs) - block.num_active_weights)
        recomputed_products += count * (sum(outputs[:-1:2]) if is_by_operator else sum(outputs) - skipped)
    products = (4 if adapter is not None else 6) * base + 6 * added
    pair = a.num_layers * a.num_heads * a.head_dim * pairs_per_token
    recomputed = fraction * (2 * recomputed_products + (0 if is_by_operator else 4 * pair))
    head = a.vocab_size * a.embed_dim
    trains_head = adapter is None
    head_cost = 2 + 2 + 2 * trains_head
    reference = 0.0
    if has_reference(memory):
        reference, head_cost = 2 * base + 4 * pair, head_cost + 2
    head_adapter = 0
    if adapter is not None and a.head in a.resolve_adapter_modules(adapter.modules):
        head_adapter = 6 * adapter.rank * (a.vocab_size + a.embed_dim)
    positions = (micro_batch_size or config.micro_batch_size) * config.data.seq_len * supervised_share
    if memory.trains_head and positions * a.vocab_size > (memory.max_logits if max_logits is None else max_logits):
        head_cost += 2
    head_total = supervised_share * (head_cost * head + head_adapter)
    return Flops(products, recomputed, 14 * pair, head_total, reference)


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
    """Estimate the duration of a step; ranks with fewer packs wait for the others.

    A ring moves (n - 1)/n of a gather or scatter through each link, and twice that for an all-reduce
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

    Args:
        memory: Memory model of the run.
        gpu: GPU and its links.
        setting: Layout and batch shape.
        flops: FLOPs per token.
        packs: Packs per step over all ranks.
        ranks_per_node: Ranks on each node.
        efficiency: Share of the GPU's dense peak that fused kernels reach.
        slots_per_pack: Computed positions per pack, including padding; None for full packs.
    """
    per_rank = math.ceil(packs / setting.world_size)
    tokens = per_rank * (memory.config.data.seq_len if slots_per_pack is None else slots_per_pack)
    micro_batches = math.ceil(per_rank / setting.micro_batch_size)
    compute = tokens * flops.total / (gpu.tflops(memory.precision.compute_dtype.itemsize) * 1e12 * efficiency)
    traffic = tokens * memory_traffic_seconds(memory, gpu, setting.fraction)
    compute -= float8_savings(memory, gpu, flops, tokens, micro_batches)
    gathered, scattered, summed = count_communication(memory, setting, micro_batches)
    inner = _bus_bytes_per_s(gpu, setting.shard, ranks_per_node)
    # The replicas of each shard reduce in separate rings at the same time.
    outer = _bus_bytes_per_s(gpu, setting.world_size, ranks_per_node, num_rings=min(setting.shard, ranks_per_node))
    shards, replicas = setting.shard, setting.replicate
    each = (shards - 1) / shards / inner
    last = 2 * summed * (replicas - 1) / replicas / outer
    last += scattered * each if memory.keeps_unsharded_gradients else 0.0
    steady = gathered * each + (0.0 if memory.keeps_unsharded_gradients else scattered * each)
    sent = steady + last
    host = offloaded_bytes(memory, setting, tokens, micro_batches) / (HOST_GB_S * 1e9)
    hidden = _OVERLAP * (compute + traffic)
    # Communication once per step overlaps with the last micro-batch only.
    exposed = (micro_batches - 1) * max(0.0, steady - hidden) / micro_batches
    exposed += max(0.0, (steady - hidden) / micro_batches + last)
    # Network and host links are independent; on each, the first block's transfer has nothing to overlap with.
    exposed = max(exposed, host - hidden, max(sent, host) / len(memory.blocks))
    state = memory.sharded_state(setting)
    moved = 2 * (state.optimizer + state.gradients) + 2 * state.gradients
    update = moved / (_HOST_MEMORY_GB_S * 1e9 if memory.config.parallel.cpu_offload else _memory_bytes_per_s(gpu))
    return StepTime(compute, traffic, sent, host, exposed, update, int(gathered), int(scattered + summed))


def has_reference(memory: MemoryModel) -> bool:
    """Return True if a step runs the frozen base too, to compare the policy with it."""
    preference = memory.config.preference
    return preference is not None and preference.needs_reference


def memory_traffic_seconds(memory: MemoryModel, gpu: Gpu, fraction: float) -> float:
    """Return the seconds per token of memory traffic beyond fused blocks without adapters.

    Published efficiencies refer to such blocks and include their traffic.
    """
    a, width = memory.architecture, memory.precision.compute_dtype.itemsize
    more = count_bytes_moved(a, memory.config, width).over(count_fused_bytes(a, width), fraction)
    return a.num_layers * more / _memory_bytes_per_s(gpu)


def float8_savings(memory: MemoryModel, gpu: Gpu, flops: Flops, tokens: float, micro_batches: int) -> float:
    """Return the seconds that float8 products save over bfloat16, each at its best rate, minus the rounding."""
    if (ratio := float8_ratio(memory, gpu)) == 1:
        return 0.0
    before = tokens * (flops.products + flops.recomputed) / (gpu.bf16_tflops * 1e12 * _BF16_SHARE)
    return before * (1 - 1 / ratio) - count_rounding_bytes(memory, tokens, micro_batches) / _memory_bytes_per_s(gpu)


def float8_ratio(memory: MemoryModel, gpu: Gpu) -> float:
    """Return how many times as fast products are in float8 as in bfloat16, at the best rates; 1 if the run has none."""
    adapter = memory.config.adapter
    is_base = adapter is not None and adapter.base == "float8"
    if gpu.fp8_tflops is None or not (memory.precision.has_float8_matmuls or is_base):
        return 1.0
    return gpu.fp8_tflops * _FLOAT8_SHARE / (gpu.bf16_tflops * _BF16_SHARE)


def count_rounding_bytes(memory: MemoryModel, tokens: float, micro_batches: int) -> float:
    """Return the bytes that rounding to float8 moves.

    Each rounding reads a tensor for its largest value, then reads it again and writes one byte per element: for the
    input and weight of a product in forward and backward, and for the gradient in backward. Compiled, the linears that
    read the same tensor share its rounding.
    """
    adapter, a = memory.config.adapter, memory.architecture
    is_base = adapter is not None and adapter.base == "float8"
    linears = [linear for block in a.blocks for linear in block.linears]
    inputs, outputs = sum(one.in_dim for one in linears), sum(one.out_dim for one in linears)
    if memory.config.compile:
        branches = [branch for block in a.blocks for branch in block.branches]
        inputs = sum(sum({one.in_dim for one in branch.inputs}) + branch.output.in_dim for branch in branches)
    # A frozen base is rounded once, before training.
    weights = 0 if is_base else 2 * sum(one.in_dim * one.out_dim for one in linears)
    numbers = tokens * ((1 if is_base else 2) * inputs + outputs) + micro_batches * weights
    return numbers * (2 * memory.precision.compute_dtype.itemsize + 1)


def count_communication(memory: MemoryModel, setting: Setting, micro_batches: int) -> tuple[float, float, float]:
    """Return the unsharded bytes that one rank gathers, reduce-scatters and all-reduces over replicas in a step.

    Sharded blocks are gathered for each forward and each backward, the head once per micro-batch because it stays
    unsharded (ZeRO stage 3, https://arxiv.org/abs/1910.02054). Gradients are reduced once per step if their unsharded
    form fits, else once per micro-batch.
    """
    trained = memory.reduction_bytes(memory.all)
    times = 1 if memory.keeps_unsharded_gradients else micro_batches
    gathered = scattered = 0.0
    if setting.shard > 1:
        passes = 2 if memory.config.parallel.reshard_after_forward else 1
        passes += has_reference(memory) and memory.config.parallel.reshard_after_forward
        blocks = sum(memory.unsharded_bytes(block) for block in memory.blocks)
        gathered = micro_batches * (passes * blocks + memory.unsharded_bytes(memory.root))
        scattered = times * trained
    summed = trained / setting.shard if setting.replicate > 1 else 0.0
    return gathered, scattered, summed


def offloaded_bytes(memory: MemoryModel, setting: Setting, tokens: float, micro_batches: int) -> float:
    """Return the bytes that a rank exchanges with the host in a step.

    With ``parallel.cpu_offload``, shards are copied to the GPU for each gather and gradients to the host
    (torch.distributed.fsdp, CPUOffloadPolicy); with ``activation_checkpointing.offload``, the inputs of checkpointed
    blocks are copied in both directions.
    """
    config, total = memory.config, 0.0
    if config.parallel.cpu_offload:
        state = memory.sharded_state(setting)
        times = 1 if memory.keeps_unsharded_gradients else micro_batches
        passes = 2 if config.parallel.reshard_after_forward else 1
        total += micro_batches * passes * (state.parameters + state.adapters) + times * state.gradients
    if config.activation_checkpointing.offload:
        total += 2 * memory.count_checkpointed(setting.fraction) * memory.block_activations.kept_policy_block * tokens
    return total


def _bus_bytes_per_s(gpu: Gpu, ranks: int, ranks_per_node: int, num_rings: int = 1) -> float:
    """Return the rate of each of ``num_rings`` rings: the node's links, or a share of its network adapters."""
    rate = gpu.link_gb_s
    if ranks > ranks_per_node:
        rate = min(rate, gpu.nic_gb_s * ranks_per_node / num_rings)
    return rate * 1e9 * _LINK_SHARE


def _memory_bytes_per_s(gpu: Gpu) -> float:
    return gpu.memory_gb_s * 1e9 * _MEMORY_SHARE
