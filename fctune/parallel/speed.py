"""Time of a step: kernels at measured rates, communication that is not hidden, and the update.

Each kind of kernel runs at a share of the GPU's datasheet rates. The shares come from one profile of Llama 3.1 8B's
LoRA on an H100 (docs/results.md); the other rows that were measured on that GPU are compared with their plans in
docs/plan.md. Arithmetic and bytes are counted from the model's shapes. Waiting for launches, which slows down models of
less than a billion parameters, is not modelled.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, fields, replace

from fctune.base.gpus import GPUS, Gpu
from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.data.loader import RowCost
from fctune.models.architecture import Architecture, Block, sum_attention
from fctune.models.context_exchange import count_repeats
from fctune.models.frozen_linear import NF4_BYTES_PER_WEIGHT
from fctune.models.loss import MAX_LOGITS
from fctune.parallel.block_memory import find_adapted, find_adapted_names, find_adapter_inputs
from fctune.parallel.memory import MemoryModel, Setting
from fctune.parallel.storage import HOST_GB_S

# Shares of the peak rate of products, attention and the head; of the memory's rate for adapters' thin products, which
# find a part of their input in the cache, and for other kernels. Float8 products are taken to reach the same share of
# their own peak.
_PRODUCTS, _ATTENTION, _HEAD = 0.726, 0.35, 0.5
_THIN, _FUSED = 1.0, 0.72

# Microseconds a token that no rate explains, on an H100 and for 32 layers of 4,096 values: attention over rows of many
# short conversations, whose kernels start with empty tiles; and loss, clipping and launches. They are taken to shrink
# as products do.
_SHORT_CONVERSATIONS, _OTHER = 5.7, 2.5
_H100_TFLOPS, _LAYERS, _WIDTH = 989.4, 32, 4096

# Bytes per number that rounding to float8 moves. By tensor, a number is read for the largest value, read again and
# written. By row (a frozen base), most of the reading is fused with the kernel before; counted in what torch's compiler
# makes of a block of 8B (``benchmarks.kernels``).
_ROUNDING_BY_TENSOR, _ROUNDING_BY_ROW = 5.0, 2.1

# Time that a run takes, as shares of the planned time. For a compiled run on one H100: the largest error of the rows
# measured there (docs/plan.md). Otherwise nothing of ours was measured; published runs of other trainers on up to 128
# GPUs took up to this much longer than a plan of ours (tests/parallel/test_published_runs.py).
MEASURED_RANGE, UNMEASURED_RANGE = (0.95, 1.05), (0.95, 1.4)

# Speed of a GPU among so many, as a share of that in one node: MPT-7B under FSDP on H100s
# (https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking). Numbers between are interpolated by doublings.
_SHARE_BY_GPUS = {8: 1.0, 128: 0.984, 256: 0.951, 512: 0.909}

# Share of a link's rate that collectives reach at a block's size of some 100 MB. An assumption, between the warning and
# failure thresholds of configs/acceptance_2x8_h100.yaml; ``fctune acceptance`` measures it.
_LINK_SHARE = 0.8

# Share of the computation that can overlap with communication: nothing precedes the first block of a step, and
# collectives occupy some multiprocessors. An assumption.
_OVERLAP = 0.9

# Rate of host memory available to one rank's optimizer update while all ranks of the node update. An assumption.
_HOST_MEMORY_GB_S = 40

_FLOAT32 = 4  # bytes of what eager RoPE computes in


@dataclass(frozen=True, slots=True)
class Flops:
    """Average FLOPs per token that a step computes; a multiply-add counts as two."""

    products: float  # matrix products of the blocks' linears and adapters
    recomputed: float
    attention: float
    head: float
    pairs_per_token: float  # tokens of its conversation that a token attends to where there is no window
    reference: float = 0.0  # forward pass of a frozen model: the base's blocks in preference training, or the teacher

    @property
    def total(self) -> float:
        """FLOPs per token, with recomputation, attention, the output head and the reference."""
        return self.products + self.recomputed + self.attention + self.head + self.reference


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes per token that kernels read and write."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Bytes of both passes."""
        return self.forward + self.backward

    def plus(self, other: BytesMoved, times: int = 1) -> BytesMoved:
        """Return the sum with a multiple of another's."""
        return BytesMoved(self.forward + times * other.forward, self.backward + times * other.backward)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Microseconds per computed position on one GPU, without communication and the update."""

    products: float  # of the blocks' linears, without adapters
    recomputed: float  # products, attention and other kernels of checkpointed blocks, again
    adapters: float  # thin products
    fused: float  # kernels between products: norms, RoPE, activations, sums, dropout, rounding, dequantization
    attention: float
    head: float  # and the loss
    other: float
    reference: float = 0.0  # forward pass of the frozen base, in preference training, or of a teacher

    @property
    def total(self) -> float:
        """Time of all kernels together."""
        return math.fsum(getattr(self, field.name) for field in fields(self))

    @property
    def arithmetic(self) -> float:
        """Time of products, attention and the head, recomputed ones included."""
        return self.products + self.recomputed + self.attention + self.head + self.reference

    @property
    def tokens_per_s(self) -> float:
        """Positions per second of one GPU, padding included."""
        return 1e6 / self.total


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by use, and the bytes communicated."""

    compute_s: float  # products, attention and the head
    memory_traffic_s: float  # other kernels: between products, of adapters, of the loss; sums of gradients
    collectives_s: float
    host_s: float  # transfers of offloaded tensors between GPU and host
    exposed_s: float  # part of the communication that training waits for
    update_s: float  # clipping and the optimizer
    stragglers_s: float  # waiting for the slowest of many GPUs
    gathered_bytes: int  # received per rank and step
    reduced_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of the step: computation, memory traffic, exposed communication, the update and stragglers."""
        return self.compute_s + self.memory_traffic_s + self.exposed_s + self.update_s + self.stragglers_s


def count_flops(
    memory: MemoryModel,
    fraction: float,
    supervised_share: float,
    pairs_per_token: float,
    max_logits: int | None = None,
    micro_batch_size: float | None = None,
    mlp_tiles: int = 1,
) -> Flops:
    """Count the FLOPs per token: 2N forward, 2N for input gradients, 2N for gradients of trained weights.

    That is 6N for full training and 4N over a frozen base plus 6 per adapter weight (https://arxiv.org/abs/2001.08361,
    section 2.1; https://arxiv.org/abs/2204.02311, appendix B). The embedding is a look-up and costs nothing. A
    checkpointed block adds its forward; with policy ``op``, only its first and every second product. Its last product
    is not recomputed, because no backward reads it (torch.utils.checkpoint, early stop). An MLP in tiles adds its
    forward, too; in eager mode, a checkpointed block recomputes its tiles first, but for the last. Attention costs 4d
    per pair forward and 10d backward, where it recomputes its scores (https://arxiv.org/abs/2205.14135). The head is
    applied to supervised positions only; if they need several chunks and the head trains, logits are recomputed.

    Args:
        memory: Memory model of the run.
        fraction: Share of the blocks that are checkpointed.
        supervised_share: Share of the positions that are supervised.
        pairs_per_token: Average number of tokens of its conversation that a token attends to without a window.
        max_logits: Logits computed in one chunk; None takes the default.
        micro_batch_size: Packs per micro-batch, or the share of a pack; None takes the config's.
        mlp_tiles: Parts of a pack in which MLPs are computed.
    """
    a, config = memory.architecture, memory.config
    adapter = config.adapter
    base = added = 0
    recomputed_products = 0.0
    names, is_by_operator = find_adapted_names(a, config), config.activation_checkpointing.policy == "op"
    for block, count in Counter(a.blocks).items():
        outputs = _count_products(block, adapter, names)
        last = block.linears[-1]
        skipped = last.in_dim * last.out_dim if adapter is None or config.compile else 0
        base += count * block.num_active_weights
        added += count * (sum(outputs) - block.num_active_weights)
        again = fraction * (sum(outputs[:-1:2]) if is_by_operator else sum(outputs) - skipped)
        if mlp_tiles > 1 and (in_tiles := sum(outputs) - sum(_count_products(block.without_mlps, adapter, names))):
            if config.compile:
                again += (1 - fraction) * (in_tiles - skipped)
            else:
                again = fraction * (sum(outputs) - in_tiles / mlp_tiles) + in_tiles - skipped
        recomputed_products += count * again
    products = (4 if adapter is not None else 6) * base + 6 * added
    pair = sum_attention(memory.attention_layers, pairs_per_token)
    recomputed = 2 * recomputed_products + (0 if is_by_operator else fraction * 4 * pair)
    head = a.vocab_size * a.embed_dim
    trains_head = adapter is None
    head_cost = 2 + 2 + 2 * trains_head
    reference = 0.0
    if memory.config.has_reference:
        reference, head_cost = 2 * base + 4 * pair, head_cost + 2
    if memory.teacher is not None:
        t = memory.teacher.architecture
        reference = 2 * _count_active_weights(t)
        reference += 4 * sum_attention(memory.teacher.attention_layers, pairs_per_token)
        reference += 2 * supervised_share * t.vocab_size * t.embed_dim
    head_adapter = 0
    if adapter is not None and a.head in names:
        head_adapter = 6 * adapter.rank * (a.vocab_size + a.embed_dim)
    positions = (micro_batch_size or config.micro_batch_packs) * config.data.row_tokens * supervised_share
    if memory.trains_head and positions * a.vocab_size > (max_logits or MAX_LOGITS):
        head_cost += 2
    head_total = supervised_share * (head_cost * head + head_adapter)
    return Flops(products, recomputed, 14 * pair, head_total, pairs_per_token, reference)


def _count_products(block: Block, adapter: AdapterConfig | None, names: Set[str]) -> list[int]:
    """Return the weights that each product of a block multiplies a token by, in their order."""
    outputs: list[int] = []
    for linear in block.linears:
        outputs.append(linear.in_dim * linear.out_dim)
        if adapter is not None and linear.name in names:
            outputs += [adapter.rank * linear.in_dim, adapter.rank * linear.out_dim]
    for expert in block.experts:
        outputs.append(expert.num_active_weights)
        if adapter is not None and expert.name in names:
            outputs += [size * expert.num_chosen * adapter.rank for size in (expert.in_dim, expert.out_dim)]
    return outputs


def count_block_bytes(a: Architecture, block: Block, config: RunConfig, width: int) -> tuple[BytesMoved, BytesMoved]:
    """Count the bytes per token of a block: of adapters' thin products, and of the kernels between products.

    Compiled, adjacent operators are fused; in eager mode, each reads its inputs and writes its output. A thin product
    with A reads its input, one with B writes the output; backward reads gradients and inputs again for the gradients of
    both, and writes that of the input.

    Args:
        a: Sizes of the model.
        block: One of its blocks.
        config: Config of the run.
        width: Bytes per element in the compute dtype.
    """
    plain = _count_plain_bytes(a, block, config.compile, width)
    adapter = config.adapter
    if adapter is None:
        return BytesMoved(0, 0), plain
    names = find_adapted_names(a, config)
    inputs = sum(read.in_dim for read in find_adapter_inputs(block, names))
    outputs = sum(linear.out_dim for linear in find_adapted(block.linears, names))
    thin = BytesMoved((inputs + outputs) * width, 2 * (inputs + outputs) * width)
    if not config.compile:
        return thin, plain.plus(_count_eager_adapter_bytes(adapter, inputs, outputs, width))
    return thin, plain.plus(_count_fused_adapter_bytes(block, names, adapter, inputs, outputs, width))


def _count_plain_bytes(a: Architecture, block: Block, is_fused: bool, width: int) -> BytesMoved:
    """Count the bytes of a block's kernels without adapters."""
    d, rotated = a.embed_dim, (a.num_heads + a.num_kv_heads) * a.head_dim
    activated = sum(branch.output.in_dim for branch in block.branches if not branch.is_attention)
    if block.experts:
        # The last product's input for each choice. Rows are copied to their experts, weighted and added: as much
        # traffic as that of the same number of activated elements, within a third.
        last = block.experts[-1]
        activated += last.num_chosen * (last.in_dim + last.out_dim)
    if is_fused:
        # Norm, RoPE, sum and norm, SwiGLU, sum; in backward the same, SwiGLU's output again, and sums of gradients.
        forward = (2 + 4 + 3) * d + 2 * rotated + 3 * activated
        return BytesMoved(forward * width, (11 * d + 2 * rotated + 6 * activated) * width)
    rope = 2 * (width + _FLOAT32)  # conversion to float32 and back
    return BytesMoved(
        # Norms, residual sums, SwiGLU; for RoPE, products with both tables, their sums and stacking.
        forward=(4 + 6) * d * width + 5 * activated * width + (rope + 9 * _FLOAT32) * rotated,
        # Norms, sums of gradients; for RoPE the same and the padding of slices.
        backward=(6 + 15) * d * width + 9 * activated * width + (rope + 14 * _FLOAT32) * rotated,
    )


def _count_fused_adapter_bytes(
    block: Block, names: Set[str], adapter: AdapterConfig, inputs: int, outputs: int, width: int
) -> BytesMoved:
    """Count what compiled kernels around adapters' products move, per token.

    They add the product to the base's, which is then written if backward needs it, as for gate and up; add gradients;
    compute the last linear's input again; and drop inputs. DoRA scales the sum; its backward computes gradients of the
    sum and of the scales.
    """
    kept = again = 0
    for branch in block.branches:
        if not branch.is_attention:
            kept += sum(linear.out_dim for linear in find_adapted(branch.inputs, names))
            again += sum(linear.in_dim for linear in find_adapted((branch.output,), names))
    dropped, scaled = (inputs if adapter.dropout else 0), (outputs if adapter.dora else 0)
    return BytesMoved((outputs + kept + dropped + scaled) * width, (inputs + again + 3 * scaled) * width)


def _count_eager_adapter_bytes(adapter: AdapterConfig, inputs: int, outputs: int, width: int) -> BytesMoved:
    """Count what eager operators around adapters' products move, per token.

    ``addmm`` copies the base's output and adds to it; gradients of an input are added. Dropout hashes 32-bit keys and
    keeps a mask; DoRA scales the sum.
    """
    dropped, dropped_back = (38 + 4 * width, 1 + 4 * width) if adapter.dropout else (0, 0)
    scaled, scaled_back = (2, 6) if adapter.dora else (0, 0)
    return BytesMoved(
        inputs * dropped + (3 + scaled) * outputs * width,
        inputs * (3 * width + dropped_back) + scaled_back * outputs * width,
    )


def count_precision_bytes(memory: MemoryModel, micro_batch_tokens: float, fraction: float) -> float:
    """Count the bytes per token that rounding to float8 and dequantizing move.

    The input and weight of a product are rounded in forward and backward, the gradient in backward; compiled, linears
    that read the same tensor share its rounding. A frozen float8 base is rounded before training, and transposed in
    backward. What a frozen base has in 4 bits, and experts in 8, are dequantized for each product, in checkpointed
    blocks once more.

    Args:
        memory: Memory model of the run.
        micro_batch_tokens: Tokens of a micro-batch, over which the weights' bytes are spread.
        fraction: Share of the blocks that are checkpointed.
    """
    adapter, a = memory.config.adapter, memory.architecture
    linears = [linear for block in a.blocks for linear in block.linears]
    weights = sum(linear.in_dim * linear.out_dim for linear in linears)
    moved = 0.0
    if adapter is not None and adapter.base != "bf16":
        experts = sum(block.num_expert_weights for block in a.blocks)
        experts //= memory.config.parallel.expert_ranks  # what the rank holds
        dequantized = experts + (weights if adapter.base == "nf4" else 0)
        stored = 1 if adapter.base == "float8" else NF4_BYTES_PER_WEIGHT
        moved = dequantized * (stored + 2) * (2 + fraction) / micro_batch_tokens
    is_base = adapter is not None and adapter.base == "float8"
    if not (is_base or memory.precision.has_float8_matmuls):
        return moved
    inputs, outputs = sum(linear.in_dim for linear in linears), sum(linear.out_dim for linear in linears)
    if memory.config.compile:
        branches = [branch for block in a.blocks for branch in block.branches]
        inputs = sum(sum({linear.in_dim for linear in branch.inputs}) + branch.output.in_dim for branch in branches)
    if is_base:
        return moved + _ROUNDING_BY_ROW * (inputs + outputs) + 2 * weights / micro_batch_tokens
    return _ROUNDING_BY_TENSOR * (2 * inputs + outputs + 2 * weights / micro_batch_tokens)


def estimate_kernel_times(
    memory: MemoryModel, gpu: Gpu, fraction: float, flops: Flops, micro_batch_tokens: float, mlp_tiles: int = 1
) -> KernelTimes:
    """Estimate the time of each kind of kernel.

    Args:
        memory: Memory model of the run.
        gpu: Rates of the GPU.
        fraction: Share of the blocks that are checkpointed.
        flops: Result of ``count_flops``.
        micro_batch_tokens: Tokens of a micro-batch.
        mlp_tiles: Parts of a pack in which MLPs are computed.
    """
    a, config, width = memory.architecture, memory.config, memory.precision.compute_dtype.itemsize
    rate, bandwidth = gpu.tflops(width) * 1e6, gpu.memory_gb_s * 1e3  # FLOP and bytes per microsecond
    multiply = rate * _PRODUCTS * float8_ratio(memory, gpu)
    thin, kernels, in_tiles = BytesMoved(0, 0), BytesMoved(0, 0), 0.0
    for block, count in Counter(a.blocks).items():
        thin_part, part = count_block_bytes(a, block, config, width)
        thin, kernels = thin.plus(thin_part, count), kernels.plus(part, count)
        if mlp_tiles > 1:
            _, rest = count_block_bytes(a, block.without_mlps, config, width)
            in_tiles += count * (part.forward - rest.forward)
    base = (6 if config.adapter is None else 4) * _count_active_weights(a)
    adapters = max(thin.total / (bandwidth * _THIN), (flops.products - base) / (rate * _PRODUCTS))
    attend_again = 4 / 14 * flops.attention  # of a forward pass, if each block runs again
    recomputed_attention = 0.0 if config.activation_checkpointing.policy == "op" else fraction * attend_again
    recomputed = (flops.recomputed - recomputed_attention) / multiply + recomputed_attention / (rate * _ATTENTION)
    recomputed += (fraction * kernels.forward + (1 - fraction) * in_tiles) / (bandwidth * _FUSED)
    reference = 0.0
    if memory.teacher is not None:
        reference = _estimate_teacher_time(memory, gpu, flops)
    elif flops.reference:
        reference = (flops.reference - attend_again) / multiply + attend_again / (rate * _ATTENTION)
        reference += kernels.forward / (bandwidth * _FUSED)
    slower = _H100_TFLOPS * 1e6 / rate
    # Tokens of a row that attend to all earlier ones of it are in one long conversation.
    short = max(0.0, 1 - (2 * flops.pairs_per_token - 1) / config.data.row_tokens)
    heads = sum(layer.width for layer in memory.attention_layers) / (_LAYERS * _WIDTH)
    moved = kernels.total + count_precision_bytes(memory, micro_batch_tokens, fraction)
    return KernelTimes(
        products=base / multiply,
        recomputed=recomputed,
        adapters=adapters,
        fused=moved / (bandwidth * _FUSED),
        attention=flops.attention / (rate * _ATTENTION) + _SHORT_CONVERSATIONS * short * heads * slower,
        head=flops.head / (rate * _HEAD),
        other=_OTHER * a.num_layers / _LAYERS * _H100_TFLOPS / gpu.bf16_tflops,
        reference=reference,
    )


def _estimate_teacher_time(memory: MemoryModel, gpu: Gpu, flops: Flops) -> float:
    """Estimate the microseconds per token of a teacher's forward pass, which has no adapters and no float8.

    Args:
        memory: Memory model of the run.
        gpu: Rates of the GPU.
        flops: FLOPs per token, the reference's of which are the teacher's.
    """
    assert memory.teacher is not None
    a, width = memory.teacher.architecture, memory.teacher.width
    rate, bandwidth = gpu.tflops(width) * 1e6, gpu.memory_gb_s * 1e3  # FLOP and bytes per microsecond
    products = 2 * _count_active_weights(a)
    attention = 4 * sum_attention(memory.teacher.attention_layers, flops.pairs_per_token)
    head = flops.reference - products - attention
    plain = replace(memory.config, adapter=None, compile=False)
    moved = sum(count_block_bytes(a, block, plain, width)[1].forward for block in a.blocks)
    times = products / _PRODUCTS + attention / _ATTENTION + head / _HEAD
    return times / rate + moved / (bandwidth * _FUSED)


def _count_active_weights(a: Architecture) -> int:
    """Return the weights of all blocks that a token is multiplied by."""
    return sum(block.num_active_weights for block in a.blocks)


def estimate_row_cost(
    memory: MemoryModel, fraction: float, max_logits: int | None = None, mlp_tiles: int = 1
) -> RowCost:
    """Estimate the cost of a row in picoseconds of an H100, by which rows are dealt to ranks whatever their device.

    Args:
        memory: Memory model of the run.
        fraction: Share of the blocks that are checkpointed.
        max_logits: Logits computed in one chunk; None takes the default.
        mlp_tiles: Parts of a row in which MLPs are computed.
    """
    seq_len = memory.config.data.row_tokens

    def time_position(supervised_share: float, pairs: float) -> float:
        flops = count_flops(memory, fraction, supervised_share, pairs, max_logits, mlp_tiles=mlp_tiles)
        tokens = memory.config.micro_batch_packs * seq_len
        return 1e6 * estimate_kernel_times(memory, GPUS["h100"], fraction, flops, tokens, mlp_tiles).total

    plain, pairs = time_position(0.0, 1.0), (seq_len + 1) / 2
    pair = (time_position(0.0, pairs) - plain) / max(1.0, pairs - 1)
    return RowCost(round(plain - pair), round(time_position(1.0, 1.0) - plain), round(pair))


def float8_ratio(memory: MemoryModel, gpu: Gpu) -> float:
    """Return how many times as fast products are in float8 as in bfloat16; 1 if the run has none.

    Those of experts are in the run's dtype.
    """
    adapter = memory.config.adapter
    is_base = adapter is not None and adapter.base == "float8"
    if gpu.fp8_tflops is None or not (memory.precision.has_float8_matmuls or is_base):
        return 1.0
    blocks = memory.architecture.blocks
    linears = sum(linear.in_dim * linear.out_dim for block in blocks for linear in block.linears)
    share = linears / sum(block.num_active_weights for block in blocks)
    return 1 / (share * gpu.bf16_tflops / gpu.fp8_tflops + 1 - share)


def estimate_step_time(
    memory: MemoryModel,
    gpu: Gpu,
    setting: Setting,
    flops: Flops,
    packs: int,
    ranks_per_node: int,
    efficiency: float | None = None,
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
        efficiency: Share of the GPU's dense peak that all kernels together reach, as measured by the user; None takes
            the rates of each kind of kernel.
        slots_per_pack: Computed positions per pack, including padding; None for full packs.
    """
    per_rank = math.ceil(packs / setting.num_shares)
    tokens = per_rank * (memory.config.data.row_tokens if slots_per_pack is None else slots_per_pack) / setting.context
    micro_batches = math.ceil(per_rank / setting.micro_batch_size)
    if efficiency is None:
        size = tokens / micro_batches
        kernels = estimate_kernel_times(memory, gpu, setting.fraction, flops, size, setting.mlp_tiles)
        compute, traffic = tokens * kernels.arithmetic / 1e6, tokens * (kernels.total - kernels.arithmetic) / 1e6
        # The gradients of later micro-batches are added to the first one's.
        sums = 3 * (micro_batches - 1) * memory.sharded_state(setting).gradients
        traffic += sums / (gpu.memory_gb_s * 1e9 * _FUSED)
    else:
        peak = gpu.tflops(memory.precision.compute_dtype.itemsize) * 1e12
        compute, traffic = tokens * flops.total / (peak * efficiency), 0.0
    gathered, scattered, summed = count_communication(memory, setting, micro_batches)
    inner = _bus_bytes_per_s(gpu, setting.shard, ranks_per_node)
    # The replicas of each shard reduce in separate rings at the same time.
    outer = _bus_bytes_per_s(gpu, setting.world_size, ranks_per_node, num_rings=min(setting.shard, ranks_per_node))
    shards, replicas = setting.shard, setting.replicate
    each = (shards - 1) / shards / inner
    last = 2 * summed * (replicas - 1) / replicas / outer
    last += scattered * each if memory.keeps_unsharded_gradients else 0.0
    # The gradients of spread experts are summed over the groups of ranks that hold them all.
    num_ranks = memory.config.parallel.expert_ranks
    groups = setting.world_size // num_ranks
    across = _bus_bytes_per_s(gpu, setting.world_size, ranks_per_node, num_rings=min(num_ranks, ranks_per_node))
    last += 2 * memory.all.expert_gradient_bytes * (groups - 1) / groups / across
    steady = gathered * each + (0.0 if memory.keeps_unsharded_gradients else scattered * each)
    exchanged = count_exchange(memory, setting, tokens) / _exchange_rate(gpu, setting.context, setting, ranks_per_node)
    to_experts = count_expert_exchange(memory, setting, tokens)
    exchanged += to_experts / _exchange_rate(gpu, num_ranks, setting, ranks_per_node)
    sent = steady + last + exchanged
    host = offloaded_bytes(memory, setting, tokens, micro_batches) / (HOST_GB_S * 1e9)
    hidden = _OVERLAP * (compute + traffic)
    # Communication once per step overlaps with the last micro-batch only.
    exposed = (micro_batches - 1) * max(0.0, steady - hidden) / micro_batches
    exposed += max(0.0, (steady - hidden) / micro_batches + last)
    # Network and host links are independent; on each, the first block's transfer has nothing to overlap with.
    exposed = max(exposed, host - hidden, max(sent, host) / len(memory.blocks))
    exposed += exchanged  # attention and experts need what they exchange at once
    state = memory.sharded_state(setting)
    # Clipping reads the gradients; the optimizer reads them too, and reads and writes its state and the weights.
    moved = 2 * (state.optimizer + state.gradients) + 2 * state.gradients
    update = moved / (_HOST_MEMORY_GB_S * 1e9 if memory.config.parallel.cpu_offload else gpu.memory_gb_s * 1e9 * _FUSED)
    stragglers = (compute + traffic) * (1 / _share_among(setting.world_size) - 1)
    sizes = int(gathered), int(scattered + summed)
    return StepTime(compute, traffic, sent, host, exposed, update, stragglers, *sizes)


def _share_among(num_gpus: int) -> float:
    """Return the speed of each of so many GPUs as a share of that in one node; that of the largest known beyond."""
    numbers = list(_SHARE_BY_GPUS)
    for low, high in itertools.pairwise(numbers):
        if num_gpus <= high:
            part = max(0.0, math.log(num_gpus / low) / math.log(high / low))
            return _SHARE_BY_GPUS[low] + part * (_SHARE_BY_GPUS[high] - _SHARE_BY_GPUS[low])
    return _SHARE_BY_GPUS[numbers[-1]]


def count_communication(memory: MemoryModel, setting: Setting, micro_batches: int) -> tuple[float, float, float]:
    """Return the unsharded bytes that one rank gathers, reduce-scatters and all-reduces over replicas in a step.

    Sharded blocks are gathered for each forward and each backward, the head once per micro-batch because it stays
    unsharded (ZeRO stage 3, https://arxiv.org/abs/1910.02054). Gradients are reduced once per step if their unsharded
    form fits, else once per micro-batch.
    """
    trained = memory.all.reduction_bytes - memory.all.expert_gradient_bytes
    times = 1 if memory.keeps_unsharded_gradients else micro_batches
    gathered = scattered = 0.0
    if setting.shard > 1:
        passes = 2 if memory.config.parallel.reshard_after_forward else 1
        passes += memory.config.has_reference and memory.config.parallel.reshard_after_forward
        blocks = sum(block.unsharded_bytes for block in memory.blocks)
        gathered = micro_batches * (passes * blocks + memory.root.unsharded_bytes)
        scattered = times * trained
    summed = trained / setting.shard if setting.replicate > 1 else 0.0
    return gathered, scattered, summed


def count_exchange(memory: MemoryModel, setting: Setting, tokens: float) -> float:
    """Return the bytes that a rank sends in a step to those that share its rows, for ``tokens`` positions.

    Queries, keys, values and the result of attention are sent in forward, their gradients in backward; a checkpointed
    block repeats its forward. Of each, the part of the rank itself stays.
    """
    if setting.context == 1:
        return 0.0
    values = 0.0
    for layer, count in Counter(memory.attention_layers).items():
        repeats = count_repeats(layer.num_heads, layer.num_kv_heads, setting.context) or 1
        values += count * 2 * (layer.num_heads + repeats * layer.num_kv_heads) * layer.head_dim
    per_token = values * memory.precision.compute_dtype.itemsize
    return (2 + setting.fraction) * per_token * tokens * (setting.context - 1) / setting.context


def count_expert_exchange(memory: MemoryModel, setting: Setting, tokens: float) -> float:
    """Return the bytes that a rank sends in a step to those that hold the other experts, for ``tokens`` positions.

    Each token's row goes to each expert that it has chosen, and the expert's output returns; in backward, their
    gradients do. A checkpointed block repeats its forward. Tokens are taken to choose all experts equally often, so
    that the rank's own get their share of the rows.
    """
    num_ranks, width = memory.config.parallel.expert_ranks, memory.precision.compute_dtype.itemsize
    mixtures = [block.experts for block in memory.architecture.blocks if block.experts]
    elements = sum(experts[0].num_chosen * (experts[0].in_dim + experts[-1].out_dim) for experts in mixtures)
    passes = 2 + setting.fraction + memory.config.has_reference
    return passes * elements * width * tokens * (num_ranks - 1) / num_ranks


def _exchange_rate(gpu: Gpu, num_ranks: int, setting: Setting, ranks_per_node: int) -> float:
    """Return the bytes per second that each rank exchanges with its group, while all ranks of its node do so.

    Groups of consecutive ranks that divide a node stay within it.
    """
    span = num_ranks if ranks_per_node % num_ranks == 0 else setting.world_size
    return _bus_bytes_per_s(gpu, span, ranks_per_node, num_rings=ranks_per_node)


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
