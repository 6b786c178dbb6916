"""Under torchrun, restarted runs resume and stopped runs are saved."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.groups import run_group
from tests.faults.harness import arguments_for, differences, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@pytest.fixture(scope="module")
def reference(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    assert run_group(arguments_for(run, *inputs), 1).codes == (0,)
    return run


def launch(
    argv: list[str], *options: str, fault: tuple[str, ...] = ("never", "1", "kill", "0")
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *options]
    command += ["-m", "tests.faults.worker", *fault, *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").is_file() and len(read_metrics(run)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{run}: did not reach step {step}")


def test_the_launcher_restarts_all_ranks_when_one_dies(
    inputs: tuple[Path, Path], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = launch(arguments_for(run, *inputs), "--max-restarts", "2", fault=("step", "8", "kill", "1"))
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output[-3000:]
    assert len(json.loads((run / "run.json").read_text())["resumed"]) == 1
    assert not differences(run, reference, 1e-9)


def test_the_launcher_reports_the_root_cause(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    process = launch(arguments_for(tmp_path / "run", *inputs), fault=("step", "3", "raise", "1"))
    output = process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert "an injected fault" in output.split("Root Cause")[-1], output[-3000:]
    assert "an injected fault" in json.loads((tmp_path / "run" / "exit.json").read_text())["reason"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_and_the_same_command_resumes(
    number: signal.Signals, inputs: tuple[Path, Path], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = arguments_for(run, *inputs, "checkpoint.every=0", "checkpoint.elastic_every=0")
    process = launch(argv, "--signals-to-handle", SIGNALS, fault=("step", "6", "slow:5", "0"))
    wait_for_step(run, 5)
    process.send_signal(number)
    process.communicate(timeout=300)
    why = json.loads((run / "exit.json").read_text())
    assert why["code"] == 75
    assert number.name in why["reason"]
    assert why["checkpoint"] is not None
    assert launch(argv).wait(timeout=300) == 0
    assert not differences(run, reference, 1e-9)


def test_a_save_that_the_launcher_kills_leaves_the_last_good_checkpoint(
    inputs: tuple[Path, Path], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    argv = arguments_for(run, *inputs)
    process = launch(argv, "--signals-to-handle", SIGNALS, fault=("write", "3", "slow:40", "1"))
    wait_for_step(run, 5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert list(run.glob("checkpoints/.*.partial"))
    assert launch(argv).wait(timeout=300) == 0
    assert json.loads((run / "run.json").read_text())["resumed"]
    assert not differences(run, reference, 1e-9)


def test_a_run_that_loses_a_node_resumes_on_the_remaining_ones(
    inputs: tuple[Path, Path], reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run"]
    command += ["--max-restarts", "3", "-m", "tests.faults.worker", "step", "8", "slow:5", "0"]
    command += arguments_for(run, *inputs)

    def start_node(name: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / name, "wb") as output:
            return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)

    nodes = [start_node("first")]
    time.sleep(2)  # the first node hosts the rendezvous, which must outlive the second node
    nodes.append(start_node("second"))
    wait_for_step(run, 7)
    assert json.loads((run / "run.json").read_text())["world_size"] == 2
    children = subprocess.run(["pgrep", "-P", str(nodes[1].pid)], capture_output=True, text=True, check=True)
    for pid in (nodes[1].pid, *map(int, children.stdout.split())):
        os.kill(pid, signal.SIGKILL)
    assert nodes[0].wait(timeout=300) == 0, (tmp_path / "first").read_text()[-3000:]
    described = json.loads((run / "run.json").read_text())
    assert described["world_size"] == 1
    assert described["resumed"]
    assert not differences(run, reference, 1e-9)
