"""Bytes that a block's kernels move beside its products and attention, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass

from fctune.config.schema import AdapterConfig, RunConfig
from fctune.models.architecture import Architecture

_WIDE = 4  # bytes of float32, which eager RoPE is done in


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """Bytes a token of one block."""

    forward: float
    backward: float

    def over(self, other: BytesMoved, recomputed: float) -> float:
        """More than another's, in a step that computes a share of the blocks again."""
        more = (self.forward - other.forward) * (1 + recomputed)
        return more + self.backward - other.backward


def count_bytes_moved(a: Architecture, config: RunConfig, width: int) -> BytesMoved:
    """What this run's kernels read and write; ``width`` is bytes of a number in the compute format.

    Eager, each operator reads its inputs and writes its output. Compiled, neighbours are one kernel. Adapters add the
    thin products, which read the input and write an output for next to no arithmetic, their scaling and their sum.
    """
    if config.compile:
        plain = count_fused_bytes(a, width)
    else:
        d, i, turned = a.embed_dim, a.intermediate_dim, a.embed_dim + a.num_kv_heads * a.head_dim
        rope = 2 * (width + _WIDE)  # to float32 and back
        plain = BytesMoved(
            # norms, sums with the residual, SwiGLU; of RoPE products with both tables, their sums, stacking
            forward=(4 + 6) * d * width + 5 * i * width + (rope + 9 * _WIDE) * turned,
            # norms, sums of gradients; of RoPE the same and what slices leave out
            backward=(6 + 15) * d * width + 9 * i * width + (rope + 14 * _WIDE) * turned,
        )
    if config.adapter is None:
        return plain
    added = [_adapter(*shape, config.adapter, config.compile, width) for shape in _adapted(a, config.adapter)]
    return BytesMoved(
        plain.forward + sum(moved.forward for moved in added), plain.backward + sum(moved.backward for moved in added)
    )


def count_fused_bytes(a: Architecture, width: int) -> BytesMoved:
    """Of a block without adapters whose neighbouring operators are one kernel: published rates are reached so."""
    d, i, turned = a.embed_dim, a.intermediate_dim, a.embed_dim + a.num_kv_heads * a.head_dim
    # Norm, RoPE, sum and norm, SwiGLU, sum; backward the same, SwiGLU's output once more, and sums of gradients.
    return BytesMoved(
        (2 + 4 + 3) * d * width + 2 * turned * width + 3 * i * width, (11 * d + 2 * turned + 6 * i) * width
    )


def _adapted(a: Architecture, adapter: AdapterConfig) -> list[tuple[int, int]]:
    return [shape for name, shape in a.linear_shapes().items() if name in a.resolve_adapter_modules(adapter.modules)]


def _adapter(in_dim: int, out_dim: int, adapter: AdapterConfig, is_compiled: bool, width: int) -> BytesMoved:
    """Of one adapter: two thin products forward, four backward, its scaling and sum; dropout hashes 64-bit keys.

    DoRA scales the sum, and its backward gives gradients of the sum and of the scales.
    """
    dropped = 0
    if adapter.dropout:
        dropped = 2 * width * in_dim if is_compiled else (250 + 4 * width) * in_dim
    dropped_back = in_dim * (1 + (2 if is_compiled else 4) * width) if adapter.dropout else 0
    sums = 3 if is_compiled else 5
    scaled, scaled_back = ((1, 3) if is_compiled else (2, 6)) if adapter.dora else (0, 0)
    forward = (in_dim + out_dim + (sums + scaled) * out_dim) * width
    backward = (2 * in_dim + 2 * out_dim + ((1 if is_compiled else 2) + scaled_back) * out_dim + 3 * in_dim) * width
    return BytesMoved(forward + dropped, backward + dropped_back)
