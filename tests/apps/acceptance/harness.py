"""Acceptance runs on local gloo ranks, started the way a launcher starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.ranks import context

CONFIG = ROOT / "configs" / "acceptance_cpu.yaml"

# Overrides for a short run.
SHORT = ("~training", "compute.sustain_s=0.2", "collectives.repetitions=3", "collectives.sizes_mib=[0.015625, 4.0]")


@dataclass(frozen=True, slots=True)
class Run:
    """A completed run: its result (None if none was written), each rank's exit code, and its duration."""

    result: dict[str, Any] | None
    codes: list[int | None]
    seconds: float

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        assert self.result is not None
        return {check["name"]: check for check in self.result["checks"]}

    @property
    def blamed(self) -> list[int]:
        """All ranks that a check blames."""
        culprits = [c for check in self.checks.values() for c in check["culprits"] if c["kind"] != "unknown"]
        return sorted({rank for culprit in culprits for rank in culprit["ranks"]})


def arguments(folder: Path, *overrides: str) -> list[str]:
    disks = [f"storage.{disk}_dir={folder / disk}" for disk in ("node", "shared")]
    return ["--config", str(CONFIG), f"output_dir={folder / 'out'}", *disks, *overrides]


def run(
    folder: Path,
    *overrides: str,
    ranks: int = 4,
    ranks_per_node: int | None = None,
    absent: Sequence[int] = (),
    meanwhile: Callable[[list[Any]], None] = lambda _: None,
    limit_s: float = 90,
) -> Run:
    """Start all ranks except the absent ones, call ``meanwhile`` with their processes, and wait for all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    launch = (ranks, ranks_per_node or ranks, port, arguments(folder, *overrides))
    processes = [context.Process(target=_start, args=(rank, *launch)) for rank in range(ranks) if rank not in absent]
    for process in processes:
        process.start()
    meanwhile(processes)
    for process in processes:
        process.join(max(0.0, limit_s - (time.monotonic() - started)))
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck, f"{len(stuck)} ranks did not end within {limit_s:g} s"
    file = folder / "out" / "acceptance.json"
    result = json.loads(file.read_text()) if file.exists() else None
    return Run(result, [process.exitcode for process in processes], time.monotonic() - started)


def left_behind(folder: Path) -> list[str]:
    """List the files that a run left on the disks it measured."""
    return [str(p.relative_to(folder)) for disk in ("node", "shared") for p in (folder / disk).rglob("*")]


def interrupt_in(phase: str, folder: Path, number: signal.Signals, ranks: Sequence[int]) -> Callable[[list[Any]], None]:
    """Return a function that signals ranks once the phase has created a file, as storage does."""

    def act(processes: list[Any]) -> None:
        deadline = time.monotonic() + 60
        while not left_behind(folder):
            assert time.monotonic() < deadline, f"{phase} never started"
            time.sleep(0.01)
        for rank in ranks:
            os.kill(processes[rank].pid, number)

    return act


def _start(rank: int, ranks: int, ranks_per_node: int, port: int, argv: list[str]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank % ranks_per_node),
        LOCAL_WORLD_SIZE=str(ranks_per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(ROOT)
    import torch

    from recipes.cluster_acceptance import run_acceptance

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(run_acceptance(argv))
