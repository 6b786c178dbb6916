"""What one transformer block keeps for its backward, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config.schema import RunConfig
from fctune.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes, a token where not said otherwise."""

    all: int  # everything backward reads
    adapter_copies: int  # of adapters in the compute format; a block, whatever its tokens
    operators: int  # under activation checkpointing with policy op
    inputs: int  # under policy block
    temporary: int  # beside it, when its backward needs most
    widening: int  # beside it, while a weight of 4 bits is widened in backward
    constant: int  # of that weight, whatever the tokens

    def whole(self, tokens: int) -> int:
        """A block's activations, not checkpointed."""
        return self.all * tokens + self.adapter_copies

    def beside(self, tokens: int) -> int:
        """What its backward needs beside them, at most."""
        return max(self.temporary * tokens, self.widening * tokens + self.constant if self.constant else 0)


def count_block_activations(a: Architecture, config: RunConfig, width: int) -> BlockActivations:
    """What a block of this run keeps; ``width`` is bytes of a number in the compute format.

    Eager, a linear that trains, or has an adapter, keeps its input; attention its three inputs, its output and a
    float32 a head; a norm its input and a float32; SwiGLU both branches and the activated one. Under adapters with
    dropout, each adapter keeps its own dropped input and a mask of bytes. With DoRA each adapted linear
    keeps the sum that it scales. Compiled, functorch's min-cut partitioner has the activation and RoPE's tables made
    again; what backward multiplies is kept as it is. Of DoRA's sums some are made again: less is kept than is said.
    """
    d, i, kv_dim = a.embed_dim, a.intermediate_dim, a.num_kv_heads * a.head_dim
    adapter = config.adapter
    shapes, linears = a.linear_shapes(), a.block_linears
    adapted = [
        name for name in linears.all if adapter is not None and name in a.resolve_adapter_modules(adapter.modules)
    ]
    keeping = linears.all if adapter is None else adapted
    small = 4 * a.num_heads + 2 * 4
    attention = 2 * d + 2 * kv_dim  # q, k, v, out
    gates = 2 * i
    inner = sum(adapter.rank for _ in adapted) if adapter is not None else 0
    # Adapters are float32: in that format they are not copied.
    copied = adapter.rank * width if adapter is not None and width < 4 else 0
    copies = copied * sum(sum(shapes[name]) for name in adapted)
    kept = 2 * d + attention + gates + inner
    masks = 0
    if config.compile:
        small += 8  # the position
    else:
        kept += i  # the gate's sigmoid-weighted value
        small += 2 * 4 * a.head_dim  # RoPE's table at each place, for q and k
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
    # SwiGLU's backward: the gradient that comes, and those of both branches; its output is let go by then.
    is_output_kept = adapter is None or linears.mlp_output in adapted
    temporary = ((2 if is_output_kept else 3) * i + d) * width
    if masks and adapter is not None:
        temporary = max(temporary, 24 * max(shapes[name][0] for name in adapted))  # hashes of 64 bits, three at once
    constant = 0
    if adapter is not None and adapter.base == "nf4":
        # Two halves as indices of 64 bits, looked up, scaled and put together: torchao's get_original_weight.
        constant = (8 + 3 * width) * i * d
    operators = d + d + _every_second_product(a, config)
    return BlockActivations(
        everything, copies, operators * width + small, d * width, temporary, (i + d) * width, constant
    )


def _every_second_product(a: Architecture, config: RunConfig) -> int:
    """Numbers a token that the kept products of a block give, in the order that they are computed in."""
    outputs: list[int] = []
    adapter = config.adapter
    for name, (_, out_dim) in a.linear_shapes().items():
        outputs.append(out_dim)
        if adapter is not None and name in a.resolve_adapter_modules(adapter.modules):
            outputs += [adapter.rank, out_dim]
    return sum(outputs[1::2])
