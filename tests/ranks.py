"""Run a function on several gloo ranks of this machine.

Processes are forked from a server that has made the slow imports, so a group starts in a fraction of a second. On a
machine with GPUs they start afresh, since some of these imports look for GPUs, after which CUDA refuses a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def _make_context() -> Any:
    import torch

    made = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    made.set_forkserver_preload(["tests.rank_imports"])
    return made


context = _make_context()
ROOT = Path(__file__).resolve().parents[1]


def start_server() -> None:
    """Start the server that ranks are forked from, which imports while tests run; nothing on a machine with GPUs.

    There is one server a process, so code under test that starts it first would decide on its imports. It leaves out
    imports that fail, without a word: it must find ``tests``, although recipes keep the working directory off the path.
    """
    if context.get_start_method() == "forkserver":
        safe_path = os.environ.pop("PYTHONSAFEPATH", None)
        with contextlib.chdir(ROOT):
            forkserver.ensure_running()
        if safe_path is not None:
            os.environ["PYTHONSAFEPATH"] = safe_path


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 480) -> list[Any]:
    """Run ``function(world, *arguments)`` on each rank and return the results; raises the first error."""
    start_server()
    port = find_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(function, rank, world_size, port, folder, arguments))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        stuck = [process for process in processes if process.is_alive()]
        for process in stuck:
            process.kill()
        results = []
        for rank in range(world_size):
            file = Path(folder) / str(rank)
            if not file.exists():
                raise RuntimeError(f"rank {rank} {'hung' if stuck else f'died ({processes[rank].exitcode})'}")
            outcome, value = pickle.loads(file.read_bytes())
            if outcome == "error":
                raise RuntimeError(f"rank {rank}:\n{value}")
            results.append(value)
        return results


def find_port() -> int:
    """Find a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def be_rank(rank: int, world_size: int, port: int) -> None:
    """Set the variables that a launcher sets for a rank."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _run(
    function: Callable[..., Any], rank: int, world_size: int, port: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    be_rank(rank, world_size, port)
    import torch

    from fctune.base.distributed import init_distributed, shutdown_distributed

    torch.set_num_threads(1)
    try:
        outcome = ("result", function(init_distributed(), *arguments))
        shutdown_distributed()
    except BaseException:
        outcome = ("error", traceback.format_exc())
    (Path(folder) / f".{rank}").write_bytes(pickle.dumps(outcome))
    (Path(folder) / f".{rank}").rename(Path(folder) / str(rank))
    if outcome[0] == "error":
        os._exit(1)  # the other ranks may wait in a collective
