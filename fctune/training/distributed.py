"""The process group, and the one door of every collective that training makes.

Ranks take the same branches: what one rank finds (an error, a reason to stop) is agreed on here before any acts on it.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fctune.errors import CheckpointError, ConfigError, DataError

T = TypeVar("T")

UserError = (ConfigError, DataError, CheckpointError)

_TIMEOUT = datetime.timedelta(minutes=30)  # data may be prepared on one rank while others wait


@dataclass(frozen=True, slots=True)
class World:
    """This process among all; ``rank`` and ``world_size`` are global."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def start_world() -> World:
    """Join the process group that the launcher describes in the environment; without a launcher, make one of one rank.

    The bare ``tune run recipes/x`` starts a recipe in its own process, without RANK.
    """
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=_TIMEOUT)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device)


def stop_world() -> None:
    """Leave the group; the barrier keeps gloo from aborting at exit now and then."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_(tensor: Tensor) -> Tensor:
    """Sum over ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()


def agree(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; where any rank meets a user's error, the first rank's is raised on all.

    ``action`` must not make collectives, or ranks that fail would leave the others waiting in one.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except UserError as caught:
        error = caught
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def on_main(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 while the others wait; its result, or its user's error, on every rank.

    The result must be small and picklable.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = action()
        except UserError as caught:
            box[1] = caught
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result
