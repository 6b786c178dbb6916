"""The moments of a step at which memory may be highest, and what a rank holds at each.

The order is that of one micro-batch: forward, loss, backward block by block, the ends of the model, update. Under FSDP2
(torch.distributed.fsdp, FSDPParamGroup) a block's weights are whole while it runs; in forward so are the buffer that
they were gathered in and that of the next block's, in backward the next block's alone. Gradients of a block are whole
until they are copied into a buffer in the format they are reduced in, which stays until the next block's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fctune.parallel.activations import is_checkpointed
from fctune.parallel.footprint import Footprint

if TYPE_CHECKING:
    from fctune.planner.memory import MemoryModel


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


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a step and what is held then."""

    phase: str
    footprint: Footprint


class Timeline:
    """One micro-batch of a rank, the last of its step."""

    def __init__(self, memory: MemoryModel, setting: Setting):
        self.memory, self.setting = memory, setting
        config, work = memory.config, memory.block_memory
        self.state = memory.state(setting)
        self.is_unit = memory.is_in_units(setting)
        self.tokens = setting.micro_batch_size * config.data.seq_len
        self.num_blocks = len(memory.blocks)
        kept = work.operators if config.activation_checkpointing.policy == "op" else work.inputs
        chosen = [is_checkpointed(index, setting.fraction) for index in range(self.num_blocks)]
        self.is_checkpointed = chosen
        self.kept = [kept * self.tokens if again else work.whole(self.tokens) for again in chosen]
        if config.activation_checkpointing.offload:
            # Two blocks' are on their way; the rest wait on the host.
            self.kept = [size * 2 // self.num_blocks for size in self.kept]
        self.a_token = memory.architecture.embed_dim * memory.precision.compute_dtype.itemsize
        self.block, self.root = memory.blocks[0], memory.root
        self.block_weights = memory.whole_bytes(self.block) if self.is_unit else 0
        self.root_weights = memory.whole_bytes(self.root) if self.is_unit else 0
        self.block_grads, self.block_buffer = memory.gradient_bytes(self.block)
        self.root_grads, self.root_buffer = memory.gradient_bytes(self.root)
        self.block_local = memory.local_gradients(self.block, setting.shard)
        # Two tables, or one that both ends use: what the head gives comes first.
        self.head_grads = memory.head_gradient_bytes()
        self.gathered_in = 1 if setting.shard > 1 else 0  # buffers beside what is gathered from them

    def moments(self) -> Iterator[Peak]:
        """In the order that they come in."""
        yield self._forward()
        yield from self._loss()
        for index in self._telling_blocks():
            yield self._backward(index)
            if self.is_unit:
                yield self._reduction(index)
        yield from self._ends()
        yield Peak("update", replace(self.state, working=self.memory.update_bytes(self.state)))

    def _telling_blocks(self) -> list[int]:
        """Those among which the highest is, or one within a block's activations of it: what is kept falls block by
        block and gradients grow, so they are at the ends, or the first and last that are computed again, or are not.
        """
        found = {0, 1, self.num_blocks - 2, self.num_blocks - 1}
        for again in (True, False):
            alike = [index for index, chosen in enumerate(self.is_checkpointed) if chosen is again]
            found |= set(alike[:2] + alike[-2:])
        return sorted((index for index in found if 0 <= index < self.num_blocks), reverse=True)

    def _forward(self) -> Peak:
        """The last block that still gathers the next."""
        index = max(0, self.num_blocks - 2)
        work = self.memory.block_memory
        return Peak(
            "forward",
            replace(
                self._accumulated(self.num_blocks),
                gathered=self._gathered(index, buffers=2 * self.gathered_in),
                activations=sum(self.kept[:index]),
                working=work.whole(self.tokens) + work.constant,
            ),
        )

    def _loss(self) -> Iterator[Peak]:
        """Logits of a chunk with their copies; then the head's gradient beside the sum of those before it."""
        memory = self.memory
        rows = int(self.tokens * memory.supervised_share)
        logits = memory.chunk_elements(rows)
        held = replace(
            self._accumulated(self.num_blocks),
            gathered=self._gathered(self.num_blocks, buffers=self.gathered_in),
            activations=sum(self.kept) + (2 * self.tokens + rows) * self.a_token,
        )
        width = memory.precision.compute_dtype.itemsize
        # The log-softmax, its gradient and the logits', all float32.
        yield Peak("loss", replace(held, reducing=held.reducing + self.head_grads, logits=12 * logits))
        if self.head_grads:
            reducing = held.reducing + 2 * self.head_grads
            yield Peak("gradient of the head", replace(held, reducing=reducing, logits=width * logits))

    def _backward(self, index: int) -> Peak:
        work = self.memory.block_memory
        beside = work.beside(self.tokens)
        whole = work.whole(self.tokens)
        is_checkpointed = self.is_checkpointed[index]
        has_next = index + 1 < self.num_blocks
        held = self._accumulated(index + 1)
        return Peak(
            "backward of " + ("the last block" if not has_next else f"block {index + 1}"),
            replace(
                held,
                gathered=self._gathered(index, buffers=self.gathered_in if index else 0),
                reducing=held.reducing
                + self.head_grads
                + (self.block_grads // 2 if self.is_unit else 0)  # of the half that backward begins with
                + (self.block_buffer if has_next and self.is_unit else 0),
                activations=sum(self.kept[:index]) + (0 if is_checkpointed else whole),
                working=beside + (whole if is_checkpointed else 0),
            ),
        )

    def _reduction(self, index: int) -> Peak:
        """The block's weights are let go before its gradients are copied; the next block's are being gathered."""
        held = self._accumulated(index)
        gathered = self.root_weights + (self.block_weights if index and self.gathered_in else 0)
        if not self.memory.config.parallel.reshard_after_forward:
            gathered = self._gathered(index - 1, buffers=0)
        return Peak(
            f"reduction of block {index + 1}",
            replace(
                held,
                gathered=gathered,
                reducing=held.reducing + self.head_grads + self.block_grads + self.block_buffer,
                activations=sum(self.kept[:index]) + self.tokens * self.a_token,
            ),
        )

    def _ends(self) -> Iterator[Peak]:
        """The embedding's gradient, then the reduction of both ends', whose weights are let go before."""
        if not self.root_grads:
            return
        held = self._accumulated(0)
        whole = self.memory.ends_gradient_bytes()
        buffer = self.block_buffer if self.is_unit else 0
        yield Peak(
            "gradient of the embedding",
            replace(
                held,
                gathered=self.root_weights,
                reducing=held.reducing + buffer + (whole if self.is_unit else whole - self.root_grads),
                activations=self.tokens * self.a_token,
            ),
        )
        if self.is_unit:
            yield Peak(
                "reduction of the ends' gradients",
                replace(held, reducing=held.reducing + self.root_grads + self.root_buffer),
            )

    def _gathered(self, index: int, buffers: int) -> int:
        """Whole weights while a block runs, past the last one those of the ends alone, and buffers of a block's."""
        if not self.is_unit:
            return 0
        running = 1 if index < self.num_blocks else 0
        if not self.memory.config.parallel.reshard_after_forward:
            running, buffers = min(index + 1, self.num_blocks), min(buffers, 1)
        return self.root_weights + (running + buffers) * self.block_weights

    def _accumulated(self, num_left: int) -> Footprint:
        """Weights, optimizer, and gradients of other micro-batches and of the blocks whose backward is over."""
        state, memory, setting = self.state, self.memory, self.setting
        if setting.mode == "ddp" and not self.is_unit:
            return state  # they lie in DDP's buckets all the time
        done = (self.num_blocks - num_left) * self.block_local
        if setting.accumulation == 1:
            return replace(state, gradients=min(done, state.gradients))
        if not self.is_unit or not memory.holds_gradients:
            return state
        left = memory.reduced_bytes(self.root) + num_left * memory.reduced_bytes(self.block)
        return replace(state, gradients=min(done, state.gradients), reducing=left)
