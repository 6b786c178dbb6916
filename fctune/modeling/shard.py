"""Parameters over ranks: FSDP2, one unit a block."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fctune.config import ParallelConfig
from fctune.modeling.build import CausalLM


def shard_(model: CausalLM, config: ParallelConfig, device_type: str, world_size: int) -> str:
    """Shard a model that is still on the meta device; returns the mode that runs.

    One rank holds everything and needs no sharding, so ``auto`` leaves it plain.
    """
    mode = "fsdp" if config.mode == "fsdp" or world_size > 1 else "none"
    if mode == "fsdp":
        mesh = init_device_mesh(device_type, (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    return mode
