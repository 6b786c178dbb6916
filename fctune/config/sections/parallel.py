"""Distribution of parameters over ranks, and recomputation of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fctune.config.fields import AT_LEAST_1, SHARE, Null, SectionProblems


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Distribution of parameters over ranks."""

    mode: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """`ddp`: a replica per rank; `fsdp`: one replica sharded over all ranks; `hsdp`: several replicas, each sharded
    over a group of ranks; `auto`: no distribution on one rank, otherwise the mode with the least network traffic that
    fits in memory."""
    replicate: Annotated[int | None, AT_LEAST_1, Null("one replica per node")] = None
    """Number of replicas with `hsdp`."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward pass. Off: keep them for the backward pass, which takes more
    memory but less traffic."""
    cpu_offload: bool = False
    """Keep shards and optimizer state in host memory (CUDA only)."""
    expert: Annotated[int | Literal["auto"], AT_LEAST_1] = 1
    """Ranks over which the experts of a mixture are spread: each holds a part of them, and tokens are sent to it. Other
    weights are sharded by `fsdp` or `hsdp`. `auto`: the fewest ranks with which a step fits in memory, or more where
    that is faster by the plan; 1 if the run's other settings exclude more. The log has the choice and its reason; a
    resumed run keeps it while it fits."""
    context: Annotated[
        int | None,
        AT_LEAST_1,
        Null("the fewest ranks of a node with which a row fits, or more where that is faster by the plan"),
    ] = None
    """Ranks that share each row: each computes an equal part of its tokens, and of the attention heads in attention.
    Each then has only its part of a row's activations in memory. It must divide the number of ranks and the attention
    heads; losses and gradients do not change."""

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that ``expert`` is; 1 for ``auto`` until a number is chosen."""
        return self.expert if isinstance(self.expert, int) else 1

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check keys that only some modes support."""
        if self.expert_ranks > 1 and self.mode == "ddp":
            problems.add(
                ("expert", "mode"),
                f"{where}.expert={self.expert}: needs ranks that shard the other weights, but ddp shards none; set "
                f"{where}.mode=fsdp or hsdp",
            )
        if self.expert_ranks > 1 and self.cpu_offload:
            problems.add(
                ("expert", "cpu_offload"),
                f"{where}.expert={self.expert}: experts that are spread over ranks stay on their devices; set "
                f"{where}.cpu_offload=false",
            )
        if self.replicate is not None and self.mode != "hsdp":
            problems.add(
                ("replicate", "mode"),
                f"{where}.replicate={self.replicate}: only hsdp uses replicas, but {where}.mode is {self.mode}; "
                f"set {where}.mode=hsdp, or leave replicate out",
            )
        if self.cpu_offload and self.mode == "ddp":
            problems.add(
                ("cpu_offload", "mode"),
                f"{where}.cpu_offload: offloads shards, but ddp has none; set {where}.mode=fsdp or hsdp",
            )


@dataclass(kw_only=True, slots=True)
class ActivationCheckpointingConfig:
    """Activations to recompute in the backward pass, which trades time for memory."""

    fraction: Annotated[float | None, SHARE, Null("the smallest share that fits")] = None
    """Share of the blocks to checkpoint, spread evenly. The default is the smallest multiple of an eighth with which a
    step fits in the device's memory, by the planner's estimate; the run logs it when it starts, and records it in
    `run.json`."""
    policy: Literal["block", "op"] = "block"
    """Tensors to keep: only a block's input, or also its attention output and every second matrix product."""
    offload: bool = False
    """Move the inputs of checkpointed blocks to host memory until the backward pass (CUDA only)."""
    mlp_tiles: Annotated[
        int | None, AT_LEAST_1, Null("1, or 8 where a step does not fit without or is faster by the plan")
    ] = None
    """Parts of a row in which each MLP is computed, and recomputed in the backward pass: its activations, most of those
    of a long row, exist for one part at a time. Losses do not change. Experts are computed as without it."""

    def check(self, where: str, problems: SectionProblems) -> None:
        """Check that offloading has something to offload, and offloads all of it, and that tiles are recomputed."""
        if (self.mlp_tiles or 1) > 1 and self.policy == "op":
            problems.add(
                ("mlp_tiles", "policy"),
                f"{where}.mlp_tiles={self.mlp_tiles}: recomputes the products of MLPs, which {where}.policy=op keeps; "
                f"set {where}.policy=block",
            )
        if self.offload and self.policy == "op":
            problems.add(
                ("offload", "policy"),
                f"{where}.offload: moves the inputs of blocks, and {where}.policy=op keeps products on the device too; "
                f"set {where}.policy=block",
            )
        if self.offload and not self.fraction:
            problems.add(
                ("offload", "fraction"),
                f"{where}.offload: moves what checkpointed blocks keep, but no block is checkpointed; set "
                f"{where}.fraction over 0",
            )
