"""One small all_reduce among the GPUs of each node, and one over all nodes, before a run.

Each rank is a process of this file: ``python -m fctune.apps.preflight.all_reduce '{"rank": 0, ...}'``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

from fctune.apps.preflight.rendezvous import Node
from fctune.base.exchange import connect_store
from fctune.base.network import set_gloo_interface
from fctune.base.processes import run_command

NUM_BYTES = 64 * 2**20
_REPETITIONS = 5
_MAX_LIMIT_S = 300.0  # for the start of the ranks and both all_reduces, which a busy shared disk may delay

_NO_RESULT = "no result"

Scope = Literal["node", "all"]


@dataclass(frozen=True, slots=True)
class Measured:
    """All_reduce of one node's ranks: GB/s (busbw of nccl-tests, the slowest rank) by scope, and what failed."""

    gb_s: dict[Scope, float]
    failed: Scope | None = None
    error: str = ""
    is_late: bool = False  # it only took too long, and no rank said why


def measure_all_reduce(node: Node, num_ranks: int, limit_s: float = _MAX_LIMIT_S) -> Measured:
    """Start a process for each rank of this node, and let them run an all_reduce in the node and over all nodes.

    Every node calls this at the same time. The processes meet in the store of the rendezvous, and are killed after
    ``limit_s``, or earlier if the other nodes do not wait for this one that long.
    """
    limit_s = min(limit_s, 0.8 * node.wait_s)

    def run(local_rank: int) -> tuple[dict[Scope, float], str]:
        task = asdict(node) | {"local_rank": local_rank, "num_ranks": num_ranks, "limit_s": limit_s}
        done = run_command([sys.executable, "-P", "-m", __name__, json.dumps(task)], limit_s=limit_s)
        found = read_bandwidths(done.output.text)
        ending = f"{_NO_RESULT} after {limit_s:g} s" if done.code is None else done.errors.last_line
        return found, "" if done.code == 0 else ending or f"its process ended with code {done.code}"

    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(run, range(num_ranks)))
    scopes: list[Scope] = [*(["node"] if num_ranks > 1 else []), *(["all"] if node.count > 1 else [])]  # type: ignore[list-item]
    gb_s: dict[Scope, float] = {}
    for scope in scopes:
        missing = [rank for rank, (found, _) in enumerate(results) if scope not in found]
        if missing:
            # A rank that raised says why; the others only waited for it.
            errors = [f"rank {rank}: {results[rank][1]}" for rank in missing]
            said = next((one for one in errors if _NO_RESULT not in one), None)
            return Measured(gb_s, scope, (said or errors[0])[:300], is_late=said is None)
        gb_s[scope] = min(found[scope] for found, _ in results)
    return Measured(gb_s)


def read_bandwidths(output: str) -> dict[Scope, float]:
    """Return the GB/s by scope from a rank's output, to which NCCL_DEBUG=INFO adds lines of NCCL."""
    found: dict[Scope, float] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def _run_rank(
    rank: int, count: int, address: str, port: int, wait_s: float, local_rank: int, num_ranks: int, limit_s: float
) -> None:
    """Run both all_reduces as one rank of one node (``rank`` of ``count``), and print the GB/s of each."""
    if count > 1:
        set_gloo_interface(address)
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    groups = [(f"node-{rank}", "node", local_rank, num_ranks)] if num_ranks > 1 else []
    groups += [("all", "all", rank * num_ranks + local_rank, count * num_ranks)] if count > 1 else []
    for name, scope, group_rank, size in groups:
        store = dist.PrefixStore(f"all_reduce/{name}", connect_store(address, port, False, wait_s))  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=limit_s)
        dist.init_process_group(backend, store=store, rank=group_rank, world_size=size, timeout=timeout)
        seconds = _time_all_reduce(group_rank, size, device)
        print(json.dumps({scope: 2 * (size - 1) / size * NUM_BYTES / seconds / 1e9}), flush=True)
        dist.barrier()  # without it, a gloo rank that ends first breaks the others' last all_reduce
        dist.destroy_process_group()


def _time_all_reduce(rank: int, size: int, device: torch.device) -> float:
    """Return the seconds of the fastest of a few all_reduces.

    Raises:
        ValueError: A result is wrong.
    """
    best = float("inf")
    for _ in range(1 + _REPETITIONS):  # the first connects the ranks, and is the slowest
        values = torch.full((NUM_BYTES // 4,), float(rank + 1), device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        dist.all_reduce(values)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
        if wrong := int((values != size * (size + 1) / 2).sum()):
            raise ValueError(f"{wrong} of {len(values)} sums are wrong")
    return best


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _run_rank(**json.loads(sys.argv[1]))
