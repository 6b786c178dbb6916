"""Failures of GPUs, nodes and the network end with the code that restarts a run; a run's own errors do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from fctune.base import distributed
from fctune.base.distributed import World
from fctune.base.errors import ConfigError
from fctune.base.exit_codes import EXIT_CODES, FAILED, INVALID, NODE_FAULT, RESTARTED, STOPPED
from fctune.checkpoint.store import CheckpointStore
from fctune.config.schema import RunConfig
from fctune.runs.directory import RunDirectory
from fctune.training.entry import Run, _record_crash, run_recipe
from fctune.training.peers import RankProcess, describe_process
from tests.conftest import ROOT

HERE = {"rank": 2, "host": os.uname().nodename}


def open_rank(folder: Path, rank: int, *peers: RankProcess) -> Run:
    """Return the run of a rank of three nodes, which is not training yet."""
    folder.mkdir(exist_ok=True)
    world = World(rank, world_size=6, local_rank=rank % 2, device=torch.device("cpu"), ranks_per_node=2)
    store = CheckpointStore(folder / "checkpoints", 1, None)
    return Run(cast(RunConfig, None), RunDirectory(folder), store, world, peers, is_open=True)


def record(folder: Path, error: Exception, *peers: RankProcess) -> dict[str, Any]:
    """Return exit.json of a run whose rank 5, on the third node, has raised an error."""
    run = open_rank(folder, 5, *peers)
    _record_crash(run, run.world, error)
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text())
    return found


@pytest.fixture(autouse=True)
def third_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "2")


@pytest.mark.parametrize(
    ("error", "code", "node"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), NODE_FAULT, HERE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), NODE_FAULT, HERE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), NODE_FAULT, HERE),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), NODE_FAULT, HERE),
        (DistBackendError("NCCL error: unhandled system error"), NODE_FAULT, None),  # any node's
        (RuntimeError("[gloo] Connection closed by peer"), NODE_FAULT, None),
        (torch.OutOfMemoryError("CUDA out of memory"), FAILED, None),
        (DistBackendError("ncclUnhandledCudaError: ... Cuda failure 2 'out of memory'"), FAILED, None),
        (RuntimeError("Triton Error [CUDA]: out of memory"), FAILED, None),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FAILED, None),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution"), FAILED, None),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), FAILED, None),
        (DistBackendError("NCCL error in: ..., invalid usage (run with NCCL_DEBUG=WARN for details)"), FAILED, None),
        (DistBackendError("ncclInvalidArgument: Invalid value for an argument."), FAILED, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FAILED, None),
        (KeyError("labels"), FAILED, None),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Exception) else "",
)
def test_only_failures_of_the_machines_restart(
    error: Exception, code: int, node: dict[str, Any] | None, tmp_path: Path
) -> None:
    ended = record(tmp_path / "run", error)
    assert ended["code"] == code
    assert ended.get("faulty_node") == node


@pytest.mark.parametrize(
    ("signal", "code", "node"),
    [
        ("SIGBUS", NODE_FAULT, HERE),
        ("SIGSEGV", NODE_FAULT, HERE),
        ("SIGABRT", NODE_FAULT, None),  # NCCL's watchdog aborts every rank after a time-out that any node may cause
        ("SIGKILL", FAILED, None),  # the kernel, when memory runs out
    ],
)
def test_a_rank_that_was_killed_names_its_node_only_if_that_is_at_fault(
    signal: str, code: int, node: dict[str, Any] | None, tmp_path: Path
) -> None:
    program = f"import os, signal; signal.signal(signal.{signal}, 0); os.kill(os.getpid(), signal.{signal})"
    if signal == "SIGKILL":
        program = "import os; os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    ended = record(tmp_path / "run", RuntimeError("Connection reset by peer"), peer_on_this_machine(killed.pid))
    killed.wait()
    assert f"was killed by {signal}" in ended["reason"]
    assert (ended["code"], ended.get("faulty_node"), ended.get("is_consequence")) == (code, node, None)


def test_a_rank_that_the_launcher_has_collected_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    """It may have been killed, or have ended because another node was lost, as this rank does now."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ended = record(tmp_path / "run", RuntimeError("Connection reset by peer"), peer_on_this_machine(gone.pid))
    assert (ended["code"], ended.get("faulty_node"), ended.get("is_consequence")) == (NODE_FAULT, None, True)
    assert f"rank 4 (process {gone.pid}" in ended["reason"]
    assert record(tmp_path / "run", KeyError("labels"))["code"] == FAILED, "the cause replaces it"


def peer_on_this_machine(process: int) -> RankProcess:
    here = describe_process(4)
    return RankProcess(4, process, here.host, here.namespace)


def test_a_cause_replaces_the_record_of_its_consequence(tmp_path: Path) -> None:
    assert record(tmp_path / "run", RuntimeError("Broken pipe"))["code"] == NODE_FAULT
    ended = record(tmp_path / "run", KeyError("labels"))
    assert (ended["code"], ended.get("is_consequence")) == (FAILED, None)
    assert record(tmp_path / "run", RuntimeError("Broken pipe")) == ended


@pytest.mark.parametrize("earlier", ["", "run.json"], ids=["new run", "earlier run"])
def test_the_launchers_signal_after_an_error_in_the_setup_does_not_hide_it(earlier: str, tmp_path: Path) -> None:
    if earlier:
        (tmp_path / earlier).write_text("{}")
    before, ended = tmp_path / "exit.json", tmp_path / ("not_started.json" if earlier else "exit.json")
    before.write_text('{"code": 76}')  # of the start before
    head = open_rank(tmp_path, 0)
    head.directory.lock()
    head._record_stop("SIGTERM before the first step; nothing to save")
    assert json.loads(ended.read_text())["code"] == STOPPED
    head.directory.unlock()

    head = open_rank(tmp_path, 0)
    head.directory.lock()
    other = open_rank(tmp_path, 5)
    _record_crash(other, other.world, KeyError("labels"))
    head._record_stop("SIGTERM before the first step; nothing to save")  # torchrun stops the other ranks
    assert json.loads(ended.read_text())["code"] == FAILED


@pytest.mark.parametrize(
    ("error", "code", "has_met"),
    [
        (None, INVALID, True),  # by its empty command line
        (ConfigError("srun started two tasks"), INVALID, True),
        (DistNetworkError("no route to host"), NODE_FAULT, False),
        (KeyError("RANK"), FAILED, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_ranks_leave_a_mark_for_the_node_script_once_they_have_met(
    error: Exception | None, code: int, has_met: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meet() -> World:
        if error is not None:
            raise error
        return World(0, 1, 0, torch.device("cpu"))

    monkeypatch.setattr(distributed, "init_distributed", meet)
    monkeypatch.setattr(distributed, "run_on_all_ranks", lambda action: action())
    monkeypatch.setenv("FCTUNE_RANKS_MET", str(tmp_path / "met"))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run_recipe(cast(Any, None), []) == code
    assert (tmp_path / "met").exists() == has_met


def test_the_docs_list_every_exit_code_and_what_restarts() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (yes|no)", (ROOT / "docs" / "reliability.md").read_text(), re.M)
    assert {int(code): (meaning, is_restarted == "yes") for code, meaning, is_restarted in rows} == {
        code: tuple(ending) for code, ending in EXIT_CODES.items()
    }
    assert RESTARTED == (75, 76)
