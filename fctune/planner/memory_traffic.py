"""Memory traffic of a block's kernels other than matrix products and attention, counted operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.architecture import Architecture
from fctune.planner.blocks import find_adapted, find_adapter_inputs

_WIDE = 4  # bytes of float32, in which eager RoPE computes


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes per token that one block reads and writes."""

    forward: float
    backward: float

    def plus(self, other: BytesMoved, times: int = 1) -> BytesMoved:
        """Return the sum with a multiple of another's."""
        return BytesMoved(self.forward + times * other.forward, self.backward + times * other.backward)

    def over(self, other: BytesMoved, recomputed: float) -> float:
        """Return the bytes in excess of another's, in a step that recomputes a share of the blocks."""
        more = (self.forward - other.forward) * (1 + recomputed)
        return more + self.backward - other.backward


def count_bytes_moved(a: Architecture, config: RunConfig, width: int) -> BytesMoved:
    """Count the bytes that the kernels of this run move per token and block.

    In eager mode, each operator reads its inputs and writes its output; compiled, adjacent operators are fused.
    Adapters add their thin matrix products, which move much memory for little arithmetic, and their sum.

    Args:
        a: Sizes of the model.
        config: Config of the run.
        width: Bytes per element in the compute dtype.
    """
    if config.compile:
        plain = count_fused_bytes(a, width)
    else:
        d, i, rotated = _sizes(a)
        rope = 2 * (width + _WIDE)  # conversion to float32 and back
        plain = BytesMoved(
            # Norms, residual sums, SwiGLU; for RoPE, products with both tables, their sums and stacking.
            forward=(4 + 6) * d * width + 5 * i * width + (rope + 9 * _WIDE) * rotated,
            # Norms, sums of gradients; for RoPE the same and the padding of slices.
            backward=(6 + 15) * d * width + 9 * i * width + (rope + 14 * _WIDE) * rotated,
        )
    if config.adapter is None:
        return plain
    block, adapter, is_compiled = a.largest_block, config.adapter, config.compile
    inputs = [_adapter_input(one.in_dim, adapter, is_compiled, width) for one in find_adapter_inputs(a, block, adapter)]
    outputs = [
        _adapter_output(one.out_dim, adapter, is_compiled, width) for one in find_adapted(a, block.linears, adapter)
    ]
    parts = [plain, *inputs, *outputs]
    return BytesMoved(sum(part.forward for part in parts), sum(part.backward for part in parts))


def count_fused_bytes(a: Architecture, width: int) -> BytesMoved:
    """Count the bytes that a fused block without adapters moves, for which published efficiencies were measured."""
    d, i, rotated = _sizes(a)
    # Norm, RoPE, sum and norm, SwiGLU, sum; in backward the same, SwiGLU's output again, and sums of gradients.
    return BytesMoved(
        (2 + 4 + 3) * d * width + 2 * rotated * width + 3 * i * width, (11 * d + 2 * rotated + 6 * i) * width
    )


def _sizes(a: Architecture) -> tuple[int, int, int]:
    """Return the elements per token of hidden states, of the activated gate, and of the rotated queries and keys."""
    block = a.largest_block
    activated = sum(branch.output.in_dim for branch in block.branches if not branch.is_attention)
    if block.experts:
        # The last product's input for each choice. Rows are copied to their experts, weighted and added: as much
        # traffic as that of the same number of activated elements, within a third.
        last = block.experts[-1]
        activated += last.num_chosen * (last.in_dim + last.out_dim)
    return a.embed_dim, activated, (a.num_heads + a.num_kv_heads) * a.head_dim


def _adapter_input(in_dim: int, adapter: AdapterConfig, is_compiled: bool, width: int) -> BytesMoved:
    """Count the reads of the adapters' input: one product forward, two backward, and the sum of gradients.

    Dropout hashes 32-bit keys; compiled, it keeps the hash in registers and computes it again in backward.
    """
    dropped = dropped_back = 0
    if adapter.dropout:
        dropped = 2 * width if is_compiled else 38 + 4 * width
        dropped_back = 2 * width if is_compiled else 1 + 4 * width
    return BytesMoved(in_dim * (width + dropped), in_dim * (5 * width + dropped_back))


def _adapter_output(out_dim: int, adapter: AdapterConfig, is_compiled: bool, width: int) -> BytesMoved:
    """Count the kernels of an adapted linear's output: one product forward, two backward, and the sum with the base.

    Compiled, a kernel reads both; in eager mode, ``addmm`` copies the base's output and adds to it. DoRA scales the
    sum, and its backward computes gradients of the sum and of the scales.
    """
    scaled, scaled_back = ((1, 3) if is_compiled else (2, 6)) if adapter.dora else (0, 0)
    return BytesMoved((4 + scaled) * out_dim * width, (2 + scaled_back) * out_dim * width)
