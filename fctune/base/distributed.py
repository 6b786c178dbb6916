"""The process group, and every collective that the library calls itself.

All ranks must take the same branches: errors and stop requests are exchanged here before any rank acts on them.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from fctune.base.errors import CheckpointError, ConfigError, DataError
from fctune.base.network import set_gloo_interface
from fctune.base.processes import check_srun_tasks

T = TypeVar("T")

# Errors in what the user provides; ``run_on_all_ranks`` and ``run_on_rank_0`` raise them on every rank.
USER_ERRORS = (ConfigError, DataError, CheckpointError)

_TIMEOUT = datetime.timedelta(minutes=30)  # the other ranks wait while rank 0 prepares the data
_SIGN_OF_LIFE_S = 5.0


class DuplicateRankError(RuntimeError):
    """Ranks of two launches have met in one rendezvous store."""


@dataclass(frozen=True, slots=True)
class World:
    """The position of this process in the process group; ``rank`` and ``world_size`` are global."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    ranks_per_node: int = 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which logs and writes files for all ranks."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """The launcher's description of this process, known before the process group exists."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int
    address: str  # of the rendezvous store
    port: int
    has_agent: bool  # the launcher hosts the store; otherwise rank 0 does
    run_id: str  # of the launcher
    restart: str  # restarts of this group so far


def read_launcher_environment() -> LauncherEnvironment:
    """Read the variables that torchrun sets; without them, set those of a single rank.

    ``tune run recipes/x`` without ``--nproc_per_node`` starts a recipe in its own process, without RANK.

    Raises:
        ConfigError: Without these variables, srun started the process as one of several.
    """
    if "RANK" not in os.environ:
        check_srun_tasks("--nproc_per_node")
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
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"),
        restart=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def init_distributed() -> World:
    """Join the process group that the launcher describes; without a launcher, create one of a single rank.

    Raises:
        ConfigError: Without a launcher, srun started this process as one of several.
        DuplicateRankError: A process of another launch has joined as this rank.
    """
    launch = read_launcher_environment()
    if launch.world_size > launch.ranks_per_node:
        set_gloo_interface(launch.address)
    if torch.cuda.is_available():
        use_expandable_segments()
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if not dist.is_initialized():
        store, rank, world_size = next(rendezvous("env://", timeout=_TIMEOUT))
        # torchrun keeps its store over a restart: without a prefix, ranks would find addresses of dead ones and hang.
        # On a fixed port, a rank of an earlier launch may find this one's store; only the run's ID tells them apart.
        prefix = f"{launch.run_id}/restart-{launch.restart}-of-{world_size}"
        store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        if store.add(f"joined/{rank}", 1) > 1:
            raise DuplicateRankError(
                f"another process has joined {launch.address}:{launch.port} as rank {rank} of {world_size}. End the "
                "ranks of earlier launches, or give each launch its own --rdzv_id and the same one on all nodes."
            )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    return World(dist.get_rank(), dist.get_world_size(), launch.local_rank, device, launch.ranks_per_node)


def use_expandable_segments() -> None:
    """Let CUDA memory blocks grow, so that rows of changing lengths leave no gaps, unless the user set the allocator.

    Call it before the first allocation.
    """
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def shutdown_distributed() -> None:
    """Destroy the process group; without the barrier, gloo sometimes aborts at exit."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def all_gather_rows(row: Tensor) -> Tensor:
    """Gather a row ``[n]`` from every rank into ``[world_size, n]`` on every rank."""
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; the tensor itself without a process group."""
    if not dist.is_initialized():
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def exchange_rows(
    rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive rows to each rank of a group, and return those received, in the order of the ranks.

    Gradients of the rows travel back the same way. Every rank of the group calls it.

    Args:
        rows: ``[n, ...]``.
        num_sent: Rows for each rank; they add up to n.
        num_received: Rows from each rank.
        group: Ranks to exchange with.
    """
    received: Tensor = _RowExchange.apply(rows, num_sent, num_received, group)  # type: ignore[no-untyped-call]
    return received


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.arguments = num_received, num_sent, group
        received = rows.new_empty(sum(num_received), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), list(num_received), list(num_sent), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(grad, *ctx.arguments), None, None, None


def barrier() -> None:
    """Block until every rank has called this."""
    dist.barrier()


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank and return its result; if it raises one of ``USER_ERRORS`` on any, raise on all.

    The error raised is that of the lowest rank. ``action`` must not fail before its last collective, because the other
    ranks would wait in it.
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
    """Run ``action`` on rank 0 and return its result on every rank, or raise its error on every rank.

    The result must be small and picklable. Only ``USER_ERRORS`` are raised on the other ranks.
    """
    box: list[Any] = [None, None]  # result, error
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


def run_long_on_rank_0(action: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
    """Run ``action`` on rank 0 on a thread, for as long as it takes; otherwise as ``wait_for_rank_0``."""
    if dist.get_rank() != 0:
        return wait_for_rank_0(None, meanwhile)
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-0")
    try:
        return wait_for_rank_0(thread.submit(action), meanwhile)
    finally:
        thread.shutdown(wait=False)


def wait_for_rank_0(result: Future[T] | None, meanwhile: Callable[[], None] = lambda: None) -> T:
    """Return the result of rank 0's future on every rank, or raise its error on every rank, as ``run_on_rank_0``.

    Rank 0 reports to the others from time to time that it still waits, because a collective ends with an error when it
    takes longer than the process group's time-out.

    Args:
        result: On rank 0; None on the others.
        meanwhile: Called on every rank each few seconds of the wait; may end it with an error, the same on all ranks.
    """

    def look() -> list[T]:
        assert result is not None
        wait([result], _SIGN_OF_LIFE_S)
        return [result.result()] if result.done() else []

    while not (found := run_on_rank_0(look)):
        meanwhile()
    return found[0]


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether it is set on any rank; a logical or over ranks."""
    tensor = torch.tensor(flags, dtype=torch.uint8)
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in tensor.tolist()]


def new_cpu_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks, for collectives in threads other than the training thread."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return group


@contextlib.contextmanager
def equal_ranks_grouped(keys: Sequence[Hashable]) -> Iterator[list[dist.ProcessGroup | None]]:
    """Create, for each position of ``keys``, the group of the ranks whose key there equals this rank's.

    Every rank enters and exits it with as many keys; the groups are destroyed at the exit.

    Yields:
        The groups; None where no other rank has this rank's key.
    """
    world = tuple(range(dist.get_world_size()))
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {world: dist.GroupMember.WORLD}
    ours: list[tuple[int, ...]] = []
    for column, own in zip(zip(*all_gather_objects(tuple(keys)), strict=True), keys, strict=True):
        for key in dict.fromkeys(column):
            members = tuple(rank for rank in world if column[rank] == key)
            if key == own:
                ours.append(members)
            # Every rank creates every group, in the same order.
            if len(members) > 1 and members not in groups:
                groups[members] = dist.new_group(list(members), _TIMEOUT)
    try:
        yield [groups[members] if len(members) > 1 else None for members in ours]
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the broadcasts are launched, perhaps not done
        for members, group in groups.items():
            if members != world and dist.get_rank() in members:
                dist.destroy_process_group(group)


def broadcast_parts_(parts: Sequence[tuple[Tensor, int]], group: dist.ProcessGroup) -> None:
    """Fill contiguous tensors with those of one member of the group each, in place; every member calls it.

    Args:
        parts: Tensors of any dtype on the group's device, each with the index in the group of the rank that has it.
        group: The ranks.
    """
    waits = [
        dist.broadcast(part.view(-1).view(torch.uint8), group_src=source, group=group, async_op=True)
        for part, source in parts
    ]
    for wait_ in waits:
        wait_.wait()


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather a small picklable value from every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_full_tensor(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Tensor | None:
    """Gather the shards of a CPU tensor on one rank; returns the full tensor there, and None on the other ranks.

    Args:
        tensor: Plain (equal on all ranks), or a DTensor sharded along its first dim and replicated on other mesh axes.
        owner: Global rank that receives the tensor.
        group: Gloo group of all ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor if dist.get_rank() == owner else None
    mesh = tensor.device_mesh
    axis = next((i for i, placement in enumerate(tensor.placements) if placement.is_shard(0)), None)
    local = tensor.to_local().contiguous()
    if axis is None:
        return local if dist.get_rank() == owner else None
    # The first replica along every other axis of the mesh sends.
    holders = mesh.mesh[tuple(slice(None) if i == axis else 0 for i in range(mesh.ndim))].tolist()
    rows = math.ceil(tensor.shape[0] / len(holders))  # FSDP shards like torch.chunk
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
