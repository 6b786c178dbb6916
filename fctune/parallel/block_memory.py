"""Memory that the blocks of a model keep for backward, counted operator by operator or in a forward pass.

Formulas describe compiled blocks, and those of torchtune: two fused norms, attention and one MLP. Models from
transformers have other layers, and norms that compute in float32 and keep their steps, so their eager blocks are run on
the meta device.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from fctune.config.schema import RunConfig
from fctune.config.sections.adapter import AdapterConfig
from fctune.models.architecture import Architecture, Block, ExpertShape, LinearShape
from fctune.models.block_kinds import repeats_skipped
from fctune.models.causal_lm import CausalLM
from fctune.models.context_exchange import count_repeats
from fctune.models.frozen_experts import CHUNK_ELEMENTS as EXPERT_CHUNK
from fctune.models.lora import apply_lora_
from fctune.models.mlp_tiles import tile_mlps_
from fctune.models.precision import PrecisionPolicy
from fctune.models.sources import build_shapes

# Lengths of the traced rows, in tokens; two, to tell what grows with them from what does not.
_LENGTHS = (128, 256)

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

# Bytes for each weight of a chunk of experts while it is dequantised without compilation: half an index in 32 bits, its
# level in 32 bits, the scaled one, and that in the run's dtype.
_UNPACKING_BYTES = 12

Shape = TypeVar("Shape", LinearShape, ExpertShape)


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes that one block keeps and needs in backward; per token unless stated otherwise."""

    kept: int  # all activations that backward reads
    adapter_copies: int  # adapters copied to the compute dtype, per block
    kept_policy_op: int  # kept under activation checkpointing with policy op
    kept_policy_block: int  # kept under policy block: the block's input
    temporary: int  # in addition, at the peak of the block's backward
    dequantization: int  # in addition, while backward dequantizes a weight
    dequantization_constant: int  # the same, per block
    kept_by_mlps: int = 0  # part of ``kept`` that MLPs in tiles do not keep
    copies_by_mlps: int = 0  # the same of ``adapter_copies``
    temporary_of_rest: int = 0  # at the peak of the backward of what is not in tiles
    width_of_ends: int = 0  # of a block's output, and of the gradient of it

    def total(self, tokens: int, tiles: int = 1) -> int:
        """Return the bytes that a block without checkpointing keeps, with its MLPs computed in so many tiles."""
        if tiles == 1:
            return self.kept * tokens + self.adapter_copies
        return (self.kept - self.kept_by_mlps) * tokens + self.adapter_copies - self.copies_by_mlps

    def forward_extra(self, tokens: int, tiles: int = 1) -> int:
        """Return the peak bytes that the block's forward needs besides the kept tensors: a tile's, and its output."""
        if tiles == 1:
            return 0
        return (self.kept_by_mlps // tiles + self.width_of_ends) * tokens + self.copies_by_mlps

    def backward_extra(self, tokens: int, tiles: int = 1) -> int:
        """Return the peak bytes that the block's backward needs in addition to the kept tensors.

        While tiles are computed, the gradients of the block's output and of the MLP's input exist in full.
        """
        dequantization = self.dequantization * tokens + self.dequantization_constant
        temporary = self.temporary * tokens
        if tiles > 1:
            ends = self.width_of_ends
            in_tiles = 2 * ends + (self.kept_by_mlps + self.temporary - ends) // tiles
            temporary = max(in_tiles * tokens + self.copies_by_mlps, self.temporary_of_rest * tokens)
        return max(temporary, dequantization if self.dequantization_constant else 0)


def count_block_activations(a: Architecture, config: RunConfig, width: int) -> BlockActivations:
    """Count the activation memory of a block of this run.

    In eager mode, a linear that is trained or has an adapter keeps its input; attention keeps its three inputs, its
    output and a float32 per head; a norm keeps its input and a float32; SwiGLU keeps both branches and the activated
    one. With dropout, the adapters of an input keep it dropped, and a byte mask; with DoRA, each adapted linear keeps
    the sum that it scales. When compiled, functorch's min-cut partitioner recomputes the activation, RoPE's tables and
    some of DoRA's sums, so that slightly less is kept than counted here. Tensors that other blocks keep in eager mode
    are counted in a forward pass on the meta device (``trace_blocks``). Of an MLP in tiles, only the input is kept.

    Args:
        a: Sizes of the model.
        config: Config of the run.
        width: Bytes per element in the compute dtype.
    """
    d, block = a.embed_dim, a.largest_block
    names = find_adapted_names(a, config)
    rest = block.without_mlps
    num_mlps = len(block.branches) - len(rest.branches)
    everything, copies = _count_kept(a, block, config, width, names), _count_copies(block, config, width, names)
    in_tiles = _count_kept(a, rest, config, width, names) + num_mlps * d * width
    copies_in_tiles = _count_copies(rest, config, width, names)
    dequantized, constant = count_dequantization(block, config, width)
    if not a.has_plain_blocks and not config.compile and (traced := trace_blocks(a, config, width)) is not None:
        everything, copies = math.ceil(traced.per_token), math.ceil(traced.constant)
        if num_mlps and (traced := trace_blocks(a, config, width, mlp_tiles=2)) is not None:
            in_tiles, copies_in_tiles = math.ceil(traced.per_token), math.ceil(traced.constant)
    # Policy op keeps no outputs of experts' products.
    operators = d + d + _every_second_product(block, config, names)
    attending = [branch for branch in rest.branches if branch.is_attention]
    heads = sum(branch.output.in_dim for branch in attending)
    # The gradients of attention's output and of all that it reads.
    mixing = 2 * heads + sum(linear.out_dim for branch in attending for linear in branch.inputs)
    return BlockActivations(
        kept=everything,
        adapter_copies=copies,
        kept_policy_op=operators * width + _count_small(a, config, len(find_adapter_inputs(block, names))),
        kept_policy_block=d * width,
        temporary=_count_temporary(a, block, config, width, names),
        dequantization=dequantized,
        dequantization_constant=constant,
        kept_by_mlps=everything - in_tiles if num_mlps else 0,
        copies_by_mlps=copies - copies_in_tiles if num_mlps else 0,
        temporary_of_rest=max(mixing * width, _count_temporary(a, rest, config, width, names)),
        width_of_ends=d * width,
    )


def count_dequantization(block: Block, config: RunConfig, width: int) -> tuple[int, int]:
    """Return the bytes per token, and those per block, that backward needs while it dequantizes a weight.

    Of experts, these are all that a rank holds or gathers.
    """
    adapter = config.adapter
    largest = max(block.linears, key=lambda linear: linear.in_dim * linear.out_dim)
    constant = 0
    if adapter is not None and adapter.base == "nf4":
        # Two halves as 64-bit indices, looked up, scaled and concatenated: torchao's get_original_weight.
        constant = (8 + 3 * width) * largest.in_dim * largest.out_dim
    per_token = (largest.in_dim + largest.out_dim) * width
    if adapter is not None and adapter.base != "bf16" and block.experts:
        # One weight of all experts, and what the rows of a product read and write.
        sizes = [(e.num_weights, e.num_chosen * (e.in_dim + e.out_dim)) for e in block.experts]
        most, rows = max(sizes)
        most //= config.parallel.expert_ranks
        part = min(most, EXPERT_CHUNK) if not config.compile else 0
        constant = max(constant, most * width + _UNPACKING_BYTES * part)
        per_token = max(per_token, rows * width)
    return per_token, constant


def _count_kept(a: Architecture, block: Block, config: RunConfig, width: int, names: Set[str]) -> int:
    """Count the bytes per token that a block keeps, by the formulas."""
    d, adapter = a.embed_dim, config.adapter
    adapted = find_adapted(block.linears, names)
    keeping = block.linears if adapter is None else adapted
    mlps = [branch for branch in block.branches if not branch.is_attention]
    # What linears before the mixing write, and, of attention, what the last one reads.
    mixed = sum(linear.out_dim for branch in block.branches for linear in branch.inputs)
    mixed += sum(branch.output.in_dim for branch in block.branches if branch.is_attention)
    inner = sum(adapter.rank for _ in adapted) if adapter is not None else 0
    inputs = find_adapter_inputs(block, names)
    kept, masks = 2 * d + mixed + inner, 0
    if not config.compile:
        kept += sum(branch.output.in_dim for branch in mlps)  # of the gate
    if adapter is not None and adapter.dropout > 0:
        kept += sum(one.in_dim for one in inputs)
        masks = 0 if config.compile else sum(one.in_dim for one in inputs)
    else:
        kept += sum(d for branch in block.branches if any(linear in keeping for linear in branch.inputs))
        kept += sum(branch.output.in_dim for branch in mlps if branch.output in keeping)
    if adapter is not None and adapter.dora:
        kept += d + sum(linear.out_dim for linear in adapted)
    return (kept + _count_experts(a, block, config, names)[0]) * width + masks + _count_small(a, config, len(inputs))


def _count_copies(block: Block, config: RunConfig, width: int, names: Set[str]) -> int:
    """Count the bytes of a block's adapters in the compute dtype.

    They are stored in float32, so that computing in float32 needs no copy; but the A matrices of the linears that share
    an input are stacked.
    """
    if config.adapter is None:
        return 0
    is_copied, rank_bytes = width < 4, config.adapter.rank * width
    inputs = find_adapter_inputs(block, names)
    copied = sum(one.in_dim * one.num_adapters for one in inputs if is_copied or one.num_adapters > 1)
    outputs = sum(linear.out_dim for linear in find_adapted(block.linears, names)) if is_copied else 0
    return rank_bytes * (copied + outputs)


def _count_small(a: Architecture, config: RunConfig, num_inputs: int) -> int:
    """Count the bytes per token that a block keeps whatever its width; adapters read ``num_inputs`` tensors."""
    small = 4 * a.num_heads + 2 * 4
    if not config.compile:
        return small + 2 * 4 * a.head_dim  # RoPE's table at each position, for q and k
    # Position ids; and of dropout the token keys, of which backward computes the masks again.
    return small + 8 + (4 * num_inputs if config.adapter is not None and config.adapter.dropout > 0 else 0)


def _count_temporary(a: Architecture, block: Block, config: RunConfig, width: int, names: Set[str]) -> int:
    """Count the bytes per token of what the backward of MLPs, dropout and experts needs in addition."""
    adapter, adapted = config.adapter, find_adapted(block.linears, names)
    mlps = [branch for branch in block.branches if not branch.is_attention]
    # SwiGLU's backward: the incoming gradient and those of both branches; its output has been released by then.
    is_output_kept = adapter is None or any(branch.output in adapted for branch in mlps)
    activated = sum(branch.output.in_dim for branch in mlps)
    temporary = ((2 if is_output_kept else 3) * activated + a.embed_dim) * width
    if adapter is not None and adapter.dropout > 0 and not config.compile and adapted:
        hashed = max(one.in_dim for one in find_adapter_inputs(block, names))
        temporary = max(temporary, 12 * hashed)  # three 32-bit hashes at once
    return max(temporary, _count_experts(a, block, config, names)[1] * width)


def count_shared_row_bytes(a: Architecture, config: RunConfig, width: int, context: int) -> int:
    """Return the bytes per token that a block keeps in addition if ``context`` ranks share a row.

    Attention keeps its output of all tokens, and the next linear, if it keeps its input, that of the rank's own; and
    key heads may be repeated.
    """
    if context == 1:
        return 0
    names, block = find_adapted_names(a, config), a.largest_block
    outputs = [branch.output for branch in block.branches if branch.is_attention]
    kept = sum(output.in_dim for output in outputs if config.adapter is None or output.name in names)
    repeats = count_repeats(a.num_heads, a.num_kv_heads, context) or 1
    return (kept + 2 * (repeats - 1) * a.num_kv_heads * a.head_dim) * width


def find_adapted_names(a: Architecture, config: RunConfig) -> frozenset[str]:
    """Return the names of the linears and experts that get adapters in a run."""
    return frozenset() if config.adapter is None else frozenset(a.resolve_adapter_modules(config.adapter.modules))


def find_adapted(weights: Sequence[Shape], names: Set[str]) -> list[Shape]:
    """Return those of a block's linears, or of its experts' weights, that get adapters."""
    return [weight for weight in weights if weight.name in names]


@dataclass(frozen=True, slots=True)
class AdapterInput:
    """A tensor that linears with adapters read, by its size and their number."""

    in_dim: int
    num_adapters: int


def find_adapter_inputs(block: Block, names: Set[str]) -> list[AdapterInput]:
    """Return the inputs of a block's adapters; the linears before the mixing of a branch share theirs."""
    inputs: list[AdapterInput] = []
    for branch in block.branches:
        sizes = Counter(linear.in_dim for linear in find_adapted(branch.inputs, names))
        inputs += [AdapterInput(in_dim, count) for in_dim, count in sizes.items()]
        inputs += [AdapterInput(linear.in_dim, 1) for linear in find_adapted((branch.output,), names)]
    return inputs


def _count_experts(a: Architecture, block: Block, config: RunConfig, names: Set[str]) -> tuple[int, int]:
    """Count the elements per token that the experts of a block keep, and those that their backward needs in addition.

    Each token's row is copied for each expert that it has chosen. A product whose weight trains, or has an adapter,
    keeps its input; the gate and the activation keep what the first product wrote, and the weights of the choices
    multiply what the last one wrote. Backward holds the gradients of the rows, and of what both products wrote.
    """
    if not block.experts:
        return 0, 0
    adapter, adapted = config.adapter, find_adapted(block.experts, names)
    first, *_, last = block.experts
    kept = first.num_chosen * (first.out_dim + last.out_dim)
    for expert in block.experts:
        if adapter is None or expert in adapted:
            kept += expert.num_chosen * (expert.in_dim + (adapter.rank if adapter is not None else 0))
    return kept, first.num_chosen * (2 * first.out_dim + last.in_dim + 2 * a.embed_dim)


def _every_second_product(block: Block, config: RunConfig, names: Set[str]) -> int:
    """Return the elements per token of every second matrix product of a block, which policy op keeps.

    Of the linears that share an input, the first one's base comes first, then the product with all A matrices.
    """
    outputs: list[int] = []
    for branch in block.branches:
        for readers in (branch.inputs, (branch.output,)):
            stacked = config.adapter.rank * len(find_adapted(readers, names)) if config.adapter else 0
            for linear in readers:
                outputs.append(linear.out_dim)
                if linear.name in names:
                    outputs += [stacked, linear.out_dim] if stacked else [linear.out_dim]
                    stacked = 0
    return sum(outputs[1::2])


@dataclass(frozen=True, slots=True)
class TracedBlocks:
    """Bytes that the blocks of a model keep for backward, on average."""

    per_token: float
    constant: float


def trace_blocks(a: Architecture, config: RunConfig, width: int, mlp_tiles: int = 1) -> TracedBlocks | None:
    """Count the bytes that the blocks keep in eager mode; None if they need values of tensors to run.

    Args:
        a: Sizes of the model.
        config: Config of the run.
        width: Bytes per element in the compute dtype.
        mlp_tiles: Parts of a row in which MLPs are computed.
    """
    # Quantised weights keep the same activations.
    adapter = None if config.adapter is None else json.dumps(asdict(replace(config.adapter, base="bf16")))
    return _trace_blocks(a, config.data.row_tokens, adapter, width, mlp_tiles)


@lru_cache(maxsize=16)  # a run plans its memory several times before it starts
def _trace_blocks(
    a: Architecture, row_tokens: int, adapter: str | None, width: int, mlp_tiles: int
) -> TracedBlocks | None:
    model = build_shapes(a, row_tokens, PrecisionPolicy.uniform(_DTYPES[width]))
    kinds = model.block_kinds()
    if adapter is not None:
        apply_lora_(model, AdapterConfig(**json.loads(adapter)))
    if mlp_tiles > 1:
        tile_mlps_(model, mlp_tiles)
    model.train()
    try:
        short, long = (_trace(model, kinds, length) for length in _LENGTHS)
    except RuntimeError:  # a layer reads values, which meta tensors do not have
        return None
    slope = (long - short) / (_LENGTHS[1] - _LENGTHS[0])
    return TracedBlocks(slope / len(kinds), max(0.0, short - slope * _LENGTHS[0]) / len(kinds))


def _trace(model: CausalLM, kinds: Sequence[Hashable], length: int) -> int:
    """Return the bytes that all blocks keep in a row of so many tokens, without their weights and buffers.

    The first block of a kind may keep what the others share, such as positions, and the first of all lacks what only a
    gradient of its input needs. The second one stands for the blocks of its kind that follow.
    """
    blocks = list(model.blocks)
    buffers = {name: buffer.to("meta") for name, buffer in model.named_buffers()}
    known = {_storage(tensor) for tensor in (*model.parameters(), *buffers.values())}
    kept = [0] * len(blocks)
    # Storages stay alive, so that none is taken for an earlier one at the same address.
    alive: list[Tensor] = []
    running: int | None = None

    def keep(tensor: Tensor) -> Tensor:
        if running is not None and _storage(tensor) not in known:
            known.add(_storage(tensor))
            kept[running] += tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    def enter(index: int, *_: Any) -> None:
        nonlocal running
        running = index

    def leave(*_: Any) -> None:
        nonlocal running
        running = None

    hooks = [block.register_forward_pre_hook(partial(enter, index)) for index, block in enumerate(blocks)]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    try:
        with repeats_skipped(blocks, kinds, 2) as skipped, saved_tensors_hooks(keep, lambda tensor: tensor):
            functional_call(_Hidden(model), {f"model.{name}": b for name, b in buffers.items()}, (length,))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(kept) + sum(kept[ran] for ran in skipped.values())


class _Hidden(nn.Module):
    """Computes the hidden states of one conversation."""

    def __init__(self, model: CausalLM):
        super().__init__()
        self.model = model

    def forward(self, length: int) -> Tensor:
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        self.model.token_keys.set_rows(torch.zeros(1, dtype=torch.int64, device="meta"), length)
        bounds = self.model.make_bounds([[length]])
        positions = torch.zeros(1, length, dtype=torch.int64, device="meta")
        return self.model.hidden_states(tokens, positions, bounds)


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
