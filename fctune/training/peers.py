"""Finding the rank that died first, since the other ranks see only a lost connection."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.02
# Of gloo and NCCL: torch raises the same RuntimeError for every failure of a collective, without a code.
_LOST_CONNECTION = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",  # NCCL
)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank; ``namespace`` identifies the machine or container in which ``process`` is valid."""

    rank: int
    process: int
    host: str
    namespace: str


class RankEnd(NamedTuple):
    """How a rank's process ended.

    The kernel sends SIGKILL when memory runs out, and SIGBUS or SIGSEGV after errors of memory or of a driver. NCCL
    aborts every rank after a time-out, which may be any node's fault.
    """

    reason: str
    is_killed: bool = False  # False: its exit status is unknown, so it may have ended because of another rank
    is_out_of_memory: bool = False
    is_nodes_fault: bool = False


def describe_process(rank: int) -> RankProcess:
    """Describe this process to the other ranks."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        namespace = ""
    return RankProcess(rank, os.getpid(), platform.node(), f"{platform.node()} {namespace}")


def is_lost_connection(error: BaseException) -> bool:
    """Return True if an error of a collective says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_CONNECTION)


def find_killed_rank(peers: Sequence[RankProcess], wait_s: float = 0.0) -> RankEnd | None:
    """Return how a rank of this machine ended, such as ``rank 1 (...) was killed by SIGKILL``.

    Args:
        peers: Processes of all ranks.
        wait_s: Limit for a process that is about to end. If it is not 0, a process that is gone without a trace counts
            as ended, though nobody knows whether it was killed.
    """
    here = describe_process(-1)
    local = [peer for peer in peers if peer.namespace == here.namespace and peer.process != here.process]
    deadline = time.monotonic() + wait_s
    while True:
        ended = {peer: _how_ended(peer.process) for peer in local}
        found = [(peer, end) for peer, end in ended.items() if end is not None and (end.is_killed or wait_s)]
        if found:
            peer, end = min(found, key=lambda one: not one[1].is_killed)  # the first killed one, if there is one
            return end._replace(reason=f"rank {peer.rank} (process {peer.process} on {peer.host}) {end.reason}")
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)


def _how_ended(process: int) -> RankEnd | None:
    """Return how a process ended; None if it runs, or has recorded its own reason."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return RankEnd("ended before")
    except PermissionError:
        return None
    try:  # its parent has not collected its exit status yet
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        state, status = fields[0], int(fields[-1])  # proc(5): the last field is the exit status
    except (OSError, ValueError, IndexError):
        return None
    if state != "Z" or not os.WIFSIGNALED(status):
        return None
    name = signal.Signals(os.WTERMSIG(status)).name
    hint = "; if nobody sent it, the machine ran out of memory" if name == "SIGKILL" else ""
    is_nodes_fault = name in ("SIGBUS", "SIGSEGV")
    return RankEnd(f"was killed by {name}{hint}", True, name == "SIGKILL", is_nodes_fault)
