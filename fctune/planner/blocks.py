"""Activation memory of one transformer block, counted operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes that one block keeps and needs in backward; per token unless stated otherwise."""

    kept: int  # all activations that backward reads
    adapter_copies: int  # adapters copied to the compute dtype, per block
    kept_policy_op: int  # kept under activation checkpointing with policy op
    kept_policy_block: int  # kept under policy block: the block's input
    temporary: int  # in addition, at the peak of the block's backward
    dequantization: int  # in addition, while backward dequantizes a 4-bit weight
    dequantization_constant: int  # the same, per block

    def total(self, tokens: int) -> int:
        """Return the bytes that a block without checkpointing keeps."""
        return self.kept * tokens + self.adapter_copies

    def backward_extra(self, tokens: int) -> int:
        """Return the peak bytes that the block's backward needs in addition to the kept tensors."""
        dequantization = self.dequantization * tokens + self.dequantization_constant
        return max(self.temporary * tokens, dequantization if self.dequantization_constant else 0)


def count_block_activations(a: Architecture, config: RunConfig, width: int) -> BlockActivations:
    """Count the activation memory of a block of this run.

    In eager mode, a linear that is trained or has an adapter keeps its input; attention keeps its three inputs, its
    output and a float32 per head; a norm keeps its input and a float32; SwiGLU keeps both branches and the activated
    one. With dropout, each adapter keeps its own dropped input and a byte mask; with DoRA, each adapted linear keeps
    the sum that it scales. When compiled, functorch's min-cut partitioner recomputes the activation, RoPE's tables and
    some of DoRA's sums, so that slightly less is kept than counted here.

    Args:
        a: sizes of the model.
        config: config of the run.
        width: bytes per element in the compute dtype.
    """
    d, i, kv_dim = a.embed_dim, a.intermediate_dim, a.num_kv_heads * a.head_dim
    adapter = config.adapter
    shapes, linears = a.linear_shapes(), a.block_linears
    adapted = [
        name for name in linears.all if adapter is not None and name in a.resolve_adapter_modules(adapter.modules)
    ]
    keeping = linears.all if adapter is None else adapted
    small = 4 * a.num_heads + 2 * 4
    attention = 2 * d + 2 * kv_dim  # q, k, v, output
    gates = 2 * i
    inner = sum(adapter.rank for _ in adapted) if adapter is not None else 0
    # Adapters are stored in float32; computing in float32 needs no copy.
    copied = adapter.rank * width if adapter is not None and width < 4 else 0
    copies = copied * sum(sum(shapes[name]) for name in adapted)
    kept = 2 * d + attention + gates + inner
    masks = 0
    if config.compile:
        small += 8  # position ids
    else:
        kept += i  # the activated gate
        small += 2 * 4 * a.head_dim  # RoPE's table at each position, for q and k
    if adapter is not None and adapter.dropout > 0:
        kept += sum(shapes[name][0] for name in adapted)
        masks = sum(shapes[name][0] for name in adapted)
    else:
        kept += d * any(n in keeping for n in linears.attention_inputs)
        kept += d * any(n in keeping for n in linears.mlp_inputs)
        kept += i * (linears.mlp_output in keeping)
    if adapter is not None and adapter.dora:
        kept += d + sum(shapes[name][1] for name in adapted)
    everything = kept * width + masks + small
    # SwiGLU's backward: the incoming gradient and those of both branches; its output has been released by then.
    is_output_kept = adapter is None or linears.mlp_output in adapted
    temporary = ((2 if is_output_kept else 3) * i + d) * width
    if masks and adapter is not None:
        temporary = max(temporary, 24 * max(shapes[name][0] for name in adapted))  # three 64-bit hashes at once
    constant = 0
    if adapter is not None and adapter.base == "nf4":
        # Two halves as 64-bit indices, looked up, scaled and concatenated: torchao's get_original_weight.
        constant = (8 + 3 * width) * i * d
    operators = d + d + _every_second_product(a, config)
    return BlockActivations(
        everything, copies, operators * width + small, d * width, temporary, (i + d) * width, constant
    )


def _every_second_product(a: Architecture, config: RunConfig) -> int:
    """Return the elements per token of every second matrix product of a block, which policy op keeps."""
    outputs: list[int] = []
    adapter = config.adapter
    for name, (_, out_dim) in a.linear_shapes().items():
        outputs.append(out_dim)
        if adapter is not None and name in a.resolve_adapter_modules(adapter.modules):
            outputs += [adapter.rank, out_dim]
    return sum(outputs[1::2])
