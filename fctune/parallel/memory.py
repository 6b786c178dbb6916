"""Peak memory of a rank by part, and the phase of a step in which it occurs.

State (weights, gradients, optimizer) is counted tensor by tensor as it is sharded. The rest of a step is counted from
the tensors that each operator keeps for its backward (https://arxiv.org/abs/2205.05198, section 4, applied to these
blocks) and from the times at which FSDP2 holds unsharded tensors (torch.distributed.fsdp, FSDPParamGroup): a block's
weights are unsharded while it runs. In forward, so are the buffer they were gathered in and the next block's buffer; in
backward, only the next block's. A block's gradients are unsharded until they are copied into a buffer in the reduction
dtype, which lives until the next block's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.frozen_linear import NF4_BYTES_PER_WEIGHT, is_nf4
from fctune.models.lora import count_parameters, is_adapter
from fctune.models.loss import MAX_LOGITS, TEACHER_COPIES, chunk_rows
from fctune.models.precision import PrecisionPolicy
from fctune.parallel.activations import is_checkpointed
from fctune.parallel.block_memory import (
    BlockActivations,
    count_block_activations,
    count_dequantization,
    count_shared_row_bytes,
)
from fctune.parallel.expert_parallel import find_expert_parameters
from fctune.parallel.footprint import GIB, SAFE_SHARE, Footprint, can_hold_gradients

# Memory other than tensors: CUDA's context with its kernels and cuBLAS's workspace (32 MiB on Hopper); NCCL's buffers
# and channels. Assumptions: what nvidia-smi commonly shows before the first tensor.
_CONTEXT_BYTES = int(0.6 * GIB)
_NCCL_BYTES = int(0.9 * GIB)

# Shares of checkpointed blocks among which a run chooses: multiples of one divided by this.
_FRACTION_STEPS = 8

# Multiples of the default number of logits among which a run chooses. More gain nothing: one weight is read for
# 2,048 positions of a vocabulary of 128,256 then.
_LOGITS_FACTORS = (8, 4, 2)

# Share of a step's temporary memory that the caching allocator cannot reuse. An assumption.
_FRAGMENTATION = 0.04

# Inputs of blocks that are on their way to the host at a time (torchtune.training.OffloadActivations).
_BLOCKS_IN_TRANSFER = 5

# Quantized moments by suffix of the optimizer's name: elements per scale, bits per element, bytes of the code book.
_QUANTIZED = {"8bit": (256, 8, 1024), "4bit": (128, 4, 64), "Fp8": (256, 8, 0)}


@dataclass(frozen=True, slots=True)
class Setting:
    """Parallel layout and batch shape of a run, which a plan varies to make the run fit or run faster."""

    mode: str  # none, ddp, fsdp, hsdp
    replicate: int
    shard: int
    fraction: float  # share of the blocks that are checkpointed
    micro_batch_size: int
    accumulation: int = 1  # micro-batches per step
    max_logits: int | None = None  # computed at once; None: the default
    context: int = 1  # ranks that share each pack
    mlp_tiles: int = 1  # parts of a pack in which MLPs are computed
    expert: int = 1  # ranks over which experts are spread, as in the config of the memory model

    @property
    def num_shares(self) -> int:
        """Groups of ranks with packs of their own."""
        return self.world_size // self.context

    @property
    def world_size(self) -> int:
        """Ranks of the run: replicas times shards."""
        return self.replicate * self.shard


@dataclass(frozen=True, slots=True)
class Peak:
    """Phase of a step with its memory footprint."""

    phase: str
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Shape and kind of one parameter.

    Attributes:
        num_parts: Ranks that hold an equal part each under expert parallelism, whatever the shards of other
            parameters; None for those that are sharded.
    """

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_adapter: bool
    is_nf4: bool
    num_parts: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return int(self.numel * NF4_BYTES_PER_WEIGHT) if self.is_nf4 else self.numel * self.itemsize

    def local_numel(self, num_shards: int) -> int:
        """Return the number of elements in the largest shard, which splits rows like ``torch.chunk``."""
        if self.num_parts is not None:
            return self.numel // self.num_parts
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])

    def local_bytes(self, num_shards: int) -> int:
        """Return the bytes of the largest shard."""
        return self.num_bytes // num_shards if self.is_nf4 else self.local_numel(num_shards) * self.itemsize


class ParameterGroup:
    """Parameters that are sharded together: one block, the ends of the model, or all of it.

    Args:
        named: The parameters by name.
        precision: Dtypes that weights are gathered and gradients are reduced in.
        spread: Parameters that expert parallelism spreads over ranks.
        num_parts: The number of these ranks, ``parallel.expert``.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        precision: PrecisionPolicy,
        spread: AbstractSet[Tensor] = frozenset(),
        num_parts: int = 1,
    ):
        self.tensors = [
            ParameterShape(
                *(tuple(p.shape), p.element_size(), p.requires_grad, is_adapter(name), is_nf4(p)),
                num_parts if p in spread else None,
            )
            for name, p in named
        ]
        sharded = [t for t in self.tensors if t.num_parts is None]
        trained = [t for t in sharded if t.is_trained]
        experts = [t for t in self.tensors if t.num_parts is not None]
        width, is_mixed = precision.compute_dtype.itemsize, precision.is_mixed
        self.numel = sum(t.numel for t in sharded)
        # Unsharded weights in the dtype that they are gathered in, and their gradients in that and in the reduction's.
        self.unsharded_bytes = self.numel * width if is_mixed else sum(t.num_bytes for t in sharded)
        self.gradient_bytes = sum(t.numel * width if is_mixed else t.num_bytes for t in trained)
        self.buffer_bytes = sum(t.numel * 4 if is_mixed else t.num_bytes for t in trained)
        # Of the rank's part of spread experts, which are not reduced over the shards; and of all.
        self.expert_gradient_bytes = sum(t.local_numel(1) * t.itemsize for t in experts if t.is_trained)
        reduced = sum(t.numel * (4 if is_mixed else t.itemsize) for t in trained)
        self.reduction_bytes = reduced + self.expert_gradient_bytes
        # Spread experts that are cast to the compute dtype while they multiply: not quantized ones, whose
        # dequantized weights no backward keeps.
        copied = [t for t in experts if t.is_trained and not t.is_adapter and t.itemsize != width]
        self.copied_bytes = sum(t.local_numel(1) * width for t in copied)

    def local_gradients(self, num_shards: int) -> int:
        """Return the bytes of one rank's shard of the gradients."""
        return sum(t.local_bytes(num_shards) for t in self.tensors if t.is_trained)


def optimizer_state_bytes(optimizer: dict[str, Any], numel: int, itemsize: int) -> int:
    """Return the bytes of optimizer state of one tensor: two moments and a step counter (https://arxiv.org/abs/1711.05101).

    Quantized moments have a scale per block (256 elements in 8 bits and float8, 128 in 4 bits) and a code book each;
    tensors that are small or not a multiple of the block keep unquantized moments (torchao.optim).
    """
    name = str(optimizer.get("_component_", "AdamW")).rpartition(".")[2]
    if name == "SGD":
        return numel * itemsize if optimizer.get("momentum") else 0
    if name == "Adafactor":
        return numel // 16
    block, bits, tables = next((sizes for suffix, sizes in _QUANTIZED.items() if name.endswith(suffix)), (0, 0, 0))
    if block and numel >= 4096 and numel % block == 0:
        return 2 * (numel * bits // 8 + numel // block * 4 + tables) + 4
    return 2 * numel * itemsize + 4


class TeacherMemory:
    """Memory of a teacher that is not sharded, and keeps nothing for a backward pass.

    Args:
        model: The teacher on the meta device, in the dtype that it computes in.
        config: Config of the run.

    Attributes:
        architecture: Its sizes.
        attention_layers: Its layers that attend.
        num_bytes: Its weights and buffers.
        width: Bytes of an element of its hidden states.
    """

    def __init__(self, model: CausalLM, config: RunConfig):
        self.architecture, self.attention_layers = model.architecture, model.attention_layers
        self.num_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        self.width = model.precision.compute_dtype.itemsize
        self._block = count_block_activations(
            model.architecture, replace(config, adapter=None, compile=False), self.width
        )

    def forward_bytes(self, tokens: int) -> int:
        """Return the bytes of a block's forward pass over so many tokens, the largest part of the teacher's."""
        return self._block.total(tokens) + self._block.forward_extra(tokens) + tokens * self.hidden_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state of one position."""
        return self.architecture.embed_dim * self.width


class MemoryModel:
    """Memory of a run's ranks under different settings.

    Args:
        model: Model on the meta device, adapters included.
        config: Config of the run.
        device_bytes: Memory of one GPU; None if unknown.
        supervised_share: Share of a micro-batch's positions at which logits are computed.
        is_cuda: Count CUDA's context, NCCL's buffers and fragmentation too.
        process_bytes: Memory of the process before the model is built, if it is the device's memory, too.
        teacher: Frozen teacher of a distillation on the meta device, of which each rank has a copy; None without one.
    """

    def __init__(
        self,
        model: CausalLM,
        config: RunConfig,
        device_bytes: int | None,
        supervised_share: float = 1.0,
        is_cuda: bool = True,
        process_bytes: int = 0,
        teacher: CausalLM | None = None,
    ):
        self.is_cuda, self.process_bytes = is_cuda, process_bytes
        self.precision: PrecisionPolicy = model.precision
        self.config, self.device_bytes = config, device_bytes
        self.supervised_share = supervised_share
        self.architecture, self.attention_layers = model.architecture, model.attention_layers
        in_blocks = {id(p) for block in model.blocks for p in block.parameters()}
        self.root = ParameterGroup(
            ((n, p) for n, p in model.named_parameters() if id(p) not in in_blocks), self.precision
        )
        self.blocks: list[ParameterGroup]
        self.all: ParameterGroup
        self._model = model
        self._group_parameters()
        self.num_base_weights = sum(n for name, n in count_parameters(model).items() if not is_adapter(name))
        self.trains_head = any(t.is_trained for t in self.root.tensors)
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        self.teacher = None if teacher is None else TeacherMemory(teacher, config)
        self.block_activations: BlockActivations = count_block_activations(
            model.architecture, config, self.precision.compute_dtype.itemsize
        )

    def _group_parameters(self) -> None:
        """Group the parameters of the blocks and of the model by how the config shards them, in place."""
        model, num_parts = self._model, self.config.parallel.expert_ranks
        spread = find_expert_parameters(model) if num_parts > 1 else set()
        self.blocks = [
            ParameterGroup(block.named_parameters(), self.precision, spread, num_parts) for block in model.blocks
        ]
        self.all = ParameterGroup(model.named_parameters(), self.precision, spread, num_parts)
        self._states: dict[int, Footprint] = {}
        self.keeps_unsharded_gradients = can_hold_gradients(self.all.reduction_bytes, self.device_bytes)

    def with_supervised_share(self, supervised_share: float) -> MemoryModel:
        """Return the same for data of which another share is supervised, without tracing the blocks again."""
        other = copy.copy(self)
        other.supervised_share = supervised_share
        return other

    def with_micro_batch(self, size: int) -> MemoryModel:
        """Return the same for micro-batches of so many packs, without tracing the blocks again."""
        other = copy.copy(self)
        other.config = replace(self.config, micro_batch_size=size)
        return other

    def with_expert_ranks(self, num_ranks: int) -> MemoryModel:
        """Return the same with experts spread over so many ranks, without tracing the blocks again."""
        other = copy.copy(self)
        other.config = replace(self.config, parallel=replace(self.config.parallel, expert=num_ranks))
        other._group_parameters()
        per_token, constant = count_dequantization(
            self.architecture.largest_block, other.config, self.precision.compute_dtype.itemsize
        )
        other.block_activations = replace(
            self.block_activations, dequantization=per_token, dequantization_constant=constant
        )
        return other

    def device_state(self, setting: Setting) -> Footprint:
        """Return the weights, gradients and optimizer state on one device; zero if they are offloaded to the host."""
        return Footprint() if self.config.parallel.cpu_offload else self.sharded_state(setting)

    def sharded_state(self, setting: Setting) -> Footprint:
        """Return the largest shard of weights, gradients and optimizer state, on the device or the host.

        Parameters are split by rows; smaller shards are padded to the same size. Experts that are spread over fewer
        ranks than hold the shards have larger parts.
        """
        if (shards := setting.shard) not in self._states:
            optimizer, trained = self.config.optimizer, [t for t in self.all.tensors if t.is_trained]
            self._states[shards] = Footprint(
                parameters=sum(t.local_bytes(shards) for t in self.all.tensors if not t.is_adapter),
                adapters=sum(t.local_bytes(shards) for t in self.all.tensors if t.is_adapter),
                gradients=self.all.local_gradients(shards),
                optimizer=sum(optimizer_state_bytes(optimizer, t.local_numel(shards), t.itemsize) for t in trained),
            )
        return self._states[shards]

    def peak(self, setting: Setting) -> Peak:
        """Return the phase of a step with the highest memory, and its footprint."""
        context = (_CONTEXT_BYTES + (_NCCL_BYTES if setting.world_size > 1 else 0)) if self.is_cuda else 0
        highest = max(_Timeline(self, setting).phases(), key=lambda peak: peak.footprint.total)
        parts = highest.footprint
        temporary = parts.gathered + parts.reducing + parts.activations + parts.working + parts.logits
        # Gradients released by an update leave gaps that are too small for the next forward's tensors: an assumption
        # supported by torchtitan's figures (8B on 8 GPUs, eager: 8 % under with it, 12 % without).
        gaps = max(0, self.device_state(setting).gradients - parts.gradients)
        lost = int(_FRAGMENTATION * temporary) + gaps if self.is_cuda else 0
        process = self.process_bytes
        teacher = 0 if self.teacher is None else self.teacher.num_bytes
        made = replace(
            parts, buffers=self.buffers, teacher=teacher, context=context, fragmentation=lost, process=process
        )
        return Peak(highest.phase, made)

    def required(
        self,
        world_size: int,
        num_shards: int,
        max_logits: int | None = None,
        fraction: float | None = None,
        context: int = 1,
        mlp_tiles: int = 1,
    ) -> Footprint:
        """Return the peak footprint of the config with each replica sharded over ``num_shards`` ranks.

        Without ``fraction``, as many blocks are checkpointed as ``choose_fraction`` returns.
        """
        if fraction is None:
            fraction = self.choose_fraction(world_size, num_shards, context, mlp_tiles)
        mode = "fsdp" if num_shards > 1 else "ddp" if world_size > 1 else "none"
        size = self.config.micro_batch_packs
        copies = max(1, world_size // num_shards)
        setting = Setting(mode, copies, num_shards, fraction, size, 1, max_logits, context, mlp_tiles)
        return self.peak(self.with_accumulation(setting)).footprint

    def _fits(self, footprint: Footprint) -> bool:
        assert self.device_bytes is not None
        return footprint.total <= SAFE_SHARE * self.device_bytes

    def choose_fraction(self, world_size: int, num_shards: int, context: int = 1, mlp_tiles: int = 1) -> float:
        """Return the share of the blocks that are checkpointed: the config's, or the smallest that fits in memory.

        That is all of them if none fits, and none if the memory is unknown.
        """
        if (configured := self.config.activation_checkpointing.fraction) is not None:
            return configured
        if self.device_bytes is None:
            return 0.0
        fractions = [step / _FRACTION_STEPS for step in range(_FRACTION_STEPS + 1)]
        required = partial(self.required, world_size, num_shards, context=context, mlp_tiles=mlp_tiles)
        return next((f for f in fractions if self._fits(required(fraction=f))), 1.0)

    def choose_max_logits(
        self, world_size: int, num_shards: int, fraction: float, context: int = 1, mlp_tiles: int = 1
    ) -> int:
        """Return the largest number of logits to compute at once that fits in memory with these checkpointed blocks.

        It is the default unless the memory of a GPU is known: on CPUs, more logits take more time, not less.
        """
        if self.device_bytes is None or not self.is_cuda:
            return MAX_LOGITS
        choices = (factor * MAX_LOGITS for factor in _LOGITS_FACTORS)
        rows: dict[str, int] = {"context": context, "mlp_tiles": mlp_tiles}
        required = partial(self.required, world_size, num_shards, fraction=fraction, **rows)
        return next((n for n in choices if self._fits(required(max_logits=n))), MAX_LOGITS)

    def with_accumulation(self, setting: Setting) -> Setting:
        """Return a setting with its micro-batches per step, none larger than a rank's share of the global batch."""
        share = math.ceil(self.config.global_batch_size / setting.num_shares)
        size = min(setting.micro_batch_size, share)
        return replace(setting, micro_batch_size=size, accumulation=math.ceil(share / size))

    def largest_micro_batch(self, setting: Setting, most: int, global_batch_size: int) -> int:
        """Return the most packs per micro-batch, up to ``most``, that fit with a safety margin; 0 if none does."""
        low, high = 0, max(1, most)
        while low < high:
            middle = (low + high + 1) // 2 if low else 1  # whether any fits comes first
            accumulation = math.ceil(global_batch_size / (middle * setting.num_shares))
            tried = replace(setting, micro_batch_size=middle, accumulation=accumulation)
            low, high = (middle, high) if self._fits(self.peak(tried).footprint) else (low, middle - 1)
        return low

    def count_checkpointed(self, fraction: float) -> int:
        """Return the number of checkpointed blocks."""
        return sum(is_checkpointed(index, fraction) for index in range(len(self.blocks)))


class _Timeline:
    """Phases of the last micro-batch of a rank's step: forward, loss, backward block by block, ends, update."""

    def __init__(self, memory: MemoryModel, setting: Setting):
        self.memory, self.setting = memory, setting
        config, work = memory.config, memory.block_activations
        self.state = memory.device_state(setting)
        # Weights are gathered and gradients reduced block by block, as FSDP2 does.
        is_sharded = setting.mode in ("fsdp", "hsdp")
        self.is_unit = is_sharded or memory.precision.is_mixed or config.parallel.cpu_offload
        self.tokens = setting.micro_batch_size * math.ceil(config.data.row_tokens / setting.context)
        self.num_blocks = len(memory.blocks)
        kept = work.kept_policy_op if config.activation_checkpointing.policy == "op" else work.kept_policy_block
        chosen = [is_checkpointed(index, setting.fraction) for index in range(self.num_blocks)]
        self.is_checkpointed = chosen
        copied = max(block.copied_bytes for block in memory.blocks)
        self.width = memory.precision.compute_dtype.itemsize
        shared = count_shared_row_bytes(memory.architecture, config, self.width, setting.context) * self.tokens
        # By a block that is not checkpointed.
        self.all_kept = work.total(self.tokens, setting.mlp_tiles) + copied + shared
        self.kept = [kept * self.tokens if again else self.all_kept for again in chosen]
        if config.activation_checkpointing.offload:
            # The inputs of a few checkpointed blocks are in transfer; the others are on the host.
            share = min(1.0, _BLOCKS_IN_TRANSFER / max(1, sum(chosen)))
            self.kept = [int(size * share) if again else size for size, again in zip(self.kept, chosen, strict=True)]
        self.token_bytes = memory.architecture.embed_dim * self.width
        self.block, self.root = max(memory.blocks, key=lambda block: block.numel), memory.root
        self.block_local = self.block.local_gradients(setting.shard)
        self.block_weights = self.block.unsharded_bytes if self.is_unit else 0
        self.root_weights = self.root.unsharded_bytes if self.is_unit else 0
        # The head's gradient comes first, whether or not its weight is tied to the embedding.
        shape, weights = memory.architecture, memory.precision.weight_dtype
        width = self.width if memory.precision.is_mixed else weights.itemsize
        self.head_grads = shape.vocab_size * shape.embed_dim * width if config.adapter is None else 0
        self.gather_buffers = 1 if setting.shard > 1 else 0  # in addition to the gathered weights

    def phases(self) -> Iterator[Peak]:
        """Yield the phases in order of time."""
        if (teacher := self.memory.teacher) is not None:
            held = replace(self._accumulated(self.num_blocks), working=teacher.forward_bytes(self.tokens))
            yield Peak("forward of the teacher", held)
        yield self._forward()
        yield from self._loss()
        for index in self._candidate_blocks():
            yield self._backward(index)
            if self.is_unit:
                yield self._reduction(index)
        yield from self._ends()
        yield Peak("update", replace(self.state, working=self._updating()))

    def _candidate_blocks(self) -> list[int]:
        """Return the blocks at which backward may peak, to within one block's activations.

        Kept activations shrink block by block while gradients grow, so the peak is at either end of the model or of the
        checkpointed or the other blocks.
        """
        found = {0, 1, self.num_blocks - 2, self.num_blocks - 1}
        for again in (True, False):
            alike = [index for index, chosen in enumerate(self.is_checkpointed) if chosen is again]
            found |= set(alike[:2] + alike[-2:])
        return sorted((index for index in found if 0 <= index < self.num_blocks), reverse=True)

    def _forward(self) -> Peak:
        """Return the footprint at the last block that prefetches the next one."""
        index = max(0, self.num_blocks - 2)
        work = self.memory.block_activations
        return Peak(
            "forward",
            replace(
                self._accumulated(self.num_blocks),
                gathered=self._gathered(index, buffers=2 * self.gather_buffers),
                activations=sum(self.kept[:index]) + self._taught(),
                working=self.all_kept
                + work.forward_extra(self.tokens, self.setting.mlp_tiles)
                + work.dequantization_constant,
            ),
        )

    def _loss(self) -> Iterator[Peak]:
        """Yield the logits of a chunk with their copies, then the head's gradient as it is added to earlier ones."""
        memory = self.memory
        rows = int(self.tokens * memory.supervised_share)
        logits = self._chunk_elements(rows)
        slopes = 0 if memory.trains_head else rows  # gradients of hidden states, kept for backward
        held = replace(
            self._accumulated(self.num_blocks),
            gathered=self._gathered(self.num_blocks, buffers=self.gather_buffers),
            activations=sum(self.kept) + (2 * self.tokens + rows + slopes) * self.token_bytes + self._taught(),
        )
        num_bytes = self._logit_bytes() * logits
        yield Peak("loss", replace(held, reducing=held.reducing + self.head_grads, logits=num_bytes))
        if self.head_grads:
            reducing = held.reducing + 2 * self.head_grads
            yield Peak("gradient of the head", replace(held, reducing=reducing, logits=self.width * logits))

    def _backward(self, index: int) -> Peak:
        work = self.memory.block_activations
        extra, total = work.backward_extra(self.tokens, self.setting.mlp_tiles), self.all_kept
        is_checkpointed = self.is_checkpointed[index]
        has_next = index + 1 < self.num_blocks
        held = self._accumulated(index + 1)
        return Peak(
            "backward of " + ("the last block" if not has_next else f"block {index + 1}"),
            replace(
                held,
                gathered=self._gathered(index, buffers=self.gather_buffers if index else 0),
                reducing=held.reducing
                + self.head_grads
                # of the half of the block that backward starts with
                + (self.block.gradient_bytes // 2 if self.is_unit else 0)
                + (self.block.buffer_bytes if has_next and self.is_unit else 0),
                activations=sum(self.kept[:index]) + (0 if is_checkpointed else total),
                working=extra + (total if is_checkpointed else 0),
            ),
        )

    def _reduction(self, index: int) -> Peak:
        """Return the footprint of a reduction: the block's weights are released, the next ones are being gathered."""
        held = self._accumulated(index)
        gathered = self.root_weights + (self.block_weights if index and self.gather_buffers else 0)
        if not self.memory.config.parallel.reshard_after_forward:
            gathered = self._gathered(index - 1, buffers=0)
        return Peak(
            f"reduction of block {index + 1}",
            replace(
                held,
                gathered=gathered,
                reducing=held.reducing + self.head_grads + self.block.gradient_bytes + self.block.buffer_bytes,
                activations=sum(self.kept[:index]) + self.tokens * self.token_bytes,
            ),
        )

    def _ends(self) -> Iterator[Peak]:
        """Yield the embedding's gradient, then the reduction of embedding and head, after their weights' release."""
        if not self.root.gradient_bytes:
            return
        held = self._accumulated(0)
        unsharded = 2 * self.head_grads  # of the head and of the embedding, before those of tied weights are summed
        buffer = self.block.buffer_bytes if self.is_unit else 0
        yield Peak(
            "gradient of the embedding",
            replace(
                held,
                gathered=self.root_weights,
                reducing=held.reducing + buffer + (unsharded if self.is_unit else unsharded - self.root.gradient_bytes),
                activations=self.tokens * self.token_bytes,
            ),
        )
        if self.is_unit:
            yield Peak(
                "reduction of the embedding's and the head's gradients",
                replace(held, reducing=held.reducing + self.root.gradient_bytes + self.root.buffer_bytes),
            )

    def _gathered(self, index: int, buffers: int) -> int:
        """Return the bytes of unsharded weights while a block runs: embedding, head, the block, and block buffers."""
        if not self.is_unit:
            return 0
        running = 1 if index < self.num_blocks else 0
        if not self.memory.config.parallel.reshard_after_forward:
            running, buffers = min(index + 1, self.num_blocks), min(buffers, 1)
        return self.root_weights + (running + buffers) * self.block_weights

    def _accumulated(self, num_left: int) -> Footprint:
        """Return the state with the gradients of earlier micro-batches and of blocks whose backward has finished."""
        state, memory, setting = self.state, self.memory, self.setting
        if setting.mode == "ddp" and not self.is_unit:
            return state  # DDP's buckets hold the gradients all the time
        done = (self.num_blocks - num_left) * self.block_local
        if setting.accumulation == 1:
            return replace(state, gradients=min(done, state.gradients))
        if not self.is_unit or not memory.keeps_unsharded_gradients:
            return state
        left = self.root.reduction_bytes + num_left * self.block.reduction_bytes
        return replace(state, gradients=min(done, state.gradients), reducing=left)

    def _chunk_elements(self, num_rows: int) -> int:
        """Return the number of logits computed at once for ``num_rows`` positions (see ``fctune.models.loss``)."""
        vocab, most = self.memory.architecture.vocab_size, self.setting.max_logits or MAX_LOGITS
        if self.memory.teacher is not None:
            most //= TEACHER_COPIES
        if num_rows * vocab <= most:
            return num_rows * vocab
        return min(num_rows, chunk_rows(vocab, most)) * vocab

    def _logit_bytes(self) -> int:
        """Return the bytes that each logit of a chunk takes at most.

        Under a head that trains, these are the log-softmax, its gradient and the gradient of the logits, in float32;
        under a frozen one the logits, their log-softmax in float32, which becomes its gradient in place, and a copy of
        either in the other's dtype. Next to a teacher, the logits of both in the compute dtype, their log-softmax in
        float32, and what the divergence keeps for its backward and computes there, also in float32: three tensors, or
        eight with a mixture of both distributions.
        """
        if self.memory.teacher is not None:
            assert self.memory.config.distill is not None
            return 2 * self.width + 4 * (5 if self.memory.config.distill.beta in (0, 1) else 10)
        if self.memory.trains_head:
            return 12
        return self.width + 4 + (0 if self.width == 4 else self.width if self.memory.is_cuda else 4)

    def _taught(self) -> int:
        """Return the bytes of the teacher's hidden states at the supervised positions, which wait for the loss."""
        teacher = self.memory.teacher
        return 0 if teacher is None else int(self.tokens * self.memory.supervised_share) * teacher.hidden_bytes

    def _updating(self) -> int:
        """Return the temporary bytes of the update: ``foreach``, torch's default, keeps a denominator per parameter."""
        optimizer = self.memory.config.optimizer
        is_sequential = optimizer.get("fused") or optimizer.get("foreach") is False
        return 0 if is_sequential else self.state.gradients
