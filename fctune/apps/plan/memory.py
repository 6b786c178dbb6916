"""Peak memory of a rank by part.

State (weights, gradients, optimizer) is counted tensor by tensor as it is sharded. The rest of a step is counted from
the tensors that each operator keeps for its backward (https://arxiv.org/abs/2205.05198, section 4, applied to these
blocks) and from the times at which FSDP2 holds unsharded tensors (torch.distributed.fsdp, FSDPParamGroup).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from fctune.apps.plan.blocks import BlockActivations, count_block_activations
from fctune.apps.plan.memory_timeline import Peak, Setting, Timeline
from fctune.apps.plan.parameters import ParameterGroup, optimizer_state_bytes
from fctune.config.schema import RunConfig
from fctune.models.causal_lm import CausalLM
from fctune.models.loss import MAX_LOGITS, chunk_rows
from fctune.models.precision import PrecisionPolicy
from fctune.parallel.activations import is_checkpointed
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


class MemoryModel:
    """Memory of a run's ranks under different settings.

    Args:
        model: Model on the meta device, adapters included.
        config: Config of the run.
        device_bytes: Memory of one GPU; None if unknown.
        supervised_share: Share of a micro-batch's positions at which logits are computed.
        max_logits: Logits computed at once; other trainers compute all of them at once.
        is_cuda: Count CUDA's context, NCCL's buffers and fragmentation too.
        process_bytes: Memory of the process before the model is built, if it is the device's memory, too.
    """

    def __init__(
        self,
        model: CausalLM,
        config: RunConfig,
        device_bytes: int | None,
        supervised_share: float = 1.0,
        max_logits: float = MAX_LOGITS,
        is_cuda: bool = True,
        process_bytes: int = 0,
    ):
        self.is_cuda, self.process_bytes = is_cuda, process_bytes
        self.precision: PrecisionPolicy = model.precision
        self.config, self.device_bytes = config, device_bytes
        self.supervised_share, self.max_logits = supervised_share, max_logits
        self.architecture = model.architecture
        num_parts = config.parallel.expert
        spread = find_expert_parameters(model) if num_parts > 1 else set()
        self.blocks = [ParameterGroup(block.named_parameters(), spread, num_parts) for block in model.blocks]
        in_blocks = {id(p) for block in model.blocks for p in block.parameters()}
        self.root = ParameterGroup((n, p) for n, p in model.named_parameters() if id(p) not in in_blocks)
        self.all = ParameterGroup(model.named_parameters(), spread, num_parts)
        self.trains_head = any(t.is_trained for t in self.root.tensors)
        self.buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        self._states: dict[int, Footprint] = {}
        self.keeps_unsharded_gradients = can_hold_gradients(self.reduction_bytes(self.all), device_bytes)
        self.block_activations: BlockActivations = count_block_activations(
            model.architecture, config, self.precision.compute_dtype.itemsize
        )

    def with_supervised_share(self, supervised_share: float) -> MemoryModel:
        """Return the same for data of which another share is supervised, without tracing the blocks again."""
        other = copy.copy(self)
        other.supervised_share = supervised_share
        return other

    def device_state(self, setting: Setting) -> Footprint:
        """Return the weights, gradients and optimizer state on one device; zero if they are offloaded to the host."""
        return Footprint() if self.config.parallel.cpu_offload else self.sharded_state(setting)

    def sharded_state(self, setting: Setting) -> Footprint:
        """Return the largest shard of weights, gradients and optimizer state, on the device or the host.

        Parameters are split by rows; smaller shards are padded to the same size. Experts that are spread over fewer
        ranks than hold the shards have larger parts.
        """
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
        """Return the phase of a step with the highest memory, and its footprint."""
        context = (_CONTEXT_BYTES + (_NCCL_BYTES if setting.world_size > 1 else 0)) if self.is_cuda else 0
        highest = max(Timeline(self, setting).phases(), key=lambda peak: peak.footprint.total)
        parts = highest.footprint
        temporary = parts.gathered + parts.reducing + parts.activations + parts.working + parts.logits
        # Gradients released by an update leave gaps that are too small for the next forward's tensors: an assumption
        # supported by torchtitan's figures (8B on 8 GPUs, eager: 8 % under with it, 12 % without).
        gaps = max(0, self.device_state(setting).gradients - parts.gradients)
        lost = int(_FRAGMENTATION * temporary) + gaps if self.is_cuda else 0
        process = self.process_bytes
        made = replace(parts, buffers=self.buffers, context=context, fragmentation=lost, process=process)
        return Peak(highest.phase, made)

    def required(self, world_size: int, num_shards: int, max_logits: int | None = None) -> Footprint:
        """Return the peak footprint of the config as it is, with each replica sharded over ``num_shards`` ranks."""
        return self._required(world_size, num_shards, self.choose_fraction(world_size, num_shards), max_logits)

    def choose_fraction(self, world_size: int, num_shards: int) -> float:
        """Return the share of the blocks that are checkpointed: the config's, or the smallest that fits in memory.

        That is all of them if none fits, and none if the memory is unknown.
        """
        if (configured := self.config.activation_checkpointing.fraction) is not None:
            return configured
        fractions = [step / _FRACTION_STEPS for step in range(_FRACTION_STEPS + 1)]
        if self.device_bytes is None:
            return fractions[0]
        limit = SAFE_SHARE * self.device_bytes
        fitting = (f for f in fractions if self._required(world_size, num_shards, f).total <= limit)
        return next(fitting, fractions[-1])

    def choose_max_logits(self, world_size: int, num_shards: int, fraction: float) -> int:
        """Return the largest number of logits to compute at once that fits in memory with these checkpointed blocks.

        It is the default unless the memory of a GPU is known: on CPUs, more logits take more time, not less.
        """
        if self.device_bytes is None or not self.is_cuda:
            return MAX_LOGITS
        limit = SAFE_SHARE * self.device_bytes
        choices = [factor * MAX_LOGITS for factor in _LOGITS_FACTORS]
        fitting = (n for n in choices if self._required(world_size, num_shards, fraction, n).total <= limit)
        return next(fitting, MAX_LOGITS)

    def _required(self, world_size: int, num_shards: int, fraction: float, max_logits: int | None = None) -> Footprint:
        mode = "fsdp" if num_shards > 1 else "ddp" if world_size > 1 else "none"
        size = self.config.micro_batch_size
        setting = Setting(mode, max(1, world_size // num_shards), num_shards, fraction, size, max_logits=max_logits)
        return self.peak(self.with_accumulation(setting)).footprint

    def with_accumulation(self, setting: Setting) -> Setting:
        """Return a setting with its micro-batches per step, none larger than a rank's share of the global batch."""
        share = math.ceil(self.config.global_batch_size / setting.world_size)
        size = min(setting.micro_batch_size, share)
        return replace(setting, micro_batch_size=size, accumulation=math.ceil(share / size))

    def largest_micro_batch(self, setting: Setting, most: int, global_batch_size: int) -> int:
        """Return the most packs per micro-batch, up to ``most``, that fit with a safety margin; 0 if none does."""
        assert self.device_bytes is not None
        low, high = 0, max(1, most)
        while low < high:
            middle = (low + high + 1) // 2
            accumulation = math.ceil(global_batch_size / (middle * setting.world_size))
            tried = replace(setting, micro_batch_size=middle, accumulation=accumulation)
            fits = self.peak(tried).footprint.total <= SAFE_SHARE * self.device_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def uses_fsdp_units(self, setting: Setting) -> bool:
        """Return True if weights are gathered and gradients reduced block by block, as FSDP2 does."""
        return setting.mode in ("fsdp", "hsdp") or self.precision.is_mixed or self.config.parallel.cpu_offload

    def unsharded_bytes(self, tensors: ParameterGroup) -> int:
        """Return the bytes of a group's unsharded weights in the dtype that they are gathered in; no spread experts."""
        if self.precision.is_mixed:
            return tensors.numel * self.precision.compute_dtype.itemsize
        return sum(t.num_bytes for t in tensors.sharded)

    def copied_bytes(self, tensors: ParameterGroup) -> int:
        """Return the bytes of a group's spread experts that are cast to the compute dtype while they multiply."""
        width = self.precision.compute_dtype.itemsize
        return sum(t.local_numel(1) * width for t in tensors.spread if t.itemsize != width and not t.is_adapter)

    def gradient_bytes(self, tensors: ParameterGroup) -> tuple[int, int]:
        """Return the bytes of a group's unsharded gradients and of the buffer that they are reduced from.

        Those of spread experts are the gradients that the rank keeps.
        """
        trained = [t for t in tensors.sharded if t.is_trained]
        if self.precision.is_mixed:
            numel = sum(t.numel for t in trained)
            return numel * self.precision.compute_dtype.itemsize, numel * 4
        return sum(t.num_bytes for t in trained), sum(t.num_bytes for t in trained)

    def head_gradient_bytes(self) -> int:
        """Return the bytes of the output head's unsharded gradient; 0 if the head is frozen."""
        if self.config.adapter is not None:
            return 0
        a = self.architecture
        return a.vocab_size * a.embed_dim * self._gradient_width()

    def head_and_embedding_gradient_bytes(self) -> int:
        """Return the bytes of the head's and the embedding's gradients, before those of tied weights are summed."""
        return 2 * self.head_gradient_bytes()

    def count_checkpointed(self, fraction: float) -> int:
        """Return the number of checkpointed blocks."""
        return sum(is_checkpointed(index, fraction) for index in range(len(self.blocks)))

    def local_gradients(self, tensors: ParameterGroup, num_shards: int) -> int:
        """Return the bytes of one rank's shard of a group's gradients."""
        return sum(tensors.local_bytes(t, num_shards) for t in tensors.tensors if t.is_trained)

    def reduction_bytes(self, tensors: ParameterGroup) -> int:
        """Return the bytes of a group's unsharded gradients in their reduction's dtype, of spread experts a part."""
        width = 4 if self.precision.is_mixed else 0
        unsharded = sum(t.numel * (width or t.itemsize) for t in tensors.sharded if t.is_trained)
        return unsharded + sum(t.local_numel(1) * t.itemsize for t in tensors.spread if t.is_trained)

    def chunk_elements(self, num_rows: int, max_logits: int | None = None) -> int:
        """Return the number of logits computed at once for ``num_rows`` positions (see ``fctune.models.loss``)."""
        vocab, most = self.architecture.vocab_size, self.max_logits if max_logits is None else max_logits
        if num_rows * vocab <= most:
            return num_rows * vocab
        return min(num_rows, chunk_rows(vocab, int(most))) * vocab

    @property
    def logit_bytes(self) -> int:
        """Return the bytes that each logit of a chunk takes at most.

        Under a head that trains, these are the log-softmax, its gradient and the gradient of the logits, in float32;
        under a frozen one the logits, their log-softmax in float32, which becomes its gradient in place, and a copy of
        either in the other's dtype.
        """
        if self.trains_head or math.isinf(self.max_logits):
            return 12
        width = self.precision.compute_dtype.itemsize
        return width + 4 + (0 if width == 4 else width if self.is_cuda else 4)

    def update_bytes(self, state: Footprint) -> int:
        """Return the temporary bytes of the update: ``foreach``, torch's default, keeps a denominator per parameter."""
        is_sequential = self.config.optimizer.get("fused") or self.config.optimizer.get("foreach") is False
        return 0 if is_sequential else state.gradients

    def _gradient_width(self) -> int:
        return (self.precision.compute_dtype if self.precision.is_mixed else self.precision.weight_dtype).itemsize
