"""What one transformer block keeps for its backward, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config import RunConfig
from fctune.modeling.architecture import Architecture

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes, a token where not said otherwise."""

    all: int  # everything backward reads
    adapter_copies: int  # of adapters in the compute format; a block, whatever its tokens
    operators: int  # under activation checkpointing with policy op
    inputs: int  # under policy block
    temporary: int  # beside it, while the block runs
    constant: int  # beside it, a block, whatever its tokens

    def whole(self, tokens: int) -> int:
        """A block's activations, not checkpointed."""
        return self.all * tokens + self.adapter_copies


def linear_shapes(a: Architecture) -> dict[str, tuple[int, int]]:
    """(in, out) of the linears of a block."""
    kv_dim = a.num_kv_heads * a.head_dim
    d, i = a.embed_dim, a.intermediate_dim
    return dict(zip(_LINEARS, ((d, d), (d, kv_dim), (d, kv_dim), (d, d), (d, i), (d, i), (i, d)), strict=True))


def measure_block(a: Architecture, config: RunConfig, width: int) -> BlockMemory:
    """What a block of this run keeps; ``width`` is bytes of a number in the compute format.

    Eager, a linear that trains, or has an adapter, keeps its input; attention its three inputs, its output and a
    float32 a head; a norm its input and a float32; SwiGLU both branches and the activated one. Under adapters with
    dropout, each adapter keeps its own dropped input and a mask of bytes. Compiled, what is cheap is computed again:
    kept are inputs of norms, what products and attention gave, nothing pointwise (functorch's min-cut partitioner).
    """
    d, i, kv_dim = a.embed_dim, a.intermediate_dim, a.num_kv_heads * a.head_dim
    adapter = config.adapter
    shapes = linear_shapes(a)
    adapted = [name for name in _LINEARS if adapter is not None and name in adapter.modules]
    keeping = list(_LINEARS) if adapter is None else adapted
    small = 4 * a.num_heads + 2 * 4
    attention = 2 * d + 2 * kv_dim  # q, k, v, out
    gates = 2 * i
    inner = sum(adapter.rank for _ in adapted) if adapter is not None else 0
    # Adapters are float32: in that format they are not copied.
    copied = adapter.rank * width if adapter is not None and width < 4 else 0
    copies = copied * sum(sum(shapes[name]) for name in adapted)
    kept = 2 * d + attention + gates + inner
    masks = 0
    if not config.compile:
        small += 2 * 4 * a.head_dim  # RoPE's table at each place, for q and k
        kept += i  # the activated branch
        has_dropout = adapter is not None and adapter.dropout > 0
        if has_dropout:
            kept += sum(shapes[name][0] for name in adapted)
            masks = sum(shapes[name][0] for name in adapted)
        else:
            kept += d * any(n in keeping for n in ("q_proj", "k_proj", "v_proj"))
            kept += d * any(n in keeping for n in ("gate_proj", "up_proj"))
            kept += i * ("down_proj" in keeping)
    everything = kept * width + masks + small
    temporary = (3 * i + 2 * d) * width
    if masks and adapter is not None:
        temporary = max(temporary, 24 * max(shapes[name][0] for name in adapted))  # hashes of 64 bits, three at once
    constant = 0
    if adapter is not None and adapter.base == "nf4":
        constant = 2 * width * i * d  # the widened weight of a product, and its parts
    operators = d + d + _every_second_product(a, config)
    return BlockMemory(everything, copies, operators * width + small, d * width, temporary, constant)


def _every_second_product(a: Architecture, config: RunConfig) -> int:
    """Numbers a token that the kept products of a block give, in the order that they are computed in."""
    outputs: list[int] = []
    adapter = config.adapter
    for name, (_, out_dim) in linear_shapes(a).items():
        outputs.append(out_dim)
        if adapter is not None and name in adapter.modules:
            outputs += [adapter.rank, out_dim]
    return sum(outputs[1::2])
