"""Acceptance runs on gloo ranks of this machine, as their launcher starts them."""

from __future__ import annotations

import json
import multiprocessing
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

CONFIG = ROOT / "configs" / "acceptance_cpu.yaml"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torchtune.modules", "fctune.acceptance.entry"])

# What makes a run short; the sizes stay those of the config.
SHORT = ("~training", "compute.sustain_s=0.2", "collectives.repetitions=3", "collectives.sizes_mib=[0.015625, 4.0]")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended: its document, None where none was written, each rank's exit code, and how long it took."""

    document: dict[str, Any] | None
    codes: list[int | None]
    seconds: float

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        assert self.document is not None
        return {check["name"]: check for check in self.document["checks"]}

    @property
    def named(self) -> list[int]:
        """Every rank that a failure is laid to."""
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
    """Start every rank but the absent ones, do something ``meanwhile`` with their processes, wait for all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    launch = (ranks, ranks_per_node or ranks, port, arguments(folder, *overrides))
    processes = [_context.Process(target=_start, args=(rank, *launch)) for rank in range(ranks) if rank not in absent]
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
    document = json.loads(file.read_text()) if file.exists() else None
    return Run(document, [process.exitcode for process in processes], time.monotonic() - started)


def left_behind(folder: Path) -> list[str]:
    """What a run left on the disks that it measured."""
    return [str(p.relative_to(folder)) for disk in ("node", "shared") for p in (folder / disk).rglob("*")]


def interrupt_in(phase: str, folder: Path, number: signal.Signals, ranks: Sequence[int]) -> Callable[[list[Any]], None]:
    """Sends a signal to ranks when a file of the phase appears, as storage's do."""

    def act(processes: list[Any]) -> None:
        deadline = time.monotonic() + 60
        while not left_behind(folder):
            assert time.monotonic() < deadline, f"{phase} never began"
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

    from fctune.acceptance.entry import run_acceptance

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(run_acceptance(argv))
