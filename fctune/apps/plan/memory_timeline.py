"""Phases of a step at which memory may peak, and the footprint of a rank in each.

The phases follow one micro-batch: forward, loss, backward block by block, embedding and head, update. Under FSDP2
(torch.distributed.fsdp, FSDPParamGroup), a block's weights are unsharded while it runs. In forward, so are the buffer
they were gathered in and the next block's buffer; in backward, only the next block's. A block's gradients are unsharded
until they are copied into a buffer in the reduction dtype, which lives until the next block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fctune.parallel.activations import is_checkpointed
from fctune.parallel.footprint import Footprint

if TYPE_CHECKING:
    from fctune.apps.plan.memory import MemoryModel


# Inputs of blocks that are on their way to the host at a time (torchtune.training.OffloadActivations).
_BLOCKS_IN_TRANSFER = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """Parallel layout and batch shape of a run, which a plan varies to make the run fit or run faster."""

    mode: str  # none, ddp, fsdp, hsdp
    replicate: int
    shard: int
    fraction: float  # share of the blocks that are checkpointed
    micro_batch_size: int
    accumulation: int = 1  # micro-batches per step
    max_logits: int | None = None  # computed at once; None: those of the memory model

    @property
    def world_size(self) -> int:
        """Ranks of the run: replicas times shards."""
        return self.replicate * self.shard


@dataclass(frozen=True, slots=True)
class Peak:
    """Phase of a step with its memory footprint."""

    phase: str
    footprint: Footprint


class Timeline:
    """Phases of the last micro-batch of a rank's step."""

    def __init__(self, memory: MemoryModel, setting: Setting):
        self.memory, self.setting = memory, setting
        config, work = memory.config, memory.block_activations
        self.state = memory.device_state(setting)
        self.is_unit = memory.uses_fsdp_units(setting)
        self.tokens = setting.micro_batch_size * config.data.seq_len
        self.num_blocks = len(memory.blocks)
        kept = work.kept_policy_op if config.activation_checkpointing.policy == "op" else work.kept_policy_block
        chosen = [is_checkpointed(index, setting.fraction) for index in range(self.num_blocks)]
        self.is_checkpointed = chosen
        copied = memory.copied_bytes(max(memory.blocks, key=memory.copied_bytes))
        self.all_kept = work.total(self.tokens) + copied  # by a block that is not checkpointed
        self.kept = [kept * self.tokens if again else self.all_kept for again in chosen]
        if config.activation_checkpointing.offload:
            # The inputs of a few checkpointed blocks are in transfer; the others are on the host.
            share = min(1.0, _BLOCKS_IN_TRANSFER / max(1, sum(chosen)))
            self.kept = [int(size * share) if again else size for size, again in zip(self.kept, chosen, strict=True)]
        self.token_bytes = memory.architecture.embed_dim * memory.precision.compute_dtype.itemsize
        self.block, self.root = max(memory.blocks, key=lambda block: block.numel), memory.root
        self.block_weights = memory.unsharded_bytes(self.block) if self.is_unit else 0
        self.root_weights = memory.unsharded_bytes(self.root) if self.is_unit else 0
        self.block_grads, self.block_buffer = memory.gradient_bytes(self.block)
        self.root_grads, self.root_buffer = memory.gradient_bytes(self.root)
        self.block_local = memory.local_gradients(self.block, setting.shard)
        # The head's gradient comes first, whether or not its weight is tied to the embedding.
        self.head_grads = memory.head_gradient_bytes()
        self.gather_buffers = 1 if setting.shard > 1 else 0  # in addition to the gathered weights

    def phases(self) -> Iterator[Peak]:
        """Yield the phases in order of time."""
        yield self._forward()
        yield from self._loss()
        for index in self._candidate_blocks():
            yield self._backward(index)
            if self.is_unit:
                yield self._reduction(index)
        yield from self._ends()
        yield Peak("update", replace(self.state, working=self.memory.update_bytes(self.state)))

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
                activations=sum(self.kept[:index]),
                working=self.all_kept + work.dequantization_constant,
            ),
        )

    def _loss(self) -> Iterator[Peak]:
        """Yield the logits of a chunk with their copies, then the head's gradient as it is added to earlier ones."""
        memory = self.memory
        rows = int(self.tokens * memory.supervised_share)
        logits = memory.chunk_elements(rows, self.setting.max_logits)
        slopes = 0 if memory.trains_head else rows  # gradients of hidden states, kept for backward
        held = replace(
            self._accumulated(self.num_blocks),
            gathered=self._gathered(self.num_blocks, buffers=self.gather_buffers),
            activations=sum(self.kept) + (2 * self.tokens + rows + slopes) * self.token_bytes,
        )
        width = memory.precision.compute_dtype.itemsize
        num_bytes = memory.logit_bytes * logits
        yield Peak("loss", replace(held, reducing=held.reducing + self.head_grads, logits=num_bytes))
        if self.head_grads:
            reducing = held.reducing + 2 * self.head_grads
            yield Peak("gradient of the head", replace(held, reducing=reducing, logits=width * logits))

    def _backward(self, index: int) -> Peak:
        work = self.memory.block_activations
        extra, total = work.backward_extra(self.tokens), self.all_kept
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
                + (self.block_grads // 2 if self.is_unit else 0)  # of the half of the block that backward starts with
                + (self.block_buffer if has_next and self.is_unit else 0),
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
                reducing=held.reducing + self.head_grads + self.block_grads + self.block_buffer,
                activations=sum(self.kept[:index]) + self.tokens * self.token_bytes,
            ),
        )

    def _ends(self) -> Iterator[Peak]:
        """Yield the embedding's gradient, then the reduction of embedding and head, after their weights' release."""
        if not self.root_grads:
            return
        held = self._accumulated(0)
        unsharded = self.memory.head_and_embedding_gradient_bytes()
        buffer = self.block_buffer if self.is_unit else 0
        yield Peak(
            "gradient of the embedding",
            replace(
                held,
                gathered=self.root_weights,
                reducing=held.reducing + buffer + (unsharded if self.is_unit else unsharded - self.root_grads),
                activations=self.tokens * self.token_bytes,
            ),
        )
        if self.is_unit:
            yield Peak(
                "reduction of the embedding's and the head's gradients",
                replace(held, reducing=held.reducing + self.root_grads + self.root_buffer),
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
        left = memory.reduction_bytes(self.root) + num_left * memory.reduction_bytes(self.block)
        return replace(state, gradients=min(done, state.gradients), reducing=left)
