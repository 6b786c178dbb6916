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
from torch.distributed import DistBackendError

from fctune.base.distributed import World
from fctune.base.exit_codes import EXIT_CODES, FAILED, NODE_FAULT, RESTARTED
from fctune.checkpoint.store import CheckpointStore
from fctune.config.schema import RunConfig
from fctune.runs.directory import RunDirectory
from fctune.training.entry import Run, _record_crash
from fctune.training.peers import RankProcess, describe_process
from tests.conftest import ROOT

HERE = {"rank": 2, "host": os.uname().nodename}


def record(folder: Path, error: Exception, *peers: RankProcess) -> dict[str, Any]:
    """Return exit.json of a run whose rank 5, on the third node, has raised an error."""
    folder.mkdir(exist_ok=True)
    world = World(rank=5, world_size=6, local_rank=1, device=torch.device("cpu"), ranks_per_node=2)
    store = CheckpointStore(folder / "checkpoints", 1, None)
    run = Run(cast(RunConfig, None), RunDirectory(folder), store, world, peers, is_open=True)
    _record_crash(run, world, error)
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text())
    return found


@pytest.fixture(autouse=True)
def third_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "2")


@pytest.mark.parametrize(
    ("error", "code", "node"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), NODE_FAULT, HERE),
        (DistBackendError("NCCL error: unhandled system error"), NODE_FAULT, None),  # any node's
        (RuntimeError("[gloo] Connection closed by peer"), NODE_FAULT, None),
        (torch.OutOfMemoryError("CUDA out of memory"), FAILED, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), FAILED, None),
        (KeyError("labels"), FAILED, None),
    ],
    ids=["GPU", "NCCL", "lost rank", "out of memory", "RuntimeError", "KeyError"],
)
def test_only_failures_of_the_machines_restart(
    error: Exception, code: int, node: dict[str, Any] | None, tmp_path: Path
) -> None:
    ended = record(tmp_path / "run", error)
    assert ended["code"] == code
    assert ended.get("faulty_node") == node


@pytest.mark.parametrize(
    ("signal", "code", "node"), [("SIGABRT", NODE_FAULT, HERE), ("SIGKILL", FAILED, None)]
)  # NCCL's watchdog aborts after its time-out; the kernel kills when memory runs out
def test_a_rank_that_was_killed_names_its_node_unless_memory_ran_out(
    signal: str, code: int, node: dict[str, Any] | None, tmp_path: Path
) -> None:
    killed = subprocess.Popen([sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), signal.{signal})"])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    here = describe_process(4)
    ended = record(
        tmp_path / "run",
        RuntimeError("Connection reset by peer"),
        RankProcess(4, killed.pid, here.host, here.namespace),
    )
    killed.wait()
    assert f"was killed by {signal}" in ended["reason"]
    assert (ended["code"], ended.get("faulty_node")) == (code, node)


def test_a_cause_replaces_the_record_of_its_consequence(tmp_path: Path) -> None:
    assert record(tmp_path / "run", RuntimeError("Broken pipe"))["code"] == NODE_FAULT
    ended = record(tmp_path / "run", KeyError("labels"))
    assert (ended["code"], ended.get("is_consequence")) == (FAILED, None)
    assert record(tmp_path / "run", RuntimeError("Broken pipe")) == ended


def test_the_docs_list_every_exit_code_and_what_restarts() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| (yes|no)", (ROOT / "docs" / "reliability.md").read_text(), re.M)
    assert {int(code): (meaning, is_restarted == "yes") for code, meaning, is_restarted in rows} == {
        code: tuple(ending) for code, ending in EXIT_CODES.items()
    }
    assert RESTARTED == (75, 76)
