"""Bandwidth of collectives by size, messages between every pair of ranks, and verification of the received data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fctune.apps.acceptance.config import CollectivesConfig, PairsConfig
from fctune.apps.acceptance.devices import time_calls
from fctune.apps.acceptance.fault_injection import FaultInjector
from fctune.apps.acceptance.session import Session
from fctune.base.distributed import World

# torch 2.13 renames these and warns about the old names, which are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_PERIOD = 61  # of the test pattern: prime, so that a shift by any piece's size is visible
_CHUNK = 2**24
_MESSAGES = 5  # that a pair exchanges each time it is its turn


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers of a collective on one rank, and the call that runs it."""

    send: Tensor
    receive: Tensor
    call: Callable[[], object]


def make_buffers(operation: str, num_bytes: int, world: World) -> Buffers:
    """Allocate float32 buffers; the larger has ``num_bytes``, rounded down to a multiple of 4 x ranks."""
    n, rank, device = world.world_size, world.rank, world.device
    part = max(1, num_bytes // 4 // n)
    full = torch.empty(part * n, device=device)
    if operation == "all_reduce":
        return Buffers(full, full, lambda: dist.all_reduce(full))
    if operation == "broadcast":
        return Buffers(full, full, lambda: dist.broadcast(full, 0))
    if operation in ("all_to_all", "point_to_point"):
        received = torch.empty_like(full)
        if operation == "all_to_all":
            return Buffers(full, received, lambda: dist.all_to_all_single(received, full))
        return Buffers(full, received, lambda: _exchange(full, received, (rank + 1) % n, (rank - 1) % n))
    shard = torch.empty(part, device=device)
    if operation == "all_gather":
        return Buffers(shard, full, lambda: _all_gather(full, shard))
    return Buffers(full, shard, lambda: _reduce_scatter(shard, full))


def fill_pattern_(tensor: Tensor, rank: int) -> None:
    """Fill a tensor with a rank's test pattern, i mod 61 + rank at index i: small integers, so that sums are exact."""
    for start, chunk in _iter_chunks(tensor):
        indices = torch.arange(start, start + len(chunk), device=tensor.device)
        chunk.copy_(indices.remainder_(_PERIOD) + rank)


def count_wrong_elements(operation: str, receive: Tensor, world: World) -> tuple[int, dict[int, int]]:
    """Count wrong elements of a result, in total and by the rank that sent them if the operation reveals it."""
    n, rank = world.world_size, world.rank
    part = len(receive) // n
    if operation in ("all_reduce", "reduce_scatter"):
        offset = 0 if operation == "all_reduce" else rank * len(receive)
        return _count_mismatches(receive, offset, n, n * (n - 1) // 2), {}
    if operation in ("broadcast", "point_to_point"):
        source = 0 if operation == "broadcast" else (rank - 1) % n
        wrong = _count_mismatches(receive, 0, 1, source)
        return wrong, {source: wrong} if wrong else {}
    offset = rank * part if operation == "all_to_all" else 0
    counts = {source: _count_mismatches(receive[source * part :][:part], offset, 1, source) for source in range(n)}
    return sum(counts.values()), {source: count for source, count in counts.items() if count}


def measure_collective(
    session: Session, config: CollectivesConfig, operation: str, num_bytes: int, world: World, faults: FaultInjector
) -> dict[str, Any]:
    """Time each repetition of a collective, and verify its result before and after."""
    duration_s = min(config.max_s, session.time_left())
    session.enter(f"{operation} of {num_bytes / 2**20:g} MiB")
    buffers = make_buffers(operation, num_bytes, world)
    wrong, sources = _verify(operation, buffers, world, faults)

    def call() -> None:
        faults.delay("slow_collectives")
        buffers.call()

    seconds = time_calls(call, max(2, config.warmup), world.device)[1:]
    mean = torch.tensor(statistics.fmean(seconds), dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)  # all ranks must run the same number of repetitions
    repetitions = max(2, min(config.repetitions, int(duration_s / max(mean.item(), 1e-9))))
    dist.barrier()
    seconds = time_calls(call, repetitions, world.device)
    wrong_after, sources_after = _verify(operation, buffers, world, faults)
    return {
        "bytes": max(buffers.send.numel(), buffers.receive.numel()) * 4,
        "seconds": [float(f"{s:.5g}") for s in seconds],
        "wrong_elements": wrong + wrong_after,
        "sources": {str(s): sources.get(s, 0) + sources_after.get(s, 0) for s in sorted({*sources, *sources_after})},
    }


def measure_pairs(
    session: Session, config: PairsConfig, world: World, faults: FaultInjector, seconds: dict[str, list[float]]
) -> None:
    """Add to ``seconds``, by the other rank's number, the durations of messages exchanged with every other rank.

    As many pairs as possible run at a time. The schedule is repeated instead of repeating each pair, so that a short
    disturbance of the machine does not hit a single pair.
    """
    count = max(1, int(config.mib * 2**18))
    send, receive = (torch.empty(count, device=world.device) for _ in range(2))
    fill_pattern_(send, world.rank)
    for repetition in range(config.repetitions + 1):
        session.time_left()
        for number, other in enumerate(_list_partners(world)):
            session.barrier(f"pairs {repetition}.{number}")
            if other is None:
                continue
            session.enter(f"messages between ranks {min(other, world.rank)} and {max(other, world.rank)}")

            def call(partner: int = other) -> None:
                faults.delay("slow_collectives")
                _exchange(send, receive, partner, partner)

            _exchange(send[:1], receive[:1], other, other)  # so that both start together
            times = time_calls(call, _MESSAGES, world.device)
            if repetition:  # the first opens connections
                seconds.setdefault(str(other), []).extend(float(f"{s:.5g}") for s in times)


def verify_pairs(world: World, faults: FaultInjector, mib: float) -> dict[str, int]:
    """Count wrong elements of one message from every other rank, by its number."""
    count = max(1, int(mib * 2**18))
    wrong = {}
    for other in _list_partners(world):
        if other is None:
            continue
        send, receive = (torch.empty(count, device=world.device) for _ in range(2))
        fill_pattern_(send, world.rank)
        faults.corrupt_("corrupt_send", send)
        _exchange(send, receive, other, other)
        faults.corrupt_("corrupt_receive", receive)
        wrong[str(other)] = _count_mismatches(receive, 0, 1, other)
    return wrong


def schedule_pairs(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Schedule rounds of disjoint pairs in which every two ranks meet once (the circle method)."""
    ranks: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def list_sizes(config: CollectivesConfig, extra: Sequence[int]) -> list[int]:
    """List the sizes to measure, in bytes: the config's and those that sharding uses for the configured model."""
    return sorted({*(int(mib * 2**20) for mib in config.sizes_mib), *extra})


def _list_partners(world: World) -> list[int | None]:
    """List this rank's partner in each round of the schedule; None in a round that it sits out."""
    return [
        next((b if a == world.rank else a for a, b in pairs if world.rank in (a, b)), None)
        for pairs in schedule_pairs(world.world_size)
    ]


def _exchange(send: Tensor, receive: Tensor, target: int, source: int) -> None:
    """Send a message to one rank while receiving one from another, or from the same."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, send, target), dist.P2POp(dist.irecv, receive, source)]):
        work.wait()


def _verify(operation: str, buffers: Buffers, world: World, faults: FaultInjector) -> tuple[int, dict[int, int]]:
    fill_pattern_(buffers.send, world.rank)
    faults.corrupt_("corrupt_send", buffers.send)
    buffers.call()
    faults.corrupt_("corrupt_receive", buffers.receive)
    return count_wrong_elements(operation, buffers.receive, world)


def _count_mismatches(received: Tensor, offset: int, factor: int, added: int) -> int:
    """Count elements that differ from ``factor`` x the pattern from index ``offset`` + ``added``."""
    wrong = torch.zeros((), dtype=torch.int64, device=received.device)
    for start, chunk in _iter_chunks(received):
        indices = torch.arange(offset + start, offset + start + len(chunk), device=received.device)
        wrong += (chunk != indices.remainder_(_PERIOD) * factor + added).sum()
    return int(wrong.item())


def _iter_chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of a flat tensor with their start: int64 indices of all of it would take twice its memory."""
    for number in range(math.ceil(len(tensor) / _CHUNK)):
        yield number * _CHUNK, tensor[number * _CHUNK :][:_CHUNK]
