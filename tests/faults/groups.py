"""Groups of ranks that are forked from a server with all imports, with a fault on one rank in one phase.

The other ranks are killed when one dies, as torchrun does.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from tests.ranks import be_rank, context, find_port

Kind = Literal[
    "kill", "raise", "hang", "slow", "read_only", "enospc", "full", "full_and_term", "term", "term_soon", "term_twice"
]

LORA, FULL, GRPO = "configs/tiny_lora.yaml", "configs/tiny_full.yaml", "configs/tiny_grpo.yaml"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault of a ``kind`` on ``rank``, ``delay_s`` after ``phase`` begins for the ``count``-th time in that process.

    ``enospc`` is one write that fails, ``full`` also every later one, ``full_and_term`` with a request to stop;
    ``slow`` is every write from then on, which takes a second longer, and ``read_only`` an error of ``disk``, an ext4
    file system, which then takes no writes.
    """

    kind: Kind
    phase: str
    rank: int
    count: int = 1
    delay_s: float = 0.0
    disk: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """End of a group of ranks: exit codes by rank, whether the fault happened, and the output of all ranks.

    ``phase`` is the last one that the faulty rank announced, in any of its threads.
    """

    codes: tuple[int | None, ...]
    fired: bool
    output: str
    phase: str | None = None


def run_group(
    argv: list[str],
    world_size: int,
    fault: Fault | None = None,
    make_recipe: Callable[[], Any] | None = None,
    grace_s: float = 0.3,
    limit_s: float = 180.0,
) -> Ended:
    """Run a config's recipe on ranks of this machine until it completes or a rank dies.

    Args:
        argv: Command line of the recipe.
        world_size: Number of ranks.
        fault: What happens to one of them.
        make_recipe: Returns the recipe on each rank, in place of the config's.
        grace_s: Seconds after which the other ranks are killed when one dies; torchrun does not notice at once either.
        limit_s: Seconds after which all are killed.
    """
    port = find_port()
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(argv, rank, world_size, port, folder, fault, make_recipe))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        started = time.monotonic()
        while any(process.is_alive() for process in processes):
            time.sleep(0.02)
            died = [process for process in processes if not process.is_alive() and process.exitcode not in (0, 74, 75)]
            if died or time.monotonic() - started > limit_s:
                for process in processes:
                    process.join(grace_s)
                    process.kill()
        codes = []
        for process in processes:
            process.join()
            codes.append(process.exitcode)
        # A rank that ends before its first line has none.
        output = "".join(file.read_text() for file in sorted(Path(folder).glob("*.out")))
        trace = Path(folder, "trace")
        announced = trace.read_text().split() if trace.exists() else []
        phase = announced[-1] if announced else None
        return Ended(tuple(codes), Path(folder, "fired").exists(), output, phase)


def _rank(
    argv: list[str],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    fault: Fault | None,
    make_recipe: Callable[[], Any] | None,
) -> None:
    be_rank(rank, world_size, port)
    output = os.open(f"{folder}/{rank}.out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    from fctune.checkpoint import fault_hooks
    from fctune.training.entry import run_recipe

    recipe = _find_recipe(argv) if make_recipe is None else make_recipe()
    torch.set_num_threads(1)
    if fault is not None and fault.rank == rank:
        fault_hooks.listen(_Listener(fault, Path(folder)))
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    code = run_recipe(recipe, argv)
    sys.stdout.flush()
    os._exit(code)


def _find_recipe(argv: list[str]) -> Any:
    from recipes.full_fc_distributed import FullFunctionCallingRecipe
    from recipes.lora_fc_distributed import LoRAFunctionCallingRecipe
    from recipes.lora_grpo_distributed import LoRAPolicyRecipe

    return {FULL: FullFunctionCallingRecipe, LORA: LoRAFunctionCallingRecipe, GRPO: LoRAPolicyRecipe}[argv[1]]


class _Listener:
    """Writes each phase to a file, and makes the fault happen."""

    def __init__(self, fault: Fault, folder: Path):
        self._fault, self._folder, self._seen = fault, folder, Counter[str]()
        self._trace = os.open(folder / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, phase: str, name: str) -> None:
        os.write(self._trace, f"{phase}\n".encode())
        self._seen[phase] += 1
        is_due = self._seen[phase] == self._fault.count
        is_due |= self._fault.kind in ("slow", "full", "full_and_term") and self._seen[phase] > self._fault.count
        is_first = not (self._folder / "fired").exists()
        if phase != self._fault.phase or not is_due:
            return
        if self._fault.delay_s:
            threading.Timer(self._fault.delay_s, self._strike).start()
        else:
            self._strike(is_first)

    def _strike(self, is_first: bool = True) -> None:
        (self._folder / "fired").touch()
        if self._fault.kind == "full_and_term" and is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        _do(self._fault)


def _do(fault: Fault) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "raise":
        raise RuntimeError("an injected fault")
    if fault.kind == "slow":
        time.sleep(1)
        return
    if fault.kind == "read_only":
        subprocess.run(["sync", "--file-system", fault.disk], check=True)
        subprocess.run(["mount", "-o", "remount,abort", fault.disk], check=True)
        return
    if fault.kind == "hang":
        time.sleep(1000)
    if fault.kind in ("enospc", "full", "full_and_term"):
        raise OSError(errno.ENOSPC, "No space left on device")
    if fault.kind == "term_soon":
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return
    os.kill(os.getpid(), signal.SIGTERM)
    if fault.kind == "term_twice":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
