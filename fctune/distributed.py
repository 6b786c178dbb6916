"""The process group, and the one door of every collective that training makes.

Ranks take the same branches: what one rank finds (an error, a reason to stop) is agreed on here before any acts on it.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from fctune.errors import CheckpointError, ConfigError, DataError

T = TypeVar("T")

USER_ERRORS = (ConfigError, DataError, CheckpointError)

_TIMEOUT = datetime.timedelta(minutes=30)  # data may be prepared on one rank while others wait


@dataclass(frozen=True, slots=True)
class World:
    """This process among all; ``rank`` and ``world_size`` are global."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    ranks_per_node: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """What a launcher says of this process, before any rank has met another."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    address: str  # where the ranks meet
    port: int
    has_agent: bool  # whether the launcher keeps the meeting point; else rank 0 does
    restart: str


def read_launcher_environment() -> LauncherEnvironment:
    """What the launcher wrote into the environment; without a launcher, one rank by itself.

    The bare ``tune run recipes/x`` starts a recipe in its own process, without RANK.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    world_size = int(os.environ["WORLD_SIZE"])
    return LauncherEnvironment(
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        has_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def init_distributed() -> World:
    """Join the process group that the launcher describes; without a launcher, make one of one rank."""
    read_launcher_environment()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if not dist.is_initialized():
        store, rank, world_size = next(rendezvous("env://", timeout=_TIMEOUT))
        # torchrun keeps its store over a restart, where ranks would find the addresses of those that died and hang.
        life = f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{world_size}"
        store = dist.PrefixStore(life, store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    world_size = dist.get_world_size()
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return World(dist.get_rank(), world_size, local_rank, device, ranks_per_node)


def shutdown_distributed() -> None:
    """Leave the group; the barrier keeps gloo from aborting at exit now and then."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_gather_rows(row: Tensor) -> Tensor:
    """The row ``[n]`` of every rank, ``[ranks, n]``, on every rank."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; where any rank meets a user's error, the first rank's is raised on all.

    ``action`` must not fail before the last of its collectives, or it would leave the other ranks waiting in one.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except USER_ERRORS as caught:
        error = caught
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def run_on_rank_0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 while the others wait; its result, or its user's error, on every rank.

    The result must be small and picklable.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except USER_ERRORS as caught:
            box[1] = caught
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """For each flag, whether it is set on any rank."""
    tensor = torch.tensor(flags, dtype=torch.uint8)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def new_cpu_group() -> dist.ProcessGroup:
    """A group of all ranks for collectives from another thread than training's, over the CPU."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return group


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank, in order, on every rank; small and picklable."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_full_tensor(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Tensor | None:
    """A tensor of the CPU, whole, on the rank ``owner`` alone; None on the others.

    Args:
        tensor: plain (the same on all ranks), or a DTensor sharded along its first dim and replicated otherwise.
        owner: global rank.
        group: of all ranks, over the CPU.
    """
    if not isinstance(tensor, DTensor):
        return tensor if dist.get_rank() == owner else None
    mesh = tensor.device_mesh
    axis = next((i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)), None)
    local = tensor.to_local().contiguous()
    if axis is None:
        return local if dist.get_rank() == owner else None
    # One replica of the shards is enough: the first along every other axis of the mesh.
    holders = mesh.mesh[tuple(slice(None) if i == axis else 0 for i in range(mesh.ndim))].tolist()
    rows = math.ceil(tensor.shape[0] / len(holders))  # as torch.chunk cuts, and FSDP with it
    bounds = [(min(i * rows, tensor.shape[0]), min((i + 1) * rows, tensor.shape[0])) for i in range(len(holders))]
    if dist.get_rank() != owner:
        for rank, (start, stop) in zip(holders, bounds, strict=True):
            if rank == dist.get_rank() and stop > start:
                dist.send(local, owner, group=group)
        return None
    full = torch.empty(tensor.shape, dtype=local.dtype)
    for rank, (start, stop) in zip(holders, bounds, strict=True):
        if rank == owner:
            full[start:stop] = local[: stop - start]
        elif stop > start:
            dist.recv(full[start:stop], rank, group=group)
    return full
