"""Collectives over sizes, with their results checked, and every pair of ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fctune.acceptance.compute import time_calls
from fctune.acceptance.config import CollectivesConfig, PairsConfig
from fctune.acceptance.fault_injection import Faults
from fctune.acceptance.session import Session
from fctune.distributed import World

# torch 2.13 renames these and warns of the old names; 2.11 has no others.
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_PERIOD = 61  # of the pattern: prime, so that a shift by any piece's size shows
_CHUNK = 2**24

_MESSAGES = 5  # of a pair each time that it is its turn


@dataclass(frozen=True, slots=True)
class Buffers:
    """A collective of one size on one rank: what is sent, what comes back, and the call."""

    send: Tensor
    receive: Tensor
    call: Callable[[], object]


def make_buffers(operation: str, num_bytes: int, world: World) -> Buffers:
    """Buffers of float32; ``num_bytes`` is of the larger side, rounded down to a multiple of 4 x the ranks."""
    n, rank, device = world.world_size, world.rank, world.device
    part = max(1, num_bytes // 4 // n)
    whole = torch.empty(part * n, device=device)
    if operation in ("all_reduce", "broadcast"):
        call = (lambda: dist.all_reduce(whole)) if operation == "all_reduce" else (lambda: dist.broadcast(whole, 0))
        return Buffers(whole, whole, call)
    if operation in ("all_to_all", "point_to_point"):
        other = torch.empty_like(whole)
        if operation == "all_to_all":
            return Buffers(whole, other, lambda: dist.all_to_all_single(other, whole))
        return Buffers(whole, other, lambda: _pass_on(whole, other, (rank + 1) % n, (rank - 1) % n))
    piece = torch.empty(part, device=device)
    if operation == "all_gather":
        return Buffers(piece, whole, lambda: _gather(whole, piece))
    return Buffers(whole, piece, lambda: _scatter(piece, whole))


def fill_(tensor: Tensor, rank: int) -> None:
    """The pattern that a rank sends, in place: at index i, i mod 61 + rank. Small whole numbers, so sums are exact."""
    for start, chunk in _chunks(tensor):
        indices = torch.arange(start, start + len(chunk), device=tensor.device)
        chunk.copy_(indices.remainder_(_PERIOD) + rank)


def count_wrong(operation: str, receive: Tensor, world: World) -> tuple[int, dict[int, int]]:
    """Wrong elements of a result; and by the rank that sent them, where the operation shows it."""
    n, rank = world.world_size, world.rank
    part = len(receive) // n
    if operation == "all_reduce":
        return _count(receive, 0, n, n * (n - 1) // 2), {}
    if operation == "reduce_scatter":
        return _count(receive, rank * len(receive), n, n * (n - 1) // 2), {}
    if operation in ("broadcast", "point_to_point"):
        source = 0 if operation == "broadcast" else (rank - 1) % n
        wrong = _count(receive, 0, 1, source)
        return wrong, {source: wrong} if wrong else {}
    offset = rank * part if operation == "all_to_all" else 0
    found = {source: _count(receive[source * part :][:part], offset, 1, source) for source in range(n)}
    return sum(found.values()), {source: count for source, count in found.items() if count}


def measure_collective(
    session: Session, config: CollectivesConfig, operation: str, num_bytes: int, world: World, faults: Faults
) -> dict[str, Any]:
    """Seconds of each repetition, and what was wrong before and after them."""
    lasts_s = min(config.max_s, session.time_left())
    session.enter(f"{operation} of {num_bytes / 2**20:g} MiB")
    buffers = make_buffers(operation, num_bytes, world)
    wrong, sources = _verify(operation, buffers, world, faults)

    def call() -> None:
        faults.delay("slow_collectives")
        buffers.call()

    seconds = time_calls(call, max(2, config.warmup), world.device)[1:]
    budget = torch.tensor(statistics.fmean(seconds), dtype=torch.float64)
    dist.all_reduce(budget, op=dist.ReduceOp.MAX)  # on the CPU: every rank must repeat as often
    repetitions = max(2, min(config.repetitions, int(lasts_s / max(budget.item(), 1e-9))))
    dist.barrier()
    seconds = time_calls(call, repetitions, world.device)
    wrong_after, sources_after = _verify(operation, buffers, world, faults)
    larger = max(buffers.send.numel(), buffers.receive.numel()) * 4
    return {
        "bytes": larger,
        "seconds": [float(f"{s:.5g}") for s in seconds],
        "wrong": wrong + wrong_after,
        "sources": {str(s): sources.get(s, 0) + sources_after.get(s, 0) for s in sorted({*sources, *sources_after})},
    }


def measure_pairs(
    session: Session, config: PairsConfig, world: World, faults: Faults, found: dict[str, list[float]]
) -> None:
    """Add to ``found`` the seconds that a message each way took with every other rank, by its rank.

    As many pairs at a time as there are.

    Rounds are dealt again and again rather than a pair at a time, so that what disturbs the machine for a moment does
    not fall on one pair.
    """
    count = max(1, int(config.mib * 2**18))
    send, receive = (torch.empty(count, device=world.device) for _ in range(2))
    fill_(send, world.rank)
    for repetition in range(config.repetitions + 1):
        session.time_left()
        for number, pairs in enumerate(make_rounds(world.world_size)):
            other = next((b if a == world.rank else a for a, b in pairs if world.rank in (a, b)), None)
            session.meet(f"pairs {repetition}.{number}")
            if other is None:
                continue
            session.enter(f"messages of ranks {min(other, world.rank)} and {max(other, world.rank)}")

            def call(partner: int = other) -> None:
                faults.delay("slow_collectives")
                _pass_on(send, receive, partner, partner)

            _pass_on(send[:1], receive[:1], other, other)  # so that both begin together
            seconds = time_calls(call, _MESSAGES, world.device)
            if repetition:  # the first opens connections
                found.setdefault(str(other), []).extend(float(f"{s:.5g}") for s in seconds)


def check_pair(world: World, faults: Faults, mib: float) -> dict[str, int]:
    """Wrong elements of one message from every other rank, by its rank."""
    count = max(1, int(mib * 2**18))
    found = {}
    for pairs in make_rounds(world.world_size):
        other = next((b if a == world.rank else a for a, b in pairs if world.rank in (a, b)), None)
        if other is None:
            continue
        send, receive = (torch.empty(count, device=world.device) for _ in range(2))
        fill_(send, world.rank)
        faults.corrupt_("corrupt_send", send)
        _pass_on(send, receive, other, other)
        faults.corrupt_("corrupt_receive", receive)
        found[str(other)] = _count(receive, 0, 1, other)
    return found


def make_rounds(num_ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which every two ranks meet once (the circle method)."""
    ranks: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    rounds = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def _pass_on(send: Tensor, receive: Tensor, to: int, source: int) -> None:
    """A message to one rank and one from another, or from the same, at once."""
    both = [dist.P2POp(dist.isend, send, to), dist.P2POp(dist.irecv, receive, source)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _verify(operation: str, buffers: Buffers, world: World, faults: Faults) -> tuple[int, dict[int, int]]:
    """The operation once, on the pattern; what is wrong of its result."""
    fill_(buffers.send, world.rank)
    faults.corrupt_("corrupt_send", buffers.send)
    buffers.call()
    faults.corrupt_("corrupt_receive", buffers.receive)
    return count_wrong(operation, buffers.receive, world)


def _count(received: Tensor, offset: int, factor: int, added: int) -> int:
    """Elements that are not ``factor`` x the pattern from ``offset`` on + ``added``."""
    wrong = torch.zeros((), dtype=torch.int64, device=received.device)
    for start, chunk in _chunks(received):
        indices = torch.arange(offset + start, offset + start + len(chunk), device=received.device)
        wrong += (chunk != indices.remainder_(_PERIOD) * factor + added).sum()
    return int(wrong.item())


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Pieces of a flat tensor with where they start: the indices of all of it would take twice its memory."""
    for number in range(math.ceil(len(tensor) / _CHUNK)):
        yield number * _CHUNK, tensor[number * _CHUNK :][:_CHUNK]


def sizes_of(config: CollectivesConfig, extra: Sequence[int]) -> list[int]:
    """Bytes to measure, in order: the config's, and those that sharding sends for the configured model."""
    return sorted({*(int(mib * 2**20) for mib in config.sizes_mib), *extra})
