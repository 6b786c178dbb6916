"""Time of a compiled step by kind of kernel, from the products and bytes that it computes and moves.

Rates are shares of the GPU's peak, measured in a profile of Llama 3.1 8B's LoRA on one H100 (docs/performance.md).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from fctune.gpus import Gpu
from fctune.models.architecture import Block
from fctune.planner.blocks import find_adapted, find_adapter_inputs
from fctune.planner.memory import MemoryModel
from fctune.planner.memory_traffic import BytesMoved, count_fused_bytes
from fctune.planner.speed import Flops, count_rounding_bytes, float8_ratio

# Shares of the peak rate of products and of memory. Products of adapters find a part of their input in the cache.
_PRODUCTS, _ATTENTION, _HEAD = 0.726, 0.35, 0.5
_THIN, _FUSED = 1.0, 0.72

# Microseconds a token on an H100 that no rate explains: attention over many short conversations, and the optimizer,
# clipping, loss and launches. They are taken to shrink as products do.
_SHORT_CONVERSATIONS, _OTHER, _H100_TFLOPS = 4.0, 2.6, 989.4


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Microseconds per token of one GPU, without communication."""

    products: float  # of the blocks' linears, without adapters
    recomputed: float  # products, attention and other kernels of checkpointed blocks, again
    adapters: float  # thin products
    fused: float  # kernels between products: norms, RoPE, activations, sums, dropout, rounding to float8
    attention: float
    head: float  # and the loss
    other: float

    @property
    def total(self) -> float:
        """Time of all kernels together, in microseconds per token."""
        total: float = sum(asdict(self).values())
        return total

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one GPU, with padding."""
        return 1e6 / self.total

    def to_json(self) -> dict[str, float]:
        """Return the times by name, with their total."""
        return asdict(self) | {"total": self.total}


def estimate_kernel_times(
    memory: MemoryModel, gpu: Gpu, fraction: float, flops: Flops, micro_batch_tokens: int
) -> KernelTimes:
    """Estimate the time of each kind of kernel in a compiled step.

    Args:
        memory: Memory model of the run.
        gpu: Rates of the GPU.
        fraction: Share of the blocks that are checkpointed.
        flops: Result of ``fctune.planner.speed.count_flops``.
        micro_batch_tokens: Tokens of a micro-batch, over which weights are rounded to float8.
    """
    a, config, width = memory.architecture, memory.config, memory.precision.compute_dtype.itemsize
    rate, bandwidth = gpu.tflops(width) * 1e6, gpu.memory_gb_s * 1e3  # FLOP and bytes per microsecond
    base = sum(block.num_active_weights for block in a.blocks)
    base_flops = (6 if config.adapter is None else 4) * base
    thin, fused = BytesMoved(0, 0), BytesMoved(0, 0)
    for block, count in Counter(a.blocks).items():
        thin_part, fused_part = count_adapter_bytes(memory, block, width)
        thin, fused = thin.plus(thin_part, count), fused.plus(fused_part, count)
    fused = fused.plus(count_fused_bytes(a, width), a.num_layers)
    per_flop = 1 / (rate * _PRODUCTS * float8_ratio(memory, gpu))
    again = 2 * base * per_flop + thin.forward / (bandwidth * _THIN) + fused.forward / (bandwidth * _FUSED)
    again += flops.attention * 4 / 14 / (rate * _ATTENTION)
    rounded = 0.0
    if float8_ratio(memory, gpu) != 1:
        rounded = count_rounding_bytes(memory, micro_batch_tokens, 1) / micro_batch_tokens
    slower = _H100_TFLOPS * 1e6 / rate
    return KernelTimes(
        products=base_flops * per_flop,
        recomputed=fraction * again,
        adapters=(thin.forward + thin.backward) / (bandwidth * _THIN),
        fused=(fused.forward + fused.backward + rounded) / (bandwidth * _FUSED),
        attention=flops.attention / (rate * _ATTENTION) + _SHORT_CONVERSATIONS * slower,
        head=flops.head / (rate * _HEAD),
        other=_OTHER * slower,
    )


def count_adapter_bytes(memory: MemoryModel, block: Block, width: int) -> tuple[BytesMoved, BytesMoved]:
    """Count the bytes per token of a block's adapters: of their thin products, and of the kernels around these.

    A product with A reads the input, one with B writes the output. Backward reads gradients and inputs again for the
    gradients of both, and writes that of the input. Fused kernels add the product to the base's, which is then written
    if backward needs it, as for gate and up; add gradients; compute the last linear's input again; and drop inputs.
    """
    adapter = memory.config.adapter
    inputs = sum(one.in_dim for one in find_adapter_inputs(memory.architecture, block, adapter))
    outputs = sum(one.out_dim for one in find_adapted(memory.architecture, block.linears, adapter))
    thin = BytesMoved((inputs + outputs) * width, 2 * (inputs + outputs) * width)
    kept = again = 0
    for branch in block.branches:
        if not branch.is_attention:
            kept += sum(linear.out_dim for linear in find_adapted(memory.architecture, branch.inputs, adapter))
            again += sum(linear.in_dim for linear in find_adapted(memory.architecture, (branch.output,), adapter))
    dropped = inputs if adapter is not None and adapter.dropout else 0
    return thin, BytesMoved((outputs + kept + dropped) * width, (inputs + again) * width)
