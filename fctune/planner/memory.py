"""Memory of a rank by part, at the moment of a step when it is highest.

State (weights, gradients, optimizer) is counted tensor by tensor, as sharding cuts it. What a step adds is counted from
what each operator keeps for its backward (https://arxiv.org/abs/2205.05198, section 4, done for these blocks) and from
when FSDP2 holds weights and gradients whole (torch.distributed.fsdp, its parameter groups).
"""

from __future__ import annotations

import math
from dataclasses import replace

from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.loss import MAX_LOGITS
from fctune.models.precision import PrecisionPolicy
from fctune.parallel.activations import is_checkpointed
from fctune.parallel.footprint import GIB, SAFE_SHARE, Footprint, can_hold_gradients
from fctune.planner.blocks import BlockActivations, count_block_activations
from fctune.planner.memory_timeline import Peak, Setting, Timeline
from fctune.planner.parameters import ParameterGroup, optimizer_state_bytes

# What is there beside the tensors: CUDA's context with its kernels and cuBLAS's workspace (32 MiB on Hopper); NCCL's
# buffers and channels. Assumptions: what nvidia-smi commonly shows before the first tensor.
_CONTEXT_BYTES = int(0.6 * GIB)
_NCCL_BYTES = int(0.9 * GIB)

# Share of what a step adds and gives back that the caching allocator cannot use again. An assumption.
_FRAGMENTATION = 0.04


class MemoryModel:
    """Memory of a run's ranks under different settings.

    Args:
        model: shaped, on the meta device.
        config: of the run.
        device_bytes: of one GPU; None where it is not known.
        supervised_share: of a micro-batch's places, those that logits are computed at.
        max_logits: elements computed at once; other trainers compute them whole.
        is_cuda: whether CUDA's own needs are among what is counted.
    """

    def __init__(
        self,
        model: CausalLM,
        config: RunConfig,
        device_bytes: int | None,
        supervised_share: float = 1.0,
        max_logits: float = MAX_LOGITS,
        is_cuda: bool = True,
    ):
        self.is_cuda = is_cuda
        self.precision: PrecisionPolicy = model.precision
        self.config, self.device_bytes = config, device_bytes
        self.supervised_share, self.max_logits = supervised_share, max_logits
        self.architecture = model.architecture
        self.blocks = [ParameterGroup(block.named_parameters()) for block in model.blocks]
        in_blocks = {id(p) for block in model.blocks for p in block.parameters()}
        self.root = ParameterGroup((n, p) for n, p in model.named_parameters() if id(p) not in in_blocks)
        self.all = ParameterGroup(model.named_parameters())
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        self._states: dict[int, Footprint] = {}
        self.holds_gradients = can_hold_gradients(self.reduced_bytes(self.all), device_bytes)
        self.block_memory: BlockActivations = count_block_activations(
            model.architecture, config, self.precision.compute_dtype.itemsize
        )

    def state(self, setting: Setting) -> Footprint:
        """Weights, gradients and optimizer, each cut by rows; a rank whose part is smaller holds as much, padded."""
        return Footprint() if self.config.parallel.cpu_offload else self.sharded_state(setting)

    def sharded_state(self, setting: Setting) -> Footprint:
        """The same, wherever it lies: offloaded, the host holds it."""
        if setting.shard not in self._states:
            self._states[setting.shard] = self._count_state(setting.shard)
        return self._states[setting.shard]

    def _count_state(self, shards: int) -> Footprint:
        base = sum(self.all.local_bytes(t, shards) for t in self.all.tensors if not t.is_adapter)
        adapters = sum(self.all.local_bytes(t, shards) for t in self.all.tensors if t.is_adapter)
        trained = [t for t in self.all.tensors if t.is_trained]
        return Footprint(
            parameters=base,
            adapters=adapters,
            gradients=sum(self.all.local_bytes(t, shards) for t in trained),
            optimizer=sum(
                optimizer_state_bytes(self.config.optimizer, t.local_numel(shards), t.itemsize) for t in trained
            ),
        )

    def peak(self, setting: Setting) -> Peak:
        """The highest moment of a step."""
        context = (_CONTEXT_BYTES + (_NCCL_BYTES if setting.world_size > 1 else 0)) if self.is_cuda else 0
        highest = max(Timeline(self, setting).moments(), key=lambda peak: peak.footprint.total)
        parts = highest.footprint
        moving = parts.gathered + parts.reducing + parts.activations + parts.working + parts.logits
        # Gradients that an update let go of leave pieces that the next forward's larger tensors cannot use: an
        # assumption that torchtitan's figures speak for (8B on 8 GPUs, eager: 8 % under with it, 12 % without).
        holes = max(0, self.state(setting).gradients - parts.gradients)
        lost = int(_FRAGMENTATION * moving) + holes if self.is_cuda else 0
        return Peak(highest.phase, replace(parts, buffers=self.buffers, context=context, fragmentation=lost))

    def required(self, world_size: int, num_shards: int) -> Footprint:
        """Of the config as it is, where each copy of the model lies on so many of the ranks."""
        mode = "fsdp" if num_shards > 1 else "ddp" if world_size > 1 else "none"
        copies = max(1, world_size // num_shards)
        fraction, size = self.config.activation_checkpointing.fraction, self.config.micro_batch_size
        return self.peak(self.accumulated(Setting(mode, copies, num_shards, fraction, size))).footprint

    def accumulated(self, setting: Setting) -> Setting:
        """The same with its number of micro-batches a step, none of them larger than a rank's share of the batch."""
        share = math.ceil(self.config.global_batch_size / setting.world_size)
        size = min(setting.micro_batch_size, share)
        return replace(setting, micro_batch_size=size, accumulation=math.ceil(share / size))

    def largest_micro_batch(self, setting: Setting, most: int, global_batch_size: int) -> int:
        """Most packs a rank can safely hold at a time, at most ``most``; 0 where not even one fits."""
        assert self.device_bytes is not None
        low, high = 0, max(1, most)
        while low < high:
            middle = (low + high + 1) // 2
            accumulation = math.ceil(global_batch_size / (middle * setting.world_size))
            tried = replace(setting, micro_batch_size=middle, accumulation=accumulation)
            fits = self.peak(tried).footprint.total <= SAFE_SHARE * self.device_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def is_in_units(self, setting: Setting) -> bool:
        """Whether weights are gathered and gradients reduced a block at a time: ``fctune.parallel.sharding.shard_``."""
        return setting.mode in ("fsdp", "hsdp") or self.precision.is_mixed or self.config.parallel.cpu_offload

    def whole_bytes(self, tensors: ParameterGroup) -> int:
        """As they are multiplied."""
        if self.precision.is_mixed:
            return tensors.numel * self.precision.compute_dtype.itemsize
        return sum(t.num_bytes for t in tensors.tensors)

    def gradient_bytes(self, tensors: ParameterGroup) -> tuple[int, int]:
        """Of a unit's whole gradients as backward makes them, and of the buffer that they are reduced from."""
        trained = [t for t in tensors.tensors if t.is_trained]
        if self.precision.is_mixed:
            numel = sum(t.numel for t in trained)
            return numel * self.precision.compute_dtype.itemsize, numel * 4
        return sum(t.num_bytes for t in trained), sum(t.num_bytes for t in trained)

    def head_gradient_bytes(self) -> int:
        """Of the head's weight, whole, where it trains."""
        if self.config.adapter is not None:
            return 0
        a = self.architecture
        return a.vocab_size * a.embed_dim * self._gradient_width()

    def ends_gradient_bytes(self) -> int:
        """Of the head's and the embedding's weights, before those of one table that both use are summed."""
        return 2 * self.head_gradient_bytes()

    def kept_per_token(self, fraction: float) -> int:
        """Bytes of a token that all blocks keep, where so many of them are computed again."""
        work, count = self.block_memory, len(self.blocks)
        kept = work.operators if self.config.activation_checkpointing.policy == "op" else work.inputs
        again = sum(is_checkpointed(index, fraction) for index in range(count))
        return again * kept + (count - again) * work.all

    def local_gradients(self, tensors: ParameterGroup, num_shards: int) -> int:
        """Of a unit, one rank's part."""
        return sum(tensors.local_bytes(t, num_shards) for t in tensors.tensors if t.is_trained)

    def reduced_bytes(self, tensors: ParameterGroup) -> int:
        """Of a unit's whole gradients in the format that they are reduced in."""
        return sum(t.numel * (4 if self.precision.is_mixed else t.itemsize) for t in tensors.tensors if t.is_trained)

    def chunk_elements(self, num_rows: int) -> int:
        """Logits computed at once: ``fctune.models.loss``."""
        vocab = self.architecture.vocab_size
        if num_rows * vocab <= self.max_logits:
            return num_rows * vocab
        return min(num_rows, max(256, int(self.max_logits) // vocab)) * vocab

    def update_bytes(self, state: Footprint) -> int:
        """Updates of many tensors at once (``foreach``, torch's default) hold a denominator for each."""
        is_alone = self.config.optimizer.get("fused") or self.config.optimizer.get("foreach") is False
        return 0 if is_alone else state.gradients

    def _gradient_width(self) -> int:
        return (self.precision.compute_dtype if self.precision.is_mixed else self.precision.weight_dtype).itemsize
