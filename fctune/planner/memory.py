"""Memory of a rank by part, at the moment of a step when it is highest.

State (weights, gradients, optimizer) is counted tensor by tensor, as sharding cuts it. What a step adds is counted from
what each operator keeps for its backward (https://arxiv.org/abs/2205.05198, section 4, done for these blocks) and from
when FSDP2 holds weights and gradients whole (torch.distributed.fsdp, its parameter groups).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from fctune.config import RunConfig
from fctune.modeling.build import CausalLM
from fctune.modeling.footprint import GIB
from fctune.modeling.frozen import NF4_BYTES, is_nf4
from fctune.modeling.lora import is_adapter
from fctune.modeling.loss import MAX_LOGITS
from fctune.modeling.precision import Formats
from fctune.planner.blocks import BlockMemory, measure_block

# What is there beside the tensors: CUDA's context with its kernels and cuBLAS's workspace (32 MiB on Hopper); NCCL's
# buffers and channels. Neither is computed: they are what nvidia-smi commonly shows before the first tensor.
_CONTEXT_BYTES = int(0.6 * GIB)
_NCCL_BYTES = int(0.9 * GIB)

# Share of what a step adds and gives back that the caching allocator cannot use again. An assumption.
_FRAGMENTATION = 0.04

# Share of a device that a setting may fill to be recommended: published peaks are up to a tenth over the plan's.
SAFE_SHARE = 0.9

# Of quantised moments: numbers that share a scale, bits of a number, bytes of the table of what they stand for.
_QUANTISED = {"8bit": (256, 8, 1024), "4bit": (128, 4, 64), "Fp8": (256, 8, 0)}

# Whole gradients may take this share of a device while they accumulate: fctune.modeling.shard.
_HELD_GRADIENTS = 0.1


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one rank."""

    parameters: int = 0  # of the base
    adapters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0  # weights that sharding holds whole
    reducing: int = 0  # gradients that are whole, and what they are reduced from
    activations: int = 0
    working: int = 0  # activations computed again, and temporaries of one block's backward
    logits: int = 0
    context: int = 0
    fragmentation: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def state(self) -> int:
        """What sharding cuts: known to the byte."""
        return self.parameters + self.adapters + self.gradients + self.optimizer

    def to_json(self) -> dict[str, int]:
        """Bytes by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)} | {"total": self.total}


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a step and what is held then."""

    moment: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class Setting:
    """What of a run can be varied to make it fit, or faster."""

    mode: str  # none, ddp, fsdp, hsdp
    replicate: int
    shard: int
    fraction: float  # of the blocks that are computed again
    micro_batch_size: int
    accumulation: int = 1

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.replicate * self.shard


class MemoryModel:
    """Memory of a run's ranks under different settings.

    Args:
        model: shaped, on the meta device.
        config: of the run.
        device_bytes: of one GPU.
        supervised_share: of a micro-batch's places, those that logits are computed at.
        max_logits: elements computed at once; other trainers compute them whole.
    """

    def __init__(
        self,
        model: CausalLM,
        config: RunConfig,
        device_bytes: int,
        supervised_share: float = 1.0,
        max_logits: float = MAX_LOGITS,
    ):
        self.formats: Formats = model.formats
        self.config, self.device_bytes = config, device_bytes
        self.supervised_share, self.max_logits = supervised_share, max_logits
        self.architecture = model.architecture
        self.blocks = [Tensors(block.named_parameters()) for block in model.blocks]
        in_blocks = {id(p) for block in model.blocks for p in block.parameters()}
        self.root = Tensors((n, p) for n, p in model.named_parameters() if id(p) not in in_blocks)
        self.all = Tensors(model.named_parameters())
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        if not any(name.endswith("tables.cache") for name, _ in model.named_buffers()):
            # Llama's scaled RoPE makes its tables when it is filled: float32 frequencies, sines and cosines.
            self.buffers += (config.data.seq_len * 4 + 2) * model.architecture.head_dim
        self.block_memory: BlockMemory = measure_block(model.architecture, config, self.formats.compute.itemsize)

    def state(self, setting: Setting) -> Parts:
        """Weights, gradients and optimizer, each cut by rows; a rank whose part is smaller holds as much, padded."""
        if self.config.parallel.cpu_offload:
            return Parts()
        shards = setting.shard
        base = sum(self.all.local_bytes(t, shards) for t in self.all.tensors if not t.is_adapter)
        adapters = sum(self.all.local_bytes(t, shards) for t in self.all.tensors if t.is_adapter)
        trained = [t for t in self.all.tensors if t.is_trained]
        return Parts(
            parameters=base,
            adapters=adapters,
            gradients=sum(self.all.local_bytes(t, shards) for t in trained),
            optimizer=sum(state_bytes(self.config.optimizer, t.local_numel(shards), t.itemsize) for t in trained),
        )

    def peak(self, setting: Setting) -> Peak:
        """The highest moment.

        Gradients count at each: they are let go after an update, but the small pieces they leave are not what the large
        tensors of the next forward can use.
        """
        state, work = self.state(setting), self.block_memory
        is_sharded = setting.mode in ("fsdp", "hsdp") or self.formats.is_mixed or self.config.parallel.cpu_offload
        tokens = setting.micro_batch_size * self.config.data.seq_len
        num_blocks = len(self.blocks)
        recomputed = sum(
            int((i + 1) * setting.fraction + 1e-9) > int(i * setting.fraction + 1e-9) for i in range(num_blocks)
        )
        checkpointed = work.operators if self.config.activation_checkpointing.policy == "op" else work.inputs
        kept = (num_blocks - recomputed) * work.whole(tokens) + recomputed * checkpointed * tokens
        if self.config.activation_checkpointing.offload:
            kept = kept * 2 // num_blocks  # two blocks' on their way
        ends = 3 * self.architecture.embed_dim * self.formats.compute.itemsize * tokens
        again = work.whole(tokens) if recomputed else 0
        block = max(self.blocks, key=lambda b: b.numel)
        weights, grads, buffer = 0, 0, 0
        root_weights = root_grads = root_buffer = 0
        if is_sharded:
            wide = 1 if self.config.parallel.reshard_after_forward else num_blocks
            weights = self.whole_bytes(block) * max(2, wide)  # the one that runs and the next
            root_weights = self.whole_bytes(self.root)
            grads, buffer = self._gradient_bytes(block)
            root_grads, root_buffer = self._gradient_bytes(self.root)
        held = self._held_gradients(setting) if is_sharded else 0
        rows = int(tokens * self.supervised_share)
        width = self.formats.compute.itemsize
        # bf16 logits and their float32 copy; then the log-softmax, its gradient and the input's, all float32
        logits = int(min(self.max_logits, rows * self.architecture.vocab_size) * max(12, width + 8))
        moments = {
            "loss": replace(
                state, gathered=root_weights, reducing=held, activations=kept + ends, working=0, logits=logits
            ),
            "backward of the last block": replace(
                state,
                gathered=root_weights + weights,
                reducing=held + root_grads // 2 + grads + buffer,
                activations=kept + ends,
                working=again + work.temporary * tokens + work.constant,
            ),
            "backward of the first block": replace(
                state,
                gathered=root_weights + min(weights, self.whole_bytes(block)),
                reducing=held + root_grads // 2 + grads + buffer,
                activations=work.whole(tokens) if not recomputed else checkpointed * tokens,
                working=again + work.temporary * tokens + work.constant,
            ),
            "reduction of the head's gradients": replace(
                state, gathered=root_weights, reducing=held + root_grads + root_buffer
            ),
            "update": replace(state, working=self._update_bytes(state)),
        }
        context = _CONTEXT_BYTES + (_NCCL_BYTES if setting.world_size > 1 else 0)
        peaks = [Peak(name, self._complete(parts, context)) for name, parts in moments.items()]
        return max(peaks, key=lambda peak: peak.parts.total)

    def largest_micro_batch(self, setting: Setting, most: int, global_batch_size: int) -> int:
        """Most packs a rank can safely hold at a time, at most ``most``; 0 where not even one fits."""
        low, high = 0, max(1, most)
        while low < high:
            middle = (low + high + 1) // 2
            accumulation = math.ceil(global_batch_size / (middle * setting.world_size))
            tried = replace(setting, micro_batch_size=middle, accumulation=accumulation)
            fits = self.peak(tried).parts.total <= SAFE_SHARE * self.device_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _complete(self, parts: Parts, context: int) -> Parts:
        moving = parts.gathered + parts.reducing + parts.activations + parts.working + parts.logits
        return replace(parts, buffers=self.buffers, context=context, fragmentation=int(_FRAGMENTATION * moving))

    def whole_bytes(self, tensors: Tensors) -> int:
        """As they are multiplied."""
        if self.formats.is_mixed:
            return tensors.numel * self.formats.compute.itemsize
        return sum(t.num_bytes for t in tensors.tensors)

    def _gradient_bytes(self, tensors: Tensors) -> tuple[int, int]:
        """Of a unit's whole gradients as backward makes them, and of the buffer that they are reduced from."""
        trained = [t for t in tensors.tensors if t.is_trained]
        if self.formats.is_mixed:
            numel = sum(t.numel for t in trained)
            return numel * self.formats.compute.itemsize, numel * 4
        return sum(t.num_bytes for t in trained), sum(t.num_bytes for t in trained)

    def _held_gradients(self, setting: Setting) -> int:
        return self._reduced_bytes() if setting.accumulation > 1 and self.holds_gradients() else 0

    def holds_gradients(self) -> bool:
        """Whether gradients stay whole while they accumulate, so that they are reduced once."""
        return self._reduced_bytes() <= _HELD_GRADIENTS * self.device_bytes

    def _reduced_bytes(self) -> int:
        return sum(t.numel * (4 if self.formats.is_mixed else t.itemsize) for t in self.all.tensors if t.is_trained)

    def _update_bytes(self, state: Parts) -> int:
        """Updates of many tensors at once (``foreach``, torch's default) hold a denominator for each."""
        is_alone = self.config.optimizer.get("fused") or self.config.optimizer.get("foreach") is False
        return 0 if is_alone else state.gradients


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A parameter."""

    shape: tuple[int, ...]
    itemsize: int
    is_trained: bool
    is_adapter: bool
    is_nf4: bool

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return int(self.numel * NF4_BYTES) if self.is_nf4 else self.numel * self.itemsize

    def local_numel(self, num_shards: int) -> int:
        """Of the largest shard: rows are dealt as ``torch.chunk`` deals them."""
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])


class Tensors:
    """The parameters of a unit of sharding."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]):
        self.tensors = [
            TensorShape(tuple(p.shape), p.element_size(), p.requires_grad, is_adapter(name), is_nf4(p))
            for name, p in named
        ]
        self.numel = sum(t.numel for t in self.tensors)

    def local_bytes(self, tensor: TensorShape, num_shards: int) -> int:
        """Bytes of one rank's part."""
        if tensor.is_nf4:
            return tensor.num_bytes // num_shards
        return tensor.local_numel(num_shards) * tensor.itemsize


def state_bytes(optimizer: dict[str, Any], numel: int, itemsize: int) -> int:
    """Bytes of optimizer state of one tensor: two moments and a step counter (https://arxiv.org/abs/1711.05101).

    Quantised moments have a scale a block (of 256 in 8 bits and float8, 128 in 4) and a table each; tensors that are
    small or not whole blocks keep theirs as they are (torchao.optim).
    """
    name = str(optimizer.get("_component_", "AdamW")).rpartition(".")[2]
    if name == "SGD":
        return numel * itemsize if optimizer.get("momentum") else 0
    if name == "Adafactor":
        return numel // 16
    block, bits, tables = next((sizes for end, sizes in _QUANTISED.items() if name.endswith(end)), (0, 0, 0))
    if block and numel >= 4096 and numel % block == 0:
        return 2 * (numel * bits // 8 + numel // block * 4 + tables) + 4
    return 2 * numel * itemsize + 4
